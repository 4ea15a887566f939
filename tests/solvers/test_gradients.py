"""Gradients: against finite differences, and Checkpointed against Backprop."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef

from solvers import (
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
    Method,
    Stats,
    StoredAdjoint,
    TorchDiffEq,
    integrate,
    solve,
)
from solvers.replay import next_kept
from solvers.rosenbrock import Rosenbrock
from solvers.system import FastTimeProblem
from tests.solvers.problems import METHODS, Network, Recorded, states

GRADIENTS = (Backprop(), Checkpointed(), Checkpointed(2))
Run = Callable[..., tuple[Tensor, Tensor]]


def network(w: Tensor, epsilon: Tensor) -> Network:
    """The network whose parameters are plain tensors, registered nowhere."""
    system = Network(epsilon, width=2)
    del system.w
    system.w = w
    return system


def leaves(seed: int = 0) -> tuple[Tensor, ...]:
    x, y = states(seed, (2, 2), (2, 2))
    w = Network(width=2).w.detach().clone()
    return tuple(leaf.requires_grad_() for leaf in (x, y, w, torch.tensor(0.3, dtype=torch.float64)))


def over_slow_time(method: Method | TorchDiffEq, gradient: Gradient | None, n: int = 2) -> Run:
    def run(x: Tensor, y: Tensor, w: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        save_at = [0.25, 0.5, 0.7]
        solution = solve(
            network(w, epsilon),
            x,
            y,
            t0=0.25,
            t1=0.7,
            method=method,
            steps=FixedSteps(n),
            gradient=gradient,
            save_at=save_at,
        )
        return solution.xs, solution.ys

    return run


def over_fast_time(method: Method | TorchDiffEq, gradient: Gradient | None) -> Run:
    def run(x: Tensor, y: Tensor, w: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        return integrate(network(w, epsilon), x, y, span=1.3, method=method, steps=FixedSteps(2), gradient=gradient)

    return run


@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("over", [over_slow_time, over_fast_time])
def test_gradients_are_those_of_finite_differences(
    over: Callable[..., Run], method: Method, gradient: Gradient
) -> None:
    """With respect to x0, y0, unregistered parameters and epsilon; at interpolated save times too."""
    assert gradcheck(over(method, gradient), leaves(), fast_mode=True, atol=1e-7)


@pytest.mark.parametrize("over", [over_slow_time, over_fast_time])
def test_gradients_entry_by_entry(over: Callable[..., Run]) -> None:
    assert gradcheck(over(Heun(), Checkpointed()), leaves())


@pytest.mark.parametrize("name", ["rk4", "euler"])
@pytest.mark.parametrize("over", [over_slow_time, over_fast_time])
def test_gradients_through_torchdiffeq(over: Callable[..., Run], name: str) -> None:
    assert gradcheck(over(TorchDiffEq(name), Backprop()), leaves(), fast_mode=True, atol=1e-7)


@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, Rosenbrock)], ids=repr)
@pytest.mark.parametrize("over", [over_slow_time, over_fast_time])
def test_second_derivatives(over: Callable[..., Run], method: Method) -> None:
    assert gradgradcheck(over(method, Backprop()), leaves(), fast_mode=True, atol=1e-6)


def gradients_of(outputs: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs[0].square().sum() + outputs[1].sin().sum(), inputs)


@pytest.mark.parametrize("save_at", [None, [0.0, 0.3, 0.9]])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_checkpointed_is_bit_equal_to_backprop(method: Method, save_at: list[float] | None) -> None:
    results = []
    adaptive = [AdaptiveSteps(1e-3, 1e-4), AdaptiveSteps(1e-2, 1e-2, first_step=0.5)] if method.error_order else []
    given = [FixedSteps(5), *adaptive]
    if isinstance(method, Rosenbrock):  # whose steps take a hundred times as long
        given = [FixedSteps(2), AdaptiveSteps(0.1, 0.1)]
    for steps in given:
        for gradient in GRADIENTS:
            inputs = leaves(7)
            x, y, w, epsilon = inputs
            solution = solve(
                network(w, epsilon), x, y, t1=0.9, method=method, steps=steps, gradient=gradient, save_at=save_at
            )
            forward = solution.xs.detach().clone(), solution.ys.detach().clone(), solution.stats
            results.append((*forward, *gradients_of((solution.xs, solution.ys), inputs)))
        *_, a, b, c = results
        for found in (b, c):
            assert all(torch.equal(p, q) if isinstance(p, Tensor) else p == q for p, q in zip(a, found, strict=True))


def replay(mesh: list[tuple[float, float]], system: FastSlowSystem, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Dopri5 over a given mesh of (tau, h)."""
    problem, rate = FastTimeProblem.over_slow_time(system), None
    for tau, h in mesh:
        step = Dopri5().step(problem, tau, h, x, y, rate)
        x, y, rate = step.x, step.y, step.end_rate
    return x, y


@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
def test_no_gradient_flows_through_the_controller(gradient: Gradient) -> None:
    """The gradient of an adaptive solve is that of the same mesh held fixed, bit for bit."""
    inputs, method = leaves(1), Recorded()
    x, y, w, epsilon = inputs
    steps = AdaptiveSteps(1e-6, 1e-6, first_step=0.6)
    solution = solve(network(w, epsilon), x, y, t1=0.6, method=method, steps=steps, gradient=gradient)
    assert solution.stats.rejected >= 1
    attempts = method._attempts[: solution.stats.steps]
    following = [*[tau for tau, _ in attempts[1:]], -1.0]
    mesh = [attempt for attempt, tau in zip(attempts, following, strict=True) if attempt[0] != tau]
    replayed = replay(mesh, network(w, epsilon), x, y)
    ours = gradients_of((solution.xs[0], solution.ys[0]), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients_of(replayed, inputs), strict=True))


def test_stats_are_those_of_the_forward_pass() -> None:
    x, y, w, epsilon = leaves()
    for steps in (FixedSteps(5), AdaptiveSteps(1e-4, 1e-4)):
        for method in (Dopri5(), Heun()):
            solution = solve(network(w, epsilon), x, y, t1=0.5, method=method, steps=steps, gradient=Checkpointed())
            before = Stats(**vars(solution.stats))
            gradients_of((solution.xs, solution.ys), (x, y, w, epsilon))
            assert solution.stats == before and before.fast_evaluations > 0


class Wide(FastSlowSystem):
    """A field with a wide hidden layer, which notes how many hidden layers are alive at each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.randn(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        self.hidden: list[StorageWeakRef] = []
        self.most = 0

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.hidden)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.w)
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        self.most = max(self.most, self.alive())
        return hidden @ self.w.T / 1000

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)


@pytest.mark.parametrize("steps", [8, 16])
@pytest.mark.parametrize("saves", [0, 25])
def test_checkpointed_keeps_the_activations_of_one_step(steps: int, saves: int) -> None:
    """Backprop keeps a hidden layer per stage of every step; Checkpointed none, and in the backward pass those of one
    step's stages - also where the solve is saved between mesh points."""
    stages, save_at = 4, torch.linspace(0, 1, saves) if saves else None
    alive, most = {}, {}
    for gradient in GRADIENTS:
        system, (x, y) = Wide(), states(0, (2, 2), (1,))
        solution = solve(
            system, x, y, t1=1.0, method=RK4(), steps=FixedSteps(steps), gradient=gradient, save_at=save_at
        )
        alive[gradient] = system.alive()
        solution.xs.sum().backward()
        most[gradient] = system.most
    assert alive[Backprop()] >= stages * steps and most[Backprop()] >= stages * steps
    assert alive[Checkpointed()] == 0
    assert most[Checkpointed()] <= stages


def test_checkpointed_packs_no_activations() -> None:
    """Bytes that autograd saves in the forward pass: for each further step the state before it, and no more."""

    def packed(gradient: Gradient, steps: int) -> int:
        total, (x, y), system = 0, states(), Network(0.5)

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            solve(system, x, y, t1=1.0, method=RK4(), steps=FixedSteps(steps), gradient=gradient)
        return total

    state = 8 * sum(part.numel() for part in states())
    assert packed(Checkpointed(), 20) - packed(Checkpointed(), 5) == 15 * state
    assert packed(Backprop(), 20) - packed(Backprop(), 5) > 15 * 4 * state


@pytest.mark.parametrize("gradient", [Checkpointed(8), StoredAdjoint()], ids=repr)
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_memory_of_a_replay_does_not_grow_with_the_steps(gradient: Gradient, adaptive: bool) -> None:
    """Peak of the bytes that autograd has saved at a time, forward and backward, beyond the stored states: the same at 16 as
    at 256 steps. Checkpointed(8) stores at most 8 of them."""

    def peak(n: int) -> tuple[int, int]:
        """Of the forward pass, which is what is stored, and of both."""
        (x, y), system = states(), Network(0.5)
        alive = most = 0

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal alive, most
                self.tensor = tensor
                alive += tensor.nbytes
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.tensor.nbytes

        h = 1 / 16
        steps = AdaptiveSteps(1e6, 1e6, first_step=h, max_step=h) if adaptive else FixedSteps(n)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            solution = solve(system, x, y, t1=n * h, method=Heun(), steps=steps, gradient=gradient)
            assert solution.stats.accepted == n
            stored = most
            solution.xs.sum().backward()
        return stored, most

    (stored_16, most_16), (stored_256, most_256) = peak(16), peak(256)
    if isinstance(gradient, Checkpointed):
        assert stored_256 <= 1.5 * stored_16
    assert 0 < most_256 - stored_256 <= 1.5 * (most_16 - stored_16)


def test_the_binomial_schedule_advances_no_more_often_than_it_must() -> None:
    """Reversing l steps with s states takes r l - binomial(s + r, r - 1) advances at least (Griewank & Walther, 2000, with
    binomial(s + r - 1, r - 1) < l <= binomial(s + r, r)), where each advance to be reversed counts once more."""

    def advances(steps: int, kept: int) -> int:
        if steps <= 1:
            return 0
        if kept == 1:
            return steps * (steps - 1) // 2
        ahead = next_kept(steps, kept)
        return ahead + advances(steps - ahead, kept - 1) + advances(ahead, kept)

    for kept in (2, 3, 5, 8):
        for steps in (2, 3, 7, 20, 56, 100):
            r = next(r for r in range(1, steps + 1) if math.comb(kept + r, r) >= steps)
            assert advances(steps, kept) == r * steps - math.comb(kept + r, r - 1)


@pytest.mark.parametrize("method", [Dopri5(), TorchDiffEq("dopri5")], ids=repr)
def test_memory_does_not_grow_over_calls(method: Method | TorchDiffEq) -> None:
    """Nothing waits for the cycle collector: with it off, no tensor outlives its solve."""
    inputs = leaves()
    x, y, w, epsilon = inputs

    def call() -> None:
        solution = solve(network(w, epsilon), x, y, t1=0.5, method=method, steps=AdaptiveSteps(1e-4, 1e-4))
        gradients_of((solution.xs, solution.ys), inputs)

    counts = []
    call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            call()
            counts.append(sum(issubclass(type(item), Tensor) for item in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[0] == counts[-1], counts


def test_epsilon_may_be_a_parameter() -> None:
    """Also a decay; each reaches the optimiser through parameters()."""

    class Learnt(Network):
        def __init__(self) -> None:
            super().__init__()
            self.epsilon = torch.nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
            self.fast_decay = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    system, (x, y) = Learnt(), states()
    assert {"epsilon", "fast_decay", "w"} == dict(system.named_parameters()).keys()
    solve(system, x, y, t1=1.0, method=Euler(), steps=FixedSteps(2)).xs.sum().backward()
    assert isinstance(system.epsilon, Tensor) and system.epsilon.grad is not None and system.epsilon.grad != 0

    class Fixed(Network):
        epsilon = 0.25

        def __init__(self) -> None:
            FastSlowSystem.__init__(self)

    assert Fixed().epsilon == 0.25 and Fixed().fast_decay == Fixed().slow_decay == 0.0


@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
@pytest.mark.parametrize("save_at", [None, [0.1, 0.5]])
@pytest.mark.parametrize("steps", [FixedSteps(3), AdaptiveSteps(1e-4, 1e-4)], ids=repr)
def test_overrides_of_functional_call_last_through_the_backward_pass(
    gradient: Gradient, save_at: list[float] | None, steps: FixedSteps | AdaptiveSteps
) -> None:
    """A replay happens after `functional_call` has put the module's own tensors back."""

    class Run(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.system = Network(0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            solution = solve(
                self.system, x, y, t1=0.5, method=Dopri5(), steps=steps, gradient=gradient, save_at=save_at
            )
            return solution.xs.sum() + solution.ys.square().sum()

    run, (x, y) = Run(), states()
    before = run.system.w.detach().clone()
    override = (0.5 * before.flip(0)).requires_grad_()
    x.requires_grad_()
    found = torch.autograd.grad(torch.func.functional_call(run, {"system.w": override}, (x, y)), (override, x))
    system = Network(0.5)
    with torch.no_grad():
        system.w.copy_(override)
    run.system = system
    expected = torch.autograd.grad(run(x, y), (system.w, x))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
