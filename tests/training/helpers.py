"""A text, and a small run on it that opens the gate within a few steps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from odeformer import FastSlowLM, RunConfig
from odeformer.training import load_run_config

SMALL = (
    "model.d_model=16",
    "model.n_layer=2",
    "model.n_head=2",
    "model.pool_size=4",
    "model.context=18",
    "flow.method=heun",
    "flow.steps=2",
    "training.steps=12",
    "training.batch_size=2",
    "training.learning_rate=0.01",
    "training.minimum_learning_rate=0.001",
    "training.warmup_steps=2",
    "training.evaluate_every=5",
    "training.evaluation_batches=2",
    "training.checkpoint_every=5",
    "training.log_every=2",
    "training.progress=false",
    "training.accelerator=cpu",
)
CONTINUOUS = ("training.scheme=continuous", "training.switch_at=6")


def write_text(folder: Path) -> Path:
    """About 6 kB of text with some structure."""
    path = folder / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(160)))
    return path


def small_config(folder: Path, *overrides: str) -> RunConfig:
    """A run on a text that is written into `folder`."""
    return load_run_config(None, small_overrides(folder, *overrides))


def small_overrides(folder: Path, *overrides: str) -> list[str]:
    return [f"data.source={write_text(folder)}", f"data.cache={folder / 'cache'}", *SMALL, *overrides]


def same_weights(first: FastSlowLM, second: FastSlowLM) -> bool:
    """Every tensor is bit-equal."""
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fill_disk(monkeypatch: pytest.MonkeyPatch, flushes: int = 0) -> None:
    """After that many more flushes to disk, every one fails as on a full disk."""
    flush, left = os.fsync, [flushes]

    def limited(handle: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        flush(handle)

    monkeypatch.setattr(os, "fsync", limited)
