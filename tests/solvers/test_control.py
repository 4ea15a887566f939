"""Error control: what the tolerances, the step bounds and the save times do."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solvers import (
    ETD2RK,
    ETD3RK,
    ROS2,
    AdaptiveSteps,
    Dopri5,
    FastSlowSystem,
    Heun,
    Method,
    Status,
    Step,
    TorchDiffEq,
    integrate,
    solve,
)
from solvers.rosenbrock import Rosenbrock
from solvers.stepping import PIController, error_ratio, hermite
from tests.solvers.problems import ADAPTIVE, Bernoulli, Field, Network, Recorded, reference, states


class Transient(FastSlowSystem):
    """dx/dt = -k (x - tanh(k (t - 1))), dy/dt = x - y: calm, then a jump of width 1/k at t = 1."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -10 * (x - torch.tanh(self.k * (torch.as_tensor(t, dtype=x.dtype) - 1)))

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x - y


@pytest.mark.parametrize("method", [*ADAPTIVE, ROS2()], ids=repr)
@pytest.mark.parametrize("epsilon", [1.0, 1 / 8])
def test_error_is_proportional_to_the_tolerance(method: Method, epsilon: float) -> None:
    """The estimated error of a step is of order error_order + 1 and below the tolerance, so the global error falls at least
    like tol^(order / (error_order + 1)), and stays within a moderate factor of tol: at tolerances small enough for the first,
    and large enough for the second where the exponent is below 1."""
    x, y = states(3)
    system = Network(epsilon)
    x_end, y_end = reference(system, x, y, [0.0, 1.0])
    tolerances = (1e-5, 1e-8)
    if isinstance(method, Heun | Rosenbrock):
        tolerances = (1e-3, 1e-5)
    elif method.order == method.error_order:
        tolerances = (1e-4, 1e-6)
    errors = []
    for tolerance in tolerances:
        with torch.no_grad():
            solution = solve(system, x, y, t1=1.0, method=method, steps=AdaptiveSteps(tolerance, tolerance))
        errors.append(float(torch.cat([solution.xs - x_end, solution.ys - y_end]).abs().max()))
        assert errors[-1] < 100 * tolerance
    rate = math.log(errors[0] / errors[1]) / math.log(tolerances[0] / tolerances[1])
    assert 0.6 < rate < 1.5, errors


@pytest.mark.parametrize("method", ADAPTIVE, ids=repr)
def test_a_hard_transient_is_met_by_rejections(method: Method) -> None:
    x, y = torch.full((1,), -1.0, dtype=torch.float64), torch.full((1,), -1.0, dtype=torch.float64)
    system = Transient(200.0)
    x_end, y_end = reference(system, x, y, [0.0, 0.95, 0.99, 1.01, 1.05, 2.0])
    solution = solve(system, x, y, t1=2.0, method=method, steps=AdaptiveSteps(1e-6, 1e-6))
    assert solution.stats.rejected > 0
    assert solution.stats.steps == solution.stats.accepted + solution.stats.rejected
    torch.testing.assert_close((solution.xs[0], solution.ys[0]), (x_end[-1], y_end[-1]), rtol=0, atol=2e-5)


def attempts(steps: AdaptiveSteps, t1: float = 2.0, epsilon: float = 0.25) -> list[tuple[float, float]]:
    method, (x, y) = Recorded(), states()
    solve(Network(epsilon), x, y, t1=t1, method=method, steps=steps)
    return method._attempts


@pytest.mark.parametrize("t1", [2.0, -2.0])
def test_step_bounds_are_slow_times(t1: float) -> None:
    epsilon, sign = 0.25, math.copysign(1, t1)
    first = attempts(AdaptiveSteps(1e-3, 1e-3, first_step=0.0125), t1)
    assert first[0] == (0.0, sign * 0.0125 / epsilon)
    bounded = attempts(AdaptiveSteps(1e-2, 1e-2, max_step=0.03125), t1)
    assert {h for _, h in bounded} == {sign * 0.125} | {h for _, h in bounded[:4]} | {bounded[-1][1]}
    assert all(abs(h) <= 0.03125 / epsilon for _, h in bounded)
    kept = attempts(AdaptiveSteps(1e-2, 1e-2, first_step=1e-6, min_step=0.0078125), t1)
    assert all(abs(h) >= 0.0078125 / epsilon for _, h in kept[:-1])
    assert kept[0][1] == sign * 0.0078125 / epsilon


def test_the_mesh_is_gapless_and_ends_at_the_end() -> None:
    for t1 in (2.0, -0.7):
        mesh = attempts(AdaptiveSteps(1e-7, 1e-7), t1)
        accepted = [a for a, b in zip(mesh, [*mesh[1:], (math.inf, 0)], strict=True) if b[0] != a[0]]
        for (tau, h), (following, _) in pairwise(accepted):
            assert tau + h == following
        tau, h = accepted[-1]
        assert tau + h == pytest.approx(t1 / 0.25, rel=1e-15)


@pytest.mark.parametrize("method", ADAPTIVE, ids=repr)
def test_forward_then_backward_returns(method: Method) -> None:
    x, y = states(2)
    system, steps = Network(0.5), AdaptiveSteps(1e-5, 1e-7)
    there = solve(system, x, y, t0=0.5, t1=1.5, method=method, steps=steps)
    back = solve(system, there.xs[0], there.ys[0], t0=1.5, t1=0.5, method=method, steps=steps)
    torch.testing.assert_close((back.xs[0], back.ys[0]), (x, y), rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", [*ADAPTIVE, TorchDiffEq("dopri5")], ids=repr)
@pytest.mark.parametrize("sign", [1, -1])
def test_save_times(method: Method | TorchDiffEq, sign: int) -> None:
    """Both ends, duplicates, neighbours closer than a step and mesh points; the mesh does not depend on them."""
    x, y = Bernoulli.start()
    save_at = [0.0, 0.0, 0.1, 0.1 + 1e-12, 0.3, 0.3, 0.5, 0.5]
    save_at = [sign * t for t in save_at]
    steps = AdaptiveSteps(1e-6, 1e-9)
    solution = solve(Bernoulli(0.5), x, y, t1=sign * 0.5, method=method, steps=steps, save_at=save_at)
    exact = torch.tensor([Bernoulli.exact(t) for t in save_at], dtype=torch.float64)
    assert solution.ts.tolist() == save_at
    torch.testing.assert_close(torch.cat([solution.xs, solution.ys], 1), exact, rtol=0, atol=2e-4)
    end_only = solve(Bernoulli(0.5), x, y, t1=sign * 0.5, method=method, steps=steps)
    assert torch.equal(solution.xs[0], x) and torch.equal(solution.xs[-1], end_only.xs[0])
    assert torch.equal(solution.xs[-1], solution.xs[-2]) and torch.equal(solution.xs[4], solution.xs[5])
    assert solution.stats.steps == end_only.stats.steps


def test_mesh_points_are_saved_without_interpolation() -> None:
    x, y = states()
    mesh = attempts(AdaptiveSteps(1e-5, 1e-5))
    times = [0.25 * tau for tau, _ in mesh]
    assert len(set(times)) == len(times) > 3, "the test needs a mesh without rejections"
    method = Recorded()
    saved = solve(Network(0.25), x, y, t1=2.0, method=method, steps=AdaptiveSteps(1e-5, 1e-5), save_at=times)
    assert method._attempts == mesh
    plain = solve(Network(0.25), x, y, t1=2.0, method=method, steps=AdaptiveSteps(1e-5, 1e-5))
    assert saved.stats == plain.stats  # no evaluation of the field but those of the steps


@given(
    st.lists(st.floats(-2, 2), min_size=4, max_size=4),
    st.floats(0, 1),
    st.floats(-2, 2).filter(lambda h: abs(h) > 0.01),
)
@settings(deadline=None, max_examples=50)
def test_hermite_is_exact_on_cubics(c: list[float], theta: float, h: float) -> None:
    def p(s: float) -> Tensor:
        return torch.tensor(c[0] + s * (c[1] + s * (c[2] + s * c[3])), dtype=torch.float64)

    def dp(s: float) -> Tensor:
        return torch.tensor(c[1] + s * (2 * c[2] + s * 3 * c[3]), dtype=torch.float64)

    value = hermite(theta, h, p(0), p(h), dp(0), dp(h))
    torch.testing.assert_close(value, p(theta * h), rtol=1e-12, atol=1e-12)


def test_x_and_y_are_weighed_separately() -> None:
    """A y of size 1e9 with 10 000 entries at rest must not hide the error of a single x."""
    x = torch.ones(1, dtype=torch.float64)
    steps = AdaptiveSteps(1e-6, 1e-12)
    alone = solve(rotation(), x, torch.zeros(0).double(), t1=5.0, method=Dopri5(), steps=steps)
    crowd = torch.full((10_000,), 1e9, dtype=torch.float64)
    beside = solve(rotation(), x, crowd, t1=5.0, method=Dopri5(), steps=steps)
    assert torch.equal(alone.xs, beside.xs) and alone.stats == beside.stats
    assert alone.xs.item() == pytest.approx(math.exp(math.sin(5.0)), rel=1e-4)


def rotation() -> Field:
    return Field(lambda t, x, y: math.cos(t) * x)


def step_of(error: list[float], end: list[float]) -> Step:
    error_x, end_x = torch.tensor(error, dtype=torch.float64), torch.tensor(end, dtype=torch.float64)
    empty = torch.zeros(0, dtype=torch.float64)
    return Step(end_x, empty, (error_x, empty))


def test_error_ratio() -> None:
    """Root mean square of error / (atol + rtol max(|start|, |end|)); infinite where anything is not finite."""
    x, empty = torch.tensor([1.0, -4.0]).double(), torch.zeros(0).double()
    steps = AdaptiveSteps(rtol=0.1, atol=0.01)
    expected = math.sqrt(((0.3 / 0.21) ** 2 + (0.5 / 0.41) ** 2) / 2)
    assert error_ratio(step_of([0.3, -0.5], [2.0, 3.0]), x, empty, steps) == pytest.approx(expected, rel=1e-15)
    assert error_ratio(step_of([math.nan, 0], [2.0, 3.0]), x, empty, steps) == math.inf
    assert error_ratio(step_of([0.3, 0], [math.inf, 3.0]), x, empty, steps) == math.inf
    assert error_ratio(step_of([0.3, 0], [2.0, math.nan]), x, empty, steps) == math.inf


def test_a_component_at_zero_under_a_relative_tolerance() -> None:
    """atol = 0: no error in a component that stays zero is within tolerance, a start at zero is no failure."""
    zeros = torch.zeros(2, dtype=torch.float64)
    for x, f in ((torch.tensor([1.0, 0.0]).double(), lambda t, x, y: -x), (zeros, lambda t, x, y: torch.ones_like(x))):
        solution = solve(Field(f), x, zeros, t1=1.0, method=Dopri5(), steps=AdaptiveSteps(1e-8, 0.0))
        assert solution.status is Status.SUCCESS
        exact = x * math.exp(-1) if x.any() else torch.ones_like(x)
        torch.testing.assert_close(solution.xs[0], exact, rtol=1e-7, atol=0)


def test_the_field_is_not_asked_outside_the_span() -> None:
    """Not even to guess the first step: f is undefined after t1."""
    seen: list[float] = []

    def f(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        seen.append(float(t))
        return torch.zeros_like(x)

    x, y = states()
    for t1 in (1e-9, -1e-9):
        solve(Field(f), x, y, t1=t1, method=Dopri5(), steps=AdaptiveSteps(1e-3, 1e-3))
        assert max(map(abs, seen)) <= 1e-9 * (1 + 1e-15)


def test_the_first_step_starts_with_the_rate_that_its_guess_took() -> None:
    """One rate at the start, one ahead of it, and of each attempt the stages but the first, where a step knows its end's rate
    or a rejection keeps its start's."""
    x, y = states(1)
    for method, stages in ((Dopri5(), 7), (Heun(), 2), (ETD2RK(), 2), (ETD3RK(), 3)):
        stats = solve(Network(0.5), x, y, t1=0.5, method=method, steps=AdaptiveSteps(1e-3, 1e-3)).stats
        assert stats.rejected == 0
        known = stats.steps if method.first_same_as_last else 1
        assert stats.fast_evaluations == stats.slow_evaluations == 2 + stages * stats.steps - known


def test_float32_states_under_error_control() -> None:
    x, y = Bernoulli.start(torch.float32)
    solution = solve(Bernoulli(0.5).float(), x, y, t1=1.0, method=Dopri5(), steps=AdaptiveSteps(1e-4, 1e-6))
    assert solution.xs.dtype == torch.float32
    exact = torch.tensor(Bernoulli.exact(1.0))
    torch.testing.assert_close(torch.cat([solution.xs[0], solution.ys[0]]), exact, rtol=1e-3, atol=1e-3)


def test_the_controller_holds_a_steady_ratio_and_its_bounds() -> None:
    """For err = C h^(k+1) the PI controller converges to a constant step with err = 0.9^(1/(0.3/(k+1))) times tol."""
    for order in (1, 4):
        controller, h, ratio = PIController(order), 1e-3, math.nan
        for _ in range(200):
            ratio = (h / 0.1) ** (order + 1)
            h *= controller.after_acceptance(ratio) if ratio <= 1 else controller.after_rejection(ratio)
        assert ratio == pytest.approx(0.9 ** ((order + 1) / 0.3), rel=1e-6)
    controller = PIController(4)
    assert controller.after_acceptance(0.0) == 5.0
    assert controller.after_rejection(math.inf) == 0.1 and controller.after_rejection(1e30) == 0.1
    assert controller.after_acceptance(0.0) == 1.0  # no growth right after a rejection
    assert all(PIController(4).after_rejection(1 + 10.0**k) <= 0.9 for k in range(-15, 5))


def test_integrate_bounds_are_fast_times() -> None:
    method, (x, y) = Recorded(), states()
    steps = AdaptiveSteps(1e-3, 1e-3, first_step=0.125, max_step=0.25)
    integrate(Network(0.25), x, y, span=2.0, method=method, steps=steps)
    assert method._attempts[0] == (0.0, 0.125) and max(h for _, h in method._attempts) == 0.25
