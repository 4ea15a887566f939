"""The one time loop, and how its steps are chosen.

Time inside is fast time measured from the start of the solve, held in Python floats (float64), so that a unit step is
exactly 1 and the last step ends exactly at the end. A fixed-step loop never reads a tensor on the host; an adaptive one
reads once per attempted step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from solvers.gradients import Backprop, Gradient
from solvers.method import Factor, Method, Pair, Past, Step, scaled
from solvers.solution import Status
from solvers.system import FastTimeProblem, StepFailed

DEFAULT_MAX_STEPS = 100_000
ROUND_OFFS = 4
"""What replaces an rtol below round-off, in units of the epsilon of the state's dtype."""


def _check_number(name: str, value: object, *, positive: bool, finite: bool = True) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (value > 0 if positive else value >= 0) or (finite and value == math.inf):
        allowed = f"{'> 0' if positive else '>= 0'}{' and finite' if finite else ''}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


@dataclass(frozen=True)
class FixedSteps:
    """`n` equal steps over the span. Raises ValueError for n < 1."""

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool):
            raise TypeError(f"FixedSteps needs an int, got n={self.n!r}")
        if self.n < 1:
            raise ValueError(f"FixedSteps needs n >= 1, got n={self.n}")

    def rescaled(self, factor: float) -> FixedSteps:
        """The same steps in a unit of time `factor` times as long: there is nothing to convert."""
        return self

    def ends(self, span: float) -> list[float]:
        """Where the steps over [0, span] end; the last one exactly there."""
        return [*(span * ((i + 1) / self.n) for i in range(self.n - 1)), span]

    def intervals(self, span: float) -> list[tuple[float, float]]:
        """(length, end) of each step over [0, span]."""
        return [(span / self.n, end) for end in self.ends(span)]


@dataclass(frozen=True)
class MeshSteps(FixedSteps):
    """Steps that end at the given times, measured from the start of the solve in its unit of time; the last is the whole span.

    Raises ValueError where the times are none, or not in one direction, or do not end with the span.
    """

    n: int = field(init=False, repr=False)
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError(f"MeshSteps needs at least one time, got {self.times!r}")
        object.__setattr__(self, "n", len(self.times))
        sign = math.copysign(1.0, self.times[-1])
        if not all(0 < sign * (later - earlier) < math.inf for earlier, later in pairwise((0.0, *self.times))):
            raise ValueError(f"times must be finite and move away from 0 in one direction, got {self.times!r}")

    def rescaled(self, factor: float) -> MeshSteps:
        """The same mesh in a unit of time `factor` times as long."""
        return MeshSteps(tuple(time / factor for time in self.times))

    def ends(self, span: float) -> list[float]:
        """The mesh, of which the end must be that of the span."""
        if self.times[-1] != span:
            raise ValueError(f"the mesh ends after {self.times[-1]!r}, the solve after {span!r}")
        return list(self.times)

    def intervals(self, span: float) -> list[tuple[float, float]]:
        """(length, end) of each step."""
        return [(end - start, end) for start, end in pairwise((0.0, *self.ends(span)))]


@dataclass(frozen=True)
class AdaptiveSteps:
    """Error control: a step is accepted when its estimated error is within atol + rtol |state|.

    The error is the larger of the root-mean-square norms of the x part and of the y part; the controller is the PI
    controller of Hairer & Wanner, Solving ODEs II, section IV.2, with safety factor 0.9. A step size changes by a factor
    within [0.2, 5] after an accepted step and [0.1, 0.9] after a rejected one, and does not grow right after a rejection.

    Args:
        rtol, atol: tolerances, > 0 and >= 0. Below the epsilon of the state's dtype, where errors are round-off and steps would
            shrink for nothing, an rtol warns and the solve takes `ROUND_OFFS` times that epsilon.
        first_step, min_step, max_step: in the solve's unit of time (slow time in `solve`); first_step None estimates it.
            The last step may be shorter than min_step.
        per_sample: every element of dimension 0 of x and y gets its own time, steps and status (`solvers.per_sample`).
    """

    rtol: float
    atol: float
    first_step: float | None = None
    min_step: float = 0.0
    max_step: float = math.inf
    per_sample: bool = False

    def __post_init__(self) -> None:
        _check_number("rtol", self.rtol, positive=True)
        _check_number("atol", self.atol, positive=False)
        _check_number("min_step", self.min_step, positive=False)
        _check_number("max_step", self.max_step, positive=True, finite=False)
        if self.first_step is not None:
            _check_number("first_step", self.first_step, positive=True)
        if self.min_step > self.max_step:
            raise ValueError(f"min_step={self.min_step} must not exceed max_step={self.max_step}")
        if not isinstance(self.per_sample, bool):
            raise TypeError(f"per_sample must be True or False, got {self.per_sample!r}")

    def rescaled(self, factor: float) -> AdaptiveSteps:
        """The same step bounds in a unit of time `factor` times as long."""
        first = None if self.first_step is None else self.first_step / factor
        return replace(self, first_step=first, min_step=self.min_step / factor, max_step=self.max_step / factor)


Steps = FixedSteps | AdaptiveSteps


@dataclass(frozen=True)
class Mesh:
    """Given steps, as (length, end) in fast time."""

    steps: Sequence[tuple[float, float]]


@dataclass
class Trajectory:
    """The end state, the states at the save times that were reached, and how the loop ended (tau: fast time)."""

    x: Tensor
    y: Tensor
    saved: list[Pair] = field(default_factory=list)
    status: Status = Status.SUCCESS
    tau: float = 0.0
    past: Past | None = None
    reason: str = ""
    """What a failure has to say beyond its status."""
    h: float = 0.0
    """The last step that error control attempted."""

    def fail(self, error: StepFailed) -> None:
        self.status = Status.NON_FINITE if math.isnan(error.residual) else error.status
        self.reason = str(error)


Observer = Callable[[Trajectory, float, float, Step, "Pair | None"], "Pair | None"]
"""Sees each accepted step: the trajectory at its start, h, its end, the step and the rate at the start if the loop knows it.
May return the rate at the end."""


@dataclass
class March:
    """One solve's loop over the fast times [0, span], span of either sign."""

    problem: FastTimeProblem
    method: Method
    steps: Steps | Mesh
    span: float
    gradient: Gradient = field(default_factory=Backprop)
    save_taus: tuple[float, ...] = ()
    max_steps: int = DEFAULT_MAX_STEPS
    observer: Observer | None = None

    def run(self, x: Tensor, y: Tensor) -> Trajectory:
        """Integrates from (x, y). A non-finite state shows in the fixed-step result itself, without a host read."""
        trajectory = Trajectory(x, y)
        self._save_start(trajectory)
        if self.span == 0:
            return trajectory
        self.problem = self.method.integrates(self.problem)
        try:
            if self.problem.constrained:
                trajectory.x = self.gradient.wrap(self.problem.settled, self.problem.system)(0.0, x, y)
            if isinstance(self.steps, AdaptiveSteps):
                self._run_adaptive(trajectory, self.steps)
            elif isinstance(self.steps, FixedSteps):
                self._run_mesh(trajectory, self.steps.intervals(self.span))
            else:
                self._run_mesh(trajectory, self.steps.steps)
        except StepFailed as error:
            trajectory.fail(error)
        self.problem.counting = False
        return trajectory

    def _run_mesh(self, trajectory: Trajectory, mesh: Sequence[tuple[float, float]]) -> None:
        step_function = self.gradient.wrap(self.method.step, self.problem.system)
        rate, stats = None, self.problem.stats
        for i, (h, tau_end) in enumerate(mesh):
            if i == self.max_steps:
                trajectory.status = Status.STEP_LIMIT
                return
            tau = trajectory.tau
            step = step_function(self.problem, tau, h, trajectory.x, trajectory.y, rate, *self._past(trajectory))
            stats.steps += 1
            stats.accepted += 1
            rate = self.accept(trajectory, h, tau_end, step, rate)

    def _run_adaptive(self, trajectory: Trajectory, steps: AdaptiveSteps) -> None:
        assert self.method.error_order is not None
        step_function = self.gradient.wrap(self.method.step, self.problem.system)
        stats, direction = self.problem.stats, math.copysign(1.0, self.span)
        rate: Pair | None = None
        if steps.first_step is None:
            x, y = trajectory.x, trajectory.y
            start_rate = self.gradient.wrap(self.problem.rates, self.problem.system)(0.0, x, y)
            guess = initial_step(self.problem, self.method, steps, x, y, self.span, start_rate)
            rate = None if self.problem.constrained else start_rate
            if math.isnan(guess):
                trajectory.status = Status.NON_FINITE
                return
        else:
            guess = steps.first_step
        size = min(max(guess, steps.min_step), steps.max_step)
        controller = PIController(self.method.error_order)
        while trajectory.tau != self.span:
            if stats.steps == self.max_steps:
                trajectory.status = Status.STEP_LIMIT
                return
            tau, remaining = trajectory.tau, abs(self.span - trajectory.tau)
            last = size >= remaining * (1 - 1e-12)
            taken = remaining if last else size
            trajectory.h = direction * taken
            if tau + direction * taken == tau:
                trajectory.status = Status.STEP_UNDERFLOW
                return
            stats.steps += 1
            try:
                step = step_function(
                    self.problem, tau, direction * taken, trajectory.x, trajectory.y, rate, *self._past(trajectory)
                )
            except StepFailed as error:
                stats.rejected += 1
                if taken <= steps.min_step or taken < 1e-14 * abs(self.span):
                    trajectory.fail(error)
                    return
                size = max(taken * controller.after_rejection(math.inf), steps.min_step)
                continue
            ratio = error_ratio(step, trajectory.x, trajectory.y, steps)
            if ratio <= 1:
                stats.accepted += 1
                tau_end = self.span if last else tau + direction * taken
                rate = self.accept(trajectory, direction * taken, tau_end, step, rate)
                size = min(max(taken * controller.after_acceptance(ratio), steps.min_step), steps.max_step)
                continue
            stats.rejected += 1
            trajectory.past = self.method.after_rejection(trajectory.past)
            if taken <= steps.min_step or taken < 1e-14 * abs(self.span):
                trajectory.status = Status.STEP_UNDERFLOW if _is_finite(step) else Status.NON_FINITE
                return
            size = max(taken * controller.after_rejection(ratio), steps.min_step)

    def accept(
        self, trajectory: Trajectory, taken: float, tau_end: float, step: Step, rate: Pair | None
    ) -> Pair | None:
        """Moves to the step's end, saving what lies in between; returns the rate at the end where the method knows it."""
        tau, direction = trajectory.tau, math.copysign(1.0, self.span)
        start_rate, end_rate = rate, step.end_rate
        if self.observer is not None:
            found = self.observer(trajectory, taken, tau_end, step, rate)
            end_rate = found if end_rate is None else end_rate
        rates = self.gradient.wrap(self.problem.rates, self.problem.system)
        while len(trajectory.saved) < len(self.save_taus):
            save_tau = self.save_taus[len(trajectory.saved)]
            if direction * (save_tau - tau_end) > 0:
                break
            if save_tau == tau_end:
                trajectory.saved.append((step.x, step.y))
                continue
            if start_rate is None:
                start_rate = rates(tau, trajectory.x, trajectory.y)
            if end_rate is None:
                end_rate = rates(tau_end, step.x, step.y)
            h = tau_end - tau
            theta = (save_tau - tau) / h
            x = hermite(theta, h, trajectory.x, step.x, start_rate[0], end_rate[0])
            y = hermite(theta, h, trajectory.y, step.y, start_rate[1], end_rate[1])
            if self.problem.constrained:
                x = self.gradient.wrap(self.problem.settled, self.problem.system)(save_tau, x, y)
            trajectory.saved.append((x, y))
        trajectory.x, trajectory.y, trajectory.tau = step.x, step.y, tau_end
        trajectory.past = step.past
        return end_rate

    def replay(
        self, tau: float, h: float, tau_end: float, x: Tensor, y: Tensor, rate: Pair | None, past: Past | None
    ) -> tuple[Trajectory, Pair | None]:
        """An accepted step once more: the trajectory that consists of it, and the rate at its end where the loop knows it."""
        inside = tuple(save_tau for save_tau in self.save_taus if abs(tau) < abs(save_tau) < abs(tau_end))
        trajectory = Trajectory(x, y, tau=tau, past=past)
        step = self.method.step(self.problem, tau, h, x, y, rate, *self._past(trajectory))
        return trajectory, replace(self, save_taus=inside, observer=None).accept(trajectory, h, tau_end, step, rate)

    def _past(self, trajectory: Trajectory) -> tuple[Past | None, ...]:
        return (trajectory.past,) if self.method.multistep else ()

    def _save_start(self, trajectory: Trajectory) -> None:
        for _ in _leading_zeros(self.save_taus):
            trajectory.saved.append((trajectory.x, trajectory.y))


def _leading_zeros(taus: tuple[float, ...]) -> Iterator[float]:
    for tau in taus:
        if tau != 0:
            return
        yield tau


def hermite(theta: Factor, h: Factor, start: Tensor, end: Tensor, start_rate: Tensor, end_rate: Tensor) -> Tensor:
    """Cubic Hermite interpolation at the fraction theta of a step h: error O(h^4), continuous in its first derivative."""
    return (
        start
        + scaled(theta * theta * (3 - 2 * theta), end - start)
        + scaled(h * theta * (1 - theta) ** 2, start_rate)
        + scaled(h * theta * theta * (theta - 1), end_rate)
    )


@dataclass
class PIController:
    """Step-size factor of Hairer & Wanner's PI controller, for an embedded solution of order `error_order`."""

    error_order: int
    previous_ratio: float = 1.0
    just_rejected: bool = False

    def after_acceptance(self, ratio: float) -> float:
        exponent = 1 / (self.error_order + 1)
        clipped = max(ratio, 1e-10)
        factor = 0.9 * clipped ** (-0.7 * exponent) * self.previous_ratio ** (0.4 * exponent)
        factor = min(max(factor, 0.2), 1.0 if self.just_rejected else 5.0)
        self.previous_ratio, self.just_rejected = max(ratio, 1e-4), False
        return factor

    def after_rejection(self, ratio: float) -> float:
        self.just_rejected = True
        if not math.isfinite(ratio):
            return 0.1
        return max(0.9 * ratio ** (-1 / (self.error_order + 1)), 0.1)


def scaled_norm(error: Tensor, scale: Tensor, dim: int | None = None) -> Tensor:
    """Root mean square of error / scale, an error of 0 being 0 even at scale 0; 0 for an empty state."""
    if error.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=error.device)
    return torch.where(error == 0, 0, _size(error) / scale).square().mean(dim).sqrt().double()


def _size(state: Tensor) -> Tensor:
    """|state| in float32 at least: squares and tolerances leave the range of half precision."""
    size = state.abs()
    return size.to(torch.promote_types(size.dtype, torch.float32))


def tolerance(steps: AdaptiveSteps, *states: Tensor) -> Tensor:
    size = _size(states[0])
    for state in states[1:]:
        size = torch.maximum(size, _size(state))
    return steps.atol + steps.rtol * size


def error_ratio(step: Step, x: Tensor, y: Tensor, steps: AdaptiveSteps) -> float:
    """`error_ratios` of the whole state. Reads the host once."""
    return float(error_ratios(step, x, y, steps))


@torch.no_grad()
def error_ratios(step: Step, x: Tensor, y: Tensor, steps: AdaptiveSteps, dim: int | None = None) -> Tensor:
    """Estimated error over tolerance, the larger of x's and y's; infinite where anything is not finite. Over `dim`, or all."""
    assert step.error is not None
    ratio = torch.maximum(
        scaled_norm(step.error[0], tolerance(steps, x, step.x), dim),
        scaled_norm(step.error[1], tolerance(steps, y, step.y), dim),
    )
    # An infinite state would hide its error behind an infinite scale.
    return torch.where(all_finite(step.x, step.y, dim) & torch.isfinite(ratio), ratio, math.inf)


def _is_finite(step: Step) -> bool:
    pairs = [(step.x, step.y), step.error] if step.error is not None else [(step.x, step.y)]
    return all(bool(all_finite(*pair)) for pair in pairs)


def all_finite(x: Tensor, y: Tensor, dim: int | None = None) -> Tensor:
    return torch.isfinite(x).all(dim) & torch.isfinite(y).all(dim)


@torch.no_grad()
def initial_step(
    problem: FastTimeProblem, method: Method, steps: AdaptiveSteps, x: Tensor, y: Tensor, span: float, rate: Pair
) -> float:
    """First step size by the algorithm of Hairer, Norsett & Wanner, Solving ODEs I, section II.4; `rate` is that at the start,
    nan is returned where it is not finite. The formulas compare times with 1, so they are evaluated in the problem's unit."""
    scale_x, scale_y, unit = tolerance(steps, x), tolerance(steps, y), problem.unit

    def norm(fast: Tensor, slow: Tensor) -> float:
        return float(torch.maximum(scaled_norm(fast, scale_x), scaled_norm(slow, scale_y)))

    if not all_finite(*rate):
        return math.nan
    d0, d1 = norm(x, y), unit * norm(*rate)
    h0 = trial_step(d0, d1, abs(span) / unit)
    h = math.copysign(unit * h0, span)
    ahead = problem.rates(h, x.add(rate[0], alpha=h), y.add(rate[1], alpha=h))
    d2 = unit * norm(ahead[0] - rate[0], ahead[1] - rate[1]) / h0
    return unit * guessed_step(h0, d1, d2, method.order)


def trial_step(d0: float, d1: float, span: float) -> float:
    """A step that changes a state of norm d0, at a rate of norm d1, by a hundredth."""
    # d1 is infinite where the tolerance is zero, at a zero of the state with atol = 0.
    h0 = 0.01 * d0 / d1 if 1e-5 <= d0 < math.inf and 1e-5 <= d1 < math.inf else 1e-6
    return min(h0, span)


def guessed_step(h0: float, d1: float, d2: float, order: int) -> float:
    """A step whose error is about a hundredth of the tolerance; d2 is the norm of the rate's change per time over h0."""
    if not math.isfinite(d1) or not math.isfinite(d2):
        return h0
    steepest = max(d1, d2)
    h1 = max(1e-6, h0 * 1e-3) if steepest <= 1e-15 else (0.01 / steepest) ** (1 / (order + 1))
    return min(100 * h0, h1)
