"""How large a demo is, and on how many threads it runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import odeformer
from odeformer.config import DataConfig, FastSlowConfig, FlowConfig, RunConfig, TrainingConfig
from odeformer.model import FastSlowLM
from solvers import RK4, Euler, Method


@dataclass(frozen=True)
class DemoPlan:
    """How large everything in a demo is."""

    config: RunConfig
    """Of the main run: continuous, with a switch."""
    arm_steps: int
    sample_tokens: int
    stability_tokens: int
    stability_methods: Sequence[Method] = (Euler(), RK4())
    stability_epsilons: Sequence[float] = (1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256)
    stability_rounds: int = 1
    long_steps: int = 200
    prompt: str = "def "
    temperature: float = 0.7
    top_k: int = 30
    quick: bool = False


def demo_plan(quick: bool = False) -> DemoPlan:
    """The demo's sizes: under 6 minutes on two idle cores; with `quick` under one, to see that everything works."""
    if quick:
        return DemoPlan(
            config=_config(
                FastSlowConfig(n_layer=2, d_model=64, n_head=4, pool_size=8, context=64, leak=0.1, relaxation=1.0),
                steps=120, switch_at=40, evaluate_every=40, log_every=5,
            ),
            arm_steps=40, sample_tokens=120, stability_tokens=16, stability_methods=(Euler(),),
            stability_epsilons=(1.0, 1 / 8, 1 / 64), quick=True,
        )  # fmt: skip
    return DemoPlan(
        config=_config(
            FastSlowConfig(n_layer=4, d_model=128, n_head=4, pool_size=16, context=128, leak=0.1, relaxation=1.0),
            steps=1500, switch_at=150, evaluate_every=75, log_every=10,
        ),
        arm_steps=150, sample_tokens=320, stability_tokens=32,
    )  # fmt: skip


def _config(model: FastSlowConfig, *, steps: int, switch_at: int, evaluate_every: int, log_every: int) -> RunConfig:
    """A leak and a relaxation above zero give the fast field a state of rest; they cost no loss at this size."""
    return RunConfig(
        model=model,
        data=DataConfig(source="stdlib", tokenizer="bytes"),
        flow=FlowConfig(method="heun", steps=2, gradient="checkpointed"),
        training=TrainingConfig(
            steps=steps,
            batch_size=6,
            learning_rate=3e-3,
            minimum_learning_rate=3e-4,
            warmup_steps=min(50, steps // 4),
            scheme="continuous",
            switch_at=switch_at,
            evaluate_every=evaluate_every,
            evaluation_batches=16,
            checkpoint_every=max(1, steps // 3),
            log_every=log_every,
            accelerator="cpu",
        ),
    )


@contextmanager
def fastest_threads(model: FastSlowLM, batch_size: int) -> Iterator[int]:
    """Inside, PyTorch computes on one thread or on as many as it is set to, whichever is faster for a step of the model now.

    Where other programs hold some of the cores, threads wait for each other at every operation, and a step can take a hundred
    times as long. A small model is no faster on many threads anyway. The setting is put back at the end.
    """
    given = torch.get_num_threads()
    tokens = torch.zeros(batch_size, model.config.context, dtype=torch.int64)
    times: dict[int, list[float]] = {1: [], given: []}

    def step(threads: int) -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        torch.autograd.grad(model(tokens).logsumexp(-1).mean(), model.embedding.weight)
        return time.perf_counter() - start

    try:
        step(1)
        for _ in range(4):
            for threads, found in times.items():
                found.append(step(threads))
            if times[given][-1] > 4 * times[1][-1]:
                break
        medians = {threads: statistics.median(found) for threads, found in times.items()}
        best = given if medians[given] < 0.9 * medians[1] else 1
        torch.set_num_threads(best)
        yield best
    finally:
        torch.set_num_threads(given)


def environment() -> dict[str, Any]:
    """Versions and threads that numbers and times depend on."""
    packages = ("torch", "pytorch-lightning", "torchdiffeq", "numpy", "scipy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return {
        "odeformer": odeformer.__version__,
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "PyTorch threads": torch.get_num_threads(),
    }
