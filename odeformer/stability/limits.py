"""Up to which step explicit methods settle and stay bounded: predicted by stability polynomials, measured by long runs.

Symbols: mu an eigenvalue of J = df/dx, lambda the leak, kappa the relaxation, ds a step in slow time, h = ds / eps the same step
in fast time, R the stability polynomial of a method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solvers import AdaptiveSteps, Dopri5, FastSlowSystem, FixedSteps, Method, integrate, solve
from solvers.explicit import ExplicitRungeKutta

Lanes = Callable[[int], FastSlowSystem]
"""Makes the (autonomous) system whose states hold that many independent runs along their first dimension."""
FAR = 1000.0
"""A run is called unbounded when it gets that many times as large as the flow."""


def stability_polynomial(method: Method) -> np.ndarray:
    """Coefficients r_0, r_1, ... of R(z) = 1 + z b^T (I - z A)^-1 1: one step multiplies exp's mode mu by R(h mu).

    Raises TypeError for a method that is not an explicit Runge-Kutta method.
    """
    if not isinstance(method, ExplicitRungeKutta):
        raise TypeError(f"only explicit Runge-Kutta methods have a stability polynomial here, got {method!r}")
    weights = np.array(method.tableau.weights)
    stages = len(weights)
    matrix = np.zeros((stages, stages))
    for index, row in enumerate(method.tableau.coefficients, start=1):
        matrix[index, : len(row)] = row
    vector, coefficients = np.ones(stages), [1.0]
    for _ in range(stages):
        coefficients.append(float(weights @ vector))
        vector = matrix @ vector
    return np.array(coefficients)


def stability_limit(method: Method, eigenvalue: complex = -1.0) -> float:
    """The largest h with |R(h' mu)| <= 1 for all 0 <= h' <= h, for the eigenvalue mu.

    For mu = -1 the length of the real stability interval: Euler 2, Heun 2, RK4 2.785, dopri5 3.307. 0 where the mode grows at
    every step size, inf for mu = 0.
    """
    if eigenvalue == 0:
        return math.inf
    coefficients = stability_polynomial(method)[::-1]
    ray = eigenvalue / abs(eigenvalue)

    def grows(length: float) -> bool:
        return bool(abs(np.polyval(coefficients, length * ray)) > 1 + 1e-12)

    lengths = np.linspace(0, 50, 5001)[1:]
    first = next((float(length) for length in lengths if grows(length)), math.inf)
    low, high = first - lengths[0], first
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if grows(middle) else (middle, high)
    return 0.0 if low < 1e-5 else round(float(low), 10) / abs(eigenvalue)  # imaginary mu: growth shows late


@dataclass(frozen=True)
class Rest:
    """Where the flow of a system comes to rest, as far as it does. States keep the shape they were started with."""

    x: Tensor
    y: Tensor
    size: float
    """Largest root mean square of x on the way; `slow_size` of y."""
    slow_size: float
    fast_time: float
    """Integrated so far."""
    speed: float
    """|f| / |x| at the end, per fast time."""
    settled: bool


@torch.no_grad()
def settle(system: FastSlowSystem, x: Tensor, y: Tensor, *, rate: float, attempts: int = 8) -> Rest:
    """Follows the flow, well resolved (Dormand-Prince, rtol 1e-7), until |f| <= 1e-4 rate |x|.

    Args:
        rate: expected slowest rate in 1 / fast time, such as the leak; up to `attempts` times 20 / rate are integrated, fewer
            where the speed has stopped falling, as on a limit cycle.
    """
    span, fast_time, speed = 20.0 / rate, 0.0, math.inf
    size, slow_size = _rms(x), _rms(y)
    epsilon = float(system.epsilon)
    for _ in range(attempts):
        times = [epsilon * span * k / 20 for k in range(1, 21)]
        steps = AdaptiveSteps(1e-7, 1e-9)
        found = solve(system, x, y, t1=times[-1], method=Dopri5(), steps=steps, save_at=times, raise_on_failure=False)
        if len(found.ts) < len(times):
            return Rest(x, y, size, slow_size, fast_time, speed, False)
        x, y, fast_time = found.xs[-1], found.ys[-1], fast_time + span
        size = max(size, *(_rms(state) for state in found.xs))
        slow_size = max(slow_size, *(_rms(state) for state in found.ys))
        before, speed = speed, _rms(system.fast(0.0, x, y)) / max(_rms(x), 1e-300)
        if speed <= 1e-4 * rate:
            return Rest(x, y, size, slow_size, fast_time, speed, True)
        if fast_time > 1.5 * span and speed > 0.3 * before:
            break
    return Rest(x, y, size, slow_size, fast_time, speed, False)


class _SideBySide(FastSlowSystem):
    """Independent runs along the first dimension; a unit step is a step of fast time `lengths[i]` at `epsilons[i]` in run i."""

    def __init__(self, system: FastSlowSystem, x: Tensor, y: Tensor, lengths: Tensor, epsilons: Tensor) -> None:
        super().__init__()
        self.system = system
        self.fast_length = lengths.to(x).reshape(-1, *[1] * (x.dim() - 1))
        self.slow_length = (lengths * epsilons).to(y).reshape(-1, *[1] * (y.dim() - 1))

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.fast_length * self.system.fast(t, x, y)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.slow_length * self.system.slow(t, x, y)


@torch.no_grad()
def long_runs(
    lanes: Lanes,
    rest: Rest,
    push: Tensor,
    method: Method,
    lengths: Sequence[float],
    epsilons: Sequence[float],
    *,
    steps: int = 200,
    most: int = 96,
) -> list[tuple[bool, bool]]:
    """(settles, bounded) of runs of `steps` equal steps that start beside the state of rest, at x + push.

    Settles: x ends no farther from rest than it started. Bounded: x and y stay finite and below `FAR` times the largest they
    are on the way to rest. (Euler's bound is h max|n_f| / (2 - h lambda) for f = -lambda x + n_f: close to the limit it is
    large without being infinite, so that a small factor would find the limit too early.)

    Args:
        push: of x's shape (1, ...), small.
        lengths, epsilons: of each run: its step in fast time, and its epsilon.
        most: runs computed at once.
    """
    outcomes: list[tuple[bool, bool]] = []
    for first in range(0, len(lengths), most):
        h, eps = (torch.tensor(values[first : first + most], dtype=torch.float64) for values in (lengths, epsilons))
        home = rest.x.expand(len(h), *rest.x.shape[1:])
        x, y = (home + push).contiguous(), rest.y.expand(len(h), *rest.y.shape[1:]).contiguous()
        bounded = torch.ones(len(h), dtype=torch.bool, device=x.device)
        distance = torch.full((len(h),), math.inf, dtype=x.dtype, device=x.device)
        running = torch.arange(len(h), device=x.device)
        for step in range(steps):
            if step % 10 == 0:  # runs that have left are dropped now and then: new shapes cost time
                kept = bounded[running]
                x, y, running = x[kept], y[kept], running[kept]
                if not len(running):
                    break
                system = _SideBySide(lanes(len(running)), x, y, h[running.cpu()], eps[running.cpu()])
            x, y = integrate(system, x, y, span=1.0, method=method, steps=FixedSteps(1))
            bounded[running] &= (_sizes(x) <= FAR * rest.size) & (_sizes(y) <= FAR * rest.slow_size)
        distance[running] = (x - home[: len(x)]).flatten(1).norm(dim=1)
        settles = bounded & (distance <= push.flatten().norm())
        outcomes += zip(settles.tolist(), bounded.tolist(), strict=True)
    return outcomes


@dataclass(frozen=True)
class Limit:
    """The largest step of one method at one epsilon, measured and predicted. Steps are in slow time."""

    method: str
    epsilon: float
    settles: float | None
    """Measured; None where the search range does not hold it."""
    bounded: float | None
    predicted_settles: float
    """eps times the method's stability limit at the eigenvalue mu of J; for Euler 2 eps / |mu|."""
    predicted_bounded: float
    """The smaller of eps c / lambda and c / kappa, with c the method's real stability interval; for Euler 2 eps / lambda."""
    cells: list[dict[str, Any]]
    """The coarse grid: step, settles, bounded."""


def explicit_limits(
    lanes: Lanes,
    rest: Rest,
    push: Tensor,
    *,
    eigenvalues: Sequence[complex],
    decay: float,
    slow_decay: float = 0.0,
    methods: Sequence[Method],
    epsilons: Sequence[float],
    steps: int = 200,
    rounds: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Limit]:
    """Measures, for each method and epsilon, up to which step long runs settle and up to which they stay bounded.

    A logarithmic grid of ratio sqrt(2) from a quarter of the smallest predicted limit to twice the largest one, then
    `rounds` times each bracket is cut in seven (5 %, then 0.7 % wide).

    Args:
        eigenvalues: of J at rest, those that may bind; the prediction is the smallest of their limits.
        decay, slow_decay: lambda > 0 and kappa >= 0 (0: y's own limit is not predicted).
    """
    limits: list[Limit] = []
    for method in methods:
        near = min(stability_limit(method, mu) for mu in eigenvalues)
        far, slow = stability_limit(method, -decay), stability_limit(method, -slow_decay)
        low = min(near, far, slow / max(epsilons)) / 4 or far / 64
        grid = low * np.sqrt(2.0) ** np.arange(math.ceil(2 * math.log2(2 * max(near, far) / low)) + 1)
        runs = list(itertools.product(epsilons, grid.tolist()))
        progress(f"{type(method).__name__}: {len(runs)} long runs")
        outcomes = long_runs(lanes, rest, push, method, [h for _, h in runs], [e for e, _ in runs], steps=steps)
        cells = dict(zip(runs, outcomes, strict=True))
        # One bracket for each epsilon and each of the two questions: the last step before the first failure, and that failure.
        brackets = {
            (epsilon, question): _bracket(grid.tolist(), [cells[epsilon, h][question] for h in grid.tolist()])
            for epsilon in epsilons
            for question in (0, 1)
        }
        for _ in range(rounds):
            inner = {key: np.geomspace(*bracket, 8).tolist() for key, bracket in brackets.items() if bracket}
            flat = [(key, h) for key, points in inner.items() for h in points[1:-1]]
            found = long_runs(lanes, rest, push, method, [h for _, h in flat], [k[0] for k, _ in flat], steps=steps)
            answers = {(key, h): pair[key[1]] for (key, h), pair in zip(flat, found, strict=True)}
            for key, points in inner.items():
                brackets[key] = _bracket(points, [True, *(answers[key, h] for h in points[1:-1]), False])
        for epsilon in epsilons:
            settles, bounded = (
                None if bracket is None else epsilon * math.sqrt(bracket[0] * bracket[1])
                for bracket in (brackets[epsilon, 0], brackets[epsilon, 1])
            )
            rows = [
                {"step": epsilon * h, "settles": cells[epsilon, h][0], "bounded": cells[epsilon, h][1]}
                for h in grid.tolist()
            ]
            name = type(method).__name__
            limits.append(Limit(name, epsilon, settles, bounded, epsilon * near, min(epsilon * far, slow), rows))
    return limits


def _bracket(points: Sequence[float], holds: Sequence[bool]) -> tuple[float, float] | None:
    """The last point before the first failure, and that failure; None where the first point fails or none does."""
    first = next((index for index, good in enumerate(holds) if not good), 0)
    return (points[first - 1], points[first]) if first else None


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _sizes(x: Tensor) -> Tensor:
    """Root mean square of each run; 0 where a state is empty. Not-a-number is never below any bound."""
    flat = x.flatten(1)
    return flat.square().mean(1).sqrt() if flat.shape[1] else flat.new_zeros(len(flat))
