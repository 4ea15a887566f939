"""Dtypes: tolerances that they do not resolve, and states in half precision."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from solvers import (
    AdaptiveSteps,
    Backprop,
    Checkpointed,
    Dopri5,
    FixedSteps,
    Method,
    Solution,
    Status,
    TorchDiffEq,
    integrate,
    solve,
)
from solvers.stepping import ROUND_OFFS, error_ratio
from tests.solvers.problems import ADAPTIVE, METHODS, Bernoulli, Field, Network, states
from tests.solvers.test_control import step_of

EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


def run(
    method: Method | TorchDiffEq, steps: AdaptiveSteps | FixedSteps, dtype: torch.dtype, **settings: object
) -> Solution:
    x, y = (state.to(dtype) for state in states(4))
    return solve(Network(0.5).to(dtype), x, y, t1=1.0, method=method, steps=steps, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rtol", [1e-18, 1e-30, 1e-200])
@pytest.mark.parametrize("method", [*ADAPTIVE, TorchDiffEq("dopri5")], ids=repr)
def test_a_tolerance_below_round_off(method: Method | TorchDiffEq, rtol: float, dtype: torch.dtype) -> None:
    """One warning, and the solve of the tolerance that it names."""
    limit = 300 if method in (Dopri5(), TorchDiffEq("dopri5")) else 20
    with torch.no_grad(), pytest.warns(UserWarning) as caught:
        found = run(method, AdaptiveSteps(rtol, 0.0), dtype, max_steps=limit, raise_on_failure=False)
    message = f"rtol={rtol:g} is below the epsilon {EPSILON[dtype]:.3g} of {dtype}"
    assert [message in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__
    taken = AdaptiveSteps(ROUND_OFFS * EPSILON[dtype], 0.0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = run(method, taken, dtype, max_steps=limit, raise_on_failure=False)
    assert torch.equal(found.xs, expected.xs) and torch.equal(found.ys, expected.ys) and found.stats == expected.stats
    assert limit == 20 or found.status is Status.SUCCESS or dtype is torch.float64


def test_what_warns_and_what_does_not() -> None:
    """The epsilon itself, fixed steps and an empty state of coarser dtype do not; `integrate` warns as `solve` does."""
    x, y = (state.float() for state in states())
    system = Network(0.5).float()
    steps = AdaptiveSteps(1e-9, 1e-3)
    with pytest.warns(UserWarning, match=r"rtol=1e-09 is below the epsilon 1\.19e-07 of torch\.float32") as caught:
        integrate(system, x, y, span=0.1, method=Dopri5(), steps=steps)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"of torch\.float32"):
        solve(Field(lambda t, x, y: -x), x.double(), y, t1=0.1, method=Dopri5(), steps=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rtol in (EPSILON[torch.float32], 1e-3):
            integrate(system, x, y, span=0.1, method=Dopri5(), steps=AdaptiveSteps(rtol, 1e-3))
        integrate(system, x, y, span=0.1, method=Dopri5(), steps=FixedSteps(1))
        empty = torch.zeros(0, dtype=torch.bfloat16)
        integrate(Field(lambda t, x, y: -x), x, empty, span=0.1, method=Dopri5(), steps=AdaptiveSteps(1e-6, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_half_precision_with_equal_steps(method: Method, dtype: torch.dtype) -> None:
    """Within round-off of the float64 solution, a few epsilons a step; states, saved states and gradients keep the dtype."""
    save_at = [0.3, 1.0]
    exact = run(method, FixedSteps(4), torch.float64, save_at=save_at)
    for gradient in (Backprop(), Checkpointed()):
        x, y = (state.to(dtype).requires_grad_() for state in states(4))
        system = Network(0.5).to(dtype)
        found = solve(system, x, y, t1=1.0, method=method, steps=FixedSteps(4), gradient=gradient, save_at=save_at)
        for state, reference in ((found.xs, exact.xs), (found.ys, exact.ys)):
            assert state.dtype is dtype
            torch.testing.assert_close(state.double(), reference, rtol=0, atol=40 * EPSILON[dtype])
        gradients = torch.autograd.grad((found.xs.sum() + found.ys.sum()), (x, y, system.w))
        assert all(grad.dtype is dtype and torch.isfinite(grad).all() and grad.any() for grad in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ADAPTIVE, ids=repr)
def test_half_precision_under_error_control(method: Method, dtype: torch.dtype) -> None:
    """At a tolerance of a few epsilons, also with an atol that half precision cannot hold."""
    tolerance = 2 * ROUND_OFFS * EPSILON[dtype]
    x, y = Bernoulli.start(dtype)
    exact = torch.tensor(Bernoulli.exact(1.0), dtype=torch.float64)
    for atol in (tolerance, 1e-12):
        steps = AdaptiveSteps(tolerance, atol)
        found = solve(Bernoulli(0.5), x, y, t1=1.0, method=method, steps=steps, max_steps=200)
        end = torch.cat([found.xs[0], found.ys[0]])
        assert end.dtype is dtype
        torch.testing.assert_close(end.double(), exact, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_error_norms_do_not_leave_the_range_of_half_precision(dtype: torch.dtype) -> None:
    """Errors of 1e4 tolerances, whose squares overflow float16, and tolerances below its smallest number."""
    empty = torch.zeros(0, dtype=dtype)
    step = step_of([0.5, 0.5], [2.0, 2.0])
    assert step.error is not None
    half = type(step)(step.x.to(dtype), empty, (step.error[0].to(dtype), empty))
    state = torch.ones(2, dtype=dtype)
    for rtol, atol in ((1e-5, 1e-5), (1e-12, 1e-12), (1e-3, 0.0)):
        expected = 0.5 / (atol + 2 * rtol)
        assert error_ratio(half, state, empty, AdaptiveSteps(rtol, atol)) == pytest.approx(expected, rel=1e-6)


def test_time_stays_in_float64_beside_half_precision() -> None:
    """dx/dt = 2 pi cos(2 pi t) over [1000, 1001.25]: bfloat16 spaces times by 4 there."""

    def f(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(x, 2 * math.pi * math.cos(2 * math.pi * t))

    x = torch.zeros(1, dtype=torch.bfloat16)
    for method, steps in ((Dopri5(), AdaptiveSteps(0.02, 0.02)), (Dopri5(), FixedSteps(5))):
        solution = solve(Field(f), x, x, t0=1000.0, t1=1001.25, method=method, steps=steps)
        assert solution.xs.item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_complex_states(method: Method) -> None:
    """x' = i x beside a real y' = -y, and the same as two real states: one solution."""
    x, y = torch.tensor([1.0 + 0.5j, 0.25 - 1j], dtype=torch.complex128), torch.ones(3, dtype=torch.float64)
    turn = Field(lambda t, x, y: 1j * x, lambda t, x, y: -y)
    turn.fast_decay = 0.5

    def turned(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([-x[..., 1], x[..., 0]], -1)

    pairs = Field(turned, lambda t, x, y: -y)
    pairs.fast_decay = 0.5
    found = solve(turn, x, y, t1=1.0, method=method, steps=FixedSteps(8))
    expected = solve(pairs, torch.view_as_real(x), y, t1=1.0, method=method, steps=FixedSteps(8))
    torch.testing.assert_close(torch.view_as_real(found.xs), expected.xs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.ys, expected.ys, rtol=1e-9, atol=1e-9)
