"""The order of every method, seen in its global error, and that the field is told the right time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from solvers import (
    MRIGARK22,
    RK4,
    AdaptiveSteps,
    AndersonAdams,
    Dopri5,
    Euler,
    FastSlowSystem,
    FixedSteps,
    LieTrotter,
    Method,
    MultirateEuler,
    Strang,
    TorchDiffEq,
    integrate,
    solve,
)
from tests.solvers.problems import METHODS, Bernoulli, Field, Network, reference, slopes, states

EPSILONS = (1.0, 1 / 8)


def fixed_errors(
    system: FastSlowSystem, x: Tensor, y: Tensor, t1: float, method: Method | TorchDiffEq, steps: list[int], end: Tensor
) -> list[float]:
    errors = []
    for n in steps:
        with torch.no_grad():
            solution = solve(system, x, y, t1=t1, method=method, steps=FixedSteps(n))
        errors.append(float((torch.cat([solution.xs[0], solution.ys[0]]) - end).abs().max()))
    return errors


def ladder(method: Method | TorchDiffEq, base: int) -> list[int]:
    """Steps fine enough to be asymptotic, coarse enough to stay above round-off."""
    order = getattr(method, "order", 4)
    if getattr(method, "multistep", False):
        return [base * k for k in (32, 64, 128)]
    return [base * k for k in ((4, 8, 16) if order >= 4 else (16, 32, 64))]


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_order_on_a_problem_with_closed_form(method: Method, epsilon: float) -> None:
    system, (x, y) = Bernoulli(epsilon), Bernoulli.start()
    end = torch.tensor([*Bernoulli.exact(1.5)], dtype=torch.float64)
    errors = fixed_errors(system, x, y, 1.5, method, ladder(method, 2), end)
    assert slopes(errors)[-1] > method.order - 0.2, errors


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_order_on_a_network_of_five_parts(method: Method, epsilon: float) -> None:
    system, (x, y) = Network(epsilon), states(3)
    x_end, y_end = reference(system, x, y, [0.0, 0.75])
    errors = fixed_errors(
        system, x, y, 0.75, method, ladder(method, 2 if epsilon == 1 else 6), torch.cat([x_end[0], y_end[0]])
    )
    assert slopes(errors)[-1] > method.order - 0.2, errors


def test_order_against_a_stiff_reference() -> None:
    system = Field(
        lambda t, x, y: -x + torch.cos(y) + math.sin(t),
        lambda t, x, y: x - y**3,
        epsilon=1 / 8,
    )
    x, y = states(5)
    x_end, y_end = reference(system, x, y, [0.0, 1.0], method="Radau")
    errors = fixed_errors(system, x, y, 1.0, RK4(), [16, 32, 64], torch.cat([x_end[0], y_end[0]]))
    assert slopes(errors)[-1] == pytest.approx(4, abs=0.2), errors


def test_splitting_is_not_better_than_it_says() -> None:
    """The parts do not commute: Lie-Trotter is of no higher order than 1, Strang no higher than 2, at any rung."""
    system, (x, y) = Network(0.5), states(3)
    x_end, y_end = reference(system, x, y, [0.0, 1.0])
    end = torch.cat([x_end[0], y_end[0]])
    for method in (LieTrotter(), Strang()):
        rungs = slopes(fixed_errors(system, x, y, 1.0, method, [8, 16, 32, 64, 128], end))
        assert all(slope == pytest.approx(method.order, abs=0.25) for slope in rungs[2:]), rungs


@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, AndersonAdams)], ids=repr)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_quadrature_of_slow_time(method: Method, epsilon: float) -> None:
    """With f = eps p(t) and g = q(t) a step is a quadrature rule, exact for polynomials of degree order - 1 in t alone.

    (Strang's rule is the midpoint rule over halves, exact for degree 1; multistep methods start with steps of order 3;
    Anderson's secants take what is a change in time for one with the state, within the method's order.)
    """
    degree, t0, t1 = (min(method.order, 3) if method.multistep else method.order) - 1, 0.75, 1.5

    def power(t: float | Tensor, state: Tensor) -> Tensor:
        return torch.full_like(state, float(t) ** degree)

    system = Field(lambda t, x, y: epsilon * power(t, x), lambda t, x, y: power(t, y), epsilon)
    x, y = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    solution = solve(system, x, y, t0=t0, t1=t1, method=method, steps=FixedSteps(3))
    exact = (t1 ** (degree + 1) - t0 ** (degree + 1)) / (degree + 1)
    assert solution.xs.item() == pytest.approx(exact, rel=1e-14)
    assert solution.ys.item() == pytest.approx(exact, rel=1e-14)


def test_stages_are_told_slow_time() -> None:
    """t0 + eps tau at every stage: dyadic numbers, so equality is exact."""
    expected: dict[Method, tuple[list[float], list[float]]] = {
        Euler(): ([0, 1], [0, 1]),
        RK4(): ([0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2], [0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2]),
        MultirateEuler(2): ([0, 0.5, 1, 1.5], [0, 1]),
        MRIGARK22(2): ([0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2], [0, 1, 1, 2]),
        MRIGARK22(1, 0.5): ([0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2], [0, 0.5, 1, 1.5]),
        LieTrotter(): ([0, 1], [0, 1]),
        Strang(): ([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75], [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]),
    }
    x, y = states()
    for method, (fast_nodes, slow_nodes) in expected.items():
        fast_times: list[float] = []
        slow_times: list[float] = []
        system = Field(noting(fast_times, 0), noting(slow_times, 1), epsilon=0.25)
        solve(system, x, y, t0=8.0, t1=8.5, method=method, steps=FixedSteps(2))
        assert fast_times == [8.0 + 0.25 * node for node in fast_nodes], method
        assert slow_times == [8.0 + 0.25 * node for node in slow_nodes], method


def noting(times: list[float], which: int) -> Callable[[float | Tensor, Tensor, Tensor], Tensor]:
    def rate(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        times.append(float(t))
        return torch.zeros_like((x, y)[which])

    return rate


def test_backwards_in_time_is_the_reflected_problem() -> None:
    x, y = states()
    forward = Network(0.5)
    reflected = Field(lambda t, x, y: -forward.fast(-t, x, y), lambda t, x, y: -forward.slow(-t, x, y), forward.epsilon)
    for method in (Euler(), RK4(), Dopri5(), MultirateEuler(2), MRIGARK22(2)):
        back = solve(forward, x, y, t0=1.0, t1=0.25, method=method, steps=FixedSteps(4))
        mirror = solve(reflected, x, y, t0=-1.0, t1=-0.25, method=method, steps=FixedSteps(4))
        torch.testing.assert_close((back.xs, back.ys), (mirror.xs, mirror.ys), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", [RK4(), Dopri5(), TorchDiffEq("rk4")], ids=repr)
def test_saved_states_converge_with_the_order_of_hermite_interpolation(method: Method | TorchDiffEq) -> None:
    """Exact on cubics, so the error between mesh points is O(h^4), however high the order of the method."""
    system, (x, y) = Bernoulli(0.5), Bernoulli.start()
    save_at = [0.0, 0.65, 1.3]
    exact = torch.tensor([Bernoulli.exact(t) for t in save_at], dtype=torch.float64)
    errors = []
    for n in (5, 15, 45, 135):  # 0.65 stays in the middle of a step
        solution = solve(system, x, y, t1=1.3, method=method, steps=FixedSteps(n), save_at=save_at)
        errors.append(float((torch.cat([solution.xs, solution.ys], 1) - exact)[1].abs().max()))
    assert slopes(errors, 3)[-1] == pytest.approx(4, abs=0.2), errors


def test_slow_and_fast_time_agree() -> None:
    """Over slow time (t1 - t0) with eps, and over fast time (t1 - t0) / eps: the same numbers for a dyadic eps."""
    x, y = states()
    system = Network(0.125)
    for method in METHODS:
        solution = solve(system, x, y, t1=0.5, method=method, steps=FixedSteps(5))
        x_end, y_end = integrate(system, x, y, span=4.0, method=method, steps=FixedSteps(5))
        assert torch.equal(solution.xs[0], x_end) and torch.equal(solution.ys[0], y_end)
    slow = solve(system, x, y, t1=0.5, method=Dopri5(), steps=AdaptiveSteps(1e-6, 1e-8, 0.0625, 2**-20, 0.25))
    x_end, y_end = integrate(system, x, y, span=4.0, method=Dopri5(), steps=AdaptiveSteps(1e-6, 1e-8, 0.5, 2**-17, 2.0))
    assert torch.equal(slow.xs[0], x_end) and torch.equal(slow.ys[0], y_end)
