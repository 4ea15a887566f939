"""Exponential Adams methods: n is the polynomial through its values at earlier steps, the diagonal linear parts are exact.

Two evaluations a step whatever the order, and a predictor that does not lag behind a slow manifold: where the steps are long
against epsilon, earlier values of n carry its drift forward. At decay 0 it is the Adams-Bashforth-Moulton pair in PECE mode.
Sources: Norsett, Lecture Notes in Math. 109 (1969) 214; Hochbruck & Ostermann, BIT 51 (2011) 889. Variable steps by divided
differences (Hairer, Norsett & Wanner, Solving ODEs I, section III.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from solvers.exponential import ETD3RK, Factor, added, phi_of, scaled
from solvers.method import Method, Pair, Past, Step
from solvers.system import FastTimeProblem


class ExponentialAdams(Method):
    """Predictor of order `order` - 1, corrector of order `order` (3 or 4), their difference as error estimate; two evaluations.

    The first step is ETD3RK's, the second of order 3. Raises ValueError for another order.
    """

    multistep = True

    def __init__(self, order: int = 4) -> None:
        if order not in (3, 4):
            raise ValueError(f"order must be 3 or 4, got {order!r}")
        self.order = order  # type: ignore[misc]

    @property
    def error_order(self) -> int:  # type: ignore[override]
        """Of the predictor."""
        return self.order - 1

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
        rates = problem.rates(tau, x, y) if rate is None else rate
        decays, past = problem.decays(), past or Past()
        n = (added(rates[0], decays[0], x), added(rates[1], decays[1], y))
        values = ((h, n), *past.values)[: self.order - 2]
        if not past.values:
            start = ETD3RK().step(problem, tau, h, x, y, rates)
            return Step(start.x, start.y, start.error, past=Past(values))
        parts = [
            Extrapolation.over(h, state, r, new, [(length, old[i]) for length, old in past.values], decay)
            for i, (state, r, new, decay) in enumerate(zip((x, y), rates, n, decays, strict=True))
        ]
        return self._correct(problem, tau + h, parts, values, past)

    def _correct(
        self,
        problem: FastTimeProblem,
        tau: float,
        parts: list[Extrapolation],
        values: tuple[tuple[float, Pair], ...],
        past: Past,
    ) -> Step:
        ahead = problem.rates(tau, parts[0].predicted, parts[1].predicted)
        errors = [part.correction(added(r, part.decay, part.predicted)) for part, r in zip(parts, ahead, strict=True)]
        x, y = parts[0].predicted + errors[0], parts[1].predicted + errors[1]
        return Step(x, y, (errors[0], errors[1]), problem.rates(tau, x, y), Past(values))


class AndersonAdams(ExponentialAdams):
    """ExponentialAdams whose corrector is iterated twice by Anderson acceleration, with secants kept from step to step.

    For fields whose n is stiff as well: the explicit corrector limits the step by n's Lipschitz constant, this one in most
    cases does not. Two evaluations a step, no host read. The mixing coefficients come from inner products: with `rows` over the
    last dimension alone, so that what is computed in one row (a token of one sequence) depends on no other row but through
    the field; without over the whole state, which is more accurate but, within the error, lets every entry depend on all.

    Args:
        order: 3 or 4.
        memory: secants kept, at least 1.
        rows: see above.

    Source: Anderson, J. ACM 12 (1965) 547, in the form of Walker & Ni, SIAM J. Numer. Anal. 49 (2011) 1715, section 2; keeping
    secants of n, from which those of the corrector follow for every step size, is ours.
    """

    def __init__(self, order: int = 3, memory: int = 4, rows: bool = False) -> None:
        super().__init__(order)
        if not isinstance(memory, int) or isinstance(memory, bool):
            raise TypeError(f"memory must be an int, got {memory!r}")
        if memory < 1:
            raise ValueError(f"memory must be at least 1, got {memory}")
        self.memory = memory
        self.rows = rows

    def _correct(
        self,
        problem: FastTimeProblem,
        tau: float,
        parts: list[Extrapolation],
        values: tuple[tuple[float, Pair], ...],
        past: Past,
    ) -> Step:
        secants, last = past.secants, past.last
        # Of the joint least squares, in which x and y weigh alike.
        scales = (1.0, 1.0) if self.rows else tuple(1 / _mean_square(part.predicted) for part in parts)
        state = (parts[0].predicted, parts[1].predicted)
        error: Pair | None = None
        for _ in range(2):
            rates = problem.rates(tau, *state)
            n = (added(rates[0], parts[0].decay, state[0]), added(rates[1], parts[1].decay, state[1]))
            if last is not None:
                secants = ((_difference(state, last[0]), _difference(n, last[1])), *secants)[: self.memory]
            last = (state, n)
            corrected = [part.predicted + part.correction(new) for part, new in zip(parts, n, strict=True)]
            residual = (corrected[0] - state[0], corrected[1] - state[1])
            error = residual if error is None else error  # secants may explain away what they don't know
            step = self._accelerated(residual, parts, secants, scales)
            state = (state[0] + step[0], state[1] + step[1])
        # n at the end is what makes it a fixed point of the corrector: an evaluation saved.
        n_end = [
            new + (end - back) / part.weight for new, end, back, part in zip(n, state, corrected, parts, strict=True)
        ]
        end_rate = (
            added(n_end[0], -parts[0].decay, state[0]),
            added(n_end[1], -parts[1].decay, state[1]),
        )
        return Step(*state, error, end_rate, Past(values, secants, last))

    def _accelerated(
        self, residual: Pair, parts: list[Extrapolation], secants: Secants, scales: Sequence[Factor]
    ) -> Pair:
        """residual minus the part of it that the secants explain: residual - (S + F) argmin_g |residual - F g|.

        S and N are the changes of the state and of n; F = w N - S, with w the corrector's weight of n, is what S does to the
        residual.
        """
        counts = [_real(part if self.rows else part.reshape(-1)).shape[-1] for part in residual if part.numel()]
        entries = (min if self.rows else sum)(counts or [1])
        secants = secants[: max(1, entries // 2)]  # as many as there are entries would explain anything
        if not secants:
            return residual
        effects, systems = [], []
        for i, (part, r, scale) in enumerate(zip(parts, residual, scales, strict=True)):
            changes = torch.stack([change[i] for change, _ in secants] + [n[i] for _, n in secants])
            effect = scaled(part.weight, changes[len(secants) :])
            effects.append(effect)
            gram, products = _normal_equations(effect - changes[: len(secants)], r, self.rows)
            systems.append((gram, products) if self.rows else (gram * scale, products * scale))
        if self.rows:
            shares = [_minimiser(*system) for system in systems]
        else:
            (gram, products), (more, others) = systems
            shares = [_minimiser(gram + more, products + others)] * 2
        x, y = (r - _combination(effect, g, self.rows) for r, effect, g in zip(residual, effects, shares, strict=True))
        return x, y


Secants = tuple[tuple[Pair, Pair], ...]
TINY = 1e-30


def _difference(a: Pair, b: Pair) -> Pair:
    return a[0] - b[0], a[1] - b[1]


def _real(value: Tensor) -> Tensor:
    """In real numbers, of float32 at least, complex ones as pairs along the last dimension."""
    value = torch.view_as_real(value).flatten(-2) if value.is_complex() else value
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _mean_square(state: Tensor) -> Tensor:
    entries = _real(state.reshape(-1))
    return entries.square().sum() / max(1, len(entries)) + TINY


def _normal_equations(F: Tensor, r: Tensor, rows: bool) -> tuple[Tensor, Tensor]:
    """F F^T and F r, over the last dimension of each row or over all entries; F (m, *shape), r (*shape)."""
    if rows:
        F, r = _real(F.movedim(0, -2)), _real(r)[..., None]
    else:
        F, r = _real(F.reshape(len(F), -1)), _real(r.reshape(-1))[:, None]
    return F @ F.mT, (F @ r)[..., 0]


def _minimiser(gram: Tensor, products: Tensor) -> Tensor:
    """The regularised least squares g of F g = r, (..., m), from F F^T (..., m, m) and F r. Reads nothing on the host."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = torch.finfo(gram.dtype).eps ** (2 / 3) * diagonal.amax(-1, keepdim=True) + TINY
    return torch.linalg.solve_ex(gram + torch.diag_embed(ridge.expand_as(diagonal)), products).result


def _combination(columns: Tensor, g: Tensor, rows: bool) -> Tensor:
    """sum_i g_i columns_i; columns (m, *shape), g (*shape[:-1], m) or (m)."""
    g = g.to(columns.dtype)
    if rows:
        return (g[..., None, :] @ columns.movedim(0, -2))[..., 0, :]
    return (g @ columns.reshape(len(columns), -1)).view(columns.shape[1:])


@dataclass
class Extrapolation:
    """n's polynomial through its past values, for the x or the y part of one step: the prediction and its correction."""

    predicted: Tensor
    decay: Factor
    weight: Factor
    """Of n at the end of the step in the corrector."""
    correction: Callable[[Tensor], Tensor]
    """What n at the end of the step adds to `predicted`."""

    @staticmethod
    def over(
        h: float, state: Tensor, rate: Tensor, n: Tensor, past: list[tuple[float, Tensor]], decay: Factor
    ) -> Extrapolation:
        """From `state`, where the rate and n are given, over h; `past` holds (length, n) of the steps before."""
        lengths = [length for length, _ in past]
        *known, newest = _moments(h, decay, lengths)
        slopes = _divided_differences(n, past)
        predicted = state
        for factor, term in zip(known, [rate, *slopes], strict=True):
            predicted = added(predicted, factor, term)
        widths = list(accumulate([h, *lengths]))

        ahead, length = n, 1.0  # n at the end of the step, by the polynomial
        for width, slope in zip(widths, slopes, strict=False):
            length *= width
            ahead = ahead.add(slope, alpha=length)
        weight = newest / (length * widths[len(slopes)])

        def correction(new: Tensor) -> Tensor:
            return scaled(weight, new - ahead)

        return Extrapolation(predicted, decay, weight, correction)


def _moments(h: float, decay: Factor, intervals: list[float]) -> list[Factor]:
    """Integrals over the step of e^{-(h - s) decay} times 1, s, s (s + h1), s (s + h1)(s + h1 + h2): as many as are needed."""
    p = phi_of(h, decay)
    polynomial, nodes = [1.0], [0.0]  # coefficients of s^j
    for interval in intervals:
        nodes.append(nodes[-1] + interval)
    moments = []
    for node in [*nodes, None]:
        terms = [c * math.factorial(j) * h ** (j + 1) * p(j + 1) for j, c in enumerate(polynomial) if c]
        moments.append(sum(terms[1:], terms[0]))
        if node is not None:
            shifted = [0.0, *polynomial]
            polynomial = [a + node * b for a, b in zip(shifted, [*polynomial, 0.0], strict=True)]
    return moments


def _divided_differences(n: Tensor, past: list[tuple[float, Tensor]]) -> list[Tensor]:
    """n[0, -h1], n[0, -h1, -h1 - h2], ... backwards from the start of the step."""
    values = [n, *(old for _, old in past)]
    intervals = [interval for interval, _ in past]
    found, level = [], values
    for depth in range(len(past)):
        level = [(a - b) / sum(intervals[k : k + depth + 1]) for k, (a, b) in enumerate(pairwise(level))]
        found.append(level[0])
    return found
