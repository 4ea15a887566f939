"""Identities that hold bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solvers import (
    MRIGARK22,
    RK4,
    RKC2,
    ROS2,
    AdaptiveSteps,
    Dopri5,
    Euler,
    FastSlowSystem,
    FixedSteps,
    Heun,
    LieTrotter,
    Method,
    MultirateEuler,
    Strang,
    integrate,
    method_by_name,
    solve,
)
from solvers.registry import METHODS as REGISTERED
from tests.solvers.problems import METHODS, Field, Network, Recorded, states

EPSILONS = (1.0, 1 / 3, 1 / 7, 1 / 10, 1 / 49, 1 / 64, 1 / 1023)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_unit_euler_step_is_the_discrete_block(epsilon: float) -> None:
    x, y = states()
    system = Network(epsilon)
    x_end, y_end = integrate(system, x, y, span=1.0, method=Euler(), steps=FixedSteps(1))
    assert torch.equal(x_end, x + system.fast(0.0, x, y))
    assert torch.equal(y_end, y + epsilon * system.slow(0.0, x, y))


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_integer_spans_take_unit_steps(epsilon: float) -> None:
    x, y = states()
    system = Network(epsilon)
    x_end, y_end = integrate(system, x, y, span=7.0, method=Euler(), steps=FixedSteps(7))
    for i in range(7):
        x, y = x + system.fast(epsilon * i, x, y), y + epsilon * system.slow(epsilon * i, x, y)
    # Only the time is rounded: tau is 7 (i / 7).
    torch.testing.assert_close((x_end, y_end), (x, y), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_unit_lie_step_is_the_sequential_block(epsilon: float) -> None:
    x, y = states()
    system = Network(epsilon)
    x_end, y_end = integrate(system, x, y, span=1.0, method=LieTrotter(), steps=FixedSteps(1))
    x = x + system.attend(0.0, x, y)
    y = y + epsilon * system.follow(0.0, x, y)
    x = x + system.transform(0.0, x, y)
    x = x + system.couple(0.0, x, y)
    y = y + epsilon * system.turn(0.0, x, y)
    assert torch.equal(x_end, x) and torch.equal(y_end, y)


def test_strang_is_symmetric_up_to_its_inner_flows() -> None:
    """Parts with sub-flows that the midpoint method solves exactly (each rate independent of its own state): the step back
    undoes the step."""
    system = Field(lambda t, x, y: torch.sin(y), lambda t, x, y: torch.cos(x) + 0.5, 0.5)
    x, y = states()
    there = integrate(system, x, y, span=1.0, method=Strang(), steps=FixedSteps(3))
    back = integrate(system, *there, span=-1.0, method=Strang(), steps=FixedSteps(3))
    torch.testing.assert_close(back, (x, y), rtol=1e-14, atol=1e-14)
    euler = integrate(system, *there, span=-1.0, method=Euler(), steps=FixedSteps(3))
    assert (euler[0] - x).abs().max() > 1e-3


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("epsilon", [1 / 3, 1 / 49])
def test_multirate_with_one_micro_step_is_euler(epsilon: float, steps: int) -> None:
    x, y = states()
    ends = [
        integrate(Network(epsilon), x, y, span=1.7, method=method, steps=FixedSteps(steps))
        for method in (Euler(), MultirateEuler(1))
    ]
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("micro", [2, 7, 16])
def test_multirate_is_euler_with_y_frozen_inside(micro: int) -> None:
    """Proposition 4; and y moves once, by eps h g at the start."""
    x, y = states()
    system = Network(1 / micro)
    x_end, y_end = integrate(system, x, y, span=float(micro), method=MultirateEuler(micro), steps=FixedSteps(1))

    class Frozen(Network):
        def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
            return torch.zeros_like(y)

    frozen = integrate(Frozen(1 / micro), x, y, span=float(micro), method=Euler(), steps=FixedSteps(micro))
    torch.testing.assert_close(x_end, frozen[0], rtol=1e-14, atol=1e-14)  # the micro times round differently
    assert torch.equal(y_end, y.add((1 / micro) * system.slow(0.0, x, y), alpha=micro))


def test_multirate_without_coupling_back_is_bit_equal_to_euler_in_x() -> None:
    system = Field(lambda t, x, y: torch.sin(x), lambda t, x, y: x, 0.25)
    x, y = states()
    multirate = integrate(system, x, y, span=8.0, method=MultirateEuler(4), steps=FixedSteps(2))
    assert torch.equal(multirate[0], integrate(system, x, y, span=8.0, method=Euler(), steps=FixedSteps(8))[0])


class Clock(FastSlowSystem):
    """Keeps the last slow time at which f was asked for."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon, self.last = epsilon, math.nan

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.last = float(t)
        return torch.ones_like(x)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.ones_like(y)


@settings(deadline=None, max_examples=60)
@given(span=st.floats(1e-3, 1e4), n=st.integers(1, 37), sign=st.sampled_from([1, -1]))
def test_equal_steps_end_exactly_at_the_end(span: float, n: int, sign: int) -> None:
    """The last save time is met by a mesh point, not by interpolation; saved times are returned as given."""
    x, y = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    t1 = sign * span
    solution = solve(Clock(0.3), x, y, t1=t1, method=Euler(), steps=FixedSteps(n), save_at=[0.0, t1, t1])
    assert solution.ts.tolist() == [0.0, t1, t1]
    assert solution.stats.steps == n and solution.stats.fast_evaluations == n
    assert solution.ys[1].item() == pytest.approx(t1, rel=1e-13)


def test_grids_that_do_not_divide_evenly() -> None:
    """A span of 5.9 in steps of 1e-4: 59 000 steps, the last of which ends at 5.9 itself."""
    x, y = torch.zeros(1), torch.zeros(1)
    with torch.no_grad():
        solution = solve(Clock(1.0), x.double(), y.double(), t1=5.9, method=Euler(), steps=FixedSteps(59_000))
    assert solution.stats.accepted == 59_000
    assert solution.ys.item() == pytest.approx(5.9, rel=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("t1", [1.0, -1.0])
def test_one_step_over_the_whole_span(method: Method, t1: float) -> None:
    x, y = states()
    solution = solve(Clock(0.5), x, y, t1=t1, method=method, steps=FixedSteps(1), save_at=[0.0, t1])
    assert torch.equal(solution.xs[0], x) and torch.equal(solution.ys[0], y)
    torch.testing.assert_close(solution.xs[1], x + 2 * t1, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("steps", [FixedSteps(4), AdaptiveSteps(1e-6, 1e-6)], ids=repr)
def test_an_empty_span_returns_the_start(steps: FixedSteps | AdaptiveSteps) -> None:
    x, y = states()
    solution = solve(Network(0.5), x, y, t0=3.0, t1=3.0, method=Dopri5(), steps=steps, save_at=[3.0, 3.0])
    assert torch.equal(solution.xs, torch.stack([x, x])) and torch.equal(solution.ys, torch.stack([y, y]))
    assert solution.ts.tolist() == [3.0, 3.0] and solution.stats.steps == solution.stats.fast_evaluations == 0


def test_evaluations_are_counted() -> None:
    x, y = states()
    expected = {
        Euler(): (5, 5),
        Heun(): (10, 10),
        RK4(): (20, 20),
        Dopri5(): (5 * 6 + 1, 5 * 6 + 1),  # first same as last
        LieTrotter(): (5, 5),
        Strang(): (20, 20),
        MultirateEuler(3): (15, 5),
        MRIGARK22(3): (30, 10),
        MRIGARK22(3, 0.5): (60, 10),
        RKC2(4): (5 * 4 + 1, 5 * 4 + 1),  # first same as last
        ROS2(): (5 * 4, 5 * 4),
    }
    for method, counts in expected.items():
        stats = solve(Network(0.5), x, y, t1=1.0, method=method, steps=FixedSteps(5)).stats
        assert (stats.fast_evaluations, stats.slow_evaluations) == counts, method
        assert (stats.steps, stats.accepted, stats.rejected) == (5, 5, 0)


@pytest.mark.parametrize(
    "shapes", [((), ()), ((4,), (2, 3)), ((2, 3, 5), (2, 0, 5)), ((0, 3), (0, 2)), ((1,), (7, 1, 2))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_states_of_any_shape(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
    """x' = i x / eps and y' = -y (x' = -x / eps for real states), with an epsilon of any scalar shape and dtype."""
    rate = 1j if dtype.is_complex else -1.0
    tolerance = 1e-4 if dtype == torch.float32 else 1e-6
    x, y = torch.ones(shapes[0], dtype=dtype), torch.ones(shapes[1], dtype=dtype)
    real = torch.float32 if dtype == torch.float32 else torch.float64
    for epsilon in (0.5, torch.tensor([[0.5]], dtype=real), torch.tensor(0.5, dtype=torch.float32)):
        system = Field(lambda t, x, y: rate * x, lambda t, x, y: -y, epsilon)
        for steps in (FixedSteps(20), AdaptiveSteps(tolerance / 10, tolerance / 10)):
            solution = solve(system, x, y, t1=1.0, method=Dopri5(), steps=steps, save_at=[0.0, 0.5, 1.0])
            assert solution.xs.dtype == solution.ys.dtype == dtype
            for times, states_, exponent in ((solution.ts, solution.xs, 2 * rate), (solution.ts, solution.ys, -1)):
                exact = torch.exp(exponent * times).to(dtype)
                exact = exact.view(3, *[1] * (states_.ndim - 1)).expand_as(states_)
                torch.testing.assert_close(states_, exact, rtol=10 * tolerance, atol=100 * tolerance)


def test_methods_have_names_and_values() -> None:
    for name, method in REGISTERED.items():
        assert method_by_name(name) == method() and hash(method_by_name(name)) == hash(method())
    assert method_by_name("multirate_euler:4") == MultirateEuler(4) != MultirateEuler(5)
    assert method_by_name("mri_gark22:4") == MRIGARK22(4) != MRIGARK22(4, 0.5)
    assert repr(method_by_name("torchdiffeq:bosh3")) == "TorchDiffEq('bosh3')"
    assert repr(Recorded()) == "Recorded()"
