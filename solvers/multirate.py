"""Multirate methods: several steps of x for one of y."""

from __future__ import annotations

from torch import Tensor

from solvers.method import Method, Pair, Step
from solvers.system import FastTimeProblem


class MultirateEuler(Method):
    """`micro_steps` Euler steps of x with y frozen, beside one Euler step of y from the same start: order 1.

    With `micro_steps` = P over a fast time of P, "y updates once per P updates of x" (mathematics, Proposition 4).
    Source: Gear & Wells, BIT 24 (1984) 484. Raises ValueError for `micro_steps` < 1.
    """

    order = 1

    def __init__(self, micro_steps: int) -> None:
        if not isinstance(micro_steps, int) or isinstance(micro_steps, bool):
            raise TypeError(f"micro_steps must be an int, got {micro_steps!r}")
        if micro_steps < 1:
            raise ValueError(f"micro_steps must be at least 1, got {micro_steps}")
        self.micro_steps = micro_steps

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        y_end = y.add(problem.slow(tau, x, y), alpha=h)
        micro = h / self.micro_steps
        for i in range(self.micro_steps):
            x = x.add(problem.fast(tau + i * micro, x, y), alpha=micro)
        return Step(x, y_end)
