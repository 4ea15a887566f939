"""The switch continuous -> discrete: in a run, and of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback

from odeformer import FastSlowLM, euler_defect, to_continuous, to_discrete
from odeformer.data import evaluation_batches, load_data
from odeformer.training import (
    SwitchToDiscrete,
    evaluate,
    flow_from_config,
    load_model,
    save_model,
    switch_checkpoint,
    train,
)
from tests.helpers import open_model
from tests.training.helpers import CONTINUOUS, fill_disk, same_weights, small_config


class Watch(Callback):
    """Notes the model's and the optimiser's identity and state around the switch."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: dict[int, Any] = {}

    def _note(self, trainer: Trainer, module: LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        self.seen[trainer.global_step] = {
            "module": type(module.model.blocks[0]).__name__,  # type: ignore[union-attr]
            "pointers": [parameter.data_ptr() for parameter in module.model.parameters()],  # type: ignore[union-attr]
            "weights": {name: t.clone() for name, t in module.model.state_dict().items()},  # type: ignore[union-attr]
            "optimizer": id(getattr(optimizer, "optimizer", optimizer)),
            "moments": [state["exp_avg"].data_ptr() for state in optimizer.state.values()],
            "updates": [int(state["step"]) for state in optimizer.state.values()],
        }

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step in (self.step, self.step + 1):
            self._note(trainer, module)


def test_the_switch_keeps_every_tensor_and_the_optimisers_state(tmp_path: Path) -> None:
    config = small_config(tmp_path, *CONTINUOUS)
    watch = Watch(6)
    result = train(config, tmp_path / "run", callbacks=[watch])
    just_after, later = watch.seen[6], watch.seen[7]
    stopped = train(config, tmp_path / "stopped", stop_after=6)
    assert just_after["module"] == later["module"] == "DiscreteBlock"
    # The weights at the start of step 7 are those after step 6: the switch itself changes none.
    assert all(torch.equal(just_after["weights"][name], t) for name, t in stopped.model.state_dict().items())
    assert just_after["pointers"] == later["pointers"] == [p.data_ptr() for p in result.model.parameters()]
    assert just_after["optimizer"] == later["optimizer"]
    assert just_after["moments"] == later["moments"]
    assert set(just_after["updates"]) == {6}
    # The last layer's slow attention and MLP have no gradient in the discrete model, so their count stands still.
    assert sorted(set(later["updates"])) == [6, 7]


def test_gap_and_defect_are_what_an_independent_evaluation_finds(tmp_path: Path) -> None:
    config = small_config(tmp_path, *CONTINUOUS)
    record = train(config, tmp_path / "run").switch
    assert record is not None
    assert record == json.loads((tmp_path / "run" / "switch.json").read_text())
    at_switch = train(config, tmp_path / "stopped", stop_after=6).model
    assert all(block.layer.gate.abs().max() > 0 for block in at_switch.blocks)  # type: ignore[union-attr]
    data = load_data(config.data, context=18)
    batches = list(evaluation_batches(data.validation, 2, 18, 2))
    before = evaluate(to_continuous(at_switch, **flow_from_config(config.flow)), batches)
    after = evaluate(to_discrete(at_switch), batches)
    assert before != after
    assert record["step"] == 6
    assert record["validation_loss_before"] == pytest.approx(before, rel=1e-6)
    assert record["validation_loss_after"] == pytest.approx(after, rel=1e-6)
    assert record["gap"] == record["validation_loss_after"] - record["validation_loss_before"]
    assert record["euler_defect"] == pytest.approx(euler_defect(at_switch, batches[0][0]), rel=1e-5)


def test_the_callback_refuses_a_step_that_never_comes() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SwitchToDiscrete(0, [])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return train(small_config(tmp_path, "training.scheme=continuous"), tmp_path / "run").folder


def test_a_checkpoint_is_switched_with_the_same_weights(tmp_path: Path, run: Path) -> None:
    report = switch_checkpoint(run, tmp_path / "discrete")
    continuous, discrete = load_model(run), load_model(tmp_path / "discrete")
    assert report.ok, str(report)
    assert same_weights(continuous, discrete)
    assert type(discrete.blocks[0]).__name__ == "DiscreteBlock"
    assert report.step == json.loads((tmp_path / "discrete" / "model.json").read_text())["step"] == 12
    assert report.gap == pytest.approx(report.validation_loss_after - report.validation_loss_before)  # type: ignore[operator]
    result = json.loads((run / "result.json").read_text())
    assert report.validation_loss_before == pytest.approx(result["validation_loss"], rel=1e-6)
    assert len(report.euler_defect or []) == 2
    assert "gap" in str(report)


def test_a_checkpoint_on_its_own_is_switched_without_a_gap(tmp_path: Path) -> None:
    model = open_model(dtype=torch.float32)
    save_model(to_continuous(model), tmp_path / "model")
    report = switch_checkpoint(tmp_path / "model", tmp_path / "discrete")
    assert report.gap is None
    assert "no validation text" in report.note
    assert same_weights(load_model(tmp_path / "discrete"), model)


def test_a_run_whose_text_is_gone_is_switched_with_a_note(tmp_path: Path, run: Path) -> None:
    (tmp_path / "text.txt").unlink()
    report = switch_checkpoint(run, tmp_path / "discrete")
    assert report.gap is None
    assert "text.txt" in report.note


def test_a_switch_overwrites_nothing_and_leaves_nothing_behind(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileExistsError):
        switch_checkpoint(run, run)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        switch_checkpoint(tmp_path / "cache", tmp_path / "discrete")
    with monkeypatch.context() as patch:
        fill_disk(patch, flushes=3)
        with pytest.raises(OSError, match=r"model\.safetensors"):
            switch_checkpoint(run, tmp_path / "discrete")
    assert not (tmp_path / "discrete").exists()


def test_nothing_is_written_where_the_certificate_fails(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import odeformer.training.switch as switch_module

    class Failed:
        ok = False
        euler_defect = (0.0, 0.0)

        def __str__(self) -> str:
            return "FAILS"

    def fails(model: FastSlowLM) -> Failed:
        return Failed()

    monkeypatch.setattr(switch_module, "certify", fails)
    assert not switch_checkpoint(run, tmp_path / "discrete").ok
    assert not (tmp_path / "discrete").exists()
