"""A run that dies in its last moments, in 64 bits, or with a damaged file beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from odeformer import TrainingConfig
from odeformer.training import load_model, train
from tests.training.helpers import CONTINUOUS, same_weights, small_config


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["save_model", "evaluate", "write_json"])
def test_a_run_killed_after_its_last_checkpoint_is_completed_by_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The last step is in last.ckpt; the safetensors, the last evaluation and result.json may not be written yet."""
    config = small_config(tmp_path, *CONTINUOUS)
    straight = train(config, tmp_path / "straight")
    home = {"save_model": "callbacks", "evaluate": "callbacks", "write_json": "run"}[at]
    right = getattr(__import__(f"odeformer.training.{home}", fromlist=[at]), at)

    def dies(*args: object, **kwargs: object) -> object:
        last = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True) if seen(tmp_path) else None
        if last is not None and last["global_step"] == 12:
            raise Killed
        return right(*args, **kwargs)

    monkeypatch.setattr(f"odeformer.training.{home}.{at}", dies)
    with pytest.raises((Killed, SystemExit)):
        train(config, tmp_path / "run")
    monkeypatch.undo()
    resumed = train(config, tmp_path / "run", resume=True)
    assert same_weights(resumed.model, straight.model)
    assert same_weights(load_model(tmp_path / "run"), straight.model)
    assert resumed.validation_loss == straight.validation_loss
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 12
    assert (tmp_path / "run/metrics.csv").read_text() == (tmp_path / "straight/metrics.csv").read_text()


def seen(folder: Path) -> bool:
    return (folder / "run/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize("overrides", [(), CONTINUOUS])
def test_a_run_in_64_bits_resumes_bit_for_bit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = small_config(tmp_path, *overrides, "training.precision=64-true")
    straight = train(config, tmp_path / "straight")
    train(config, tmp_path / "run", stop_after=8)
    resumed = train(config, tmp_path / "run", resume=True)
    assert next(resumed.model.parameters()).dtype == torch.float64
    assert same_weights(resumed.model, straight.model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.csv", b"loss\n1\n", r"metrics.csv is damaged: no column 'step'"),
        ("metrics.csv", b"step,train/loss\n2,1.0,7\n", r"metrics.csv is damaged: row 2 has another number"),
        ("metrics.csv", b"step,train/loss\n2,one\n", r"metrics.csv is damaged: could not convert"),
        ("metrics.csv", b"step,train/loss\n2,\xff\n", r"metrics.csv is damaged: .*utf-8"),
        ("checkpoints/last.ckpt", b"short", r"last.ckpt is damaged"),
    ],
)
def test_damaged_files_are_named_before_work_starts(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    config = small_config(tmp_path)
    train(config, tmp_path / "run", stop_after=5)
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / name).read_bytes() == content


def test_a_checkpoint_that_holds_no_run_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    train(config, tmp_path / "run", stop_after=5)
    torch.save({"global_step": 5}, tmp_path / "run/checkpoints/last.ckpt")
    with pytest.raises(ValueError, match=r"last.ckpt is damaged or not a checkpoint of a run: .*lacks state_dict"):
        train(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"switch_at": 5}, "switch_at=5 needs scheme='continuous', got 'discrete'"),
        ({"switch_at": 12, "steps": 12, "scheme": "continuous"}, "switch_at=12 must be less than steps=12"),
        ({"switch_at": 30, "steps": 12, "scheme": "continuous"}, "switch_at=30 must be less than steps=12"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)  # type: ignore[arg-type]
