"""The reduced system: its distance to the full one, its cost, its gradient and its failures; and Anderson acceleration."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from odeformer import FastSlowConfig
from odeformer.fields import FastSlowField, FastSlowLayer
from solvers import (
    ETD2RK,
    RK4,
    AdaptiveSteps,
    Backprop,
    Checkpointed,
    Dopri5,
    Euler,
    FastSlowSystem,
    FixedSteps,
    Gradient,
    Heun,
    SlowManifold,
    Solution,
    SolveError,
    Stats,
    Status,
    Steps,
    integrate,
    solve,
)
from solvers.anderson import MEMORY, NotConverged, find_root
from solvers.explicit import ExplicitRungeKutta
from solvers.system import FastTimeProblem
from tests.solvers.problems import Field, nan_after, reference, slopes, states

ONE = torch.ones(1, dtype=torch.float64)


class Pull(FastSlowSystem):
    """f = -2 x + tanh(x W_0 + y) + sin t, g = sin(x W_1) - y: an attracting root for |W_0| < 2."""

    def __init__(self, epsilon: float | Tensor, w: Tensor | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.w = 0.5 * torch.randn(2, 3, 3, dtype=torch.float64, generator=generator) if w is None else w
        self.epsilon, self.fast_decay = epsilon, 2.0

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -2 * x + torch.tanh(x @ self.w[0] + y) + torch.sin(torch.as_tensor(t, dtype=x.dtype))

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x @ self.w[1]) - y


def distance(system: FastSlowSystem, x: Tensor, y: Tensor, t1: float, correction: bool) -> tuple[float, float]:
    """|x - x_full| and |y - y_full| at t1, the full solution starting on its slow manifold to O(eps^2)."""
    problem = FastTimeProblem.over_slow_time(system)
    start = SlowManifold(correction=True).integrates(problem).settled(0.0, x, y)
    x_full, y_full = reference(system, start, y, [0.0, t1])
    found = solve(system, x, y, t1=t1, method=SlowManifold(RK4(), correction=correction), steps=FixedSteps(16))
    return float((found.xs - x_full).abs().max()), float((found.ys - y_full).abs().max())


@pytest.mark.parametrize(("correction", "order"), [(False, 1), (True, 2)])
def test_the_distance_to_the_closed_form_of_a_linear_problem(correction: bool, order: int) -> None:
    """eps x' = -x + a y, y' = b x - d y on its slow eigenvector x = c y, eps c (b c - d) = a - c."""
    a, b, d, errors = 1.5, -0.7, 0.3, []
    for epsilon in (2.0**-k for k in (6, 7, 8, 9)):
        c = (d * epsilon - 1 + math.sqrt((1 - d * epsilon) ** 2 + 4 * a * b * epsilon)) / (2 * b * epsilon)
        system = Field(lambda t, x, y: -x + a * y, lambda t, x, y: b * x - d * y, epsilon)
        system.fast_decay = 1.0
        method = SlowManifold(RK4(), correction=correction)
        found = solve(system, c * ONE, ONE, t1=1.0, method=method, steps=FixedSteps(20))
        y = math.exp(b * c - d)
        errors.append(max(abs(found.xs.item() - c * y), abs(found.ys.item() - y)))
    assert slopes(errors)[-1] == pytest.approx(order, abs=0.1), errors


@pytest.mark.parametrize(("correction", "order"), [(False, 1), (True, 2)])
def test_the_distance_to_a_fast_slow_transformer(correction: bool, order: int) -> None:
    errors = []
    for epsilon in (1 / 64, 1 / 128):
        torch.manual_seed(0)
        config = FastSlowConfig(
            vocab_size=7,
            n_layer=1,
            n_head=2,
            d_model=8,
            pool_size=2,
            context=8,
            leak=1.0,
            relaxation=0.5,
            epsilon=epsilon,
        )
        layer = FastSlowLayer(config).double().requires_grad_(False)
        torch.nn.init.normal_(layer.gate)
        system = FastSlowField(layer, torch.randn(1, 4, 8, dtype=torch.float64))
        errors.append(distance(system, system.u, torch.randn(1, 2, 8, dtype=torch.float64), 0.25, correction))
    of_x, of_y = zip(*errors, strict=True)
    assert slopes(of_x)[-1] == pytest.approx(order, abs=0.1) and slopes(of_y)[-1] > order - 0.2, errors


@pytest.mark.parametrize("method", [Euler(), Heun(), RK4(), Dopri5()], ids=repr)
def test_the_order_is_that_of_the_inner_method(method: ExplicitRungeKutta) -> None:
    """With a manifold in closed form, x + x^3 = sin y + t, solved for y by SciPy."""
    system = Field(lambda t, x, y: torch.sin(y) + t - x - x**3, lambda t, x, y: x - y * y, epsilon=1 / 1000)

    def phi(t: float | Tensor, y: Tensor) -> Tensor:  # Cardano's formula
        half = (torch.sin(y) + t) / 2
        root = torch.sqrt(half * half + 1 / 27)
        return (root + half) ** (1 / 3) - (root - half) ** (1 / 3)

    reduced = Field(lambda t, x, y: torch.zeros_like(x), lambda t, x, y: phi(t, y) - y * y)
    _, y_end = reference(reduced, ONE, ONE, [0.0, 1.0])
    errors = []
    for n in (4, 8, 16):
        found = solve(system, 3 * ONE, ONE, t1=1.0, method=SlowManifold(method, 1e-14), steps=FixedSteps(n))
        errors.append(float((found.ys - y_end).abs().max() + (found.xs - phi(1.0, y_end)).abs().max()))
    assert slopes(errors)[-1] > method.order - 0.2, errors


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("steps", [FixedSteps(8), AdaptiveSteps(1e-3, 1e-5)], ids=repr)
def test_the_work_does_not_depend_on_epsilon(steps: Steps, correction: bool) -> None:
    x, y = states()
    work = []
    for epsilon in (2.0**-6, 2.0**-12, 2.0**-24):
        stats = solve(Pull(epsilon), x, y, t1=1.0, method=SlowManifold(correction=correction), steps=steps).stats
        work.append((stats.steps, stats.fast_evaluations))
    taken, evaluations = zip(*work, strict=True)
    assert max(taken) <= min(taken) + 1, work
    # The correction, a change of x by O(eps), is found the sooner the smaller it is.
    assert sorted(evaluations, reverse=True) == list(evaluations) or max(evaluations) <= 1.05 * min(evaluations), work
    assert correction or max(evaluations) <= 1.05 * min(evaluations), work


def test_error_control_meets_its_tolerance() -> None:
    x, y = states()
    fine = solve(Pull(1 / 64), x, y, t1=2.0, method=SlowManifold(RK4(), 1e-14), steps=FixedSteps(200))
    for tolerance in (1e-3, 1e-6):
        for method in (Heun(), Dopri5()):
            steps = AdaptiveSteps(tolerance, tolerance)
            found = solve(Pull(1 / 64), x, y, t1=2.0, method=SlowManifold(method), steps=steps)
            assert float((found.ys - fine.ys).abs().max()) < 10 * tolerance


@pytest.mark.parametrize("correction", [False, True])
def test_saved_states_are_on_the_manifold(correction: bool) -> None:
    """Also between mesh points, where y is interpolated; the start is returned as it was given."""
    x, y = states()
    system, save_at = Pull(1 / 64), [0.0, 0.2, 0.55, 1.0]
    method = SlowManifold(RK4(), 1e-13, correction=correction)
    found = solve(system, x, y, t1=1.0, method=method, steps=FixedSteps(4), save_at=save_at)
    fine = solve(system, x, y, t1=1.0, method=method, steps=FixedSteps(40), save_at=save_at)
    assert torch.equal(found.xs[0], x)
    problem = method.integrates(FastTimeProblem.over_slow_time(system))
    for t, x_t, y_t in zip(save_at[1:], found.xs[1:], found.ys[1:], strict=True):
        torch.testing.assert_close(x_t, problem.settled(64 * t, x_t, y_t), rtol=0, atol=1e-12)
    torch.testing.assert_close((found.xs[1:], found.ys[1:]), (fine.xs[1:], fine.ys[1:]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()], ids=repr)
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("over", ["slow", "fast"])
def test_gradients_are_those_of_finite_differences(over: str, correction: bool, gradient: Gradient) -> None:
    """With respect to y0, parameters and epsilon (x0 has no influence), at interpolated save times too."""
    method = SlowManifold(tolerance=1e-14, correction=correction)

    def run(y: Tensor, w: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        system = Pull(epsilon, w)
        if over == "fast":
            return integrate(
                system, torch.zeros_like(y), y, span=3.0, method=method, steps=FixedSteps(2), gradient=gradient
            )
        found = solve(
            system,
            torch.zeros_like(y),
            y,
            t0=0.25,
            t1=1.0,
            method=method,
            steps=FixedSteps(2),
            gradient=gradient,
            save_at=[0.4, 1.0],
        )
        return found.xs, found.ys

    y, w = states()[1][:1], Pull(1.0).w
    leaves = [leaf.clone().requires_grad_() for leaf in (y, w, torch.tensor(0.2, dtype=torch.float64))]
    assert gradcheck(run, leaves, fast_mode=True, atol=1e-7)


def gradients(x: Tensor, gradient: Gradient, steps: Steps) -> tuple[Tensor, ...]:
    y, w = states()[1].requires_grad_(), Pull(1.0).w.requires_grad_()
    settings = {"method": SlowManifold(tolerance=1e-13, correction=True), "steps": steps, "gradient": gradient}
    found = solve(Pull(1 / 16, w), x, y, t1=1.0, save_at=[0.3, 1.0], **settings)  # type: ignore[arg-type]
    before = Stats(**vars(found.stats))
    result = torch.autograd.grad(found.xs.square().sum() + found.ys.sum(), (y, w))
    assert found.stats == before, "the backward pass is not counted"
    return (found.xs.detach(), found.ys.detach(), *result)


@pytest.mark.parametrize("steps", [FixedSteps(4), AdaptiveSteps(1e-2, 1e-3)], ids=repr)
def test_checkpointed_is_bit_equal_to_backprop(steps: Steps) -> None:
    x, _ = states()
    for a, b in zip(gradients(x, Backprop(), steps), gradients(x, Checkpointed(), steps), strict=True):
        assert torch.equal(a, b)


def test_the_gradient_does_not_know_where_the_search_began() -> None:
    near, far = (gradients(scale * states()[0], Backprop(), FixedSteps(4)) for scale in (0.0, 100.0))
    torch.testing.assert_close(near, far, rtol=1e-10, atol=1e-11)


def test_second_derivatives_are_refused() -> None:
    y = states()[1].requires_grad_()
    found = solve(Pull(0.1), y.detach(), y, t1=1.0, method=SlowManifold(), steps=FixedSteps(1))
    (first,) = torch.autograd.grad(found.ys.sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()], ids=repr)
def test_overrides_of_functional_call_last_through_the_backward_pass(gradient: Gradient) -> None:
    """The Jacobian of the implicit gradient is that of the forward pass, also when the parameters are back in place."""

    class Run(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.system = Pull(0.1)
            self.system.w = torch.nn.Parameter(self.system.w)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            method, steps = SlowManifold(tolerance=1e-13), FixedSteps(2)
            found = solve(self.system, x, y, t1=0.5, method=method, steps=steps, gradient=gradient)
            return found.xs.sum() + found.ys.square().sum()

    run, (x, y) = Run(), states()
    override = (-run.system.w.detach()).requires_grad_()
    (found,) = torch.autograd.grad(torch.func.functional_call(run, {"system.w": override}, (x, y)), override)
    with torch.no_grad():
        run.system.w.copy_(override)
    assert torch.equal(found, torch.autograd.grad(run(x, y), run.system.w)[0])


def test_an_exact_root_costs_one_evaluation() -> None:
    for f in (lambda t, x, y: y - x, lambda t, x, y: torch.zeros_like(x)):
        stats = solve(Field(f), ONE, ONE, t1=1.0, method=SlowManifold(Euler()), steps=FixedSteps(5)).stats
        assert stats.fast_evaluations == 6 and stats.slow_evaluations == 6
    assert torch.equal(solve(Field(f), ONE, ONE, t1=1.0, method=SlowManifold(), steps=FixedSteps(5)).xs[0], ONE)


def attempt(system: FastSlowSystem, steps: Steps, method: SlowManifold | None = None, t1: float = 2.0) -> Solution:
    return solve(system, ONE, ONE, t1=t1, method=method or SlowManifold(), steps=steps, raise_on_failure=False)


def time_of(solution: Solution) -> float:
    match = re.search(r"\(no root of f at t = (\S+): residual \S+ after \d+ evaluations\)", solution.message)
    assert match, solution.message
    return float(match.group(1))


@pytest.mark.parametrize("steps", [FixedSteps(40), AdaptiveSteps(1e-4, 1e-6)], ids=repr)
def test_a_root_that_is_not_there_is_a_failure(steps: Steps) -> None:
    solution = attempt(Field(lambda t, x, y: 1 + x * x), steps)
    assert solution.status is Status.ROOT_NOT_FOUND and time_of(solution) == 0 and len(solution.ts) == 0
    with pytest.raises(SolveError, match=r"no root of the fast field found .* raise max_iterations"):
        solve(Field(lambda t, x, y: 1 + x * x), ONE, ONE, t1=1.0, method=SlowManifold(), steps=steps)


@pytest.mark.parametrize("steps", [FixedSteps(40), AdaptiveSteps(1e-4, 1e-6)], ids=repr)
def test_a_fold_of_the_manifold_is_located(steps: Steps) -> None:
    """f = y - x^2, y' = -1: the root sqrt(1 - t) ends at t = 1, which shorter steps approach and do not pass."""
    solution = attempt(Field(lambda t, x, y: y - x * x, lambda t, x, y: -torch.ones_like(y), 0.01), steps)
    assert solution.status is Status.ROOT_NOT_FOUND
    assert time_of(solution) == pytest.approx(1, abs=0.06 if isinstance(steps, FixedSteps) else 1e-6)


def test_too_few_iterations_and_a_field_of_nan() -> None:
    hard = Field(lambda t, x, y: torch.cos(3 * x) + y - x)
    assert attempt(hard, FixedSteps(2), SlowManifold(max_iterations=2)).status is Status.ROOT_NOT_FOUND
    assert attempt(hard, FixedSteps(2)).status is Status.SUCCESS
    for steps in (FixedSteps(20), AdaptiveSteps(1e-4, 1e-6)):
        assert attempt(nan_after(-1.0), steps).status is Status.NON_FINITE
    relaxing = Field(lambda t, x, y: torch.full_like(x, math.nan) if t > 0.5 else y - x)
    for steps in (FixedSteps(20), AdaptiveSteps(1e-4, 1e-6)):
        solution = attempt(relaxing, steps)
        assert solution.status is Status.NON_FINITE and time_of(solution) == pytest.approx(0.55, abs=0.06)


def test_a_singular_jacobian_has_no_gradient() -> None:
    """f = a (y - 1): any x is a root at y = 1."""
    a = torch.ones(1, dtype=torch.float64, requires_grad=True)
    found = solve(
        Field(lambda t, x, y: a * (y - 1) + 0 * x), ONE, ONE, t1=1.0, method=SlowManifold(), steps=FixedSteps(1)
    )
    with pytest.raises(RuntimeError, match="gradient through a root of f was not found: residual"):
        found.xs.sum().backward()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"explicit Runge-Kutta method such as Heun\(\), got ETD2RK\(\)"):
        SlowManifold(ETD2RK())  # type: ignore[arg-type]
    for setting in ({"tolerance": 0.0}, {"tolerance": math.nan}, {"max_iterations": 0}, {"max_iterations": 2.0}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            SlowManifold(**setting)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no error estimate"):
        attempt(Pull(0.5), AdaptiveSteps(1e-3, 1e-3), SlowManifold(RK4()))


@pytest.mark.parametrize("shapes", [((), ()), ((4,), (2, 3)), ((0, 3), (0, 2)), ((2, 3), (0,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_states_of_any_shape(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    """x = (3 + cos t) / (2 - i / 2), with a decay that is a tensor holding a zero, and y' = -y."""
    rate = 2 - 0.5j if dtype.is_complex else 2.0
    x, y = (torch.ones(shape, dtype=dtype) for shape in shapes)
    system = Field(lambda t, x, y: 3 + math.cos(t) - rate * x, lambda t, x, y: -y, 0.01)
    system.fast_decay = torch.tensor([0.0, 2.0, 3.0, 4.0])[: max(x.shape[-1:], default=1)]
    if x.ndim == 0:
        system.fast_decay = 0.0
    found = solve(system, x, y, t1=1.0, method=SlowManifold(Dopri5()), steps=AdaptiveSteps(1e-5, 1e-5))
    assert found.xs.dtype == found.ys.dtype == dtype
    torch.testing.assert_close(found.xs[0], torch.full_like(x, (3 + math.cos(1.0)) / rate), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.ys[0], math.exp(-1) * torch.ones_like(y), rtol=1e-4, atol=0)


def counted(matrix: Tensor, b: Tensor) -> tuple[Tensor, int]:
    count = 0

    def r(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return b - matrix @ x

    return find_root(r, torch.zeros_like(b), 1e-10, 50)[0], count


@pytest.mark.parametrize("n", range(1, MEMORY + 1))
def test_linear_systems_end_after_as_many_steps_as_unknowns(n: int) -> None:
    """As GMRES (Walker & Ni, section 2); the plain iteration diverges, for the eigenvalues reach 2 n."""
    generator = torch.Generator().manual_seed(n)
    basis, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    matrix = basis @ torch.diag(2.0 * torch.arange(1, n + 1, dtype=torch.float64)) @ basis.T
    b = torch.randn(n, dtype=torch.float64, generator=generator)
    x, count = counted(matrix, b)
    torch.testing.assert_close(matrix @ x, b, rtol=0, atol=1e-9)
    assert count <= 2 * n + 2


def test_trials_that_are_not_finite_are_survived() -> None:
    """r = -log x at x = 30 leads to x < 0 by the plain step and by the secant."""
    x, _ = find_root(lambda x: -10 * torch.log(x), 30 * ONE, 1e-12, 50)
    assert x.item() == pytest.approx(1, abs=1e-11)
    with pytest.raises(NotConverged, match="residual nan after 1 evaluations"):
        find_root(torch.log, -ONE, 1e-12, 50)
