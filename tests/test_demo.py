"""The demo from end to end on a tiny plan, and how it ends otherwise."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from odeformer import certify
from odeformer.demo import DemoPlan, demo_plan, run_demo
from odeformer.demo import run as demo_run
from odeformer.demo.run import noise_threshold
from odeformer.reporting.figures import read_metrics
from odeformer.training import load_model
from solvers import Euler
from tests.training.helpers import CONTINUOUS, small_config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_plan(folder: Path) -> DemoPlan:
    config = small_config(folder, *CONTINUOUS, "model.leak=0.2", "model.relaxation=1.0")
    return DemoPlan(
        config=config,
        arm_steps=6,
        sample_tokens=10,
        stability_tokens=6,
        stability_methods=(Euler(),),
        stability_epsilons=(1 / 4, 1 / 32),
        long_steps=60,
        prompt="7 ",
    )


def test_a_demo_from_end_to_end(tmp_path: Path) -> None:
    shown = io.StringIO()
    output = tmp_path / "demo"
    result = run_demo(output, plan=tiny_plan(tmp_path), console=Console(file=shown, width=100))
    assert result.folder == output
    assert result.causality_ok and result.certificate_ok
    results = json.loads((output / "results.json").read_text())
    assert results["finished"]
    for name in ("config.yaml", "metrics.csv", "switch.json", "tensorboard"):
        assert (output / name).exists(), name
    assert {"model.safetensors", "model.json", "last.ckpt"} <= {
        path.name for path in (output / "checkpoints").iterdir()
    }
    figures = {path.name for path in (output / "figures").iterdir()}
    assert {"loss.png", "gates.png", "euler_defect.png", "arms.png"} <= figures

    training, switch = results["training"], json.loads((output / "switch.json").read_text())
    assert training["switch"] == switch
    assert result.switch_gap == switch["validation_loss_after"] - switch["validation_loss_before"]
    per_byte = results["data"]["validation"]["tokens"] / results["data"]["validation"]["bytes"]
    assert training["bits_per_byte"] == pytest.approx(result.validation_loss / math.log(2) * per_byte)
    assert certify(load_model(output)).ok

    coupled, frozen, dense = results["arms"]
    assert [arm["name"] for arm in results["arms"]] == ["coupled", "frozen", "dense"]
    assert frozen["trained_parameters"] == dense["parameters"] < coupled["parameters"] == frozen["parameters"]
    assert max(read_metrics(output / "arms/frozen/metrics.csv")["gate/layer_0"][1]) == 0
    noise = results["arms_noise"]
    assert noise["losses"][0] == coupled["validation_loss"]
    assert noise["threshold"] == noise_threshold(noise["losses"]) > 0

    text = (output / "report.html").read_text()
    assert "did not run to its end" not in text
    for value in (f"{result.validation_loss:.3f}", f"{result.switch_gap:+.3f}"):
        assert value in text
    last = shown.getvalue().splitlines()[-3:]
    assert "report.html" in last[0]
    assert "odeformer generate" in last[1] and "odeformer certify" in last[2]


def test_the_noise_threshold_bounds_19_of_20_differences() -> None:
    draws = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inside = sum(abs(row[3] - row[4]) < noise_threshold(row[:3]) for row in draws.tolist())
    assert inside / 4000 == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 4000) ** 0.5)


def test_a_folder_with_something_in_it_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        run_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_demo_leaves_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "generate_text", interrupt)
    threads = torch.get_num_threads()
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo", plan=tiny_plan(tmp_path), console=Console(file=shown))
    results = json.loads((tmp_path / "demo/results.json").read_text())
    assert not results["finished"]
    assert {"causality", "certificate", "training"} <= set(results)
    text = (tmp_path / "demo/report.html").read_text()
    assert "did not run to its end" in text
    assert "Missing: the sampled text" in text
    assert "Stopped" in shown.getvalue()
    assert torch.get_num_threads() == threads


def test_results_before_training_are_on_disk_when_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from odeformer.training.module import FastSlowModule

    def interrupt(*args: object, **kwargs: object) -> None:
        raise RuntimeError("stop here")

    monkeypatch.setattr(FastSlowModule, "training_step", interrupt)
    with pytest.raises(RuntimeError, match="stop here"):
        run_demo(tmp_path / "demo", plan=tiny_plan(tmp_path), console=Console(file=io.StringIO()))
    results = json.loads((tmp_path / "demo/results.json").read_text())
    assert results["causality"]["ok"] and results["certificate"]["ok"]
    assert (tmp_path / "demo/report.html").is_file()


@pytest.mark.parametrize("quick", [False, True])
def test_the_plans_train_continuously_with_the_discrete_adjoint_and_switch(quick: bool) -> None:
    plan = demo_plan(quick)
    training = plan.config.training
    assert training.scheme == "continuous"
    assert training.switch_at is not None and training.switch_at < training.steps
    assert plan.config.flow.gradient == "checkpointed"
    assert plan.config.model.leak > 0
    assert dataclasses.replace(plan).quick is quick
