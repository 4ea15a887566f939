"""Runge-Kutta-Chebyshev: its stability polynomial, its cost on stiff decay and diffusion, and the spectral radius it reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.polynomial.chebyshev import Chebyshev
from torch import Tensor

from solvers import RKC2, AdaptiveSteps, Dopri5, FastSlowSystem, FixedSteps, Status, solve, stability_interval
from solvers.method import Past, SpectralRadius
from solvers.stabilised import DAMPING, MAX_STAGES, RENEWAL, coefficients, spectral_radius
from solvers.system import FastTimeProblem
from tests.solvers.problems import Field, nan_after, states

STAGES = (2, 3, 4, 7, 12, 30, 101)
EMPTY = torch.zeros(0, dtype=torch.float64)


def linear(rates: Tensor | float) -> FastTimeProblem:
    return FastTimeProblem.over_fast_time(Field(lambda t, x, y: rates * x))


def polynomial(stages: int, z: Tensor) -> tuple[Tensor, Tensor]:
    """P_s(z) by one step of length 1 of x' = z x from x = 1, and the error estimate of that step."""
    step = RKC2(stages).step(linear(z), 0.0, 1.0, torch.ones_like(z), EMPTY)
    assert step.error is not None
    return step.x, step.error[0]


@pytest.mark.parametrize("stages", STAGES)
def test_the_stability_polynomial_is_the_published_one(stages: int) -> None:
    """P_s(z) = a_s + b_s T_s(w0 + w1 z); bounded by 1 on the interval, by 1 - damping / 3 away from 0, and not far beyond."""
    T = Chebyshev.basis(stages)
    w0 = 1 + DAMPING / stages**2
    d1, d2 = T.deriv(1)(w0), T.deriv(2)(w0)
    b, w1 = d2 / d1**2, d1 / d2
    beta = stability_interval(stages)
    z = torch.linspace(-beta, 0, 2000, dtype=torch.float64)
    values = polynomial(stages, z)[0]
    published = 1 - b * T(w0) + b * T(w0 + w1 * z.numpy())
    np.testing.assert_allclose(values.numpy(), published, rtol=0, atol=1e-15 * stages**3)
    assert values.abs().max() <= 1 + 1e-12
    if stages > 2:
        assert values[z < -4].abs().max() <= 1 - DAMPING / 3 + 0.01
    if stages % 2 == 0:  # of an odd degree it falls at the end, from 1 to -1
        assert polynomial(stages, torch.tensor([-1.05 * beta - 0.1]).double())[0] > 1


@pytest.mark.parametrize("stages", STAGES)
def test_one_step_is_exact_to_the_third_order(stages: int) -> None:
    """P_s(z) = 1 + z + z^2 / 2 + O(z^3), and the estimate is O(z^3): a cube of the step is a cube of the error."""
    z = torch.tensor([1e-2, 5e-3], dtype=torch.float64)
    value, estimate = polynomial(stages, z)
    for error in (value - z.exp(), estimate):
        assert math.log2(error[0] / error[1]) == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize("stages", STAGES)
def test_the_step_is_the_published_recurrence(stages: int) -> None:
    """Y_j = (1 - mu - nu) Y_0 + mu Y_{j-1} + nu Y_{j-2} + mu~ h F_{j-1} + gamma~ h F_0, gamma~_j = -a_{j-1} mu~_j."""

    def rate(t: float, v: Tensor) -> Tensor:
        return torch.sin(2 * v) - v + math.cos(3 * t)

    w0 = 1 + DAMPING / stages**2
    T = [Chebyshev.basis(j) for j in range(stages + 1)]
    w1 = T[-1].deriv(1)(w0) / T[-1].deriv(2)(w0)
    b = [t.deriv(2)(w0) / t.deriv(1)(w0) ** 2 for t in T[2:]]
    b = [b[0], b[0], *b]
    a = [1 - b_j * t(w0) for b_j, t in zip(b, T, strict=True)]
    c = [0.0, w1 * b[1], *(w1 * t.deriv(2)(w0) / t.deriv(1)(w0) for t in T[2:])]
    start, h, tau = states()[0], 0.3, 0.7
    first = rate(tau, start)
    older, stage = start, start + w1 * b[1] * h * first
    for j in range(2, stages + 1):
        mu, nu, mu_tilde = 2 * w0 * b[j] / b[j - 1], -b[j] / b[j - 2], 2 * w1 * b[j] / b[j - 1]
        slope = mu_tilde * h * rate(tau + c[j - 1] * h, stage) - a[j - 1] * mu_tilde * h * first
        older, stage = stage, (1 - mu - nu) * start + mu * stage + nu * older + slope
    problem = FastTimeProblem.over_fast_time(Field(lambda t, x, y: rate(float(t), x)))
    step = RKC2(stages).step(problem, tau, h, start, EMPTY)
    torch.testing.assert_close(step.x, stage, rtol=0, atol=1e-14 * stages**2)
    c_1, rows = coefficients(stages)
    np.testing.assert_allclose([c_1, *(row.c for row in rows)], c[1:], rtol=1e-11)
    assert step.end_rate is not None
    assert torch.equal(step.end_rate[0], problem.fast(tau + h, step.x, EMPTY))


def test_single_precision_loses_less_than_by_the_published_recurrence() -> None:
    """What the form in differences is for: 100 stages on a smooth state of the heat equation, against float64."""
    n, stages = 200, 100
    grid = torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)
    x = torch.sin(math.pi * grid) + 0.3 * torch.sin(5 * math.pi * grid)
    h = 0.99 * stability_interval(stages) / 4

    def heat(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (1, 1))
        return padded[2:] - 2 * x + padded[:-2]

    problem = FastTimeProblem.over_fast_time(Field(heat))
    double = RKC2(stages).step(problem, 0.0, h, x, EMPTY).x
    single = RKC2(stages).step(problem, 0.0, h, x.float(), EMPTY.float()).x
    c_1, rows = coefficients(stages)
    start, first = x.float(), heat(0.0, x.float(), EMPTY)
    older, stage, c_before, c = start, start + c_1 * h * first, 0.0, c_1
    for row in rows:
        gamma = row.c - row.mu * c - row.nu * c_before - row.mu_tilde
        slope = row.mu_tilde * h * heat(0.0, stage, EMPTY) + gamma * h * first
        older, stage = stage, (1 - row.mu - row.nu) * start + row.mu * stage + row.nu * older + slope
        c_before, c = c, row.c
    assert 3 * (single - double).abs().max() < (stage - double).abs().max()


class Relaxing(FastSlowSystem):
    """eps x' = y - x, y' = -y on its slow eigenvector x = y / (1 - eps)."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -y


@pytest.mark.parametrize("steps", [FixedSteps(20), AdaptiveSteps(1e-4, 1e-4)], ids=repr)
def test_the_cost_grows_like_the_root_of_stiffness(steps: FixedSteps | AdaptiveSteps) -> None:
    evaluations, epsilons = [], (1e-4, 1e-5, 1e-6)
    for epsilon in epsilons:
        y = torch.ones(1, dtype=torch.float64)
        solution = solve(Relaxing(epsilon), y / (1 - epsilon), y, t1=1.0, method=RKC2(), steps=steps)
        error = max(abs(solution.xs.item() * (1 - epsilon) - math.exp(-1)), abs(solution.ys.item() - math.exp(-1)))
        assert error < 2e-3
        evaluations.append(solution.stats.fast_evaluations)
    slope = math.log(evaluations[-1] / evaluations[0]) / math.log(epsilons[0] / epsilons[-1])
    assert slope == pytest.approx(0.5, abs=0.1), evaluations


def test_the_heat_equation_in_single_precision() -> None:
    """u_t = u_xx on 1000 points, u = 0 at both ends: the modes sin(k pi i / 1001) decay at 4 sin(k pi / 2002)^2 / dx^2."""
    n = 1000
    dx = 1 / (n + 1)
    grid = torch.arange(1, n + 1, dtype=torch.float64) * dx
    modes = {1: 1.0, 3: -0.5, 10: 0.25}
    t1 = 0.02

    def heat(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (1, 1))
        return (padded[2:] - 2 * x + padded[:-2]) / dx**2

    def exact(t: float) -> Tensor:
        decays = {k: (2 * math.sin(k * math.pi * dx / 2) / dx) ** 2 for k in modes}
        return sum(a * math.exp(-decays[k] * t) * torch.sin(k * math.pi * grid) for k, a in modes.items())  # type: ignore

    tolerance, evaluations = 1e-3, {}
    for method in (RKC2(), Dopri5()):
        with torch.no_grad():
            solution = solve(
                Field(heat),
                exact(0.0).float(),
                torch.zeros(0),
                t1=t1 if method == RKC2() else t1 / 50,
                method=method,
                steps=AdaptiveSteps(tolerance, tolerance),
            )
        evaluations[method] = solution.stats.fast_evaluations
        if method == RKC2():
            assert solution.xs.dtype == torch.float32
            assert (solution.xs[0].double() - exact(t1)).abs().max() < 10 * tolerance
    assert 10 * evaluations[RKC2()] < 50 * evaluations[Dopri5()], evaluations


def radius_of(matrix: Tensor, scale: float = 1.0) -> float:
    """As RKC2 estimates it, x and y sharing the rows of the matrix, y measured in units of `scale`."""
    n = len(matrix) // 2

    def product(x: Tensor, y: Tensor) -> Tensor:
        return matrix @ torch.cat([x, y / scale])

    system = Field(lambda t, x, y: product(x, y)[:n], lambda t, x, y: scale * product(x, y)[n:])
    x, y = torch.ones(n).double(), scale * torch.ones(len(matrix) - n).double()
    problem = FastTimeProblem.over_fast_time(system)
    return spectral_radius(problem, 0.0, (x, y), problem.rates(0.0, x, y)).value


@pytest.mark.parametrize("seed", range(5))
def test_the_spectral_radius_is_bounded_tightly(seed: int) -> None:
    """Between the radius and 1.2 times it, up to the 1 % at which the iteration stops; also in other units of y."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=generator))
    matrix = basis @ torch.diag(-torch.tensor([1, 3, 10, 20, 40, 100, 300, 1000.0]).double()) @ basis.T
    assert 1190 < radius_of(matrix) < 1201
    assert 1190 < radius_of(matrix, 1e9) < 1201
    assert 1190 < radius_of(matrix, 1e-9) < 1201


def test_radii_that_a_power_method_does_not_find_at_once() -> None:
    """A rotation of two speeds, a nilpotent Jacobian, none, and a rate that is an eigenvector of a small eigenvalue."""
    turn = torch.tensor([[0.0, 1.0], [-4.0, 0.0]]).double()  # +- 2i; the growth oscillates between 1 and 4
    assert 2 <= radius_of(turn) <= 4 * 1.2 + 1e-6
    assert radius_of(torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()) == 0
    assert radius_of(torch.zeros(4, 4).double()) == 0
    x = torch.tensor([1.0, 0.0]).double()
    problem = linear(torch.tensor([-1.0, -1e6]).double())
    assert spectral_radius(problem, 0.0, (x, EMPTY), problem.rates(0.0, x, EMPTY)).value == pytest.approx(1.2e6)


def test_the_estimate_is_kept_and_renewed() -> None:
    """For 25 accepted steps, and no longer than to a rejection; a renewal starts from the last eigenvector."""
    problem, x = linear(-3.0), torch.ones(2).double()
    rate, known = problem.rates(0.0, x, EMPTY), SpectralRadius(7.0, (torch.ones(2).double(), EMPTY))
    for _ in range(RENEWAL):
        known = spectral_radius(problem, 0.0, (x, EMPTY), rate, known)
        assert known.value == 7.0
    before = problem.stats.fast_evaluations
    assert spectral_radius(problem, 0.0, (x, EMPTY), rate, known).value == pytest.approx(3.6)
    assert problem.stats.fast_evaluations - before == 2
    method = RKC2()
    renewed = method.after_rejection(Past(radius=known._replace(age=3)))
    assert renewed is not None
    step = method.step(problem, 0.0, 0.1, x, EMPTY, None, renewed)
    assert step.past is not None and step.past.radius is not None
    assert step.past.radius.value == pytest.approx(3.6) and step.past.radius.age == 0
    assert method.after_rejection(None) is None and method.after_rejection(Past()) == Past()


def test_stiffness_that_rises_is_noticed() -> None:
    """x' = -k(t) (x - 1), k from 1 to 1e5: error control rejects what the old estimate makes unstable, and then renews it."""

    def f(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (1 - x) * (1e5 if t > 0.5 else 1.0)

    x = torch.zeros(1, dtype=torch.float64)
    solution = solve(Field(f), x, EMPTY, t1=1.0, method=RKC2(), steps=AdaptiveSteps(1e-4, 1e-4))
    assert solution.stats.rejected > 0
    assert solution.xs.item() == pytest.approx(1, abs=1e-3)
    assert solution.stats.fast_evaluations < 2000


def test_stages_without_bound_are_refused() -> None:
    """A fixed step for which no 10 000 stages would do is nan; error control takes shorter ones."""
    stiff = Field(lambda t, x, y: 1e9 * (1 - x))
    x = torch.zeros(1, dtype=torch.float64)
    solution = solve(stiff, x, EMPTY, t1=1.0, method=RKC2(), steps=FixedSteps(2), raise_on_failure=False)
    assert solution.status is Status.NON_FINITE and solution.stats.fast_evaluations < 20
    assert stability_interval(MAX_STAGES) < 1e9
    solution = solve(nan_after(-1.0), x, x, t1=1.0, method=RKC2(), steps=FixedSteps(2), raise_on_failure=False)
    assert solution.status is Status.NON_FINITE


def test_arguments_are_checked() -> None:
    for call in (RKC2, stability_interval):
        for wrong in (1, 0, -3):
            with pytest.raises(ValueError, match=f"stages must be at least 2, got {wrong}"):
                call(wrong)
        for kind in (2.0, True, "3"):
            with pytest.raises(TypeError, match="stages must be an int, got"):
                call(kind)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stages must be an int, got None"):
        stability_interval(None)  # type: ignore[arg-type]
    assert RKC2() == RKC2() != RKC2(5) and hash(RKC2(5)) == hash(RKC2(5))
    assert RKC2().reads_host and RKC2().multistep and not RKC2(5).reads_host and not RKC2(5).multistep


@pytest.mark.parametrize("shapes", [((), ()), ((4,), (2, 3)), ((0, 3), (0, 2)), ((2, 3), (0,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_states_of_any_shape(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    """x' = -(2 - i / 2) x / eps, y' = -y."""
    rate = 2 - 0.5j if dtype.is_complex else 2.0
    x, y = (torch.ones(shape, dtype=dtype) for shape in shapes)
    system = Field(lambda t, x, y: -rate * x, lambda t, x, y: -y, 0.1)
    found = solve(system, x, y, t1=0.1, method=RKC2(), steps=AdaptiveSteps(1e-5, 1e-5))
    assert found.xs.dtype == found.ys.dtype == dtype
    exact = torch.exp(torch.tensor(-rate, dtype=torch.complex128))
    exact = exact.to(dtype) if dtype.is_complex else exact.real.to(dtype)
    torch.testing.assert_close(found.xs[0], exact * x, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.ys[0], math.exp(-0.1) * y, rtol=0, atol=1e-3)
