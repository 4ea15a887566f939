"""Error control for each sample of a batch alone, all of them advanced together by batched evaluations of the field.

Dimension 0 of x and y, of one size B, numbers the samples. Inside, states are (B, n), a row a sample, and times and steps are
(B, 1), so that the methods need one code for both loops. The decisions taken for a sample are those of `solvers.stepping`'s
loop, except that a step is also rejected where the rate at its end, if anything follows, is not finite. The host reads once per
batched attempt. The field must not mix samples.

The field always sees B rows. A sample that has ended or failed makes steps of length 0, cut off the graph, where its rate was
last known to be finite; and where a graph is recorded, an attempt that is not finite in some row is made again with a step of
length 0 there. So no nan enters the graph, in which even 0 * nan would reach the gradients of shared parameters; but for a
sample on which the field is nan whatever its state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from solvers.diagnosis import Site
from solvers.explicit import advance
from solvers.gradients import Gradient
from solvers.method import Method, Pair, Step
from solvers.solution import SampleStats, Status
from solvers.stepping import (
    AdaptiveSteps,
    PIController,
    all_finite,
    error_ratios,
    guessed_step,
    hermite,
    scaled_norm,
    tolerance,
    trial_step,
)
from solvers.system import FastSlowSystem, FastTimeProblem, shaped


class Rows(FastSlowSystem):
    """A system whose states are seen as (B, n), and its times as (B, 1)."""

    def __init__(self, system: FastSlowSystem, x_shape: Sequence[int], y_shape: Sequence[int]) -> None:
        super().__init__()
        self.system = system
        self.x_shape, self.y_shape = x_shape, y_shape

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.reshape(self.x_shape), y.reshape(self.y_shape)
        return as_rows(shaped("fast", self.system.fast(_time_beside(x, t), x, y), x))

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.reshape(self.x_shape), y.reshape(self.y_shape)
        return as_rows(shaped("slow", self.system.slow(_time_beside(y, t), x, y), y))

    @property
    def fast_decay(self) -> float | Tensor:  # type: ignore[override]
        return _decay_rows(self.system.fast_decay, self.x_shape)

    @property
    def slow_decay(self) -> float | Tensor:  # type: ignore[override]
        return _decay_rows(self.system.slow_decay, self.y_shape)


def as_rows(state: Tensor) -> Tensor:
    """(B, n)"""
    return state.reshape(len(state), -1)


def _time_beside(state: Tensor, t: float | Tensor) -> Tensor:
    """(B, 1, ..., 1), in the state's dtype: a tensor of another would change the state's."""
    return torch.as_tensor(t).to(state.real.dtype).reshape(-1, *[1] * (state.ndim - 1))


def _decay_rows(decay: float | Tensor, shape: Sequence[int]) -> float | Tensor:
    return as_rows(decay.expand(shape)) if isinstance(decay, Tensor) and decay.ndim else decay


@dataclass
class Sample:
    """Where one sample stands, the size of its next step, and, once it has ended, its status."""

    controller: PIController
    size: float = 0.0
    tau: float = 0.0
    """Fast time of its row in the loop's states; of the start of the last step once that has succeeded."""
    h: float = 0.0
    """The step being attempted, signed."""
    end: float = 0.0
    """Where that step ends."""
    running: bool = True
    status: Status = Status.SUCCESS
    saved: int = 0
    """Save times that are behind."""
    stats: SampleStats = field(default_factory=SampleStats)

    def propose(self, span: float, max_steps: int) -> None:
        """Sets the next step, or fails if there is none to take."""
        if self.stats.steps == max_steps:
            self.fail(Status.STEP_LIMIT)
            return
        remaining = abs(span - self.tau)
        last = self.size >= remaining * (1 - 1e-12)
        self.h = math.copysign(remaining if last else self.size, span)
        self.end = span if last else self.tau + self.h
        if self.tau + self.h == self.tau:
            self.fail(Status.STEP_UNDERFLOW)
            return
        self.stats.steps += 1

    def accept(self, ratio: float, span: float, steps: AdaptiveSteps) -> None:
        self.stats.accepted += 1
        factor = self.controller.after_acceptance(ratio)
        self.size = min(max(abs(self.h) * factor, steps.min_step), steps.max_step)
        self.running = self.end != span

    def reject(self, ratio: float, span: float, steps: AdaptiveSteps) -> bool:
        """Shortens the next step; true where none may be shorter."""
        self.stats.rejected += 1
        taken = abs(self.h)
        self.size = max(taken * self.controller.after_rejection(ratio), steps.min_step)
        return taken <= steps.min_step or taken < 1e-14 * abs(span)

    def fail(self, status: Status) -> None:
        self.running, self.status = False, status


@dataclass
class Saves:
    """States at save times, gathered as the samples pass them: pieces (rows, n), and the row of (save, sample)."""

    pieces: list[Pair] = field(default_factory=list)
    row: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, keys: list[tuple[int, int]], x: Tensor, y: Tensor) -> None:
        for key in keys:
            self.row[key] = len(self.row)
        self.pieces.append((x, y))

    def table(self, count: int, batch: int) -> Pair:
        """(count, B, n) of x and of y; nan where a sample failed before."""
        rows = [self.row.get((k, i), len(self.row)) for k in range(count) for i in range(batch)]
        tables = []
        for parts in zip(*self.pieces, strict=True):
            gathered = torch.cat([*parts, torch.full_like(parts[0][:1], math.nan)])
            tables.append(gathered[torch.tensor(rows, device=gathered.device)].reshape(count, batch, -1))
        return tables[0], tables[1]


@dataclass
class BatchTrajectory:
    """How each sample ended, its states at the save times and at the end, nan where it failed before."""

    problem: FastTimeProblem
    """Whose states are rows."""
    samples: list[Sample]
    xs: Tensor
    ys: Tensor
    x: Tensor
    y: Tensor
    rows: Pair
    """The last good states of the samples that failed."""

    def site(self) -> Site:
        tau, h = (_column([getattr(s, name) for s in self.samples], self.x) for name in ("tau", "h"))
        return Site(self.problem, tau, *self.rows, ahead=[h], follow=True, rows=len(self.samples))


@dataclass
class BatchMarch:
    """One solve's loop over the fast times [0, span], span of either sign, for every sample of a batch."""

    problem: FastTimeProblem
    method: Method
    steps: AdaptiveSteps
    span: float
    gradient: Gradient
    save_taus: tuple[float, ...]
    max_steps: int

    def run(self, x0: Tensor, y0: Tensor) -> BatchTrajectory:
        """Integrates from (x0, y0). A sample's failure is its own."""
        assert self.method.error_order is not None
        batch = len(x0)
        self.problem = replace(self.problem, system=Rows(self.problem.system, x0.shape, y0.shape))
        samples = [Sample(PIController(self.method.error_order)) for _ in range(batch)]
        x, y, saves = as_rows(x0), as_rows(y0), Saves()
        rows = (x, y)
        for k, _ in enumerate(takewhile(lambda tau: tau == 0, self.save_taus)):
            saves.add([(k, i) for i in range(batch)], x, y)
            for sample in samples:
                sample.saved += 1
        if self.span == 0:
            saves.add([(len(self.save_taus), i) for i in range(batch)], x, y)
        else:
            rows = self._march(samples, saves, x, y)
        self.problem.counting = False
        count = len(self.save_taus) + 1  # the end, too
        xs, ys = saves.table(count, batch) if saves.pieces else (_nans(x, count), _nans(y, count))
        xs, ys = xs.reshape(count, *x0.shape), ys.reshape(count, *y0.shape)
        return BatchTrajectory(self.problem, samples, xs[:-1], ys[:-1], xs[-1], ys[-1], rows)

    def _march(self, samples: list[Sample], saves: Saves, x: Tensor, y: Tensor) -> Pair:
        """The last good states."""
        stats, start = self.problem.stats, (x, y)
        x, y, rate = self._start(samples, x, y)
        while rows := self._propose(samples):
            step = self._attempt(rows, samples, x, y, rate)
            going = {i for i in rows if self._goes_on(samples[i])}
            ratios = self._ratios(step, x, y, going)
            accepted = [i for i in rows if ratios[i] <= 1]
            finite = [i for i in rows if math.isfinite(ratios[i])]
            stats.steps += 1
            stats.accepted += bool(accepted)
            stats.rejected += not accepted
            for i in set(rows) - set(accepted):
                if samples[i].reject(ratios[i], self.span, self.steps):
                    finite_end = _is_finite(step, i, with_rate=i in going)
                    samples[i].fail(Status.STEP_UNDERFLOW if finite_end else Status.NON_FINITE)
            if not accepted:
                continue
            if len(finite) < len(rows) and (step.x.requires_grad or step.y.requires_grad):
                step = self._attempt(finite, samples, x, y, rate)
            self._save(accepted, samples, saves, (x, y), step, rate)
            moved = [i for i in accepted if i in going]  # to where their rate is known
            if step.end_rate is not None and moved:
                x, y = _where(moved, step.x, x), _where(moved, step.y, y)
                rate = (_where(moved, step.end_rate[0], rate[0]), _where(moved, step.end_rate[1], rate[1]))
            for i in accepted:
                samples[i].accept(ratios[i], self.span, self.steps)
            for i in moved:
                samples[i].tau = samples[i].end
        begun = [i for i, sample in enumerate(samples) if sample.stats.steps]
        return _where(begun, x, start[0]), _where(begun, y, start[1])

    def _start(self, samples: list[Sample], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Pair]:
        """(x, y, their rate), with the first step sizes set. A sample whose rate is not finite has failed; its row becomes
        that of another."""
        rates, everyone = self.gradient.wrap(self.problem.rates, self.problem.system), range(len(samples))
        tau = _column([0.0] * len(samples), x)
        rate = rates(tau, x, y)
        good = all_finite(*rate, -1) & all_finite(x, y, -1)
        finite = [i for i, ok in zip(everyone, good.tolist(), strict=True) if ok]
        for i in set(everyone) - set(finite):
            samples[i].fail(Status.NON_FINITE)
        if finite and len(finite) < len(samples):
            x, y = (_where(finite, state, state.detach()[finite[0]].expand_as(state)) for state in (x, y))
            rate = rates(tau, x, y)
        guesses = self._guesses(x, y, rate) if self.steps.first_step is None else [self.steps.first_step] * len(samples)
        for sample, guess in zip(samples, guesses, strict=True):
            sample.size = min(max(guess, self.steps.min_step), self.steps.max_step)
        return x, y, rate

    @torch.no_grad()
    def _guesses(self, x: Tensor, y: Tensor, rate: Pair) -> list[float]:
        """First step sizes, as `stepping.initial_step` guesses them."""
        scale_x, scale_y = tolerance(self.steps, x), tolerance(self.steps, y)

        def norms(fast: Tensor, slow: Tensor) -> Tensor:
            return torch.maximum(scaled_norm(fast, scale_x, -1), scaled_norm(slow, scale_y, -1)).expand(len(x))

        d0, d1 = torch.stack([norms(x, y), norms(*rate)]).tolist()
        h0 = [trial_step(a, b, abs(self.span)) for a, b in zip(d0, d1, strict=True)]
        h = _column([math.copysign(value, self.span) for value in h0], x)
        ahead = self.problem.rates(h, advance(x, h, (1.0,), [rate[0]]), advance(y, h, (1.0,), [rate[1]]))
        changes = norms(ahead[0] - rate[0], ahead[1] - rate[1]).tolist()
        return [guessed_step(a, b, c / a, self.method.order) for a, b, c in zip(h0, d1, changes, strict=True)]

    def _propose(self, samples: list[Sample]) -> list[int]:
        """The samples that take a step."""
        for sample in samples:
            if sample.running:
                sample.propose(self.span, self.max_steps)
        return [i for i, sample in enumerate(samples) if sample.running]

    def _goes_on(self, sample: Sample) -> bool:
        """Whether the rate at the end of the sample's step will be wanted: by a next step, or to interpolate."""
        if sample.end != self.span:
            return True
        return sample.saved < len(self.save_taus) and self.save_taus[sample.saved] != self.span

    def _attempt(self, rows: list[int], samples: list[Sample], x: Tensor, y: Tensor, rate: Pair) -> Step:
        """One step of each of `rows`, with the rate at the end where a sample wants it; steps of length 0 of the others."""
        stepping = set(rows)
        step = self.gradient.wrap(self.method.step, self.problem.system)(
            self.problem,
            _column([sample.tau for sample in samples], x),
            _column([sample.h if i in stepping else 0.0 for i, sample in enumerate(samples)], x),
            _where(rows, x, x.detach()),
            _where(rows, y, y.detach()),
            (_where(rows, rate[0], rate[0].detach()), _where(rows, rate[1], rate[1].detach())),
        )
        going = {i for i in rows if self._goes_on(samples[i])}
        if step.end_rate is None and going:
            ends = _column([sample.end if i in going else sample.tau for i, sample in enumerate(samples)], x)
            rates = self.gradient.wrap(self.problem.rates, self.problem.system)
            step.end_rate = rates(ends, _where(going, step.x, x.detach()), _where(going, step.y, y.detach()))
        return step

    @torch.no_grad()
    def _ratios(self, step: Step, x: Tensor, y: Tensor, going: set[int]) -> list[float]:
        """Estimated error over tolerance of each sample, infinite also where the rate at the end is wanted and not finite."""
        ratios = error_ratios(step, x, y, self.steps, -1)
        if step.end_rate is not None:
            stuck = ~all_finite(*step.end_rate, -1) & _mask(going, x)[:, 0]
            ratios = torch.where(stuck, math.inf, ratios)
        return ratios.tolist()

    def _save(
        self, accepted: list[int], samples: list[Sample], saves: Saves, start: Pair, step: Step, rate: Pair
    ) -> None:
        """Notes the states at the save times that the accepted steps reach."""
        sign = math.copysign(1.0, self.span)
        at_end: list[tuple[int, int]] = []
        between: list[tuple[int, int]] = []
        for i in accepted:
            sample = samples[i]
            while sample.saved < len(self.save_taus) and sign * (self.save_taus[sample.saved] - sample.end) <= 0:
                (at_end if self.save_taus[sample.saved] == sample.end else between).append((sample.saved, i))
                sample.saved += 1
            if sample.end == self.span:
                at_end.append((len(self.save_taus), i))
        if at_end:
            rows = [i for _, i in at_end]
            saves.add(at_end, step.x[rows], step.y[rows])
        if between:
            assert step.end_rate is not None
            rows = [i for _, i in between]
            lengths = [samples[i].end - samples[i].tau for i in rows]
            fractions = [(self.save_taus[k] - samples[i].tau) / h for (k, i), h in zip(between, lengths, strict=True)]
            theta, h = _column(fractions, step.x), _column(lengths, step.x)
            x, y = (
                hermite(theta, h, *(state[rows] for state in part))
                for part in zip(start, (step.x, step.y), rate, step.end_rate, strict=True)
            )
            saves.add(between, x, y)


def _column(values: list[float], like: Tensor) -> Tensor:
    """(B, 1), float64."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _mask(rows: Collection[int], like: Tensor) -> Tensor:
    """(B, 1), true in the given rows."""
    chosen = set(rows)
    return torch.tensor([[i in chosen] for i in range(len(like))], device=like.device)


def _where(rows: Collection[int], new: Tensor, old: Tensor) -> Tensor:
    """`new` in the given rows, `old` in the others. Also where those are all: a gradient's sums then have one order, whatever
    the mates do."""
    return torch.where(_mask(rows, old), new, old)


def _is_finite(step: Step, row: int, with_rate: bool) -> bool:
    pairs = [(step.x, step.y), step.error, step.end_rate if with_rate else None]
    return all(bool(all_finite(pair[0][row], pair[1][row])) for pair in pairs if pair is not None)


def _nans(state: Tensor, count: int) -> Tensor:
    return state.new_full((count, *state.shape), math.nan)
