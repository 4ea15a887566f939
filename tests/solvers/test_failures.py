"""Failures are data: a status, a message with the time, and what was reached."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from solvers import (
    RK4,
    AdaptiveSteps,
    Dopri5,
    Euler,
    FixedSteps,
    Heun,
    Method,
    Solution,
    SolveError,
    Status,
    Steps,
    TorchDiffEq,
    integrate,
    solve,
)
from tests.solvers.problems import METHODS, Field, Network, nan_after, states


def attempt(system: Field, t1: float, method: Method | TorchDiffEq, steps: Steps, **settings: object) -> Solution:
    x, y = states()
    return solve(system, x, y, t1=t1, method=method, steps=steps, raise_on_failure=False, **settings)  # type: ignore[arg-type]


def time_in(message: str) -> float:
    match = re.search(r"at slow time t = (\S+) with", message)
    assert match, message
    return float(match.group(1))


@pytest.mark.parametrize("onset", [0.0, 1e-9, 0.3, 0.999])
@pytest.mark.parametrize("method", [Heun(), Dopri5()], ids=repr)
def test_a_field_that_turns_nan(method: Method, onset: float) -> None:
    solution = attempt(nan_after(onset), 1.0, method, AdaptiveSteps(1e-4, 1e-6), save_at=[0.0, onset / 2, 1.0])
    assert solution.status is Status.NON_FINITE
    assert time_in(solution.message) == pytest.approx(onset, abs=1e-5)
    assert repr(method) in solution.message
    assert len(solution.ts) == len(solution.xs) == len(solution.ys) == 2
    assert torch.isfinite(solution.xs).all() and torch.isfinite(solution.ys).all()
    assert solution.stats.steps < 300


def test_a_field_that_turns_nan_backwards_and_with_a_smallest_step() -> None:
    system = Field(lambda t, x, y: torch.full_like(x, 1.0 if t > -0.3 else math.nan))
    solution = attempt(system, -1.0, Dopri5(), AdaptiveSteps(1e-4, 1e-4))
    assert solution.status is Status.NON_FINITE and time_in(solution.message) == pytest.approx(-0.3, abs=1e-6)
    solution = attempt(nan_after(0.3), 1.0, Dopri5(), AdaptiveSteps(1e-4, 1e-4, min_step=1e-3))
    assert solution.status is Status.NON_FINITE and time_in(solution.message) == pytest.approx(0.3, abs=2e-3)


@pytest.mark.parametrize("method", [*METHODS, TorchDiffEq("rk4")], ids=repr)
def test_equal_steps_into_nan(method: Method | TorchDiffEq) -> None:
    """Known to the resolution of the save times; the states before are kept."""
    solution = attempt(nan_after(0.55), 1.0, method, FixedSteps(10), save_at=[0.0, 0.25, 0.5, 0.75, 1.0])
    assert solution.status is Status.NON_FINITE
    between = re.search(r"between slow times t = (\S+) and t = (\S+) with", solution.message)
    assert between, solution.message
    before, by = map(float, between.groups())
    assert before <= 0.55 <= by <= before + 0.25
    assert solution.ts[-1] == before and torch.isfinite(solution.xs).all()
    solution = attempt(nan_after(0.55), 1.0, method, FixedSteps(10))
    assert "between slow times t = 0 and t = 1" in solution.message and len(solution.ts) == len(solution.xs) == 0


def test_a_step_that_overflows_is_not_accepted() -> None:
    """x' = x^2 blows up at t = 1 / x0 = 1/2."""
    x = torch.full((1,), 2.0, dtype=torch.float64)
    for method in (Dopri5(), Heun(), TorchDiffEq("dopri5")):
        solution = solve(
            Field(lambda t, x, y: x * x),
            x,
            x,
            t1=1.0,
            method=method,
            steps=AdaptiveSteps(1e-4, 1e-6),
            raise_on_failure=False,
            max_steps=20_000,
        )
        assert solution.status in (Status.NON_FINITE, Status.STEP_UNDERFLOW)
        assert time_in(solution.message) == pytest.approx(0.5, abs=1e-2)


def test_a_transient_nan_from_too_long_a_step_is_survived() -> None:
    """sqrt(x) with x' = -sqrt(x) - overshooting into x < 0 gives nan, a shorter step does not."""
    x = torch.full((1,), 1.0, dtype=torch.float64)
    steps = AdaptiveSteps(1e-6, 1e-9, first_step=1.9)
    solution = solve(Field(lambda t, x, y: -torch.sqrt(x)), x, x, t1=1.9, method=Dopri5(), steps=steps)
    assert solution.stats.rejected > 0
    assert solution.xs.item() == pytest.approx((1 - 1.9 / 2) ** 2, rel=1e-3)


def test_step_limit() -> None:
    for method, steps in (
        (Dopri5(), AdaptiveSteps(1e-10, 1e-10)),
        (RK4(), FixedSteps(8)),
        (TorchDiffEq("dopri5"), AdaptiveSteps(1e-10, 1e-10)),
        (TorchDiffEq("rk4"), FixedSteps(8)),
    ):
        solution = attempt(Network(0.25), 4.0, method, steps, max_steps=7)
        assert solution.status is Status.STEP_LIMIT and solution.stats.steps == 7, method
        assert 0 < time_in(solution.message) < 4, method
    assert attempt(Network(0.25), 4.0, RK4(), FixedSteps(7), max_steps=7).status is Status.SUCCESS
    saved = attempt(Network(0.25), 4.0, RK4(), FixedSteps(8), max_steps=6, save_at=[0.0, 1.0, 2.0, 3.1])
    assert saved.ts.tolist() == [0.0, 1.0, 2.0] and time_in(saved.message) == 3.0


def test_the_step_limit_of_torchdiffeq_counts_the_whole_span() -> None:
    """Its own limit counts anew at every output time."""
    save_at = torch.linspace(0, 4, 41, dtype=torch.float64)
    solution = attempt(
        Network(0.25), 4.0, TorchDiffEq("dopri5"), AdaptiveSteps(1e-8, 1e-8), max_steps=20, save_at=save_at
    )
    assert solution.status is Status.STEP_LIMIT and solution.stats.steps == 20


def test_step_underflow() -> None:
    """A jump, and a tolerance that no step of at least min_step meets."""
    jump = Field(lambda t, x, y: torch.full_like(x, 1e8 if t > 0.5 else 0.0))
    solution = attempt(jump, 1.0, Dopri5(), AdaptiveSteps(1e-9, 1e-9, min_step=1e-3))
    assert solution.status is Status.STEP_UNDERFLOW and time_in(solution.message) == pytest.approx(0.5, abs=2e-3)
    assert "min_step" in solution.message


def test_failures_raise_by_default_and_carry_the_solution() -> None:
    x, y = states()
    with pytest.raises(SolveError, match="non-finite state or field at slow time") as caught:
        solve(nan_after(0.5), x, y, t1=1.0, method=Dopri5(), steps=AdaptiveSteps(1e-4, 1e-4), save_at=[0.25, 1.0])
    assert caught.value.solution.status is Status.NON_FINITE and caught.value.solution.ts.tolist() == [0.25]
    with pytest.raises(SolveError, match="non-finite"):
        solve(nan_after(0.5), x, y, t1=1.0, method=Euler(), steps=FixedSteps(3))
    with pytest.raises(SolveError, match="non-finite"):
        integrate(nan_after(0.5), x, y, span=1.0, method=Dopri5(), steps=AdaptiveSteps(1e-4, 1e-4))
    with pytest.raises(SolveError, match="step limit"):
        integrate(Network(), x, y, span=1.0, method=Euler(), steps=FixedSteps(3), max_steps=2)


def test_equal_steps_of_integrate_show_nan_in_the_result() -> None:
    x, y = states()
    x_end, _ = integrate(nan_after(0.5), x, y, span=1.0, method=Euler(), steps=FixedSteps(4))
    assert torch.isnan(x_end).all()


@pytest.mark.parametrize("method", [TorchDiffEq("dopri5"), TorchDiffEq("rk4"), Dopri5()], ids=repr)
def test_assertions_of_the_field_are_its_own(method: Method | TorchDiffEq) -> None:
    def f(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("the field's own")

    steps = FixedSteps(2) if repr(method) == "TorchDiffEq('rk4')" else AdaptiveSteps(1e-3, 1e-3)
    with pytest.raises(AssertionError, match="the field's own"):
        attempt(Field(f), 1.0, method, steps)
