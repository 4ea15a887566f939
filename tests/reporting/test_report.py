"""The report: self-contained, escaped, honest about what is missing. The figures: whole PNG files from plain numbers."""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from odeformer.reporting import figures
from odeformer.reporting.report import RESULTS_FILE, draw_figures, main, write_report

METRICS = """step,train/loss,validation/loss,learning_rate,gate/layer_0,gate/layer_1
10,5.0,,0.001,0.1,0.2
20,4.0,4.5,0.001,0.2,0.21
30,3.0,3.5,,0.3,0.31
"""
SWITCH = {
    "step": 20,
    "validation_loss_before": 4.4,
    "validation_loss_after": 4.5,
    "gap": 0.1,
    "euler_defect": [2.0, 0.1],
}
EVIL = "<script>alert('x')</script> & \"quotes\""


def results() -> dict[str, Any]:
    cells = [{"step": 0.1, "settles": True, "bounded": True}, {"step": 10.0, "settles": False, "bounded": False}]
    limits = [
        {"method": "Euler", "epsilon": epsilon, "settles": epsilon, "bounded": None, "predicted_settles": epsilon,
         "predicted_bounded": 2 * epsilon, "cells": cells}
        for epsilon in (1.0, 0.1)
    ]  # fmt: skip
    arm = {"parameters": 1000, "trained_parameters": 900, "steps": 9, "validation_loss": 3.0, "seed": 1}
    arm |= {"milliseconds_per_step": 5.0, "tokens_per_second": 100.0}
    return {
        "quick": False,
        "finished": True,
        "seconds": 61.0,
        "environment": {"python": "3.11", "note": EVIL},
        "model": {"n_layer": 2, "d_model": 16, "n_head": 2, "context": 18, "pool_size": 4, "epsilon": 0.25,
                  "leak": 0.1, "relaxation": 1.0, "parameters": 1000, "vocab_size": 256},
        "data": {"source": [EVIL], "train": {"bytes": 5000}, "validation": {"bytes": 500}},
        "causality": {"ok": True, "pairs": 210, "text": "Causal"},
        "certificate": {"ok": True, "text": EVIL},
        "certificate_trained": {"ok": True, "text": "holds"},
        "training": {"steps": 30, "validation_loss": 3.5, "bits_per_byte": 5.049, "tokens_per_second": 1234.0,
                     "flow": "heun", "switch": SWITCH},
        "sample": {"prompt": "def ", "text": EVIL, "temperature": 0.7, "top_k": 30},
        "stability": {"layer": 1, "tokens": 8, "steps": 200, "note": "At rest.", "at_input": [-1.0, 0.5], "limits": limits},
        "arms": [{"name": name, "folder": name, **arm} for name in ("coupled", "frozen", "dense")],
        "arms_noise": {"losses": [3.0, 3.01, 3.02], "threshold": 0.061},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / RESULTS_FILE).write_text(json.dumps(results()))
    (tmp_path / "metrics.csv").write_text(METRICS)
    (tmp_path / "config.yaml").write_text(f"data: {{source: {EVIL}}}\n")
    for name in ("coupled", "frozen", "dense"):
        (tmp_path / "arms" / name).mkdir(parents=True)
        (tmp_path / "arms" / name / "metrics.csv").write_text(METRICS)
    return tmp_path


def test_a_whole_report_is_self_contained_and_escaped(folder: Path) -> None:
    drawn = draw_figures(folder)
    assert {path.name for path in drawn} == {
        "loss.png", "gates.png", "euler_defect.png", "stability.png", "overview.png", "arms.png",
    }  # fmt: skip
    text = write_report(folder).read_text(encoding="utf-8")
    assert "Missing:" not in text
    assert "<script" not in text and "<link" not in text and "@import" not in text
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:)?//""", text)
    assert text.count("&lt;script&gt;") == 5  # source, environment, certificate, sample, config
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert [base64.b64decode(code) for code in embedded] == [
        (folder / "figures" / name).read_bytes()
        for name in ("loss.png", "gates.png", "euler_defect.png", "stability.png", "arms.png")
    ]
    assert text.count("<img") == 5
    for words in (
        "+0.100",
        "5.049 bits per byte",
        "1,234",
        "One seed: no claim that one arm is better",
        "differences below 0.061",
    ):
        assert words in text
    assert "1 min 01 s" in text


def test_an_empty_folder_gives_a_report_that_names_what_is_missing(tmp_path: Path) -> None:
    assert draw_figures(tmp_path) == []
    text = write_report(tmp_path).read_text(encoding="utf-8")
    parts = ["the training run", "the causality check", "the certificate", "the stability sweep", "the sampled text"]
    parts += [
        "the comparison of the three arms",
        "figure loss.png",
        "figure arms.png",
        "config.yaml",
        "the environment",
    ]
    assert [part for part in parts if f"Missing: {part}" not in text] == []
    assert text.count('class="card missing"') == 5
    assert "did not run to its end" in text


@pytest.mark.parametrize("key", [key for key in results() if key not in ("quick", "finished")])
def test_any_one_part_may_be_missing(folder: Path, key: str) -> None:
    found = results()
    del found[key]
    (folder / RESULTS_FILE).write_text(json.dumps(found))
    assert write_report(folder).is_file()


def test_a_failed_verdict_is_not_shown_as_good(folder: Path) -> None:
    found = results()
    found["certificate_trained"] = {"ok": False, "text": "FAILS"}
    found["causality"]["ok"] = False
    (folder / RESULTS_FILE).write_text(json.dumps(found))
    text = write_report(folder).read_text(encoding="utf-8")
    assert text.count('class="card bad"') == 2
    assert 'class="card good"' not in text


def test_a_damaged_results_file_is_named(tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"results\.json is damaged"):
        write_report(tmp_path)


def test_the_command_draws_everything_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("report.html")
    assert main(["nowhere"]) == 2


def test_figures_are_png_of_a_readable_size_and_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = figures.defect_figure([1.0], tmp_path / "defect.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000 and height >= 500

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError, match="No space left"):
        figures.defect_figure([2.0], path)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["defect.png"]


def test_metrics_skip_empty_fields_and_name_bad_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(METRICS)
    found = figures.read_metrics(path)
    assert found["validation/loss"] == ([20, 30], [4.5, 3.5])
    assert found["train/loss"][0] == [10, 20, 30]
    path.write_text("step,train/loss\n1,abc\n")
    with pytest.raises(ValueError, match=r"metrics\.csv, line 2"):
        figures.read_metrics(path)
