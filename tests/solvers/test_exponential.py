"""The phi functions and the exponential methods: exact where they should be, orders uniform in the decay."""

from __future__ import annotations

import math

import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor
from torch.autograd import gradcheck

from solvers import (
    ETD2RK,
    ETD3RK,
    ExponentialAdams,
    ExponentialEuler,
    FixedSteps,
    Heun,
    Method,
    integrate,
    solve,
)
from solvers.method import Past
from solvers.phi import phi
from solvers.system import FastTimeProblem
from tests.solvers.problems import Field, reference, slopes, states

EXPONENTIAL: tuple[Method, ...] = (ExponentialEuler(), ETD2RK(), ETD3RK())
ADAMS: tuple[Method, ...] = (ExponentialAdams(3), ExponentialAdams(4))


def exact_phi(k: int, z: float) -> float:
    """From the power series at 60 digits, which is enough for |z| <= 60."""
    with mp.workdps(90):
        return float(sum(mpf(z) ** j / mp.factorial(j + k) for j in range(300)))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_phi_is_right_to_round_off_everywhere(k: int) -> None:
    points = [0.0, *(-(10.0**e) for e in (-300, -16, -8, -4, -2, -1)), -0.5, -0.9999, -1.0, -1.0001, -3.0, -20.0, -60.0]
    for z in points:
        assert phi(k, z) == pytest.approx(exact_phi(k, z), rel=4e-15), z
    values = phi(k, torch.tensor(points, dtype=torch.float64))
    expected = torch.tensor([exact_phi(k, z) for z in points], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=4e-15, atol=0)
    assert phi(k, -1e300) == pytest.approx(0.0 if k == 0 else 1e-300 / math.factorial(k - 1), rel=1e-14)


def test_phi_is_differentiable_on_both_sides_of_its_branches() -> None:
    z = torch.tensor([0.0, -1e-9, -0.3, -0.99, -1.01, -7.0, -40.0], dtype=torch.float64, requires_grad=True)
    for k in (0, 1, 2, 3, 4):
        assert gradcheck(lambda z, k=k: phi(k, z), (z,))


@pytest.mark.parametrize("method", EXPONENTIAL, ids=repr)
@pytest.mark.parametrize("decay", [0.0, 1.0, 1e3, 1e8])
def test_a_linear_decay_towards_a_constant_is_exact_in_one_step(method: Method, decay: float) -> None:
    x, y = states()
    target = torch.full_like(x, 0.3)
    system = Field(lambda t, x, y: -decay * x + target, lambda t, x, y: -2.0 * y, epsilon=0.25)
    system.fast_decay, system.slow_decay = decay, 2.0
    x_end, y_end = integrate(system, x, y, span=1.5, method=method, steps=FixedSteps(1))
    rest = target / decay if decay else 0
    exact = rest + math.exp(-1.5 * decay) * (x - rest) if decay else x + 1.5 * target
    torch.testing.assert_close(x_end, exact, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(y_end, math.exp(-0.75) * y, rtol=1e-14, atol=1e-15)


def test_without_decay_etd2rk_is_heuns_method() -> None:
    x, y = states()
    system = Field(lambda t, x, y: torch.sin(x * y) + t, lambda t, x, y: torch.cos(x) - y, epsilon=0.5)
    ours, theirs = (
        integrate(system, x, y, span=1.0, method=method, steps=FixedSteps(3)) for method in (ETD2RK(), Heun())
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


class Heat(Field):
    """u_t = u_xx + 1 / (1 + u^2) + source on 100 points, as sine coefficients; the source makes w(1 - w) e^t the solution.

    The example of Hochbruck & Ostermann (2005), section 6. Decays run from 10 to 40000; n has Lipschitz constant 1.
    """

    def __init__(self, points: int = 100) -> None:
        k = torch.arange(1, points + 1, dtype=torch.float64)
        w = k / (points + 1)
        self.profile = w * (1 - w)
        sine = torch.sin(math.pi * k * w[:, None]) * math.sqrt(2 / (points + 1))  # orthogonal, its own inverse
        self.decay = 4 * (points + 1) ** 2 * torch.sin(math.pi * k / (2 * (points + 1))) ** 2

        def rate(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
            u, exact = sine @ x, self.profile * math.exp(t)
            source = exact + 2 * math.exp(t) - 1 / (1 + exact**2)  # second differences of a parabola are exact
            return -self.decay * x + sine @ (1 / (1 + u**2) + source)

        super().__init__(rate)
        self.fast_decay = self.decay
        self.sine = sine

    def coefficients(self, t: float) -> Tensor:
        return self.sine @ (self.profile * math.exp(t))


@pytest.mark.parametrize("method", EXPONENTIAL + ADAMS, ids=repr)
def test_the_stiff_order_on_a_parabolic_problem(method: Method) -> None:
    """Steps up to 2500 times the explicit limit; the classical order alone would not show here."""
    system, y = Heat(), torch.zeros(0, dtype=torch.float64)
    errors = []
    for n in (8, 16, 32, 64):
        found = solve(system, system.coefficients(0.0), y, t1=1.0, method=method, steps=FixedSteps(n))
        errors.append(float((found.xs[0] - system.coefficients(1.0)).abs().max()))
    assert all(slope == pytest.approx(method.order, abs=0.35) for slope in slopes(errors)), errors


class Driven(Field):
    """eps dx/dt = -x + cos(t) + eps sin(x + y) / 2, y' = -y + feedback sin(x)."""

    def __init__(self, epsilon: float, feedback: float) -> None:
        super().__init__(
            lambda t, x, y: -x + torch.cos(torch.as_tensor(t, dtype=torch.float64)) + epsilon * torch.sin(x + y) / 2,
            lambda t, x, y: -y + feedback * torch.sin(x),
            epsilon,
        )
        self.fast_decay, self.slow_decay = 1.0, 1.0


def driven_errors(method: Method, epsilon: float, steps: list[int], feedback: float = 0.0) -> list[float]:
    system = Driven(epsilon, feedback)
    x, y = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    for _ in range(50):  # on the slow manifold, to O(eps^2): an initial layer that steps skip would be seen
        x = 1 + epsilon * torch.sin(x + y) / 2
    x_end, y_end = reference(system, x, y, [0.0, 1.0], method="Radau")
    errors = []
    for n in steps:
        found = solve(system, x, y, t1=1.0, method=method, steps=FixedSteps(n))
        errors.append(float((found.xs - x_end).abs().max() + (found.ys - y_end).abs().max()))
    return errors


@pytest.mark.parametrize(("method", "bound"), list(zip(EXPONENTIAL, (5e-2, 1e-3, 1e-3), strict=True)))
def test_the_error_of_sixteen_steps_is_bounded_over_all_epsilon(method: Method, bound: float) -> None:
    """Steps of 1/16 in slow time, up to 4096 times epsilon: an explicit method would be unstable from epsilon = 1/64 on."""
    assert max(driven_errors(method, epsilon, [16])[0] for epsilon in (1 / 64, 1 / 1024, 1 / 65536)) < 1.1 * bound


def test_the_order_falls_by_one_through_a_slow_variable_that_reads_x() -> None:
    """n / eps is then stiff too: a stage's x lags behind its manifold by O(h), whatever the method's order."""
    for method in (ETD2RK(), ETD3RK()):
        errors = driven_errors(method, 1 / 65536, [16, 32, 64], feedback=1.0)
        assert 0.8 < slopes(errors)[-1] < method.order - 0.5, errors


@pytest.mark.parametrize("method", ADAMS, ids=repr)
@pytest.mark.parametrize("epsilon", [1 / 64, 1 / 1024, 1 / 65536])
def test_adams_loses_at_most_one_order_through_a_slow_variable_that_reads_x(method: Method, epsilon: float) -> None:
    """Earlier values of n carry the manifold's drift, so that x does not lag behind."""
    errors = driven_errors(method, epsilon, [16, 32, 64, 128], feedback=1.0)
    assert slopes(errors)[-1] > method.order - 1.2, errors
    if method.order == 4:
        assert errors[0] < driven_errors(ETD3RK(), epsilon, [16], feedback=1.0)[0] / 20


@pytest.mark.parametrize("method", ADAMS, ids=repr)
def test_adams_is_exact_for_polynomial_n_of_degree_order_minus_two(method: Method) -> None:
    """After exact starting values; with steps of unequal lengths, under which divided differences are seen."""
    decay, degree = 7.0, method.order - 2

    def exact(t: float) -> float:  # of x' = -7 x + t^degree
        if degree == 1:
            return t / decay - 1 / decay**2
        return t**2 / decay - 2 * t / decay**2 + 2 / decay**3

    system = Field(lambda t, x, y: -decay * x + torch.full_like(x, t**degree))
    system.fast_decay = decay
    problem = FastTimeProblem.over_fast_time(system)
    x, y = torch.tensor([exact(0.0) + 1.0], dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    t, rate, past = 0.0, None, Past()
    for h in (0.1, 0.3, 0.05, 0.7, 0.2):
        step = method.step(problem, t, h, x, y, rate, past)  # type: ignore[call-arg]
        t += h
        solution = exact(t) + math.exp(-decay * t)
        starting = len(past.values) < method.order - 2
        x, rate, past = step.x, step.end_rate, step.past
        if starting:
            x = torch.full_like(x, solution)
        assert x.item() == pytest.approx(solution, rel=1e-12), t


def test_adams_without_decay_is_adams_bashforth_moulton() -> None:
    """Order 3: the two-step predictor with 3/2, -1/2 and the corrector with 5/12, 8/12, -1/12, from equal steps."""
    x, y = states()
    system = Field(lambda t, x, y: torch.sin(x * y) + t, lambda t, x, y: torch.cos(x) - y, epsilon=0.5)
    problem = FastTimeProblem.over_fast_time(system)
    method, h = ExponentialAdams(3), 0.1
    first = method.step(problem, 0.0, h, x, y)
    second = method.step(problem, h, h, first.x, first.y, None, first.past)
    f0, f1 = problem.rates(0.0, x, y), problem.rates(h, first.x, first.y)
    ahead = [s + h * (1.5 * b - 0.5 * a) for s, a, b in zip((first.x, first.y), f0, f1, strict=True)]
    f2 = problem.rates(2 * h, *ahead)
    expected = [s + h * (5 * c + 8 * b - a) / 12 for s, a, b, c in zip((first.x, first.y), f0, f1, f2, strict=True)]
    torch.testing.assert_close([second.x, second.y], expected, rtol=1e-13, atol=1e-13)


def test_adams_takes_two_evaluations_a_step() -> None:
    x, y = states()
    system = Field(lambda t, x, y: -x + torch.sin(y), lambda t, x, y: -y)
    system.fast_decay = 1.0
    stats = solve(system, x, y, t1=1.0, method=ExponentialAdams(4), steps=FixedSteps(20)).stats
    assert stats.fast_evaluations == 3 + 1 + 19 * 2  # a starting step of ETD3RK, a rate, then two a step


def test_adams_refuses_other_orders() -> None:
    with pytest.raises(ValueError, match="order must be 3 or 4, got 2"):
        ExponentialAdams(2)


def test_the_decay_may_be_a_tensor_of_any_broadcastable_shape_with_gradient() -> None:
    x, y = states(0, (2, 3), (2, 2))
    decay = torch.tensor([0.5, 2.0, 30.0], dtype=torch.float64, requires_grad=True)

    def run(method: Method, decay: Tensor) -> Tensor:
        system = Field(lambda t, x, y: -decay * x + torch.sin(x), lambda t, x, y: -y, epsilon=0.5)
        system.fast_decay = decay
        return integrate(system, x, y, span=1.0, method=method, steps=FixedSteps(2))[0]

    for method in EXPONENTIAL:
        assert gradcheck(lambda decay, m=method: run(m, decay), (decay,))
        single = [run(method, d)[:, i] for i, d in enumerate(decay.detach().tolist())]
        torch.testing.assert_close(run(method, decay), torch.stack(single, 1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", EXPONENTIAL, ids=repr)
def test_a_float32_state_stays_float32(method: Method) -> None:
    x, y = (state.float() for state in states())
    system = Field(lambda t, x, y: -x, lambda t, x, y: -y, epsilon=0.5)
    system.fast_decay = torch.tensor(1.0, dtype=torch.float64)
    x_end, y_end = integrate(system, x, y, span=1.0, method=method, steps=FixedSteps(2))
    assert x_end.dtype == y_end.dtype == torch.float32
