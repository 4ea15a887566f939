"""Training runs: reproducible, resumable bit for bit, and careful with what exists."""

import csv
import errno
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback

import odeformer.blocks
import odeformer.training.run as run_module
from odeformer import CausalityError
from odeformer.coupling import lift
from odeformer.model import SLOW_PATH
from odeformer.training import DivergedError, TrainingInterrupted, load_model, load_run_config, train
from odeformer.training.callbacks import Metrics, Stopwatch
from odeformer.training.preparation import initial_model, with_vocabulary
from tests.training.helpers import CONTINUOUS, fill_disk, same_weights, small_config


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


class AtStep(Callback):
    """Does something after a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.action(module)


def test_a_run_learns_and_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = tmp_path / "run"
    result = train(config, folder)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"config.yaml", "data.json", "metrics.csv", "result.json", "tokenizer/tokenizer_kind.json"} <= found
    assert {"checkpoints/last.ckpt", "checkpoints/model.json", "checkpoints/model.safetensors"} <= found
    assert any(name.startswith("tensorboard/") for name in found)
    assert not any(name.endswith(".part") for name in found)
    assert load_run_config(folder / "config.yaml").model.vocab_size == result.model.config.vocab_size
    assert same_weights(load_model(folder, result.model.config), result.model)
    assert json.loads((folder / "result.json").read_text())["steps"] == result.steps == 12
    table = rows(folder)
    assert list(table[0]) == ["step", "train/loss", "validation/loss", "learning_rate", "gate/layer_0", "gate/layer_1"]
    assert [row["step"] for row in table if row["train/loss"]] == ["2", "4", "6", "8", "10", "12"]
    assert [row["step"] for row in table if row["validation/loss"]] == ["5", "10", "12"]
    assert float(table[-1]["validation/loss"]) == result.validation_loss < float(table[0]["train/loss"])
    assert float(table[-1]["train/loss"]) == result.train_loss
    assert float(table[-1]["gate/layer_0"]) > 0
    assert float(table[-1]["learning_rate"]) == pytest.approx(config.training.minimum_learning_rate)
    assert result.seconds > 0
    assert result.tokens_per_second == pytest.approx(12 * 2 * 18 / result.seconds)
    assert result.switch is None


def test_one_seed_is_one_run_and_other_seeds_are_others(tmp_path: Path) -> None:
    torch.manual_seed(5)
    first = train(small_config(tmp_path, *CONTINUOUS), tmp_path / "a")
    torch.manual_seed(6)
    second = train(small_config(tmp_path, *CONTINUOUS), tmp_path / "b")
    other = train(small_config(tmp_path, *CONTINUOUS, "training.seed=2"), tmp_path / "c")
    assert same_weights(first.model, second.model)
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()
    assert first.validation_loss != other.validation_loss


# 4: between checkpoints; 5: on a checkpoint; 6: at the switch; 7, 11: after it.
@pytest.mark.parametrize("stop_after", [4, 5, 6, 7, 11])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    tmp_path: Path, straight: dict[str, Any], stop_after: int
) -> None:
    config = small_config(tmp_path, *CONTINUOUS)
    part = train(config, tmp_path / "run", stop_after=stop_after)
    assert part.steps == stop_after
    whole = train(config, tmp_path / "run", resume=True)
    assert whole.steps == 12
    assert same_weights(whole.model, straight["model"])
    assert type(whole.model.blocks[0]).__name__ == "DiscreteBlock"
    assert whole.switch == straight["switch"]
    assert whole.validation_loss == straight["validation_loss"]
    # The part that was stopped also evaluated at its end; every other row is the same.
    after = [row for row in rows(tmp_path / "run") if int(row["step"]) != stop_after]
    assert after == [row for row in straight["rows"] if int(row["step"]) != stop_after]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("straight")
    result = train(small_config(folder, *CONTINUOUS), folder / "run")
    return {
        "model": result.model,
        "switch": result.switch,
        "validation_loss": result.validation_loss,
        "rows": rows(folder / "run"),
    }


def test_a_finished_run_can_be_resumed_and_has_nothing_to_do(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    first = train(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = train(config, tmp_path / "run", resume=True)
    assert same_weights(first.model, again.model)
    assert (again.steps, again.validation_loss) == (12, first.validation_loss)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_can_be_resumed(tmp_path: Path, straight: dict[str, Any], number: int) -> None:
    config = small_config(tmp_path, *CONTINUOUS)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(TrainingInterrupted, match=r"after step 7 of 12; .*last\.ckpt holds step 7"):
        train(config, tmp_path / "run", callbacks=[AtStep(7, lambda module: signal.raise_signal(number))])
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert same_weights(train(config, tmp_path / "run", resume=True).model, straight["model"])


def test_a_second_interrupt_stops_at_once_and_keeps_the_checkpoint(tmp_path: Path, straight: dict[str, Any]) -> None:
    def twice(module: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    config = small_config(tmp_path, *CONTINUOUS)
    with pytest.raises(TrainingInterrupted, match=r"after step 7 of 12; .*last\.ckpt holds step 5"):
        train(config, tmp_path / "run", callbacks=[AtStep(7, twice)])
    assert same_weights(train(config, tmp_path / "run", resume=True).model, straight["model"])


def test_frozen_training_leaves_the_slow_path_bit_identical(tmp_path: Path) -> None:
    config = small_config(tmp_path, "model.coupling=frozen", "training.weight_decay=0.5", *CONTINUOUS)
    result = train(config, tmp_path / "run")
    start = initial_model(with_vocabulary(config, result.model.config.vocab_size or 0)).state_dict()
    slow = [name for name in start if any(part in name for part in SLOW_PATH)]
    assert len(slow) > 10
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, start[name]) == (name in slow), name


def test_the_arms_start_equal_and_the_dense_arm_is_the_frozen_one(tmp_path: Path) -> None:
    losses = {
        arm: [
            row["train/loss"]
            for row in rows(train(small_config(tmp_path, f"model.coupling={arm}"), tmp_path / arm).folder)
        ]
        for arm in ("coupled", "frozen", "dense")
    }
    assert losses["frozen"] == losses["dense"] != losses["coupled"]


def test_evaluating_more_often_changes_nothing_else(tmp_path: Path) -> None:
    seldom = train(small_config(tmp_path, "training.evaluate_every=100"), tmp_path / "a")
    often = train(small_config(tmp_path, "training.evaluate_every=1", "training.evaluation_batches=5"), tmp_path / "b")
    assert same_weights(seldom.model, often.model)
    assert [r["train/loss"] for r in rows(often.folder) if r["train/loss"]] == [
        r["train/loss"] for r in rows(seldom.folder) if r["train/loss"]
    ]


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_run_through_the_switch(tmp_path: Path, precision: str) -> None:
    config = small_config(tmp_path, *CONTINUOUS, f"training.precision={precision}")
    result = train(config, tmp_path / "run")
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert all(parameter.dtype == dtype for parameter in load_model(tmp_path / "run").parameters())
    assert torch.tensor(result.validation_loss).isfinite()


def test_error_control_and_torchdiffeq_train_too(tmp_path: Path) -> None:
    for name, flow in {
        "adaptive": ("flow.method=dopri5", "flow.steps=null"),
        "torchdiffeq": ("flow.method=torchdiffeq:midpoint", "flow.gradient=backprop"),
    }.items():
        config = small_config(tmp_path, *flow, "training.scheme=continuous", "training.steps=2")
        assert type(train(config, tmp_path / name).model.blocks[0]).__name__ == "FlowBlock"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.scheme=continuous", "flow.method=rk5"], "rk5"),
        (["training.scheme=continuous", "flow.method=rk4", "flow.steps=null"], "error estimate"),
        (["training.scheme=continuous", "flow.method=torchdiffeq:midpoint"], "Backprop"),
        (["model.horizon=1.5"], "horizon=1.5 has no discrete twin"),
        (["model.horizon=1.5", *CONTINUOUS], "horizon=1.5 has no discrete twin"),
        (["model.vocab_size=5"], "model.vocab_size=5"),
        (["model.context=100000"], "100[_,]?00[01]"),
        (["training.minimum_learning_rate=1.0"], "minimum_learning_rate"),
        (["training.accelerator=gpu"], "accelerator"),
        (["data.tokenizer=words"], "words"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    if "accelerator" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=words):
        train(small_config(tmp_path, *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_horizon_without_a_twin_can_be_trained_as_a_flow(tmp_path: Path) -> None:
    config = small_config(tmp_path, "model.horizon=1.5", "training.scheme=continuous", "training.steps=2")
    assert train(config, tmp_path / "run").steps == 2


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="run"):
        train(small_config(tmp_path), folder)
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        train(small_config(tmp_path), folder / "notes.txt")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_what_cannot_be_resumed_is_refused_by_name(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with pytest.raises(ValueError, match="no run folder"):
        train(config, tmp_path / "nowhere", resume=True)
    train(config, tmp_path / "run", stop_after=5)
    changed = small_config(tmp_path, "model.d_model=32", "training.seed=3", "training.progress=true")
    with pytest.raises(ValueError, match=r"model.d_model: 16 there, 32 given; training.seed: 1337 there, 3 given$"):
        train(changed, tmp_path / "run", resume=True)
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text.replace("squared", "SQUARED"))
    with pytest.raises(ValueError, match="text or its tokenizer has changed"):
        train(config, tmp_path / "run", resume=True)
    (tmp_path / "text.txt").write_text(text)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged"):
        train(config, tmp_path / "run", resume=True)
    last.unlink()
    with pytest.raises(ValueError, match="to resume from"):
        train(config, tmp_path / "run", resume=True)


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(tmp_path: Path) -> None:
    def spoil(module: Any) -> None:
        module.model.norm.weight.data.fill_(float("nan"))

    with pytest.raises(DivergedError, match="nan in step 8"):
        train(small_config(tmp_path), tmp_path / "run", callbacks=[AtStep(7, spoil)])
    assert load_model(tmp_path / "run").norm.weight.isfinite().all()


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    def spoil(module: Any) -> None:
        module.model.norm.weight.data.fill_(float("inf"))

    with pytest.raises(DivergedError, match=r"after step 10 these weights are not finite: norm\.weight"):
        train(small_config(tmp_path), tmp_path / "run", callbacks=[AtStep(10, spoil)])
    assert json.loads((tmp_path / "run" / "checkpoints" / "model.json").read_text())["step"] == 5


def test_a_bad_loss_is_traced_to_its_step_when_losses_are_looked_at_seldom() -> None:
    metrics = Metrics(10, Stopwatch())
    metrics._recent = [torch.tensor(value) for value in (1.0, 2.0, float("inf"), float("nan"))]
    with pytest.raises(DivergedError, match="inf in step 39"):
        metrics._check(40)


def test_a_full_disk_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    train(config, tmp_path / "warm", stop_after=1)
    for folder in (tmp_path / "run", tmp_path / "empty"):
        with monkeypatch.context() as patch:
            fill_disk(patch)
            (tmp_path / "empty").mkdir(exist_ok=True)
            with pytest.raises(OSError, match=r"config\.yaml") as caught:
                train(config, folder)
        assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "empty").iterdir())


def test_a_full_disk_later_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[str, Any]
) -> None:
    config = small_config(tmp_path, *CONTINUOUS)
    with monkeypatch.context() as patch:
        fill = AtStep(9, lambda module: fill_disk(patch))
        with pytest.raises(OSError, match=r"last\.ckpt") as caught:
            train(config, tmp_path / "run", callbacks=[fill])
    assert caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "run").rglob("*.part"))
    assert same_weights(train(config, tmp_path / "run", resume=True).model, straight["model"])


def test_a_model_that_leaks_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(v: torch.Tensor, length: int, size: int) -> torch.Tensor:
        # Token t reads the block that is complete at t + 1.
        return lift(v, length, size).roll(-1, 1)

    monkeypatch.setattr(odeformer.blocks, "lift", early)
    with pytest.raises(CausalityError, match="LEAK"):
        train(small_config(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_training_checks_causality_at_its_start_and_before_the_final_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    check = run_module.check_causality

    def counted(model: Any, **settings: Any) -> Any:
        assert settings == {"raise_on_leak": True}
        calls.append(type(model.blocks[0]).__name__)
        return check(model, **settings)

    monkeypatch.setattr(run_module, "check_causality", counted)
    monkeypatch.setattr("odeformer.training.callbacks.check_causality", counted)
    train(small_config(tmp_path, *CONTINUOUS), tmp_path / "run")
    assert calls == ["FlowBlock", "DiscreteBlock"]


def test_a_run_says_nothing_and_warns_of_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(small_config(tmp_path), tmp_path / "run")
    assert capfd.readouterr() == ("", "")


def test_the_progress_line_ends_at_the_last_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(small_config(tmp_path, "training.progress=true"), tmp_path / "run", label="small run")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "small run" in shown.err
    assert "12/12" in shown.err
    assert "validation=" in shown.err


def test_training_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    train(small_config(tmp_path, "training.steps=2"), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)
    assert os.environ.get("PL_GLOBAL_SEED") is None
