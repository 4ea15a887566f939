"""Exponential Adams methods: n is the polynomial through its values at earlier steps, the diagonal linear parts are exact.

Two evaluations a step whatever the order, and stages that do not lag behind a slow manifold: where the steps are long
against epsilon, earlier values of n carry its drift forward. At decay 0 it is the Adams-Bashforth-Moulton pair in PECE mode.
Sources: Norsett, Lecture Notes in Math. 109 (1969) 214; Hochbruck & Ostermann, BIT 51 (2011) 889. Variable steps by divided
differences (Hairer, Norsett & Wanner, Solving ODEs I, section III.5).
"""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor

from solvers.exponential import ETD3RK, Factor, added, phi_of, scaled
from solvers.method import Method, Pair, Past, Step
from solvers.system import FastTimeProblem


class ExponentialAdams(Method):
    """Predictor of order `order` - 1 and corrector of order `order` (3 or 4), whose difference is the error estimate.

    The first `order` - 2 steps are ETD3RK's. Raises ValueError for another order.
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
        past: Past = (),
    ) -> Step:
        rates = problem.rates(tau, x, y) if rate is None else rate
        decays = problem.decays()
        n = (added(rates[0], decays[0], x), added(rates[1], decays[1], y))
        memory = ((h, n), *past)[: self.order - 2]
        if len(past) < self.order - 2:
            start = ETD3RK().step(problem, tau, h, x, y, rates)
            return Step(start.x, start.y, start.error, past=memory)
        intervals = [interval for interval, _ in past]
        moments = [_moments(h, decay, intervals) for decay in decays]
        slopes = [_divided_differences(n[i], [(interval, old[i]) for interval, old in past]) for i in (0, 1)]
        predicted = [
            _sum(state, [moment[0], *moment[1:-1]], [r, *slope])
            for state, moment, r, slope in zip((x, y), moments, rates, slopes, strict=True)
        ]
        ahead = problem.rates(tau + h, predicted[0], predicted[1])
        errors = []
        for i in (0, 1):
            new = added(ahead[i], decays[i], predicted[i])
            newest = _newest_difference(new, n[i], h, intervals, slopes[i])
            errors.append(scaled(moments[i][-1], newest))
        x_end, y_end = predicted[0] + errors[0], predicted[1] + errors[1]
        return Step(x_end, y_end, (errors[0], errors[1]), problem.rates(tau + h, x_end, y_end), memory)


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


def _newest_difference(new: Tensor, n: Tensor, h: float, intervals: list[float], slopes: list[Tensor]) -> Tensor:
    """The divided difference over the end of the step and all earlier points."""
    difference, width = (new - n) / h, h
    for interval, slope in zip(intervals, slopes, strict=True):
        width += interval
        difference = (difference - slope) / width
    return difference


def _sum(state: Tensor, factors: list[Factor], terms: list[Tensor]) -> Tensor:
    for factor, term in zip(factors, terms, strict=True):
        state = added(state, factor, term)
    return state
