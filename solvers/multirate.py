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
        _check_micro_steps(micro_steps)
        self.micro_steps = micro_steps

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        y_end = y.add(problem.slow(tau, x, y), alpha=h)
        micro = h / self.micro_steps
        for i in range(self.micro_steps):
            x = x.add(problem.fast(tau + i * micro, x, y), alpha=micro)
        return Step(x, y_end)


class MRIGARK22(Method):
    """Sandu's second-order multirate infinitesimal methods: a two-stage method for y, whose stages x is integrated between.

    In Sandu's additive form, v = (x, y), the fast part is (f, 0) and the slow part (0, g), so that the fast equation
    dv/dtheta = Delta c_i F(v) + sum_j gamma_ij G(V_j) of stage i, theta in [0, h], falls apart: y runs along the straight line
    from Y_i to Y_{i+1} = Y_i + h sum_j gamma_ij k_j, and x follows dx/dtau = f(x, y(tau)) beside it. The table is
    gamma = (c), (-(2 c^2 - 2 c + 1) / (2 c), 1 / (2 c)) with c = `node`, hence y_end = y + h ((1 - 1/(2c)) k_1 + k_2 / (2c)).
    c = 1/2 is MRI-GARK-ERK22a, c = 2/3 SUNDIALS' Ralston table, and c = 1 ERK22b: there the second interval is empty, x is
    integrated once. Order 2 in h with `micro_steps` Heun steps of x an interval held fixed: what x reads is y to O(h^2).

    Source: Sandu, SIAM J. Numer. Anal. 57 (2019) 2300; the table with c = 1/2 and 1 as in SUNDIALS' ARKODE, MRIStepCoupling.
    Raises ValueError for `micro_steps` < 1 and for a node outside [1/2, 1].
    """

    order = 2

    def __init__(self, micro_steps: int, node: float = 1.0) -> None:
        _check_micro_steps(micro_steps)
        if not isinstance(node, int | float) or not 0.5 <= node <= 1:
            raise ValueError(f"node must be in [1/2, 1], got {node!r}")
        self.micro_steps = micro_steps
        self.node = float(node)

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        c, b = self.node, 1 / (2 * self.node)
        k_1 = problem.slow(tau, x, y)
        x, y_stage = self._follow(problem, tau, c * h, x, y, k_1), y.add(k_1, alpha=c * h)
        k_2 = problem.slow(tau + c * h, x, y_stage)
        y_end = y.add(k_1, alpha=(1 - b) * h).add(k_2, alpha=b * h)
        if c < 1:
            x = self._follow(problem, tau + c * h, (1 - c) * h, x, y_stage, (y_end - y_stage) / ((1 - c) * h))
        return Step(x, y_end)

    def _follow(self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        """x after Heun steps over h, while y moves on the line y + (time since tau) slope."""
        micro = h / self.micro_steps
        for i in range(self.micro_steps):
            start, end = i * micro, (i + 1) * micro
            first = problem.fast(tau + start, x, y.add(slope, alpha=start))
            second = problem.fast(tau + end, x.add(first, alpha=micro), y.add(slope, alpha=end))
            x = x.add(first, alpha=micro / 2).add(second, alpha=micro / 2)
        return x


def _check_micro_steps(micro_steps: int) -> None:
    if not isinstance(micro_steps, int) or isinstance(micro_steps, bool):
        raise TypeError(f"micro_steps must be an int, got {micro_steps!r}")
    if micro_steps < 1:
        raise ValueError(f"micro_steps must be at least 1, got {micro_steps}")
