"""Situations that users of other ODE libraries report as bugs, here for every method that can be in them."""

from __future__ import annotations

import gc
import math
import re

import pytest
import torch
from torch import Tensor, nn

from solvers import (
    ETD3RK,
    AdaptiveSteps,
    AndersonAdams,
    Backprop,
    Checkpointed,
    Dopri5,
    FastSlowSystem,
    FixedSteps,
    Gradient,
    Heun,
    Method,
    Status,
    Steps,
    TorchDiffEq,
    solve,
)
from solvers.stepping import MeshSteps
from tests.solvers.problems import ADAPTIVE, METHODS, Field, Network, nan_after, states
from tests.solvers.test_odeint import Mesh

CONTROLLED: tuple[Method | TorchDiffEq, ...] = (*ADAPTIVE, TorchDiffEq("dopri5"), TorchDiffEq("bosh3"))
EXACT = (Backprop(), Checkpointed())


@pytest.mark.parametrize("onset", [0.0, 0.37])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("method", CONTROLLED, ids=repr)
def test_a_field_that_turns_nan_is_named_as_such(method: Method | TorchDiffEq, sign: int, onset: float) -> None:
    """At its time, in few steps; not as a step size that underflows. ETD3RK has no stage at the end of a step, and torchdiffeq
    does not step back from one: they know the time to within a step."""
    x, y = states()
    field = Field(lambda t, x, y: torch.full_like(x, 1.0 if sign * t < onset else math.nan), lambda t, x, y: -y)
    solution = solve(
        field, x, y, t1=float(sign), method=method, steps=AdaptiveSteps(1e-4, 1e-4), raise_on_failure=False
    )
    assert solution.status is Status.NON_FINITE and "underflow" not in solution.message
    found = re.match(r"non-finite state or field at slow time t = (\S+) with", solution.message)
    assert found
    if isinstance(method, TorchDiffEq):
        assert 0 <= sign * float(found.group(1)) <= onset
    else:
        assert sign * float(found.group(1)) == pytest.approx(onset, abs=0.1 if method == ETD3RK() else 1e-5)
    assert solution.stats.steps < 300


@pytest.mark.parametrize("method", [*METHODS, *(TorchDiffEq(name) for name in ("rk4", "dopri5"))], ids=repr)
def test_the_step_limit_is_a_result(method: Method | TorchDiffEq) -> None:
    """Under error control where there is any: what was reached, in just as many steps as allowed."""
    controlled = method.error_order is not None if isinstance(method, Method) else not method.fixed_grid
    steps: Steps = AdaptiveSteps(1e-9, 1e-9) if controlled else FixedSteps(40)
    x, y = states()
    solution = solve(
        Network(0.5), x, y, t1=4.0, method=method, steps=steps, max_steps=6, raise_on_failure=False, save_at=[0.0, 4.0]
    )
    assert solution.status is Status.STEP_LIMIT and solution.stats.steps == 6
    assert "step limit reached at slow time t = " in solution.message
    if isinstance(method, Method):
        assert solution.ts.tolist() == [0.0] and torch.equal(solution.xs[0], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saving_at_59_001_times(dtype: torch.dtype) -> None:
    """[0, 5.9] in 1e-4 steps, where arange would overshoot and 5.9 / 1e-4 is no integer: mesh points and interpolated times."""
    save_at = torch.linspace(0, 5.9, 59_001, dtype=dtype)
    x, y = torch.zeros(1, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    field = Field(lambda t, x, y: torch.ones_like(x))
    t1 = save_at[-1].item()
    with torch.no_grad():
        solution = solve(field, x, y, t1=t1, method=Dopri5(), steps=AdaptiveSteps(1e-6, 1e-6), save_at=save_at)
    assert solution.status is Status.SUCCESS and torch.equal(solution.ts, save_at.double())
    torch.testing.assert_close(solution.xs[:, 0], save_at.double(), rtol=1e-12, atol=1e-12)
    mesh = Mesh()
    solve(field, x, y, t1=t1, method=mesh, steps=FixedSteps(59_000))
    tau, h = mesh._steps[-1]
    assert len(mesh._steps) == 59_000 and tau + h == pytest.approx(t1, rel=1e-15) and h == t1 / 59_000


def test_times_past_the_end_by_round_off_are_refused_by_name() -> None:
    x, y = states()
    save_at = torch.arange(0, 5.9 + 1e-4, 1e-4)
    with pytest.raises(ValueError, match=r"save_at holds 5\.9\d*, outside \[0\.0, 5\.9\]"):
        solve(Network(), x, y, t1=5.9, method=Dopri5(), steps=AdaptiveSteps(1e-4, 1e-4), save_at=save_at)


class Recorded(Backprop):
    """Notes (tau, h) of every attempted step of a method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.attempts: list[tuple[float, float]] = []

    def wrap(self, step, system):  # type: ignore[no-untyped-def]
        def recorded(problem, tau, h, *rest):  # type: ignore[no-untyped-def]
            self.attempts.append((tau, h))
            return step(problem, tau, h, *rest)

        return recorded if step == self.method.step else step


@pytest.mark.parametrize("gradient", EXACT, ids=repr)
@pytest.mark.parametrize("method", ADAPTIVE, ids=repr)
def test_no_gradient_leaks_through_the_choice_of_the_first_step(method: Method, gradient: Gradient) -> None:
    """The first step is guessed from x0, y0 and the field; the gradient is that of the mesh that came of it, held fixed."""
    epsilon = 0.5

    def gradients(steps: Steps, how: Gradient) -> tuple[Tensor, ...]:
        x, y = (state.requires_grad_() for state in states(6))
        system = Network(epsilon)
        solution = solve(system, x, y, t1=0.8, method=method, steps=steps, gradient=how)
        return torch.autograd.grad(solution.xs.square().sum() + solution.ys.sin().sum(), (x, y, system.w))

    recorded = Recorded(method)
    steps = AdaptiveSteps(1e-3, 1e-3)
    gradients(steps, recorded)
    following = [tau for tau, _ in recorded.attempts[1:]]
    ends = [after for (tau, _), after in zip(recorded.attempts, following, strict=False) if after != tau]
    mesh = MeshSteps((*(epsilon * end for end in ends), 0.8))
    assert mesh.n > 2
    for found, expected in zip(gradients(steps, gradient), gradients(mesh, Backprop()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class StraightThrough(FastSlowSystem):
    """f is that of a frozen layer in the forward pass; another layer's gradient takes its place in the backward pass."""

    def __init__(self, surrogate: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.layer = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
        self.surrogate = surrogate

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        value = torch.tanh(self.frozen(x)).detach()
        surrogate = torch.tanh(self.layer(x))
        return value + (surrogate - surrogate.detach() if self.surrogate else 0.0)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x - y


@pytest.mark.parametrize("steps", [FixedSteps(4), AdaptiveSteps(1e-2, 1e-2)], ids=repr)
@pytest.mark.parametrize("method", [method for method in ADAPTIVE if not method.reads_host], ids=repr)
def test_a_fast_layer_that_only_the_backward_pass_uses(method: Method, steps: Steps) -> None:
    """It leaves the values alone and gets its gradient, the same from every exact gradient. (Methods that take Jacobians or
    their size would use it in the forward pass as well.)"""
    found = []
    for gradient in EXACT:
        system, (x, y) = StraightThrough(surrogate=True), states(2)
        solution = solve(system, x, y, t1=1.0, method=method, steps=steps, gradient=gradient)
        plain = solve(StraightThrough(surrogate=False), x, y, t1=1.0, method=method, steps=steps)
        torch.testing.assert_close((solution.xs, solution.ys), (plain.xs, plain.ys), rtol=1e-14, atol=1e-14)
        solution.ys.sum().backward()
        assert system.frozen.weight.grad is None
        assert isinstance(system.layer.weight.grad, Tensor) and system.layer.weight.grad.abs().min() > 0
        found.append(system.layer.weight.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("gradient", EXACT, ids=repr)
@pytest.mark.parametrize("method", [*ADAPTIVE, TorchDiffEq("dopri5")], ids=repr)
def test_an_output_kept_on_the_module_does_not_grow_memory(method: Method | TorchDiffEq, gradient: Gradient) -> None:
    """The solution holds its graph, the graph the module, and the module the solution, but only the last."""
    if isinstance(method, TorchDiffEq) and gradient == Checkpointed():
        gradient = Backprop()
    system, (x, y) = Network(0.5), states()
    counts = []
    for _ in range(4):
        solution = solve(system, x, y, t1=0.5, method=method, steps=AdaptiveSteps(1e-2, 1e-2), gradient=gradient)
        system.kept = solution.xs
        (solution.xs.sum() + solution.ys.sum()).backward()
        del solution
        gc.collect()
        counts.append(sum(issubclass(type(item), Tensor) for item in gc.get_objects()))
    assert counts[1] == counts[2] == counts[3], counts


class Heat(FastSlowSystem):
    """u_t = u_xx on n inner points of [0, 1], 0 at the ends: sin(k pi x) falls off at the rate (2 sin(k pi dx / 2) / dx)^2."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.dx = 1 / (n + 1)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        u = nn.functional.pad(x, (1, 1))
        return (u[..., 2:] - 2 * x + u[..., :-2]) / self.dx**2

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    def mode(self, k: int, n: int, t: float) -> Tensor:
        points = torch.arange(1, n + 1, dtype=torch.float64) * self.dx
        rate = (2 * math.sin(k * math.pi * self.dx / 2) / self.dx) ** 2
        return math.exp(-rate * t) * torch.sin(k * math.pi * points)


@pytest.mark.parametrize("method", [Dopri5(), Heun(), AndersonAdams()], ids=repr)
def test_the_heat_equation_in_float32(method: Method) -> None:
    """1000 points, eigenvalues down to -4e6: the round-off of the field does not stop error control at rtol 1e-4."""
    n, t1 = 1000, 2e-4
    system = Heat(n)
    start = system.mode(1, n, 0.0) + 0.5 * system.mode(40, n, 0.0)
    with torch.no_grad():
        solution = solve(
            system,
            start.float(),
            torch.zeros(0),
            t1=t1,
            method=method,
            steps=AdaptiveSteps(1e-4, 1e-6),
            max_steps=20_000,
        )
    assert solution.status is Status.SUCCESS
    exact = system.mode(1, n, t1) + 0.5 * system.mode(40, n, t1)
    torch.testing.assert_close(solution.xs[0].double(), exact, rtol=0, atol=1e-3)


def test_equal_steps_into_nan_say_so_too() -> None:
    x, y = states()
    for method in METHODS:
        solution = solve(nan_after(0.5), x, y, t1=1.0, method=method, steps=FixedSteps(8), raise_on_failure=False)
        assert solution.message.startswith("non-finite state or field between slow times t = 0 and t = 1 with")
