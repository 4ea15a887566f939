"""StoredAdjoint and Backsolve: the gradient of the differential equation, against that of fine steps and finite differences."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from odeformer.blocks import FlowBlock
from odeformer.config import FastSlowConfig
from odeformer.coupling import pool
from odeformer.fields import FastSlowField, FastSlowLayer
from solvers import (
    ETD2RK,
    ETD3RK,
    MRIGARK22,
    RK4,
    AdaptiveSteps,
    AndersonAdams,
    Backprop,
    Backsolve,
    Checkpointed,
    Dopri5,
    Euler,
    ExponentialAdams,
    FastSlowSystem,
    FixedSteps,
    Gradient,
    Heun,
    LieTrotter,
    Method,
    MultirateEuler,
    SlowManifold,
    SolveError,
    Status,
    Steps,
    StoredAdjoint,
    Strang,
    TorchDiffEq,
    integrate,
    solve,
)
from tests.solvers.problems import Field, slopes, states
from tests.solvers.test_gradients import gradients_of, leaves, network

SAVE_AT = [0.0, 0.31, 0.9]


def gradients(
    gradient: Gradient,
    method: Method | TorchDiffEq,
    steps: Steps,
    save_at: list[float] | None = SAVE_AT,
    t1: float = 0.9,
) -> tuple[Tensor, ...]:
    """With respect to x0, y0, unregistered parameters and epsilon, from states saved at mesh points and between."""
    inputs = leaves(7)
    x, y, w, epsilon = inputs
    solution = solve(network(w, epsilon), x, y, t1=t1, method=method, steps=steps, gradient=gradient, save_at=save_at)
    return gradients_of((solution.xs, solution.ys), inputs)


def distance(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    """Relative, the largest over the inputs."""
    return max(float((p - q).norm() / q.norm()) for p, q in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def exact() -> tuple[Tensor, ...]:
    return gradients(Backprop(), RK4(), FixedSteps(300))


@pytest.mark.parametrize(
    ("method", "order"),
    [
        (Euler(), 1),
        (Heun(), 2),
        (RK4(), 4),
        (Dopri5(), 4),
        (ETD2RK(), 2),
        (ETD3RK(), 3),
        (ExponentialAdams(3), 3),
        (AndersonAdams(), 3),
        (MultirateEuler(2), 1),
        (MRIGARK22(2), 2),
    ],
    ids=repr,
)
def test_the_adjoint_converges_with_the_order_of_the_method(
    method: Method, order: int, exact: tuple[Tensor, ...]
) -> None:
    """Up to 4, that of the interpolation of the stored states."""
    counts = (40, 80) if order > 1 else (100, 200)
    errors = [distance(gradients(StoredAdjoint(), method, FixedSteps(n)), exact) for n in counts]
    assert slopes(errors)[-1] > order - 0.3, errors


@pytest.mark.parametrize("method", [ETD3RK(), AndersonAdams()], ids=repr)
def test_error_control_of_the_adjoint(method: Method, exact: tuple[Tensor, ...]) -> None:
    errors = [distance(gradients(StoredAdjoint(), method, AdaptiveSteps(tol, tol)), exact) for tol in (1e-3, 1e-5)]
    assert errors[0] < 1e-2 and errors[1] < 1e-3 and errors[1] < errors[0] / 5


def test_the_adjoint_has_steps_of_its_own(exact: tuple[Tensor, ...]) -> None:
    for steps in (FixedSteps(60), AdaptiveSteps(1e-5, 1e-5)):
        assert distance(gradients(StoredAdjoint(steps), ETD3RK(), AdaptiveSteps(1e-5, 1e-5)), exact) < 2e-3


def test_the_adjoint_backwards_in_time() -> None:
    found = gradients(StoredAdjoint(), RK4(), FixedSteps(60), [0.0, -0.17, -0.4], t1=-0.4)
    assert distance(found, gradients(Backprop(), RK4(), FixedSteps(200), [0.0, -0.17, -0.4], t1=-0.4)) < 1e-5


def test_the_adjoint_is_that_of_finite_differences_and_of_torchdiffeq() -> None:
    def run(x: Tensor, y: Tensor, w: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        return integrate(
            network(w, epsilon), x, y, span=1.3, method=RK4(), steps=FixedSteps(60), gradient=StoredAdjoint()
        )

    assert gradcheck(run, leaves(), fast_mode=True, atol=1e-5)
    tight = AdaptiveSteps(1e-8, 1e-8)
    ours = gradients(StoredAdjoint(FixedSteps(200)), RK4(), FixedSteps(200), t1=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = gradients(Backsolve(), TorchDiffEq("dopri5"), tight, t1=0.9)
    assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("gradient", [StoredAdjoint(), Checkpointed(3)], ids=repr)
def test_tensors_that_depend_on_each_other(gradient: Gradient) -> None:
    """The field closes over v, over u = tanh(v), which is no leaf, and over x0; each has its own share of the gradient. A hook
    sees the whole gradient once."""
    hooked = []

    def found(gradient: Gradient) -> tuple[Tensor, ...]:
        v, y = states(3)
        v, y = v.requires_grad_(), y.requires_grad_()
        handle = v.register_hook(lambda g: hooked.append(g.clone()))
        u = torch.tanh(v)
        system = Field(lambda t, x, y: torch.sin(u * x) + v * y - x, lambda t, x, y: u - x * y, 0.5)
        solution = solve(system, u, y, t1=1.0, method=RK4(), steps=FixedSteps(60), gradient=gradient)
        result = torch.autograd.grad(solution.xs.square().sum() + solution.ys.sum(), (v, y, u))
        handle.remove()
        return result

    expected = found(Backprop())
    assert len(hooked) == 1
    ours = found(gradient)
    assert len(hooked) == 2 and distance(ours, expected) < 1e-6
    if isinstance(gradient, Checkpointed):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.mark.parametrize("gradient", [StoredAdjoint(), Checkpointed(3)], ids=repr)
def test_a_tensor_that_cannot_be_followed_is_refused(gradient: Gradient) -> None:
    """An unregistered one read by a custom autograd function; a parameter may be."""
    (x, y), w = states(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    system = Field(lambda t, x, y: -Doubled.apply(w) * x)
    settings: dict[str, Any] = {"t1": 1.0, "method": RK4(), "steps": FixedSteps(20), "gradient": gradient}
    solution = solve(system, x, y, **settings)
    with pytest.raises(RuntimeError, match="register it on the system"):
        solution.xs.sum().backward()
    system.w = nn.Parameter(w.detach())
    system.f = lambda t, x, y: -Doubled.apply(system.w) * x
    (ours,) = torch.autograd.grad(solve(system, x, y, **settings).xs.sum(), system.w)
    torch.testing.assert_close(ours, -2 * (x * math.exp(-2)).sum(0), rtol=1e-4, atol=0)


class Linear(FastSlowSystem):
    """eps x' = -A x + y, y' = x - y with A = 1 + a small rotation: x contracts at rate 1, y keeps its adjoint alive."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon, self.fast_decay = epsilon, 1.0
        self.a = nn.Parameter(
            torch.eye(3, dtype=torch.float64) + 0.05 * torch.tensor([[0, 1, 0], [-1, 0, 1], [0, -1, 0]])
        )

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return y - x @ self.a.T

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x - y


def test_backsolve_is_wrong_where_the_field_contracts_and_says_by_how_much() -> None:
    system, (x, y) = Linear(1 / 64), states()
    steps = AdaptiveSteps(1e-5, 1e-7)

    def found(gradient: Gradient, method: Method | TorchDiffEq, steps: Steps = steps) -> Tensor:
        solution = solve(system, x, y, t1=1.0, method=method, steps=steps, gradient=gradient)
        return torch.autograd.grad(solution.ys.square().sum(), system.a)[0]

    exact = found(Checkpointed(), ETD3RK(), AdaptiveSteps(1e-8, 1e-8))

    def error(a: Tensor) -> float:
        return float((a - exact).norm() / exact.norm())

    assert error(found(StoredAdjoint(), ETD3RK())) < 1e-3 and error(found(Checkpointed(), ETD3RK())) < 1e-3
    with pytest.warns(UserWarning, match=r"grow about 1e\d+-fold .* use StoredAdjoint\(\)") as caught:
        wrong = error(found(Backsolve(), TorchDiffEq("dopri5")))
    match = re.search(r"about 1e(\d+)-fold", str(caught[0].message))
    assert match is not None and wrong > 1e6
    decades = int(match.group(1))
    assert abs(decades - 64 / math.log(10)) < 2
    # An error of rtol to round-off of the state grows so much.
    assert decades - 12 < math.log10(wrong) < decades


def test_backsolve_is_silent_where_nothing_contracts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = (state.requires_grad_() for state in states())
        system = Field(lambda t, x, y: y, lambda t, x, y: -x)
        for method, steps in ((TorchDiffEq("dopri5"), AdaptiveSteps(1e-8, 1e-8)), (TorchDiffEq("rk4"), FixedSteps(40))):
            solution = solve(
                system, x, y, t1=3.0, method=method, steps=steps, gradient=Backsolve(), save_at=[1.0, 2.2, 3.0]
            )
            by_x, by_y = torch.autograd.grad(solution.xs.sum(), (x, y))
            expected = [sum(f(t) for t in (1.0, 2.2, 3.0)) for f in (math.cos, math.sin)]
            for g, value in zip((by_x, by_y), expected, strict=True):
                torch.testing.assert_close(g, torch.full_like(g, value), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("epsilon", [1.0, 1 / 16])
@pytest.mark.parametrize("method", [AndersonAdams(), ETD3RK()], ids=repr)
def test_a_stiff_attention_field_at_the_default_steps(method: Method, epsilon: float) -> None:
    """Relative error of all gradients together at rtol 1e-5 (the same down to epsilon = 1/1024, which takes minutes)."""
    torch.manual_seed(0)
    config = FastSlowConfig(
        vocab_size=5, d_model=4, n_head=1, pool_size=4, epsilon=epsilon, leak=1.0, relaxation=1.0, context=8
    )
    layer = FastSlowLayer(config).double()
    with torch.no_grad():
        layer.gate.normal_()
    u = torch.randn(1, 8, 4, dtype=torch.float64, requires_grad=True)

    def found(gradient: Gradient, rtol: float) -> Tensor:
        steps = AdaptiveSteps(rtol, rtol / 100)
        settings: dict[str, Any] = {"t1": 0.2, "method": method, "steps": steps, "gradient": gradient}
        solution = solve(FastSlowField(layer, u), u, pool(u, 4), **settings)
        loss = solution.xs.square().sum() + solution.ys.sin().sum()
        by_all = torch.autograd.grad(loss, [u, *layer.parameters()], materialize_grads=True)
        return torch.cat([g.flatten() for g in by_all])

    exact = found(Checkpointed(), 1e-6)
    assert float((found(StoredAdjoint(), 1e-5) - exact).norm() / exact.norm()) < 1e-4


def test_a_flow_block_under_the_adjoint() -> None:
    """All parameters, and the input u that the block's field closes over; the error falls with the method's order."""
    torch.manual_seed(1)
    config = FastSlowConfig(vocab_size=5, d_model=8, n_head=2, pool_size=4, leak=1.0, relaxation=1.0, context=8)
    layer = FastSlowLayer(config).double()
    with torch.no_grad():
        layer.gate.normal_()
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def found(gradient: Gradient, n: int) -> tuple[Tensor, ...]:
        u = x @ weight
        x_end, y_end = FlowBlock(layer, RK4(), FixedSteps(n), gradient)(u, pool(u, 4), u)
        return torch.autograd.grad(x_end.square().sum() + y_end.sin().sum(), (weight, *layer.parameters()))

    exact = found(Backprop(), 64)
    errors = [distance(found(StoredAdjoint(), n), exact) for n in (8, 16)]
    assert errors[1] < 1e-4 and slopes(errors)[0] > 3.5, errors


def test_overrides_of_functional_call_last_through_the_adjoint() -> None:
    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.system = Linear(0.5)

        def forward(self, x: Tensor) -> Tensor:
            settings: dict[str, Any] = {"t1": 0.5, "method": ETD3RK(), "steps": FixedSteps(30)}
            return solve(self.system, x, x, gradient=StoredAdjoint(), **settings).xs.sum()

    run, (x, _) = Run(), states()
    override = (1.5 * run.system.a.detach()).requires_grad_()
    found = torch.autograd.grad(torch.func.functional_call(run, {"system.a": override}, (x,)), override)
    run.system.a = nn.Parameter(override.detach())
    assert torch.equal(found[0], torch.autograd.grad(run(x), run.system.a)[0])


class BackwardBreaks(torch.autograd.Function):
    """The identity, whose derivative is nan for entries at most 1/2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.where(ctx.saved_tensors[0] > 0.5, g, math.nan)


@pytest.mark.parametrize("steps", [AdaptiveSteps(1e-4, 1e-6), FixedSteps(20)], ids=repr)
def test_a_failure_of_the_backward_pass(steps: Steps) -> None:
    """x = e^t / 10: the derivative is nan before t = log 5."""
    x = torch.full((1,), 0.1, dtype=torch.float64, requires_grad=True)
    system = Field(lambda t, x, y: BackwardBreaks.apply(x))
    settings: dict[str, Any] = {"t1": 2.5, "method": Dopri5(), "steps": steps, "save_at": [1.0, 2.0, 2.5]}
    solution = solve(system, x, x, gradient=StoredAdjoint(), **settings)
    with pytest.raises(
        SolveError, match=r"in the backward pass, non-finite .*StoredAdjoint\(\) by Dopri5.*check"
    ) as caught:
        solution.xs.sum().backward()
    assert caught.value.solution.status is Status.NON_FINITE
    times = [float(t) for t in re.findall(r"t = (\S+)", str(caught.value))]
    if isinstance(steps, FixedSteps):
        assert times == [1.0, 2.0]
    else:
        assert times == [pytest.approx(math.log(5), abs=0.1)]
    solution = solve(system, x, x, gradient=StoredAdjoint(AdaptiveSteps(1e-12, 1e-14)), **settings | {"max_steps": 30})
    with pytest.raises(SolveError, match="in the backward pass, step limit"):
        solution.xs[-1].sum().backward()


def test_second_derivatives_are_refused() -> None:
    for gradient in (StoredAdjoint(), Checkpointed(2)):
        x, y, w, epsilon = leaves()
        x_end, _ = integrate(network(w, epsilon), x, y, span=1.0, method=RK4(), steps=FixedSteps(3), gradient=gradient)
        message = re.escape(f"{gradient!r} has no second derivatives (create_graph=True): use Backprop()")
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(x_end.sum(), x, create_graph=True)


def test_a_change_in_place_is_noticed() -> None:
    for gradient in (StoredAdjoint(), Checkpointed(2)):
        x, y, w, epsilon = leaves()
        x_end, _ = integrate(network(w, epsilon), x, y, span=1.0, method=RK4(), steps=FixedSteps(3), gradient=gradient)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x_end.sum().backward()


@pytest.mark.parametrize(
    ("gradient", "method", "steps", "message"),
    [
        (StoredAdjoint(), SlowManifold(), FixedSteps(2), "no adjoint on the manifold"),
        (StoredAdjoint(), LieTrotter(), FixedSteps(2), "LieTrotter() needs parts"),
        (StoredAdjoint(), Strang(), FixedSteps(2), "Strang() needs parts"),
        (StoredAdjoint(), TorchDiffEq("rk4"), FixedSteps(2), "Backprop() or Backsolve(), got StoredAdjoint()"),
        (StoredAdjoint(AdaptiveSteps(1e-3, 1e-3)), RK4(), FixedSteps(2), "must be FixedSteps(n), got StoredAdjoint"),
        (Backsolve(), RK4(), FixedSteps(2), "goes with TorchDiffEq(name), got RK4()"),
        (Checkpointed(4), SlowManifold(), FixedSteps(2), "use Checkpointed(), which keeps every state"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_pairs_that_do_not_fit(gradient: Gradient, method: Any, steps: Steps, message: str) -> None:
    def untouchable(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("the field was evaluated")

    x, y = states()
    with pytest.raises(ValueError, match=re.escape(message)):
        solve(Field(untouchable), x, y, t1=1.0, method=method, steps=steps, gradient=gradient)


def test_arguments_of_gradients() -> None:
    with pytest.raises(TypeError, match="steps must be None, FixedSteps"):
        StoredAdjoint(4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"states must be an int or None, got 2\.5"):
        Checkpointed(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="states must be at least 2, got 1"):
        Checkpointed(1)
    assert repr(Checkpointed(3)) == "Checkpointed(states=3)" and Checkpointed(3) != Checkpointed()
    assert StoredAdjoint(FixedSteps(2)) == StoredAdjoint(FixedSteps(2)) != StoredAdjoint()
