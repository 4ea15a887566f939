"""The Runge-Kutta-Chebyshev method: explicit, with an interval of stability on the negative real axis that grows like stages^2.

For a rate whose Jacobian has its eigenvalues near that axis (decay, diffusion) the cost of a step of length h is
about sqrt(1.5 h rho) evaluations, rho the spectral radius, where a classical explicit method needs O(h rho).

Symbols, as in Sommeijer, Shampine & Verwer, J. Comput. Appl. Math. 88 (1998) 315: s stages, T_j the Chebyshev polynomials,
w0 = 1 + damping / s^2, w1 = T_s'(w0) / T_s''(w0), b_j = T_j''(w0) / T_j'(w0)^2, a_j = 1 - b_j T_j(w0); F_j the rate at stage Y_j.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.method import Method, Pair, Past, SpectralRadius, Step
from solvers.system import FastTimeProblem

DAMPING = 2 / 13
SAFETY = 1.2
"""The estimate of a spectral radius is from below."""
RENEWAL = 25
"""Accepted steps for which an estimate is kept."""
MAX_ITERATIONS = 50
MAX_STAGES = 10_000


def stability_interval(stages: int) -> float:
    """beta, where |P_s(z)| <= 1 for z in [-beta, 0]: 2/3 (s^2 - 1) (1 - 2/15 damping). Raises for `stages` < 2."""
    _check_stages(stages)
    return 2 / 3 * (stages**2 - 1) * (1 - 2 / 15 * DAMPING)


class RKC2(Method):
    """The second-order Runge-Kutta-Chebyshev method: `stages` evaluations a step, stable for h rho <= stability_interval(stages).

    Stage j is Y_j = Y_0 + c_j h F_0 + E_j with E_j = mu_j E_{j-1} + nu_j E_{j-2} + mu~_j h (F_{j-1} - F_0), which is the paper's
    recurrence (2.2) in differences: its gamma~_j is what c_j = mu_j c_{j-1} + nu_j c_{j-2} + mu~_j + gamma~_j makes it.
    The error estimate is the paper's, (2.8); it is of order h^3.

    Args:
        stages: at least 2. None: as few as are stable, by an estimate of the spectral radius of the whole Jacobian in fast time
            (a power method on differences of the rate) that is renewed every 25 steps and after a rejection. It reads the host
            once an iteration. The number of stages is not differentiated; it is one for the whole state, so that within the error
            a sequence's result depends on its batch mates, and a token's on later tokens.

    A step that needs more than 10 000 stages is not taken: its state is nan, to which error control answers with shorter steps.
    Eigenvalues far from the negative real axis limit the step further: error control sees to that, equal steps do not.
    """

    order = 2
    error_order = 2
    first_same_as_last = True

    def __init__(self, stages: int | None = None) -> None:
        if stages is not None:
            _check_stages(stages)
        self.stages = stages

    @property
    def multistep(self) -> bool:  # type: ignore[override]
        """Whether an estimate goes from step to step."""
        return self.stages is None

    @property
    def reads_host(self) -> bool:  # type: ignore[override]
        return self.stages is None

    def after_rejection(self, past: Past | None) -> Past | None:
        """Demands a new estimate."""
        if past is None or past.radius is None:
            return past
        return past._replace(radius=past.radius._replace(age=RENEWAL))

    def step(
        self,
        problem: FastTimeProblem,
        tau: float,
        h: float,
        x: Tensor,
        y: Tensor,
        rate: Pair | None = None,
        past: Past | None = None,
    ) -> Step:
        first = problem.rates(tau, x, y) if rate is None else rate
        stages, past_end = self.stages, None
        if stages is None:
            radius = spectral_radius(problem, tau, (x, y), first, past.radius if past else None)
            past_end, needed = Past(radius=radius), _stages_needed(abs(h) * radius.value)
            if needed > MAX_STAGES:
                lost = (x * math.nan, y * math.nan)
                return Step(*lost, lost, past=past_end)
            stages = int(needed)
        moves = (h * first[0], h * first[1])
        c, rows = coefficients(stages)
        older = change = (torch.zeros_like(x), torch.zeros_like(y))  # E_{j-2}, E_{j-1}
        x_stage, y_stage = x + c * moves[0], y + c * moves[1]
        for row in rows:
            found = problem.rates(tau + c * h, x_stage, y_stage)
            new_x, new_y = (
                (row.mu * e).add(e_before, alpha=row.nu).add(r - f, alpha=row.mu_tilde * h)
                for e, e_before, r, f in zip(change, older, found, first, strict=True)
            )
            older, change, c = change, (new_x, new_y), row.c
            x_stage, y_stage = x + (c * moves[0] + new_x), y + (c * moves[1] + new_y)
        end_rate = problem.rates(tau + h, x_stage, y_stage)
        error_x, error_y = (
            (0.8 * (start - end)).add(f + f_end, alpha=0.4 * h)
            for start, end, f, f_end in zip((x, y), (x_stage, y_stage), first, end_rate, strict=True)
        )
        return Step(x_stage, y_stage, (error_x, error_y), end_rate, past_end)


class Row(NamedTuple):
    """The coefficients of one stage."""

    mu: float
    nu: float
    mu_tilde: float
    c: float


def coefficients(stages: int) -> tuple[float, tuple[Row, ...]]:
    """c_1, and the rows of the stages 2 .. s: equations (2.3) to (2.6) of the paper, with b_0 = b_1 = b_2."""
    w0 = 1 + DAMPING / stages**2
    T, T1, T2 = [1.0, w0], [0.0, 1.0], [0.0, 0.0]  # T_j(w0) and its first two derivatives
    for _ in range(2, stages + 1):
        T2.append(4 * T1[-1] + 2 * w0 * T2[-1] - T2[-2])
        T1.append(2 * T[-1] + 2 * w0 * T1[-1] - T1[-2])
        T.append(2 * w0 * T[-1] - T[-2])
    w1 = T1[-1] / T2[-1]
    b = [T2[j] / T1[j] ** 2 for j in range(2, stages + 1)]
    b = [b[0], b[0], *b]
    rows = [
        Row(2 * w0 * b[j] / b[j - 1], -b[j] / b[j - 2], 2 * w1 * b[j] / b[j - 1], w1 * T2[j] / T1[j])
        for j in range(2, stages + 1)
    ]
    rows[-1] = rows[-1]._replace(c=1.0)  # free of round-off
    return w1 * b[1], tuple(rows)


@torch.no_grad()
def spectral_radius(
    problem: FastTimeProblem, tau: float, state: Pair, rate: Pair, known: SpectralRadius | None = None
) -> SpectralRadius:
    """The spectral radius of the Jacobian of (f, eps g) at the state, where the rate is given, times 1.2.

    Power iterations v <- F(state + v) - F(state), v held at a length of sqrt(round-off), x and y each in units of its own
    norm, until the growth changes by less than 1 %; without convergence, after 50, the largest growth seen. `known` is
    returned where it is not yet due, and starts the iteration where it is.
    """
    if known is not None and known.age < RENEWAL:
        return known._replace(age=known.age + 1)
    units = [_unit(part) for part in state]

    def length(v: Pair) -> Tensor:
        return torch.hypot(v[0].norm() / units[0], v[1].norm() / units[1])

    v = _random(state) if known is None else known.vector
    growth, largest = 0.0, 0.0
    for _ in range(MAX_ITERATIONS):
        size = length(v)
        v = v[0] / size, v[1] / size
        ahead = problem.rates(tau, state[0] + v[0], state[1] + v[1])
        image = ahead[0] - rate[0], ahead[1] - rate[1]
        before, growth = growth, float(length(image))
        largest = max(largest, growth)
        if growth == 0 or not math.isfinite(growth):
            return SpectralRadius(growth, v)
        if abs(growth - before) <= 0.01 * growth:
            return SpectralRadius(SAFETY * growth, image)
        v = image
    return SpectralRadius(SAFETY * largest, v)


def _unit(part: Tensor) -> Tensor:
    norm = part.norm()
    return math.sqrt(torch.finfo(part.dtype).eps) * torch.where(norm == 0, 1, norm)


def _random(state: Pair) -> Pair:
    """Reproducible, with a share of every eigenvector. (The rate itself may be an eigenvector, and of another eigenvalue.)"""
    generator = torch.Generator(state[0].device).manual_seed(0)
    x, y = (torch.randn(s.shape, dtype=s.dtype, device=s.device, generator=generator) for s in state)
    return x, y


def _stages_needed(z: float) -> float:
    """The fewest stages, at least 2, with z <= stability_interval(stages); infinite where z is not finite."""
    if not math.isfinite(z):
        return math.inf
    return max(2, math.ceil(math.sqrt(1 + z / (stability_interval(2) / 3))))


def _check_stages(stages: int) -> None:
    if not isinstance(stages, int) or isinstance(stages, bool):
        raise TypeError(f"stages must be an int, got {stages!r}")
    if stages < 2:
        raise ValueError(f"stages must be at least 2, got {stages}")
