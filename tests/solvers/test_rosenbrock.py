"""Rosenbrock methods: order conditions, stability, stiff problems, cost, gradients and failures; and GMRES."""

from __future__ import annotations

import gc
import math
import re

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from odeformer import FastSlowConfig
from odeformer.fields import FastSlowField, FastSlowLayer
from solvers import (
    ROS2,
    ROS34PW2,
    AdaptiveSteps,
    Backprop,
    Checkpointed,
    Dopri5,
    FastSlowSystem,
    FixedSteps,
    Gradient,
    SolveError,
    Stats,
    Status,
    Steps,
    integrate,
    solve,
)
from solvers.krylov import Linearisation, NotSolved, gmres
from solvers.rosenbrock import Rosenbrock
from solvers.system import FastTimeProblem
from tests.solvers.problems import Field, Network, nan_after, slopes, states

BOTH: tuple[Rosenbrock, ...] = (ROS2(), ROS34PW2())
EMPTY = torch.zeros(0, dtype=torch.float64)
ONE = torch.ones(1, dtype=torch.float64)


def matrices(method: Rosenbrock) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """alpha, gamma (with its diagonal), b and the embedded weights."""
    tableau, stages = method.tableau, len(method.tableau.weights)
    alpha, gamma = np.zeros((stages, stages)), tableau.gamma * np.eye(stages)
    for i, (alphas, gammas) in enumerate(zip(tableau.alphas, tableau.gammas, strict=True), start=1):
        alpha[i, :i], gamma[i, :i] = alphas, gammas
    b = np.array(tableau.weights)
    return alpha, gamma, b, b - np.array(tableau.error)


def conditions(b: np.ndarray, alpha: np.ndarray, gamma: np.ndarray, order: int) -> list[float]:
    """Those of a W-method, for any matrix in place of J (Rang & Angermann, BIT 45 (2005) 761)."""
    one = np.ones(len(b))
    found = [b @ one - 1]
    if order >= 2:
        found += [b @ alpha @ one - 1 / 2, b @ gamma @ one]
    if order >= 3:
        found += [b @ (alpha @ one) ** 2 - 1 / 3, b @ alpha @ alpha @ one - 1 / 6]
        found += [b @ alpha @ gamma @ one, b @ gamma @ alpha @ one, b @ gamma @ gamma @ one]
    return found


@pytest.mark.parametrize("method", BOTH, ids=repr)
def test_the_order_conditions_of_w_methods(method: Rosenbrock) -> None:
    alpha, gamma, b, embedded = matrices(method)
    np.testing.assert_allclose(conditions(b, alpha, gamma, method.order), 0, atol=1e-14)
    assert method.error_order is not None
    np.testing.assert_allclose(conditions(embedded, alpha, gamma, method.error_order), 0, atol=1e-14)
    assert np.abs(conditions(embedded, alpha, gamma, method.error_order + 1)).max() > 1e-2
    if isinstance(method, ROS34PW2):  # stiffly accurate: the last stage is the end
        np.testing.assert_allclose(alpha[-1] + gamma[-1], b, atol=1e-15)


def stability(method: Rosenbrock, z: complex) -> complex:
    """R(z), by one step of length 1 of x' = z x from x = 1."""
    problem = FastTimeProblem.over_fast_time(Field(lambda t, x, y: z * x))
    return method.step(problem, 0.0, 1.0, torch.ones(1, dtype=torch.complex128), EMPTY).x.item()


@pytest.mark.parametrize("method", BOTH, ids=repr)
def test_l_stability(method: Rosenbrock) -> None:
    """R(z) = 1 + z b (1 - z (alpha + gamma))^{-1} 1, |R| <= 1 on the imaginary axis, R(-infinity) = 0."""
    alpha, gamma, b, _ = matrices(method)

    def R(z: complex) -> complex:
        return 1 + z * b @ np.linalg.solve(np.eye(len(b)) - z * (alpha + gamma), np.ones(len(b)))

    for z in (-1.0, -0.3 + 2j, -30 + 4j, 3j, -1e3, 1e3j):
        assert stability(method, z) == pytest.approx(R(z), rel=0, abs=1e-9)
    assert max(abs(R(1j * w)) for w in np.logspace(-2, 4, 400)) <= 1 + 1e-14
    for z in (-1e4, -1e8, -1e12):
        assert abs(stability(method, z)) < 10 / -z + 1e-9


class ProtheroRobinson(FastSlowSystem):
    """eps x' = (1 + y)(cos t - x) - eps sin t, y' = -y^2 / 2: x = cos t, y = 2 / (2 + t) for every eps."""

    def __init__(self, epsilon: float, decay: float = 0.0) -> None:
        super().__init__()
        self.epsilon, self.fast_decay = epsilon, decay

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(t, float)
        return (1 + y) * (math.cos(t) - x) - self.epsilon * math.sin(t)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -y * y / 2


@pytest.mark.parametrize("method", BOTH, ids=repr)
def test_prothero_and_robinson(method: Rosenbrock) -> None:
    """x follows cos t without a lag, however stiff, and of no lower order than y: the difference in place of F_t sees to it."""
    for epsilon in (1e-2, 1e-4, 1e-8):
        errors = []
        for n in (8, 16, 32):
            found = solve(ProtheroRobinson(epsilon), ONE, ONE, t1=2.0, method=method, steps=FixedSteps(n))
            errors.append(max(abs(found.xs.item() - math.cos(2)), abs(found.ys.item() - 0.5)))
        assert errors[-1] < 1e-3, (epsilon, errors)
        assert epsilon == 1e-2 or slopes(errors)[-1] > method.order - 0.2, (epsilon, errors)


@pytest.mark.parametrize("decay", [0.0, 1.5])
@pytest.mark.parametrize("method", BOTH, ids=repr)
def test_the_cost_does_not_depend_on_stiffness(method: Rosenbrock, decay: float) -> None:
    """Evaluations and products, at a tolerance that is met. (A guess of the first step is a fast time, from which it grows.)"""
    work = []
    for epsilon in (1e-4, 1e-6, 1e-8):
        steps = AdaptiveSteps(1e-3, 1e-3, first_step=0.01)
        found = solve(ProtheroRobinson(epsilon, decay), ONE, ONE, t1=2.0, method=method, steps=steps)
        assert found.xs.item() == pytest.approx(math.cos(2), abs=1e-3)
        assert found.ys.item() == pytest.approx(0.5, abs=1e-3)
        work.append(found.stats.fast_evaluations + found.stats.jacobian_products)
    assert max(work) < 1.25 * min(work), work


def test_the_decay_preconditions() -> None:
    """A diagonal of 30 rates from 1 to 1e6 and a weak coupling: fewer iterations than without, and the same result."""
    generator = torch.Generator().manual_seed(0)
    decay = torch.logspace(0, 6, 30, dtype=torch.float64)
    coupling = 0.1 * torch.randn(30, 30, dtype=torch.float64, generator=generator)
    found = []
    for given in (decay, 0.0):
        system = Field(lambda t, x, y: 1 + torch.tanh(x @ coupling + y) - decay * x, lambda t, x, y: -y, 0.1)
        system.fast_decay = given
        found.append(solve(system, 0 * decay, 1 + 0 * decay, t1=1.0, method=ROS2(1e-10), steps=FixedSteps(5)))
    torch.testing.assert_close(found[0].xs, found[1].xs, rtol=1e-6, atol=1e-12)
    assert 3 * found[0].stats.linear_iterations < found[1].stats.linear_iterations


class VanDerPol(FastSlowSystem):
    """eps x' = (1 - y^2) x - y, y' = x, with eps = 1 / mu^2 (Hairer & Wanner, Solving ODEs II, section IV.1)."""

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.epsilon = 1 / mu**2

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (1 - y * y) * x - y

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x


def test_van_der_pol_against_radau() -> None:
    """Over two relaxations, y from -2 to 2: in a few hundred steps where the stiffness is 1e6."""
    times, mu = [0.5, 1.0, 1.5, 2.0], 1e3
    radau = solve_ivp(
        lambda t, z: [mu**2 * ((1 - z[1] ** 2) * z[0] - z[1]), z[0]],
        (0.0, times[-1]),
        [-0.66, 2.0],
        method="Radau",
        rtol=1e-8,
        atol=1e-10,
        t_eval=times,
    )
    x, y, steps = -0.66 * ONE, 2 * ONE, AdaptiveSteps(1e-3, 1e-3)
    with torch.no_grad():
        found = solve(VanDerPol(mu), x, y, t1=2.0, method=ROS34PW2(), steps=steps, save_at=times)
    np.testing.assert_allclose(found.ys.flatten().numpy(), radau.y[1], rtol=0, atol=2e-3)
    assert found.xs[-1].item() == pytest.approx(radau.y[0, -1], abs=2e-3)
    assert found.stats.steps < 600


def attention_field(dtype: torch.dtype = torch.float64) -> tuple[FastSlowField, Tensor, Tensor]:
    """One layer with an open gate, stiff by eps = 1/64; and a start."""
    generator = torch.Generator().manual_seed(3)
    config = FastSlowConfig(
        vocab_size=5, d_model=8, n_head=2, n_layer=1, pool_size=4, epsilon=1 / 64, leak=1.0, relaxation=1.0
    )
    layer = FastSlowLayer(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    u = torch.randn(2, 8, 8, dtype=torch.float64, generator=generator).to(dtype)
    return FastSlowField(layer.to(dtype), u), u, u[:, ::4] * 0.5


@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()], ids=repr)
def test_an_attention_field(gradient: Gradient) -> None:
    """State and gradient against Dopri5 at a tight tolerance; with the fused attention kernel in the field."""
    results = []
    for method, steps in ((ROS34PW2(), FixedSteps(8)), (Dopri5(), AdaptiveSteps(1e-6, 1e-7))):
        field, x, y = attention_field()
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        found = solve(field, x, y, t1=0.05, method=method, steps=steps, gradient=gradient)
        loss = found.xs.square().mean() + found.ys.sin().mean()
        gradients = torch.autograd.grad(loss, (x, y, *field.parameters()))
        results.append((found.xs.detach(), found.ys.detach(), *gradients))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).norm() <= 1e-2 * exact.norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_attention_field_without_gradients(dtype: torch.dtype) -> None:
    """In single precision and in inference mode: the same numbers as with gradients."""
    field, x, y = attention_field(dtype)
    settings = {"t1": 0.1, "method": ROS2(), "steps": FixedSteps(3)}
    with torch.inference_mode():
        inferred = solve(field, x, y, **settings)  # type: ignore[arg-type]
        started_there = solve(field, x + 0, y + 0, **settings)  # type: ignore[arg-type]
    with torch.no_grad():
        plain = solve(field, x, y, **settings)  # type: ignore[arg-type]
    trained = solve(field, x, y, **settings)  # type: ignore[arg-type]
    assert trained.xs.requires_grad and inferred.xs.dtype == dtype
    for other in (started_there, plain, trained):
        assert torch.equal(inferred.xs, other.xs) and torch.equal(inferred.ys, other.ys)
        assert inferred.stats == other.stats


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_unit_of_y_does_not_matter(unit: float) -> None:
    """y in another unit: the same solution to the accuracy of the linear systems."""
    plain, (x, y) = Network(0.1), states()
    scaled = Field(
        lambda t, x, y: plain.fast(t, x, y / unit), lambda t, x, y: unit * plain.slow(t, x, y / unit), plain.epsilon
    )
    first = solve(plain, x, y, t1=0.5, method=ROS2(1e-12), steps=FixedSteps(5))
    second = solve(scaled, x, unit * y, t1=0.5, method=ROS2(1e-12), steps=FixedSteps(5))
    torch.testing.assert_close((first.xs, first.ys), (second.xs, second.ys / unit), rtol=1e-9, atol=1e-9)


def test_counts() -> None:
    """Evaluations: the stages', one ahead, one for the Jacobian. The backward pass is not counted."""
    x, y = states()
    for method, stages in ((ROS2(), 2), (ROS34PW2(), 4)):
        for gradient in (Backprop(), Checkpointed()):
            stats = solve(Network(0.5), x, y, t1=1.0, method=method, steps=FixedSteps(5), gradient=gradient)
            before = Stats(**vars(stats.stats))
            assert before.fast_evaluations == before.slow_evaluations == 5 * (stages + 2)
            assert before.jacobian_products == before.linear_iterations > 5 * stages
            stats.xs.sum().backward()
            assert stats.stats == before


def test_at_rest_there_is_nothing_to_solve() -> None:
    """f = g = 0 at the state, which stays, bit for bit; with its gradient."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    system = Field(lambda t, x, y: torch.sin(x - 1), lambda t, x, y: y * (x.sum() - 3))
    for method in BOTH:
        for steps in (FixedSteps(3), AdaptiveSteps(1e-6, 1e-6)):
            found = solve(system, x, ONE, t1=2.0, method=method, steps=steps)
            assert torch.equal(found.xs[0], x) and torch.equal(found.ys[0], ONE)
            assert found.stats.linear_iterations == 0
            (slope,) = torch.autograd.grad(found.xs.sum(), x)
            assert torch.isfinite(slope).all()


def test_second_derivatives_are_refused() -> None:
    x, y = states()
    x.requires_grad_()
    found = solve(Network(0.5), x, y, t1=0.5, method=ROS2(), steps=FixedSteps(1))
    (first,) = torch.autograd.grad(found.xs.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Noting(FastSlowSystem):
    """x' = tanh(x W) W^T, which notes the hidden layers of its evaluations outside of forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        self.hidden: list[StorageWeakRef] = []

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.hidden)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.w)
        if not torch._C._functorch.is_functorch_wrapped_tensor(hidden):
            self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden @ self.w.T / 50

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)


def test_graphs_of_the_jacobian_do_not_outlive_their_step() -> None:
    """Backprop keeps the layers of the evaluations of a step without that for the Jacobian; Checkpointed none."""
    x, y = states(0, (2, 2), (1,))
    for gradient, kept in ((Backprop(), 3), (Checkpointed(), 0)):
        system = Noting()
        found = solve(system, x, y, t1=1.0, method=ROS2(), steps=FixedSteps(4), gradient=gradient)
        gc.collect()
        assert len(system.hidden) == 4 * 4 and system.alive() == 4 * kept
        found.xs.sum().backward()
        assert system.w.grad is not None and system.w.grad.abs().max() > 0
        del found
        gc.collect()
        assert system.alive() == 0


@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()], ids=repr)
def test_overrides_of_functional_call_last_through_the_backward_pass(gradient: Gradient) -> None:
    """The transposed systems are those of the forward pass, also after `functional_call` has put the parameters back."""

    class Run(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.system = Network(0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found = solve(self.system, x, y, t1=0.5, method=ROS2(), steps=FixedSteps(2), gradient=gradient)
            return found.xs.sum() + found.ys.square().sum()

    run, (x, y) = Run(), states()
    override = (0.5 * run.system.w.detach().flip(0)).requires_grad_()
    found = torch.autograd.grad(torch.func.functional_call(run, {"system.w": override}, (x, y)), override)
    with torch.no_grad():
        run.system.w.copy_(override)
    assert torch.equal(found[0], torch.autograd.grad(run(x, y), run.system.w)[0])


MATRIX = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MATRIX = -MATRIX @ MATRIX.T - torch.eye(12)
STIFF = Field(lambda t, x, y: x @ MATRIX + y, lambda t, x, y: -y, 0.01)
"""12 rates, without a decay that would precondition them."""


@pytest.mark.parametrize("steps", [FixedSteps(4), AdaptiveSteps(1e-3, 1e-3, min_step=0.1)], ids=repr)
def test_a_system_that_is_not_solved_is_a_failure(steps: Steps) -> None:
    x = torch.ones(12, dtype=torch.float64)
    found = solve(
        STIFF, x, x, t1=1.0, method=ROS2(max_iterations=2), steps=steps, raise_on_failure=False, save_at=[0.0, 1.0]
    )
    assert found.status is Status.LINEAR_SOLVE and found.ts.tolist() == [0.0]
    assert re.search(
        r"linear system not solved at slow time t = 0 .*\(no stage of the step from t = 0: relative residual \S+ after 2 "
        r"iterations\): .*raise max_iterations or linear_tolerance",
        found.message,
    )
    with pytest.raises(SolveError, match="linear system not solved"):
        integrate(STIFF, x, x, span=100.0, method=ROS2(max_iterations=2), steps=FixedSteps(4))


def test_shorter_steps_are_tried_first() -> None:
    """h J is small for a short step, and so is the work."""
    x = torch.ones(12, dtype=torch.float64)
    method, steps = ROS2(1e-4, max_iterations=8), AdaptiveSteps(1e-2, 1e-2, first_step=1.0)
    found = solve(STIFF, x, x, t1=1.0, method=method, steps=steps)
    assert found.stats.rejected > 0
    eye = torch.eye(12, dtype=torch.float64)
    flow = torch.matrix_exp(torch.cat([torch.cat([MATRIX, eye], 1) / 0.01, torch.cat([0 * eye, -eye], 1)]))
    torch.testing.assert_close(torch.cat([found.xs[0], found.ys[0]]), flow @ torch.cat([x, x]), rtol=0, atol=3e-2)


def test_a_singular_stage_and_a_field_of_nan() -> None:
    """h gamma J = 1 has no stage; and what is not finite is reported as that."""
    gamma = ROS2.tableau.gamma
    growing = Field(lambda t, x, y: x / gamma)
    found = solve(growing, ONE, ONE, t1=2.0, method=ROS2(), steps=FixedSteps(2), raise_on_failure=False)
    assert found.status is Status.LINEAR_SOLVE
    for steps in (FixedSteps(10), AdaptiveSteps(1e-4, 1e-6)):
        found = solve(nan_after(0.35), ONE, ONE, t1=1.0, method=ROS2(), steps=steps, raise_on_failure=False)
        assert found.status is Status.NON_FINITE


def test_arguments_are_checked() -> None:
    for setting, error in (
        ({"linear_tolerance": 0.0}, ValueError),
        ({"linear_tolerance": 1.0}, ValueError),
        ({"linear_tolerance": math.nan}, ValueError),
        ({"max_iterations": 0}, ValueError),
        ({"max_iterations": 2.0}, TypeError),
        ({"max_iterations": True}, TypeError),
    ):
        with pytest.raises(error, match=rf"{next(iter(setting))} must be .* got {next(iter(setting.values()))}"):
            ROS2(**setting)  # type: ignore[arg-type]
    assert ROS2() == ROS2() != ROS2(1e-4) and ROS2() != ROS34PW2() and hash(ROS2(1e-4)) == hash(ROS2(1e-4))


@pytest.mark.parametrize("shapes", [((), ()), ((4,), (2, 3)), ((0, 3), (0, 2)), ((2, 3), (0,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_states_of_any_shape(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    """x' = -(2 - i / 2) x / eps, with a decay that is a tensor, and y' = -y; and the gradient of x at the end."""
    rate = 2 - 0.5j if dtype.is_complex else 2.0
    x, y = (torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    system = Field(lambda t, x, y: -rate * x, lambda t, x, y: -y, 0.1)
    system.fast_decay = torch.full(x.shape[-1:], 2.0)
    found = solve(system, x, y, t1=0.1, method=ROS34PW2(), steps=AdaptiveSteps(1e-5, 1e-5))
    assert found.xs.dtype == found.ys.dtype == dtype
    factor = torch.exp(torch.tensor(-rate, dtype=torch.complex128))
    factor = factor.to(dtype) if dtype.is_complex else factor.real.to(dtype)
    torch.testing.assert_close(found.xs[0], factor * x, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.ys[0], math.exp(-0.1) * y, rtol=0, atol=1e-4)
    (slope,) = torch.autograd.grad(found.xs.real.sum(), x)
    torch.testing.assert_close(slope, (factor.conj() * torch.ones_like(x)).detach(), rtol=0, atol=1e-4)


def matrix_of(n: int, seed: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, n, dtype=torch.float64, generator=generator) / math.sqrt(n)
    matrix = matrix + matrix.T if symmetric else matrix + 2 * torch.eye(n)
    return matrix, torch.randn(n, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_gmres_solves(n: int, symmetric: bool) -> None:
    """Also indefinite matrices, in no more iterations than unknowns, to the residual asked for."""
    for seed in range(3):
        matrix, b = matrix_of(n, seed, symmetric)
        v, iterations = gmres(lambda v, m=matrix: m @ v, b, 1e-12, 100)
        assert iterations <= n and (b - matrix @ v).norm() <= 2e-12 * b.norm()
        condition = float(torch.linalg.cond(matrix))
        torch.testing.assert_close(v, torch.linalg.solve(matrix, b), rtol=0, atol=1e-11 * condition * float(v.norm()))
        loose, fewer = gmres(lambda v, m=matrix: m @ v, b, 1e-2, 100)
        assert fewer <= iterations and (b - matrix @ loose).norm() <= 1e-2 * b.norm()


def test_gmres_restarts() -> None:
    matrix, b = matrix_of(60, 0, symmetric=False)
    products = 0

    def product(v: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return matrix @ v

    v, iterations = gmres(product, b, 1e-10, 300, restart=8)
    assert (b - matrix @ v).norm() <= 1.01e-10 * b.norm() and iterations > 16
    assert products == iterations + (iterations - 1) // 8
    with pytest.raises(NotSolved, match=r"relative residual \S+ after 16 iterations"):
        gmres(product, b, 1e-10, 16, restart=8)
    with pytest.raises(NotSolved, match=r"relative residual \S+ after 11 iterations"):
        gmres(product, b, 1e-10, 11, restart=8)


def test_gmres_on_singular_systems() -> None:
    """Consistent ones are solved; of others, what is left is told. Zero takes no iteration, an eigenvector one."""
    matrix, b = matrix_of(6, 2, symmetric=True)
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.cat([torch.zeros(2).double(), values[2:]])
    singular = vectors @ torch.diag(values) @ vectors.T
    consistent = singular @ b
    v, iterations = gmres(lambda v: singular @ v, consistent, 1e-12, 50)
    assert (singular @ v - consistent).norm() <= 1e-11 * consistent.norm() and iterations <= 4
    assert (vectors[:, :2].T @ v).norm() < 1e-10, "the solution of least norm"
    left = (vectors[:, :2].T @ b).norm() / b.norm()
    with pytest.raises(NotSolved) as raised:
        gmres(lambda v: singular @ v, b, 1e-12, 50)
    assert raised.value.residual == pytest.approx(left.item(), rel=1e-6)
    with pytest.raises(NotSolved, match="relative residual 1 after 0 iterations"):
        gmres(torch.zeros_like, b, 1e-12, 50)
    assert gmres(lambda v: singular @ v, torch.zeros(6).double(), 1e-12, 50)[1] == 0
    v, iterations = gmres(lambda v: matrix @ v, vectors[:, 3], 1e-12, 50)
    assert iterations == 1
    torch.testing.assert_close(matrix @ v, vectors[:, 3], rtol=0, atol=1e-12)
    for wrong in (math.nan, math.inf):
        assert gmres(lambda v, wrong=wrong: wrong * v, b, 1e-12, 50)[0].isnan().all()
        assert gmres(lambda v: v, wrong * b, 1e-12, 50)[0].isnan().all()


def test_products_with_the_jacobian() -> None:
    """Against the Jacobian itself; also of rates that do not depend on a part of the state, and in inference mode."""
    system, (x, y) = Network(0.3), states()
    cases = [
        lambda x, y: (system.fast(0.4, x, y), system.slow(0.4, x, y)),
        lambda x, y: (torch.ones_like(x), x * 2.0),
        lambda x, y: (torch.ones_like(x), torch.zeros_like(y)),
    ]
    v = states(5)
    for rates in cases:
        jacobian = torch.autograd.functional.jacobian(rates, (x, y))
        forward = [torch.tensordot(row[0], v[0], 2) + torch.tensordot(row[1], v[1], 2) for row in jacobian]
        backward = [torch.tensordot(v[0], jacobian[0][i], 2) + torch.tensordot(v[1], jacobian[1][i], 2) for i in (0, 1)]
        for inference in (False, True):
            with torch.inference_mode(inference):
                linear = Linearisation(rates, x + 0, y + 0)
                torch.testing.assert_close(list(linear.product(v)), forward, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(list(linear.transposed_product(v)), backward, rtol=1e-12, atol=1e-12)
