"""`solve`, over slow time, and `integrate`, the same over fast time (which the model's layers use)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from numbers import Real

import torch
from torch import Tensor

from solvers.diagnosis import Site, diagnose
from solvers.gradients import Backprop, Gradient
from solvers.method import Method
from solvers.per_sample import BatchMarch, BatchTrajectory
from solvers.solution import Solution, SolveError, Status, failure_message
from solvers.stepping import DEFAULT_MAX_STEPS, ROUND_OFFS, AdaptiveSteps, FixedSteps, March, Steps, Trajectory
from solvers.system import FastSlowSystem, FastTimeProblem
from solvers.torchdiffeq_adapter import TorchDiffEq


def solve(
    system: FastSlowSystem,
    x0: Tensor,
    y0: Tensor,
    *,
    t0: float = 0.0,
    t1: float,
    method: Method | TorchDiffEq,
    steps: Steps,
    gradient: Gradient | None = None,
    save_at: Sequence[float] | Tensor | None = None,
    max_steps: int = DEFAULT_MAX_STEPS,
    raise_on_failure: bool = True,
) -> Solution:
    """Integrates eps dx/dt = f, dy/dt = g from t0 to t1 (slow time; t1 < t0 integrates backwards).

    Args:
        x0, y0: floating-point states of any shape, on one device.
        method: for instance `Euler()`, `Dopri5()` or `TorchDiffEq("dopri5")`.
        steps: `FixedSteps(n)` or `AdaptiveSteps(rtol, atol)`; error control needs a method with an error estimate. With
            `AdaptiveSteps(rtol, atol, per_sample=True)` the elements of dimension 0 of x0 and y0 are solved with steps of
            their own, side by side: the field must not mix them, and takes the time as a tensor (see `FastSlowSystem`).
        gradient: `Backprop()` (the default), `Checkpointed()`, `StoredAdjoint()`, or `Backsolve()` with `TorchDiffEq`.
        save_at: (N,) slow times in the direction of integration, within [t0, t1]; None saves t1 alone. Between steps the
            state is interpolated (cubic Hermite; torchdiffeq's adaptive solvers by their own interpolants).
        max_steps: attempted steps after which the solve fails.
        raise_on_failure: raise `SolveError` (with per_sample: if any sample fails), or return the solution with its `status`.

    Returns the states at the saved times. Gradients flow to x0, y0, the system's parameters and a tensor epsilon.
    Raises TypeError or ValueError, before any work, for arguments that do not fit together.
    """
    t0, t1 = _time("t0", t0), _time("t1", t1)
    epsilon = check_problem(system, x0, y0, method, steps, gradient, max_steps)
    times = _save_times(save_at, t0, t1)
    steps = resolvable(steps, x0, y0)
    problem = FastTimeProblem.over_slow_time(system, t0)
    fast_span = (t1 - t0) / epsilon
    if not math.isfinite(fast_span):
        raise ValueError(f"t0={t0!r} and t1={t1!r} are too far apart at epsilon={epsilon!r}")
    taus = tuple(fast_span if t == t1 else (t - t0) / epsilon for t in times)
    steps = steps.rescaled(epsilon)
    task = _Task(x0, y0, t0, t1, epsilon, method, steps)
    if isinstance(steps, AdaptiveSteps) and steps.per_sample:
        batch = _run_batch(problem, method, steps, fast_span, gradient, taus, max_steps, x0, y0)
        return _batch_solution(task, batch, times, raise_on_failure)
    trajectory = _run(problem, method, steps, fast_span, gradient, taus, max_steps, x0, y0)
    return _solution(task, problem, trajectory, times, raise_on_failure)


def integrate(
    system: FastSlowSystem,
    x0: Tensor,
    y0: Tensor,
    *,
    span: float,
    method: Method | TorchDiffEq,
    steps: Steps,
    gradient: Gradient | None = None,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> tuple[Tensor, Tensor]:
    """(x, y) after the fast time `span`: dx/dtau = f, dy/dtau = eps g. Step bounds in `steps` are fast times.

    With equal steps nothing is read on the host, except a tensor epsilon, once. Raises `SolveError` where error control
    fails or max_steps is reached, and TypeError or ValueError as `solve` does.
    """
    span = _time("span", span)
    epsilon = check_problem(system, x0, y0, method, steps, gradient, max_steps)
    steps = resolvable(steps, x0, y0)
    problem = FastTimeProblem.over_fast_time(system)
    task = _Task(x0, y0, 0.0, epsilon * span, epsilon, method, steps)
    if isinstance(steps, AdaptiveSteps) and steps.per_sample:
        batch = _run_batch(problem, method, steps, span, gradient, (), max_steps, x0, y0)
        _batch_solution(task, batch, (), raise_on_failure=True)
        return batch.x, batch.y
    trajectory = _run(problem, method, steps, span, gradient, (), max_steps, x0, y0)
    if trajectory.status is not Status.SUCCESS:
        _solution(task, problem, trajectory, (), raise_on_failure=True)
    return trajectory.x, trajectory.y


def check_problem(
    system: FastSlowSystem,
    x0: Tensor,
    y0: Tensor,
    method: Method | TorchDiffEq,
    steps: Steps,
    gradient: Gradient | None,
    max_steps: int,
) -> float:
    """Validates a solve's arguments together; returns epsilon's value."""
    if not isinstance(system, FastSlowSystem):
        raise TypeError(f"system must be a FastSlowSystem, got {type(system).__name__}")
    for name, state in (("x0", x0), ("y0", y0)):
        if not isinstance(state, Tensor):
            raise TypeError(f"{name} must be a tensor, got {state!r}")
        if not (state.is_floating_point() or state.is_complex()):
            raise TypeError(f"{name} must be a floating-point or complex tensor, got {state.dtype}")
    if x0.device != y0.device:
        raise ValueError(f"x0 and y0 must be on one device, got {x0.device} and {y0.device}")
    if not isinstance(max_steps, int) or isinstance(max_steps, bool):
        raise TypeError(f"max_steps must be an int, got {max_steps!r}")
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")
    check_scheme(method, steps, gradient)
    if isinstance(steps, AdaptiveSteps) and steps.per_sample:
        sizes = (tuple(x0.shape), tuple(y0.shape))
        if not all(sizes) or sizes[0][0] != sizes[1][0] or sizes[0][0] == 0:
            raise ValueError(
                f"per_sample needs x0 and y0 of one size > 0 in dimension 0, got shapes {sizes[0]} and {sizes[1]}"
            )
    if isinstance(method, TorchDiffEq) and x0.dtype != y0.dtype:
        raise ValueError(f"{method!r} needs x0 and y0 of one dtype, got {x0.dtype} and {y0.dtype}")
    epsilon = system.epsilon
    if not isinstance(epsilon, Real | Tensor) or isinstance(epsilon, bool):
        raise TypeError(f"epsilon must be a number or a scalar tensor, got {epsilon!r}")
    if isinstance(epsilon, Tensor) and epsilon.numel() != 1:
        raise ValueError(f"epsilon must be a scalar, got a tensor of shape {tuple(epsilon.shape)}")
    value = float(epsilon.detach()) if isinstance(epsilon, Tensor) else float(epsilon)
    if not 0 < value <= 1:
        raise ValueError(f"epsilon must satisfy 0 < epsilon <= 1, got {value!r}")
    return value


def check_scheme(method: Method | TorchDiffEq, steps: Steps, gradient: Gradient | None) -> None:
    """Refuses by name what does not fit together: a method, its steps and its gradient."""
    if not isinstance(method, Method | TorchDiffEq):
        raise TypeError(f"method must be a method such as Euler(), got {method!r}")
    if not isinstance(steps, FixedSteps | AdaptiveSteps):
        raise TypeError(f"steps must be FixedSteps(n) or AdaptiveSteps(rtol, atol), got {steps!r}")
    if gradient is not None and not isinstance(gradient, Gradient):
        raise TypeError(f"gradient must be a gradient such as Backprop() or Checkpointed(), got {gradient!r}")
    if isinstance(method, TorchDiffEq):
        method.check(steps, gradient)
    elif isinstance(steps, AdaptiveSteps) and method.error_order is None:
        raise ValueError(
            f"{method!r} has no error estimate, so it takes FixedSteps(n); for AdaptiveSteps use Heun(), Dopri5() "
            "or TorchDiffEq('dopri5')"
        )
    if isinstance(steps, AdaptiveSteps) and steps.per_sample and not getattr(method, "takes_tensor_steps", False):
        raise ValueError(
            f"{method!r} does not take steps of single samples; for per_sample=True use Heun(), Dopri5(), ETD2RK() or ETD3RK()"
        )
    if gradient is not None and isinstance(method, Method):
        gradient.check(method, steps)


def resolvable(steps: Steps, *states: Tensor) -> Steps:
    """`steps` with an rtol that the states' dtypes resolve. Warns, at the caller's caller, of one below their epsilon."""
    if not isinstance(steps, AdaptiveSteps):
        return steps
    dtype = max((state.dtype for state in states if state.numel()), key=_epsilon, default=torch.float64)
    epsilon = _epsilon(dtype)
    if steps.rtol >= epsilon:
        return steps
    raised = replace(steps, rtol=ROUND_OFFS * epsilon)
    warnings.warn(
        f"rtol={steps.rtol:g} is below the epsilon {epsilon:.3g} of {dtype}: the solve takes rtol={raised.rtol:.3g}",
        UserWarning,
        stacklevel=3,
    )
    return raised


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _run(
    problem: FastTimeProblem,
    method: Method | TorchDiffEq,
    steps: Steps,
    span: float,
    gradient: Gradient | None,
    taus: tuple[float, ...],
    max_steps: int,
    x0: Tensor,
    y0: Tensor,
) -> Trajectory:
    gradient = gradient or Backprop()
    if isinstance(method, TorchDiffEq):
        return method.run(problem, steps, span, gradient, taus, max_steps, x0, y0)
    return gradient.run(March(problem, method, steps, span, gradient, taus, max_steps), x0, y0)


def _run_batch(
    problem: FastTimeProblem,
    method: Method | TorchDiffEq,
    steps: AdaptiveSteps,
    span: float,
    gradient: Gradient | None,
    taus: tuple[float, ...],
    max_steps: int,
    x0: Tensor,
    y0: Tensor,
) -> BatchTrajectory:
    assert isinstance(method, Method)
    return BatchMarch(problem, method, steps, span, gradient or Backprop(), taus, max_steps).run(x0, y0)


def _time(name: str, value: object) -> float:
    """A finite time given as a number, or as a scalar tensor to which no gradient is asked for."""
    scalar = isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()
    if not (isinstance(value, Real) or scalar) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(f"{name} must not require grad: no gradient flows to times, got {value!r}")
    number = float(value)  # type: ignore[arg-type]
    if not -math.inf < number < math.inf:  # torch.compile may hold the number as a symbol, which has no isfinite
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def _save_times(save_at: Sequence[float] | Tensor | None, t0: float, t1: float) -> tuple[float, ...]:
    if save_at is None:
        return (t1,)
    if isinstance(save_at, Tensor):
        if save_at.ndim != 1 or save_at.requires_grad:
            raise ValueError(f"save_at must be 1-dimensional and without gradient, got {save_at!r}")
        save_at = save_at.tolist()
    if not isinstance(save_at, Iterable):
        raise TypeError(f"save_at must be a sequence of times, got {save_at!r}")
    times = tuple(_time("save_at", t) for t in save_at)
    low, high = min(t0, t1), max(t0, t1)
    if not times:
        raise ValueError("save_at must name at least one time")
    for t in times:
        if not low <= t <= high:
            raise ValueError(f"save_at holds {t!r}, outside [{low!r}, {high!r}]")
    sign = 1 if t1 >= t0 else -1
    if any(sign * (later - earlier) < 0 for earlier, later in pairwise(times)):
        raise ValueError(f"save_at must follow the direction of integration, from {t0!r} to {t1!r}")
    return times


@dataclass(frozen=True)
class _Task:
    """What a solve was asked for; epsilon by value, step bounds in fast time."""

    x0: Tensor
    y0: Tensor
    t0: float
    t1: float
    epsilon: float
    method: Method | TorchDiffEq
    steps: Steps

    def slow_time(self, tau: float) -> float:
        return self.t0 + self.epsilon * tau

    def diagnose(self, site: Site, statuses: Sequence[Status]) -> list[str]:
        return diagnose(site, statuses, self.method, self.steps, (self.t0, self.t1, self.epsilon))


def _solution(
    task: _Task, problem: FastTimeProblem, trajectory: Trajectory, times: tuple[float, ...], raise_on_failure: bool
) -> Solution:
    saved = trajectory.saved
    status = trajectory.status
    end = task.slow_time(trajectory.tau)
    before, by, where = end, end, f"at slow time t = {end:.6g}"
    if status is Status.SUCCESS and not torch.compiler.is_compiling() and not _finite(trajectory.x, trajectory.y):
        # Equal steps are not watched on the way, so the time is known to the resolution of save_at.
        status = Status.NON_FINITE
        saved = list(takewhile(lambda state: _finite(*state), saved))
        before, by = (times[len(saved) - 1] if saved else task.t0), (*times, end)[len(saved)]
        where = f"between slow times t = {before:.6g} and t = {by:.6g}"
        trajectory = Trajectory(*(saved[-1] if saved else (task.x0, task.y0)), tau=(before - task.t0) / task.epsilon)
    message = ""
    if status is not Status.SUCCESS:
        site = _site(task, problem, trajectory, (by - before) / task.epsilon)
        (why,) = task.diagnose(site, [status])
        message = failure_message(status, where, repr(task.method), problem.stats, trajectory.reason, why)
    x, y = trajectory.x, trajectory.y
    solution = Solution(
        ts=torch.tensor(times[: len(saved)], dtype=torch.float64, device=x.device),
        xs=torch.stack([x for x, _ in saved]) if saved else x.new_empty((0, *x.shape)),
        ys=torch.stack([y for _, y in saved]) if saved else y.new_empty((0, *y.shape)),
        stats=problem.stats,
        status=status,
        message=message,
    )
    if message and raise_on_failure:
        raise SolveError(solution)
    return solution


def _site(task: _Task, problem: FastTimeProblem, trajectory: Trajectory, gap: float) -> Site:
    """Where to look for what failed within the fast time `gap` after the trajectory's end."""
    if isinstance(task.method, Method):
        tau, follow = trajectory.tau, isinstance(task.steps, AdaptiveSteps)
        ahead = [trajectory.h] if follow else [gap * (i + 1) / PROBES for i in range(PROBES)]
    else:
        # torchdiffeq leaves no state but the first.
        known = trajectory.status is Status.SUCCESS
        tau, follow = (trajectory.tau if known else 0.0), False
        start, end = (0.0, gap) if known else (trajectory.tau, (task.t1 - task.t0) / task.epsilon)
        ahead = [start + (end - start) * (i + 1) / PROBES for i in range(PROBES)]
    return Site(problem, tau, trajectory.x, trajectory.y, [*ahead], follow)


PROBES = 8
"""Times at which the field is asked for, where a failure is known to an interval only."""


def _batch_solution(task: _Task, batch: BatchTrajectory, times: tuple[float, ...], raise_on_failure: bool) -> Solution:
    failures = [i for i, sample in enumerate(batch.samples) if sample.status is not Status.SUCCESS]
    messages = [""] * len(batch.samples)
    if failures:
        reasons = task.diagnose(batch.site(), [sample.status for sample in batch.samples])
        for i in failures:
            sample = batch.samples[i]
            where = f"at slow time t = {task.slow_time(sample.tau):.6g}"
            messages[i] = failure_message(sample.status, where, repr(task.method), sample.stats, why=reasons[i])
    solution = Solution(
        ts=torch.tensor(times, dtype=torch.float64, device=batch.xs.device),
        xs=batch.xs,
        ys=batch.ys,
        stats=batch.problem.stats,
        status=batch.samples[failures[0]].status if failures else Status.SUCCESS,
        message=_summary(failures, messages),
        statuses=tuple(sample.status for sample in batch.samples),
        messages=tuple(messages),
        sample_stats=tuple(sample.stats for sample in batch.samples),
    )
    if failures and raise_on_failure:
        raise SolveError(solution)
    return solution


def _summary(failures: list[int], messages: list[str]) -> str:
    if not failures:
        return ""
    named = [f"sample {i}: {messages[i]}" for i in failures[:NAMED_FAILURES]]
    rest = len(failures) - len(named)
    return "\n".join(
        [f"{len(failures)} of {len(messages)} samples failed", *named, *([f"and {rest} more"] if rest else [])]
    )


NAMED_FAILURES = 10
"""Failed samples that one message describes."""


def _finite(x: Tensor, y: Tensor) -> bool:
    return bool(torch.isfinite(x).all() & torch.isfinite(y).all())
