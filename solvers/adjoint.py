"""The continuous adjoint, integrated backwards along the stored forward states.

With z = (x, y), dz/dtau = F(tau, z; theta) and J = dF/dz, the adjoint a = dL/dz obeys da/dtau = -J^T a and the gradient of
theta is the integral of (dF/dtheta)^T a (Pontryagin; Chen et al., arXiv:1806.07366, appendix B). In s = tau_end - tau the
equation is da/ds = J^T a: it contracts where the forward one does, and its diagonal linear part is that of F, so a method for
the stiff forward problem is one for this. The states are not integrated again backwards, where a contraction is an explosion
(mathematics, section 7), but interpolated between those that are stored (cubic Hermite).

State of the backward solve: X = (a_x, A_x) and Y = (a_y, A_y), each stacked, with A the integral of a: error control then
resolves the layer in which a decays after each saved time, which the quadrature of theta needs. Over a step of length h that
is Simpson's rule with the middle weight such that it is exact for constant dF/dtheta:
q_0 a_0 + q_m (Delta A - h (a_0 + a_1) / 6) + q_1 a_1, q = (dF/dtheta)^T, with h / 6 in the outer terms.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from solvers.closure import Attached, Closure
from solvers.gradients import Backprop, Gradient, R
from solvers.method import Method, Pair, Step
from solvers.solution import Solution, SolveError, Stats, Status, failure_message
from solvers.stepping import AdaptiveSteps, FixedSteps, March, Mesh, Steps, Trajectory, hermite
from solvers.system import FastTimeProblem, Part


class StoredAdjoint(Gradient):
    """The adjoint equation by the method of the forward solve, along its stored states; activations of one evaluation at a time.

    Its gradient is that of the differential equation, not of the steps taken: it converges to it with the order of the
    method, up to 4. No second derivatives. A failure in the backward pass raises `SolveError` there. Reads the host once a
    backward pass with given steps, and once per attempted step under error control.

    Args:
        steps: of the backward pass. None: the forward mesh reversed where it is of equal steps, else the forward tolerances,
            applied to the adjoint divided by its largest entry. `FixedSteps(n)` are n equal steps over the span, broken
            at the saved times; step bounds of `AdaptiveSteps` are fast times.

    Raises TypeError for other steps.
    """

    def __init__(self, steps: Steps | None = None) -> None:
        if steps is not None and not isinstance(steps, FixedSteps | AdaptiveSteps):
            raise TypeError(f"steps must be None, FixedSteps(n) or AdaptiveSteps(rtol, atol), got {steps!r}")
        self.steps = steps

    def check(self, method: Method, steps: Steps) -> None:
        if method.constrains or method.splits:
            cause = "has no adjoint on the manifold" if method.constrains else "needs parts, which the adjoint has not"
            raise ValueError(f"{method!r} {cause}: {self!r} does not fit; use Checkpointed() or Backprop()")
        for name, given in (("steps", steps), ("the adjoint's steps", self.steps)):
            if getattr(given, "per_sample", False):
                raise ValueError(f"{self!r} integrates the whole batch on one mesh, got {name} {given!r}")
        if isinstance(self.steps, AdaptiveSteps) and method.error_order is None:
            raise ValueError(
                f"{method!r} has no error estimate, so the adjoint's steps must be FixedSteps(n), got {self!r}"
            )

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        return step

    def run(self, march: March, x: Tensor, y: Tensor) -> Trajectory:
        if march.span == 0 or not torch.is_grad_enabled():
            return march.run(x, y)
        return self._run(replace(march, gradient=Backprop()), x, y)

    @torch.compiler.disable
    def _run(self, march: March, x: Tensor, y: Tensor) -> Trajectory:
        closure, taus, states, rates = Closure(march.problem.system, x.device), [0.0], [(x.detach(), y.detach())], {}

        def store(trajectory: Trajectory, h: float, tau_end: float, step: Step, rate: Pair | None) -> None:
            if step.end_rate is not None:
                rates[len(taus)] = step.end_rate
            taus.append(tau_end)
            states.append((step.x, step.y))

        with closure.watched():
            trajectory = replace(march, observer=store).run(*states[0])
        inputs = (x, y)
        sources = {id(t): t for t in inputs if t.requires_grad} | closure.sources
        if not sources:
            return trajectory
        problem, known = replace(march.problem, counting=False), list(rates)
        output_taus = [taus[-1], *march.save_taus[: len(trajectory.saved)]]
        outputs = [(trajectory.x, trajectory.y), *trajectory.saved]

        def pullback(cotangents: Sequence[Tensor | None], stored: Sequence[Tensor]) -> list[Tensor | None]:
            pairs = list(zip(stored[::2], stored[1::2], strict=True))
            path = Path(problem, taus, pairs[: len(taus)], dict(zip(known, pairs[len(taus) :], strict=True)), closure)
            backward = _Backward(replace(march, problem=problem), self, path, closure)
            given = list(zip(output_taus, cotangents[::2], cotangents[1::2], strict=True))
            start, found = closure.call(lambda: backward.run(given))
            totals: list[Tensor | None] = []
            for key in sources:
                terms = [a for t, a in zip(inputs, start, strict=True) if id(t) == key]
                terms += [found[key]] if key in found else []
                totals.append(sum(terms[1:], terms[0]) if terms else None)
            return totals

        stored = [part for pair in (*states, *rates.values()) for part in pair]
        flat = [part for pair in outputs for part in pair]
        attached = iter(Attached.apply(repr(self), pullback, flat, stored, *sources.values()))
        (trajectory.x, trajectory.y), *trajectory.saved = [(next(attached), next(attached)) for _ in outputs]
        return trajectory


@dataclass
class Path:
    """The stored solution as a function of fast time: states at the mesh, and rates where they are known."""

    problem: FastTimeProblem
    taus: list[float]
    states: list[Pair]
    rates: dict[int, Pair]
    closure: Closure

    def at(self, tau: float) -> Pair:
        """(x, y)."""
        direction = math.copysign(1.0, self.taus[-1])
        k = bisect_right(self.taus, direction * tau, key=lambda t: direction * t) - 1
        k = min(max(k, 0), len(self.taus) - 2)
        h = self.taus[k + 1] - self.taus[k]
        theta = (tau - self.taus[k]) / h
        for node, end in ((k, 0.0), (k + 1, 1.0)):
            if abs(theta - end) < 1e-9:
                return self.states[node]
        ends = zip(self.states[k], self.states[k + 1], self._rate(k, k), self._rate(k + 1, k), strict=True)
        x, y = (hermite(theta, h, *of_part) for of_part in ends)
        return x, y

    def _rate(self, node: int, interval: int) -> Pair:
        """At a mesh point; what had to be evaluated for other intervals is forgotten."""
        if node in self.rates:
            return self.rates[node]
        self._evaluated = {n: r for n, r in getattr(self, "_evaluated", {}).items() if n in (interval, interval + 1)}
        if node not in self._evaluated:
            with torch.no_grad(), self.closure.standing_in():
                self._evaluated[node] = self.problem.rates(self.taus[node], *self.states[node])
        return self._evaluated[node]


@dataclass
class AdjointProblem(FastTimeProblem):
    """dX/ds, dY/ds as rates in "fast time" s."""

    path: Path | None = None
    closure: Closure | None = None
    tau_end: float = 0.0
    """tau at s = 0."""

    def rates(self, tau: float, x: Tensor, y: Tensor) -> Pair:  # type: ignore[override]
        by_x, by_y = self.products(tau, x[0], y[0], parameters=False)[0]
        return torch.stack([by_x, x[0]]), torch.stack([by_y, y[0]])

    def fast(self, tau: float, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.rates(tau, x, y)[0]

    def slow(self, tau: float, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.rates(tau, x, y)[1]

    def decays(self) -> tuple[float | Tensor, float | Tensor]:
        """Those of F for a, none for A."""
        assert self.path is not None
        decays, state = self.path.problem.decays(), self.path.states[0]
        return _stacked(decays[0], state[0]), _stacked(decays[1], state[1])

    def part_rates(self) -> list[Part]:
        raise NotImplementedError("the adjoint equation has no parts")

    def products(self, s: float, a_x: Tensor, a_y: Tensor, *, parameters: bool) -> tuple[Pair, dict[int, Tensor]]:
        """J^T a and, with `parameters`, (dF/dtheta)^T a by the id of theta; Stats count the evaluation."""
        assert self.path is not None and self.closure is not None
        self.stats.fast_evaluations += 1
        self.stats.slow_evaluations += 1
        tau = self.tau_end - s
        x, y = (part.detach().requires_grad_() for part in self.path.at(tau))
        with torch.enable_grad(), self.closure.standing_in():
            rates = self.path.problem.rates(tau, x, y)
        outputs = [(rate, a) for rate, a in zip(rates, (a_x, a_y), strict=True) if rate.requires_grad]
        stand_ins = self.closure.stand_ins if parameters else {}
        wanted = [x, y, *stand_ins.values()]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if outputs:
            found = torch.autograd.grad(
                [rate for rate, _ in outputs],
                wanted,
                [a for _, a in outputs],
                allow_unused=True,
                create_graph=torch.is_grad_enabled() and (a_x.requires_grad or a_y.requires_grad),
            )
        by_x, by_y, *others = found
        return (
            (torch.zeros_like(x) if by_x is None else by_x, torch.zeros_like(y) if by_y is None else by_y),
            {key: g for key, g in zip(stand_ins, others, strict=True) if g is not None},
        )


def _stacked(decay: float | Tensor, state: Tensor) -> float | Tensor:
    if not isinstance(decay, Tensor) and decay == 0:
        return 0.0
    decay = torch.as_tensor(decay, dtype=state.real.dtype, device=state.device).detach().expand(state.shape)
    return torch.stack([decay, torch.zeros_like(decay)])


@dataclass
class _Backward:
    """The backward pass of one solve, from saved time to saved time."""

    march: March
    gradient: StoredAdjoint
    path: Path
    closure: Closure
    sums: dict[int, Tensor] = field(default_factory=dict)

    def run(self, given: list[tuple[float, Tensor | None, Tensor | None]]) -> tuple[Pair, dict[int, Tensor]]:
        """(a at tau = 0, gradients by id) from (tau, cotangent of x, of y)."""
        a = [torch.zeros_like(part) for part in self.path.states[0]]
        cotangents = [c for _, *pair in given for c in pair if c is not None and c.numel()]
        if not cotangents:
            return (a[0], a[1]), {}
        size = torch.stack([c.abs().max().to(a[0].real.dtype) for c in cotangents]).max()
        size = torch.where(size > 0, size, 1.0)
        taus = sorted({0.0, *(tau for tau, *_ in given)}, key=abs, reverse=True)
        finite: list[Tensor] = []
        stats = Stats()
        self._check_graph()
        for tau, tau_next in pairwise([*taus, 0.0]):
            for at, *pair in given:
                if at == tau:
                    a = [part if c is None else part + c / size for part, c in zip(a, pair, strict=True)]
            if tau_next != tau:
                a = self._segment(tau, tau_next, a, stats)
                finite.append(torch.isfinite(a[0]).all() & torch.isfinite(a[1]).all())
        if finite and not bool(torch.stack(finite).all()):
            first = int(torch.stack(finite).logical_not().nonzero()[0])
            self._fail(Status.NON_FINITE, taus[first], taus[first + 1], stats)
        return (a[0] * size, a[1] * size), {key: total * size for key, total in self.sums.items()}

    def _segment(self, tau: float, tau_next: float, a: list[Tensor], stats: Stats) -> list[Tensor]:
        shared = {f.name: getattr(self.march.problem, f.name) for f in fields(FastTimeProblem)} | {"stats": stats}
        problem = AdjointProblem(**shared, path=self.path, closure=self.closure, tau_end=tau)
        steps = self._steps(tau, tau_next)
        march = March(problem, self.march.method, steps, tau - tau_next, max_steps=self.march.max_steps)
        weights = {"start": 0.0}

        def integrate(trajectory: Trajectory, h: float, s_end: float, step: Step, rate: Pair | None) -> None:
            s, (x, y) = trajectory.tau, (trajectory.x, trajectory.y)
            h = s_end - s
            middle = [end[1] - start[1] - h / 6 * (start[0] + end[0]) for start, end in ((x, step.x), (y, step.y))]
            self._add(problem, s, x[0], y[0], weights["start"] + h / 6)
            self._add(problem, s + h / 2, middle[0], middle[1], 1.0)
            weights["start"] = h / 6

        if self.closure.stand_ins:
            march.observer = integrate
        start = [torch.stack([part, torch.zeros_like(part)]) for part in a]
        found = march.run(start[0], start[1])
        if found.status is not Status.SUCCESS:
            self._fail(found.status, tau - found.tau, None, stats, found.reason)
        if self.closure.stand_ins:
            self._add(problem, march.span, found.x[0], found.y[0], weights["start"])
        return [found.x[0], found.y[0]]

    def _add(self, problem: AdjointProblem, s: float, a_x: Tensor, a_y: Tensor, weight: float) -> None:
        for key, value in problem.products(s, a_x, a_y, parameters=True)[1].items():
            if key in self.sums:
                self.sums[key].add_(value, alpha=weight)
            else:
                self.sums[key] = weight * value

    def _steps(self, tau: float, tau_next: float) -> Mesh | AdaptiveSteps:
        steps = self.march.steps if self.gradient.steps is None else self.gradient.steps
        if isinstance(steps, AdaptiveSteps):
            return replace(steps, first_step=None) if self.gradient.steps is None else steps
        taus, span = self.path.taus, self.path.taus[-1]
        if self.gradient.steps is not None:
            assert isinstance(steps, FixedSteps)
            taus = [span * (i / steps.n) for i in range(steps.n + 1)]
        inner = [t for t in reversed(taus) if abs(tau_next) < abs(t) < abs(tau)]
        ends = [tau - t for t in (*inner, tau_next)]
        return Mesh([(end - start, end) for start, end in pairwise([0.0, *ends])])

    def _check_graph(self) -> None:
        x, y = (part.detach().requires_grad_() for part in self.path.states[-1])
        with torch.enable_grad(), self.closure.standing_in():
            rates = self.path.problem.rates(self.path.taus[-1], x, y)
        self.closure.check(rates, (x, y))

    def _fail(self, status: Status, tau: float, before: float | None, stats: Stats, reason: str = "") -> None:
        problem = self.march.problem
        t, by = (
            None if value is None else float(torch.as_tensor(problem.slow_time(value)).detach())
            for value in (tau, before)
        )
        where = f"at slow time t = {t:.6g}" if by is None else f"between slow times t = {by:.6g} and t = {t:.6g}"
        scheme = f"{self.gradient!r} by {self.march.method!r}"
        message = (
            f"in the backward pass, {failure_message(status, where, scheme, stats, reason)}; or use Checkpointed()"
        )
        x, y = (part.new_empty((0, *part.shape)) for part in self.path.states[0])
        raise SolveError(Solution(torch.empty(0, dtype=torch.float64, device=x.device), x, y, stats, status, message))
