"""The command line: every command, and errors in one clear message with nothing left behind."""

import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from odeformer import to_continuous
from odeformer.cli import main
from odeformer.discretisation import certificate
from odeformer.training import load_model, save_model
from tests.helpers import open_model
from tests.training.helpers import CONTINUOUS, fill_disk, same_weights, small_overrides


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    torch.set_num_threads(1)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must be refused, with exit code 2 and no traceback."""
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.err.strip()
    return shown.err


@pytest.mark.parametrize("command", ["train", "switch", "certify", "causality", "generate", "demo"])
def test_every_command_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert "Example" in capsys.readouterr().out
    assert main([]) == 0
    assert command in capsys.readouterr().out


def test_help_needs_no_lightning() -> None:
    code = "import sys; from odeformer.cli import main; main(['--help']); sys.exit('pytorch_lightning' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[1]).returncode == 0
    )


def test_train_resume_generate_and_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = small_overrides(tmp_path, *CONTINUOUS)
    assert main(["train", *overrides]) == 0
    assert main(["train", *overrides]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-1", "train-2"]
    assert same_weights(load_model("runs/train-1"), load_model("runs/train-2"))
    shown = capsys.readouterr().out
    assert "12 steps, validation loss" in shown
    assert "Switched to discrete at step 6" in shown
    assert main(["train", "--resume", "--output", "runs/train-1"]) == 0
    capsys.readouterr()

    assert main(["generate", "runs/train-1", "--prompt", "7 ", "--count", "9", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("7 ")
    assert main(["generate", "runs/train-1", "--prompt", "7 ", "--count", "9", "--top-k", "1", "--seed", "5"]) == 0
    assert capsys.readouterr().out == first

    assert main(["train", *small_overrides(tmp_path, "training.scheme=continuous"), "--output", "flow"]) == 0
    assert main(["switch", "flow"]) == 0
    assert "gap" in capsys.readouterr().out
    assert same_weights(load_model("flow"), load_model("runs/switch-1"))
    assert main(["generate", "runs/switch-1", "--prompt", "7 ", "--count", "3"]) == 0


def test_certify_a_config_file_overrides_and_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("model: {d_model: 16, n_layer: 2, n_head: 2, pool_size: 4, sublayers: sequential}\n")
    assert main(["certify", "run.yaml", "model.pool_size=3", "--json", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert found["ok"] is True
    assert (found["sublayers"], found["graph_lengths"]) == ("sequential", [2, 3, 10])
    save_model(to_continuous(open_model(pool_size=4)), "model")
    assert main(["certify", "model"]) == 0
    assert capsys.readouterr().out.count("holds") == 2
    assert "takes no overrides" in refused(capsys, "certify", "model", "model.pool_size=3")
    assert "found.json exists" in refused(capsys, "certify", "run.yaml", "--json", "found.json")


def test_a_certificate_that_fails_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "TOLERANCE", -1.0)
    assert main(["certify", "model.d_model=16", "model.n_layer=1", "model.pool_size=3"]) == 1


def test_causality(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.d_model=16", "model.n_layer=2", "model.pool_size=3"]
    assert main(["causality", *small, "training.scheme=continuous"]) == 0
    assert "Causal" in capsys.readouterr().out


def test_demo_is_called_with_a_folder_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, bool]] = []
    demo = types.ModuleType("odeformer.demo")
    demo.run_demo = lambda output, quick: calls.append((output, quick))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odeformer.demo", demo)
    Path("runs/demo-1").mkdir(parents=True)
    assert main(["demo"]) == 0
    assert main(["demo", "--output", "mine", "--quick"]) == 0
    assert calls == [(Path("runs/demo-2"), False), (Path("mine"), True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.n_head=3"], "model.n_head: n_head=3 must divide d_model=16"),
        (["model.head=3"], "model.head: unknown key; did you mean n_head?"),
        (["model.pool_size=0"], "model.pool_size"),
        (["model.epsilon=-1"], "model.epsilon"),
        (["model.leak=-1"], "model.leak"),
        (["data.source=nowhere.txt"], "nowhere.txt"),
        (["data.source=binary.txt"], "binary.txt"),
        (["data.source=empty.txt"], "empty.txt"),
        (["data.source=short.txt"], "has 5 tokens, fewer than context + 1 = 19"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--output", "taken"], "taken"),
        (["--resume"], "--output"),
        (["--resume", "--output", "nowhere"], "nowhere"),
        (["training.steps"], "section.key=value"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_to_train_is_one_message_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    Path("binary.txt").write_bytes(bytes(range(256)) * 20)
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("short")
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    before = sorted(str(path) for path in Path().rglob("*"))
    assert words in refused(capsys, "train", *small_overrides(tmp_path), *arguments)
    assert sorted(str(path) for path in Path().rglob("*")) == before


def test_a_full_disk_is_one_message_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = small_overrides(tmp_path)
    assert main(["train", *overrides, "training.steps=1", "--output", "warm"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        fill_disk(patch)
        message = refused(capsys, "train", *overrides, "--output", "run")
    assert "config.yaml: No space left on device" in message
    assert not Path("run").exists()


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from odeformer.training.callbacks import Metrics

    log = Metrics.on_train_batch_end

    def interrupted(self: Metrics, trainer: object, *rest: object) -> None:
        log(self, trainer, *rest)  # type: ignore[arg-type]
        if trainer.global_step == 3:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "on_train_batch_end", interrupted)
        assert main(["train", *small_overrides(tmp_path), "--output", "run"]) == 130
    assert "odeformer train --output run --resume" in capsys.readouterr().err
    assert main(["train", "--output", "run", "--resume"]) == 0
    assert main(["train", *small_overrides(tmp_path), "--output", "straight"]) == 0
    assert same_weights(load_model("run"), load_model("straight"))


@pytest.mark.parametrize("command", [["generate"], ["switch"], ["certify"]])
def test_a_damaged_checkpoint_is_refused_by_every_command(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert "nowhere" in refused(capsys, *command, "nowhere")
    weights = save_model(open_model(), "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert "model.safetensors is truncated or altered" in refused(capsys, *command, "model")
    assert not Path("runs").exists()


def test_generate_refuses_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *small_overrides(tmp_path, "training.steps=1"), "--output", "run"]) == 0
    capsys.readouterr()
    assert "temperature" in refused(capsys, "generate", "run", "--temperature", "-1")
    assert "count" in refused(capsys, "generate", "run", "--count", "-1")
    assert "top_k" in refused(capsys, "generate", "run", "--top-k", "0")
    assert "prompt" in refused(capsys, "generate", "run", "--prompt", "")
    save_model(open_model(dtype=torch.float32), "alone")
    assert "outside a run folder" in refused(capsys, "generate", "alone")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "nowhere.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
