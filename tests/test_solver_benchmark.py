"""The solver benchmark: its measures are right, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import solver_benchmark
from experiments.solver_benchmark import PeakBytes, in_turns, loosest
from experiments.solver_peers import ours, torchdiffeq_solver
from experiments.solver_problem import problem, relative_error
from solvers import ETD2RK, AndersonAdams


def test_peak_bytes_are_those_alive_at_once() -> None:
    given = torch.zeros(1000, dtype=torch.float64)  # made outside: not counted
    with PeakBytes() as watch:
        a = given + 1
        b = a * 2
        del a
        c = b.view(10, 100).t()  # a view is no new storage
        d = b + 1
        b.add_(1)
        del b, d
        assert watch.now == 8000
        del c
    assert (watch.peak, watch.now) == (16000, 0)


def test_peak_bytes_see_what_a_backward_pass_keeps() -> None:
    x = torch.zeros(1000, dtype=torch.float64, requires_grad=True)

    def layers(n: int) -> Tensor:
        y = x
        for _ in range(n):
            y = y.exp()
        return y.sum()

    peaks = []
    for n in (10, 20):
        with PeakBytes() as watch:
            torch.autograd.grad(layers(n), x)
        peaks.append(watch.peak)
    assert peaks[1] - peaks[0] == 10 * 8000


def test_relative_error_is_that_of_all_parts_together() -> None:
    exact = [torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)]
    assert relative_error([exact[0] + 1, exact[1]], exact) == pytest.approx(0.2)


def test_the_loosest_tolerance_that_reaches_an_error() -> None:
    assert loosest(lambda tolerance: 0.5 * tolerance, 0.01, (0.1, 0.05, 0.02, 0.01)) == 0.02
    with pytest.raises(ValueError, match="no tolerance down to"):
        loosest(lambda tolerance: 1.0, 0.01, (0.1, 0.01))


def test_turns_are_taken() -> None:
    order: list[str] = []
    in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b", "a", "b"]


def test_the_field_is_stiff_coupled_and_the_same_in_every_dtype() -> None:
    p, q = problem(1 / 64, tokens=32), problem(1 / 64, torch.float32, tokens=32)
    assert torch.equal(p.x0.float(), q.x0) and p.field.fast_decay == p.field.slow_decay == 1.0
    f, y_changed = p.field.fast(0.0, p.x0, p.y0), p.field.fast(0.0, p.x0, p.y0 + 1)
    assert not torch.equal(f, y_changed)


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_benchmark, "all_solvers", lambda: [ours(ETD2RK()), torchdiffeq_solver("dopri5")])
    monkeypatch.setattr(solver_benchmark, "TOLERANCES", (0.1, 1e-2))
    monkeypatch.setattr(solver_benchmark, "METHOD", AndersonAdams(4))
    solver_benchmark.main(["--quick", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "solver_benchmark.json").read_text())
    assert {m["solver"] for m in results["measurements"]} == {"ETD2RK", "torchdiffeq dopri5"}
    errors = results["gradient_error"]
    assert all(e < 1e-3 for name, row in errors.items() if "odeint" not in name for e in row.values())
    adjoint = errors["odeint_adjoint 1e-06"]["1/64"]
    assert adjoint is None or adjoint > 0.05
    stiff = [m for m in results["measurements"] if m["epsilon"] == 1 / 64 and m["tolerance"] == 1e-2]
    assert all(m["state_error"] < 0.05 for m in stiff)
    assert stiff[0]["evaluations"] < stiff[1]["evaluations"]
    for name in ("work_precision.png", "gradient_precision.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
