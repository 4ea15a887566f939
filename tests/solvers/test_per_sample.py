"""Error control per sample: what a sample solved alone gets, whatever its mates do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from solvers import (
    ETD2RK,
    ETD3RK,
    RK4,
    AdaptiveSteps,
    AndersonAdams,
    Backprop,
    Checkpointed,
    Dopri5,
    ExponentialAdams,
    FastSlowSystem,
    Gradient,
    Heun,
    Method,
    SlowManifold,
    Solution,
    SolveError,
    Status,
    TorchDiffEq,
    integrate,
    solve,
)
from tests.solvers.problems import Field, Network, reference, states
from tests.solvers.test_host import HostReads

PER_SAMPLE: tuple[Method, ...] = (Heun(), Dopri5(), ETD2RK(), ETD3RK())
ELEMENTWISE = (Heun(), Dopri5())  # whose steps round alike for a number and for a tensor
GRADIENTS: tuple[Gradient, ...] = (Backprop(), Checkpointed())
STIFFNESS = torch.tensor([1.0, 3.0, 10.0, 30.0, 300.0], dtype=torch.float64)


class Relaxation(FastSlowSystem):
    """eps dx/dt = eps k (y / 2 - x) + t x^2 / 100, dy/dt = -y^3 + t y: elementwise, of stiffness k, with the decay eps k.

    x (B, 2, 3), y (B, 2), k a number or (B,).
    """

    def __init__(self, k: Tensor, epsilon: float = 0.25) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.fast_decay = epsilon * k.reshape(-1, 1, 1)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.fast_decay * (0.5 * y[:, :, None] - x) + t * x * x * 0.01

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return t * y - y * y * y

    def alone(self, i: int) -> Relaxation:
        return Relaxation(self.fast_decay[i] / self.epsilon, self.epsilon)


def batch(seed: int = 0, size: int = 5) -> tuple[Tensor, Tensor]:
    return states(seed, (size, 2, 3), (size, 2))


def control(rtol: float = 1e-5, atol: float = 1e-6, **bounds: Any) -> AdaptiveSteps:
    return AdaptiveSteps(rtol, atol, per_sample=True, **bounds)


def steps_of(solution: Solution, i: int | None = None) -> tuple[int, int, int]:
    stats = solution.stats if i is None else solution.sample_stats[i]
    return stats.steps, stats.accepted, stats.rejected


@pytest.mark.parametrize("method", PER_SAMPLE, ids=repr)
@pytest.mark.parametrize("t1", [0.5, -0.02])
@pytest.mark.parametrize("first_step", [None, 0.03])
def test_a_sample_gets_what_it_gets_alone(method: Method, t1: float, first_step: float | None) -> None:
    """Steps, states at both ends and at save times within steps, and evaluations: those of the ordinary loop."""
    system, (x, y) = Relaxation(STIFFNESS), batch()
    save_at = [c * t1 for c in (0.0, 0.0, 0.1, 0.1 + 1e-12, 0.5, 0.5, 0.9, 1.0, 1.0)]
    tolerances = (1e-3, 1e-4) if method.order == 2 else (1e-5, 1e-6)
    plain, single = AdaptiveSteps(*tolerances, first_step=first_step), control(*tolerances, first_step=first_step)
    together = solve(system, x, y, t1=t1, method=method, steps=single, save_at=save_at)
    assert together.status is Status.SUCCESS and together.statuses == (Status.SUCCESS,) * 5
    assert together.messages == ("",) * 5 and together.ts.tolist() == save_at
    evaluations = []
    for i in range(5):
        alone = solve(system.alone(i), x[i : i + 1], y[i : i + 1], t1=t1, method=method, steps=plain, save_at=save_at)
        assert steps_of(together, i) == steps_of(alone)
        if method in ELEMENTWISE:
            assert torch.equal(together.xs[:, i], alone.xs[:, 0]) and torch.equal(together.ys[:, i], alone.ys[:, 0])
        else:
            scale = float(alone.xs.abs().max())
            torch.testing.assert_close(together.xs[:, i], alone.xs[:, 0], rtol=0, atol=1e-13 * scale)
            torch.testing.assert_close(together.ys[:, i], alone.ys[:, 0], rtol=0, atol=1e-13 * scale)
        evaluations.append(alone.stats.fast_evaluations)
    stats, stages = together.stats, {Heun: 2, Dopri5: 6, ETD2RK: 2, ETD3RK: 3}[type(method)]
    assert stats.steps == max(sample.steps for sample in together.sample_stats)
    start = 1 if first_step else 2
    assert stats.fast_evaluations == start + stages * stats.steps - (0 if method.first_same_as_last else 1)
    assert stats.fast_evaluations == stats.slow_evaluations <= max(evaluations) + 1 < sum(evaluations)


def test_batched_evaluations_are_those_of_the_longest_solve() -> None:
    system, (x, y) = Relaxation(STIFFNESS), batch()
    together = solve(system, x, y, t1=0.5, method=Dopri5(), steps=control())
    alone = [
        solve(system.alone(i), x[i : i + 1], y[i : i + 1], t1=0.5, method=Dopri5(), steps=AdaptiveSteps(1e-5, 1e-6))
        for i in range(5)
    ]
    counts = [solution.stats.fast_evaluations for solution in alone]
    assert together.stats.fast_evaluations == max(counts) and len(set(counts)) > 3
    assert counts == [2 + 6 * solution.stats.steps for solution in alone]


@pytest.mark.parametrize("method", PER_SAMPLE, ids=repr)
def test_permuting_the_batch_permutes_the_results(method: Method) -> None:
    order = [3, 0, 4, 2, 1]
    x, y = batch()
    settings: dict[str, Any] = {"t1": 0.5, "method": method, "steps": control(1e-4, 1e-4), "save_at": [0.1, 0.37, 0.5]}
    one = solve(Relaxation(STIFFNESS), x, y, **settings)
    two = solve(Relaxation(STIFFNESS[order]), x[order], y[order], **settings)
    assert torch.equal(one.xs[:, order], two.xs) and torch.equal(one.ys[:, order], two.ys)
    assert tuple(one.sample_stats[i] for i in order) == two.sample_stats


Disturbance = Callable[[Tensor, Tensor, Tensor], Tensor]


class Mixed(FastSlowSystem):
    """A shared network whose f is, for one sample, replaced by a function of (t, x, f)."""

    def __init__(self, disturbance: Disturbance) -> None:
        super().__init__()
        self.epsilon = 0.5
        self.fast_decay = 1.5
        self.network = Network(0.5)
        self.disturbance = disturbance

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        value = self.network.fast(t, x, y)
        disturbed = torch.arange(len(x)).view(-1, 1) == 1
        return torch.where(disturbed, self.disturbance(torch.where(disturbed, t, 0.0), x, value), value)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.network.slow(t, x, y)


DISTURBANCES: dict[str, Disturbance] = {
    "nan later": lambda t, x, f: f * torch.where(t > 0.3, math.nan, 1.0),
    "infinite later": lambda t, x, f: f / (0.3 - t).clamp_min(0),
    "leaves a domain": lambda t, x, f: f * torch.sqrt(0.2 - t),
    "blows up": lambda t, x, f: f + 50 * x * x.abs(),
    "stiff": lambda t, x, f: f - 100 * x,
}


@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
@pytest.mark.parametrize("method", PER_SAMPLE, ids=repr)
@pytest.mark.parametrize("kind", DISTURBANCES)
def test_a_bad_mate_changes_nothing(kind: str, method: Method, gradient: Gradient) -> None:
    """Neither values nor, bit for bit, the gradients of shared parameters: not by 0 * nan either."""

    def mates(disturbance: Disturbance) -> tuple[Solution, tuple[Tensor, ...]]:
        system, (x, y) = Mixed(disturbance), states(4, (3, 3), (3, 3))
        x.requires_grad_()
        solution = solve(
            system,
            x,
            y,
            t1=0.5,
            method=method,
            steps=control(1e-3, 1e-4),
            gradient=gradient,
            save_at=[0.0, 0.2, 0.5],
            max_steps=400,
            raise_on_failure=False,
        )
        loss = solution.xs[:, [0, 2]].square().sum() + solution.ys[:, [0, 2]].sin().sum()
        return solution, torch.autograd.grad(loss, (system.network.w, x))

    calm, expected = mates(lambda t, x, f: f)
    disturbed, found = mates(DISTURBANCES[kind])
    assert calm.status is Status.SUCCESS
    assert disturbed.statuses[0] is disturbed.statuses[2] is Status.SUCCESS
    assert (disturbed.statuses[1] is Status.SUCCESS) == (kind == "stiff")
    for a, b in ((calm.xs, disturbed.xs), (calm.ys, disturbed.ys)):
        assert torch.equal(a[:, [0, 2]], b[:, [0, 2]])
        assert not torch.equal(a[-1, 1], b[-1, 1])
    assert calm.sample_stats[::2] == disturbed.sample_stats[::2]
    assert all(torch.isfinite(value).all() and (value != 0).any() for value in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_start_that_is_not_finite(bad: float) -> None:
    system, (x, y) = Network(0.5), states(4, (3, 3), (3, 3))
    settings: dict[str, Any] = {"t1": 0.5, "method": Heun(), "steps": control(1e-4), "raise_on_failure": False}
    fine = solve(system, x, y, **settings)
    expected = torch.autograd.grad(fine.xs[:, :2].sum(), system.w)[0]
    x[2, 1] = bad
    solution = solve(system, x, y, **settings)
    assert solution.statuses == (Status.SUCCESS, Status.SUCCESS, Status.NON_FINITE)
    assert torch.equal(solution.xs[:, :2], fine.xs[:, :2]) and solution.xs[:, 2].isnan().all()
    assert torch.equal(torch.autograd.grad(solution.xs[:, :2].sum(), system.w)[0], expected)
    x[:] = bad
    assert solve(system, x, y, **settings).statuses == (Status.NON_FINITE,) * 3


def test_failures_are_each_samples_own() -> None:
    """dx/dt = 0 up to t = onset, nan from there on; the last sample needs more steps than there may be."""
    onset = torch.tensor([[0.25], [2.0], [0.75], [2.0]], dtype=torch.float64)
    rate = torch.tensor([[0.0], [0.0], [0.0], [1e4]], dtype=torch.float64)
    system = Field(lambda t, x, y: torch.where(t < onset, torch.sin(rate * t), math.nan), lambda t, x, y: -y)
    x, y = states(0, (4, 1), (4, 2))
    settings: dict[str, Any] = {
        "t1": 1.0,
        "method": Dopri5(),
        "steps": control(1e-6, 1e-6),
        "save_at": [0.0, 0.2, 0.5, 0.9],
        "max_steps": 200,
    }
    solution = solve(system, x, y, **settings, raise_on_failure=False)
    assert solution.statuses == (Status.NON_FINITE, Status.SUCCESS, Status.NON_FINITE, Status.STEP_LIMIT)
    assert solution.status is Status.NON_FINITE
    reached = [2, 4, 3]
    for i, count in enumerate(reached):
        for states_of in (solution.xs, solution.ys):
            assert torch.isfinite(states_of[:count, i]).all() and states_of[count:, i].isnan().all()
    torch.testing.assert_close(solution.ys[:, 1], torch.exp(-solution.ts)[:, None] * y[1], rtol=1e-5, atol=0)
    times = [re.search(r"at slow time t = (\S+) with Dopri5\(\)", message) for message in solution.messages]
    assert times[1] is None and solution.messages[1] == ""
    assert float(times[0].group(1)) == pytest.approx(0.25, abs=1e-6)  # type: ignore[union-attr]
    assert float(times[2].group(1)) == pytest.approx(0.75, abs=1e-6)  # type: ignore[union-attr]
    assert solution.sample_stats[3].steps == 200
    with pytest.raises(SolveError, match="3 of 4 samples failed") as caught:
        solve(system, x, y, **settings)
    for i in (0, 2, 3):
        assert f"sample {i}: {solution.messages[i]}" in str(caught.value)
    assert "sample 1" not in str(caught.value)
    assert caught.value.solution.statuses == solution.statuses
    with pytest.raises(SolveError, match="sample 0: non-finite"):
        integrate(system, x, y, span=1.0, method=Dopri5(), steps=control(max_step=0.2))


def test_many_failures_make_a_short_message() -> None:
    x, y = states(0, (30, 1), (30, 1))
    solution = solve(
        Field(lambda t, x, y: math.nan * x),
        x,
        y,
        t1=1.0,
        method=Heun(),
        steps=control(),
        raise_on_failure=False,
    )
    assert "30 of 30 samples failed" in solution.message and "and 20 more" in solution.message
    assert "sample 9:" in solution.message and "sample 10:" not in solution.message and all(solution.messages)


@pytest.mark.parametrize("method", [Dopri5(), ETD3RK()], ids=repr)
def test_samples_of_very_different_stiffness_agree_with_scipy(method: Method) -> None:
    stiffness = torch.tensor([0.5, 20.0, 1000.0], dtype=torch.float64)
    system, (x, y) = Relaxation(stiffness), batch(2, 3)
    save_at = [0.013, 0.2, 0.5]
    solution = solve(system, x, y, t1=0.5, method=method, steps=control(1e-7, 1e-9), save_at=save_at)
    for i in range(3):
        xs, ys = reference(system.alone(i), x[i : i + 1], y[i : i + 1], [0.0, *save_at])
        torch.testing.assert_close(solution.xs[:, i], xs[:, 0], rtol=0, atol=2e-6)
        torch.testing.assert_close(solution.ys[:, i], ys[:, 0], rtol=0, atol=2e-6)
    if isinstance(method, Dopri5):  # stable for steps of 3.3 / 1000 only
        assert solution.sample_stats[2].steps > 0.5 / 0.0034 > 5 * solution.sample_stats[0].steps


@pytest.mark.parametrize("method", PER_SAMPLE, ids=repr)
@pytest.mark.parametrize("over", [solve, integrate], ids=["slow time", "fast time"])
@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
def test_gradients_are_those_of_finite_differences(
    gradient: Gradient, over: Callable[..., Any], method: Method
) -> None:
    """With respect to x0, y0, parameters and epsilon; a mesh that no error moves."""
    steps = control(1e3, 1e3, first_step=0.11, max_step=0.3)

    def run(x: Tensor, y: Tensor, w: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        system = Network(epsilon, width=2)
        del system.w
        system.w = w
        settings: dict[str, Any] = {"method": method, "steps": steps, "gradient": gradient}
        if over is integrate:
            return integrate(system, x, y, span=1.3, **settings)
        solution = solve(system, x, y, t0=0.25, t1=0.95, save_at=[0.25, 0.5, 0.95], **settings)
        return solution.xs, solution.ys

    x, y = states(0, (3, 2), (3, 2))
    w = Network(width=2).w.detach().clone()
    leaves = tuple(leaf.requires_grad_() for leaf in (x, y, w, torch.tensor(0.3, dtype=torch.float64)))
    assert gradcheck(run, leaves, fast_mode=True, atol=1e-7)


@pytest.mark.parametrize("method", PER_SAMPLE, ids=repr)
def test_gradients_are_those_of_the_ordinary_loop(method: Method) -> None:
    """Where the samples' meshes differ, and are met by rejections; Checkpointed bit-equal to Backprop."""
    system = Network(0.2)
    x, y = states(5, (4, 3), (4, 3))
    x, y = x * torch.tensor([[0.1], [1.0], [4.0], [20.0]]).double(), y * torch.tensor([[1.0], [9.0], [0.2], [3.0]])
    inputs = (x.requires_grad_(), y.requires_grad_(), system.w)
    save_at = [0.1, 0.4, 0.8]
    found = []
    for gradient in GRADIENTS:
        together = solve(
            system,
            x,
            y,
            t1=0.8,
            method=method,
            steps=control(1e-3, 1e-3, first_step=0.3),
            save_at=save_at,
            gradient=gradient,
        )
        loss = together.xs.square().sum() + together.ys.sin().sum()
        found.append(torch.autograd.grad(loss, inputs))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len({stats.steps for stats in together.sample_stats}) > 1
    assert any(stats.rejected for stats in together.sample_stats)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        alone = solve(
            system,
            x[i : i + 1],
            y[i : i + 1],
            t1=0.8,
            method=method,
            steps=AdaptiveSteps(1e-3, 1e-3, first_step=0.3),
            save_at=save_at,
        )
        total = total + alone.xs.square().sum() + alone.ys.sin().sum()
    for a, b in zip(found[0], torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


def test_overrides_of_functional_call_last_through_the_backward_pass() -> None:
    class Run(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.system = Network(0.5)

        def forward(self, x: Tensor) -> Tensor:
            solution = solve(
                self.system, x, x, t1=0.5, method=Dopri5(), steps=control(), gradient=Checkpointed(), save_at=[0.1, 0.5]
            )
            return solution.xs.sum()

    run, (x, _) = Run(), states()
    override = (0.5 * run.system.w.detach().flip(0)).requires_grad_()
    found = torch.autograd.grad(torch.func.functional_call(run, {"system.w": override}, (x,)), override)[0]
    with torch.no_grad():
        run.system.w.copy_(override)
    assert torch.equal(found, torch.autograd.grad(run(x), run.system.w)[0])


def test_the_field_sees_times_that_broadcast() -> None:
    """(B, 1, ..., 1) beside x in f and beside y in g, of their dtypes; all samples of one evaluation at their own times."""
    seen: dict[str, list[Tensor]] = {"f": [], "g": []}

    def f(t: Any, x: Tensor, y: Tensor) -> Tensor:
        seen["f"].append(t)
        return -x * torch.arange(1, 4).view(-1, 1, 1) * (1 + t)

    def g(t: Any, x: Tensor, y: Tensor) -> Tensor:
        seen["g"].append(t)
        return -y + t

    x, y = torch.ones(3, 2, 2, dtype=torch.float32), torch.ones(3, dtype=torch.float64)
    solution = solve(Field(f, g), x, y, t0=0.5, t1=2.0, method=Dopri5(), steps=control())
    assert solution.xs.shape == (1, 3, 2, 2) and solution.ys.shape == (1, 3)
    assert solution.xs.dtype == torch.float32 and solution.ys.dtype == torch.float64
    assert {(t.shape, t.dtype) for t in seen["f"]} == {((3, 1, 1), torch.float32)}
    assert {(t.shape, t.dtype) for t in seen["g"]} == {((3,), torch.float64)}
    assert seen["g"][0].tolist() == [0.5] * 3 and any(len(set(t.tolist())) == 3 for t in seen["g"])
    assert all(float(t.min()) >= 0.5 and float(t.max()) <= 2.0 for t in seen["g"])
    exact = torch.exp(-torch.arange(1, 4) * (1.5 + (4 - 0.25) / 2))
    torch.testing.assert_close(solution.xs[0, :, 0, 0], exact, rtol=1e-3, atol=1e-4)


def test_complex_states_and_empty_ones() -> None:
    """dz/dt = i omega z, each sample with its frequency, beside a y without entries."""
    omega = torch.tensor([[1.0], [5.0], [25.0]], dtype=torch.float64)
    z, y = torch.ones(3, 1, dtype=torch.complex128), torch.zeros(3, 0, dtype=torch.float64)
    for method in PER_SAMPLE:
        tolerance = 1e-3 if method.order == 2 else 1e-6
        steps = control(tolerance, tolerance)
        solution = solve(Field(lambda t, x, y: 1j * omega * x), z, y, t1=1.0, method=method, steps=steps)
        torch.testing.assert_close(solution.xs[0], torch.exp(1j * omega), rtol=0, atol=200 * tolerance)
        assert solution.ys.shape == (1, 3, 0)
        assert solution.sample_stats[0].steps < solution.sample_stats[2].steps


def test_step_bounds_hold_for_every_sample() -> None:
    system, (x, y) = Relaxation(STIFFNESS), batch()
    bounded = solve(system, x, y, t1=0.5, method=Dopri5(), steps=control(max_step=0.005))
    assert all(stats.accepted >= 100 for stats in bounded.sample_stats)
    assert bounded.sample_stats[0].accepted <= 104  # the guess of the first step is below the bound
    calm, (x, y) = Relaxation(0 * STIFFNESS), batch()
    kept = solve(calm, x, y, t1=0.5, method=Heun(), steps=control(1e-9, 1e-9, min_step=0.01), raise_on_failure=False)
    assert kept.statuses == (Status.STEP_UNDERFLOW,) * 5 and "min_step" in kept.messages[4]
    limited = solve(system, x, y, t1=0.5, method=Dopri5(), steps=control(), max_steps=20, raise_on_failure=False)
    assert [stats.steps for stats in limited.sample_stats][-1] == 20
    assert {limited.statuses[0], limited.statuses[-1]} == {Status.SUCCESS, Status.STEP_LIMIT}


def test_no_span_and_save_times_at_the_start() -> None:
    x, y = batch()
    solution = solve(Relaxation(STIFFNESS), x, y, t1=0.0, method=Heun(), steps=control(), save_at=[0.0, 0.0])
    assert torch.equal(solution.xs, torch.stack([x, x])) and torch.equal(solution.ys, torch.stack([y, y]))
    x_end, y_end = integrate(Relaxation(STIFFNESS), x, y, span=0.0, method=Heun(), steps=control())
    assert torch.equal(x_end, x) and torch.equal(y_end, y)


def test_integrate_is_solve_over_fast_time() -> None:
    system, (x, y) = Relaxation(STIFFNESS, 0.25), batch()
    solution = solve(system, x, y, t1=0.5, method=Dopri5(), steps=control(max_step=0.05))
    x_end, y_end = integrate(system, x, y, span=2.0, method=Dopri5(), steps=control(max_step=0.2))
    assert torch.equal(solution.xs[0], x_end) and torch.equal(solution.ys[0], y_end)


@pytest.mark.parametrize("method", PER_SAMPLE, ids=repr)
def test_the_host_reads_once_per_batched_step(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """And three times at the start; under Backprop too."""
    system, (x, y), lists = Network(1 / 2), states(0, (4, 3), (4, 3)), 0
    read = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return read(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    with HostReads() as mode:
        solution = solve(system, x, y, t1=1.0, method=method, steps=control(1e-3, 1e-3), save_at=[0.1, 0.25, 1.0])
    assert solution.xs.requires_grad and solution.stats.rejected + solution.stats.accepted == solution.stats.steps
    assert lists == solution.stats.steps + 3 and not mode.reads


def test_the_ordinary_solution_has_no_samples() -> None:
    x, y = batch()
    solution = solve(Relaxation(STIFFNESS), x, y, t1=0.1, method=Heun(), steps=AdaptiveSteps(1e-3, 1e-3))
    assert solution.statuses == solution.messages == solution.sample_stats == ()


class Untouchable(FastSlowSystem):
    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("the field was evaluated")

    slow = fast


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x0": torch.ones(3, 2), "y0": torch.ones(2, 2)}, ValueError, "got shapes (3, 2) and (2, 2)"),
        ({"x0": torch.ones(())}, ValueError, "got shapes () and (2, 3)"),
        ({"x0": torch.ones(0, 2), "y0": torch.ones(0)}, ValueError, "one size > 0 in dimension 0, got shapes (0, 2)"),
        ({"method": ExponentialAdams()}, ValueError, "ExponentialAdams(order=4) does not take steps of single samples"),
        ({"method": AndersonAdams()}, ValueError, "AndersonAdams(order=3, memory=4, rows=False) does not take steps"),
        ({"method": SlowManifold()}, ValueError, "does not take steps of single samples"),
        ({"method": TorchDiffEq("dopri5")}, ValueError, "TorchDiffEq('dopri5') does not take steps of single samples"),
        ({"method": RK4()}, ValueError, "RK4() has no error estimate"),
    ],
)
@pytest.mark.parametrize("over", [solve, integrate])
def test_refuses(over: Callable[..., Any], change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, y = states()
    end = {"t1": 1.0} if over is solve else {"span": 1.0}
    arguments: dict[str, Any] = {"x0": x, "y0": y, "method": Heun(), "steps": control(), **end}
    with pytest.raises(error, match=re.escape(message)):
        over(Untouchable(), **{**arguments, **change})


def test_per_sample_is_a_truth_value() -> None:
    with pytest.raises(TypeError, match="per_sample must be True or False, got 1"):
        AdaptiveSteps(1e-3, 1e-3, per_sample=1)  # type: ignore[arg-type]


def test_a_rate_of_another_shape_is_refused() -> None:
    """Also one with as many entries, which rows would hide."""
    x, y = states(0, (2, 3, 4), (2, 1))
    with pytest.raises(ValueError, match=r"fast must return its state's shape \(2, 3, 4\), got \(2, 4, 3\)"):
        solve(Field(lambda t, x, y: x.mT), x, y, t1=1.0, method=Heun(), steps=control())
