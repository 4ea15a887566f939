"""Operator splitting over a system's parts.

Sources: Trotter, Proc. AMS 10 (1959) 545; Strang, SIAM J. Numer. Anal. 5 (1968) 506. Each part is integrated alone with
everything else frozen, in the order of `FastSlowSystem.parts`.
"""

from __future__ import annotations

from torch import Tensor

from solvers.method import Method, Pair, Step
from solvers.system import FastTimeProblem, Part


class LieTrotter(Method):
    """Each sub-flow by one Euler step, in order: order 1. One step of fast time 1 is the sequential block."""

    order = 1
    splits = True

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        for part in problem.part_rates():
            if part.clock == "fast":
                x = x.add(part.rate(tau, x, y), alpha=h)
            else:
                y = y.add(part.rate(tau, x, y), alpha=h)
        return Step(x, y)


class Strang(Method):
    """Half a step of each sub-flow in order, then half a step of each in reverse, by the midpoint method: order 2."""

    order = 2
    splits = True

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        parts = problem.part_rates()
        for part in parts:
            x, y = _midpoint(part, tau, h / 2, x, y)
        for part in reversed(parts):
            x, y = _midpoint(part, tau + h / 2, h / 2, x, y)
        return Step(x, y)


def _midpoint(part: Part, tau: float, h: float, x: Tensor, y: Tensor) -> Pair:
    half = part.rate(tau, x, y)
    if part.clock == "fast":
        return x.add(part.rate(tau + h / 2, x.add(half, alpha=h / 2), y), alpha=h), y
    return x, y.add(part.rate(tau + h / 2, x, y.add(half, alpha=h / 2)), alpha=h)
