"""metrics.csv: one row a step, kept when a run is resumed."""

import csv
import os
from pathlib import Path

import pytest

from odeformer.training.loggers import MetricsFile


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_what_is_logged_at_one_step_is_one_row_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    logger = MetricsFile(path, ["train/loss", "validation/loss"])
    logger.log_metrics({"train/loss": 2.5}, step=1)
    assert _rows(path) == [{"step": "1", "train/loss": "2.5", "validation/loss": ""}]
    logger.log_metrics({"validation/loss": 3.0}, step=1)
    logger.log_metrics({"train/loss": 2.0}, step=2)
    assert _rows(path) == [
        {"step": "1", "train/loss": "2.5", "validation/loss": "3.0"},
        {"step": "2", "train/loss": "2.0", "validation/loss": ""},
    ]
    logger.finalize("success")


def test_an_unforeseen_metric_gets_a_column(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    logger = MetricsFile(path, ["train/loss"])
    logger.log_metrics({"train/loss": 2.5}, step=1)
    logger.log_metrics({"train/loss": 2.0}, step=2)
    logger.log_metrics({"other": 1.0}, step=2)
    logger.log_metrics({"other": 4.0}, step=3)
    logger.finalize("success")
    assert _rows(path) == [
        {"step": "1", "train/loss": "2.5", "other": ""},
        {"step": "2", "train/loss": "2.0", "other": "1.0"},
        {"step": "3", "train/loss": "", "other": "4.0"},
    ]


def test_a_resumed_run_keeps_its_rows_and_repeats_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path, ["train/loss"])
    for step in (2, 4, 6):
        first.log_metrics({"train/loss": float(step)}, step=step)
    first.log_metrics({"other": 1.0}, step=6)
    first.finalize("failed")
    second = MetricsFile(path, ["train/loss"], first_step=4)
    for step in (6, 8):
        second.log_metrics({"train/loss": -float(step)}, step=step)
    second.finalize("success")
    assert [(row["step"], row["train/loss"]) for row in _rows(path)] == [
        ("2", "2.0"),
        ("4", "4.0"),
        ("6", "-6.0"),
        ("8", "-8.0"),
    ]


def test_rows_survive_a_rewrite_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path, ["train/loss"])
    first.log_metrics({"train/loss": 2.0}, step=2)
    first.finalize("failed")
    before = path.read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"metrics\.csv"):
        MetricsFile(path, ["train/loss"], first_step=2).log_metrics({"train/loss": 1.0}, step=3)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.csv"]
