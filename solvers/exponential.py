"""Exponential Runge-Kutta methods: the diagonal linear parts of f and g are integrated exactly, the rest explicitly.

Symbols: f = -lambda x + n_f, g = -kappa y + n_g; for each of the two, L its decay in fast time, z = -h L and phi_k the
functions of `solvers.phi`. Since e^z x = x - h L phi_1(z) x, every method is written with the whole rate at the start and with
differences of n from there: a stage is s + c h phi_1(c z) rate + h sum_j a_j (n_j - n_1). At decay 0 each method is its
classical counterpart. However large the decay, it does not limit the step; the Lipschitz constant of n does.

Sources: Cox & Matthews, J. Comput. Phys. 176 (2002) 430; Hochbruck & Ostermann, SIAM J. Numer. Anal. 43 (2005) 1069, where
the stiff order, which holds uniformly in the decay, is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from solvers.method import Factor, Method, Pair, Step, added, scaled
from solvers.phi import phi
from solvers.system import FastTimeProblem

Phi = Callable[..., Factor]
"""phi_k(c z) as p(k, c), c = 1 by default."""


class ExponentialRungeKutta(Method):
    """Stages at the nodes c; rows and weights are those of n_j - n_1, j >= 2, as functions of phi."""

    takes_tensor_steps = True
    nodes: ClassVar[tuple[float, ...]] = (0.0,)

    def row(self, stage: int, p: Phi) -> Sequence[Factor]:
        """a_j of stage number `stage` (from 1; the start is 0), for j = 1 .. stage - 1."""
        return ()

    def weights(self, p: Phi) -> Sequence[Factor]:
        """b_j, for j = 1 .. the last stage."""
        return ()

    def error_weights(self, p: Phi) -> Sequence[Factor] | None:
        """b_j minus those of the embedded method."""
        return None

    def step(
        self, problem: FastTimeProblem, tau: Factor, h: Factor, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        starts = (x, y)
        rates = problem.rates(tau, x, y) if rate is None else rate
        decays = problem.decays()
        phis = [phi_of(h, decay) for decay in decays]
        changes: tuple[list[Tensor], list[Tensor]] = ([], [])  # n_j - n_1, of f and of g
        for number, node in enumerate(self.nodes[1:], start=1):
            stage = [
                _combine(start, h, [(node * p(1, node), r), *zip(self.row(number, p), change, strict=True)])
                for start, r, p, change in zip(starts, rates, phis, changes, strict=True)
            ]
            found = problem.rates(tau + node * h, stage[0], stage[1])
            for change, new, old, state, start, decay in zip(changes, found, rates, stage, starts, decays, strict=True):
                change.append(added(new - old, decay, state - start))
        ends, errors = [], []
        for start, r, p, change in zip(starts, rates, phis, changes, strict=True):
            ends.append(_combine(start, h, [(p(1), r), *zip(self.weights(p), change, strict=True)]))
            error_weights = self.error_weights(p)
            if error_weights is not None:
                errors.append(_combine(None, h, list(zip(error_weights, change, strict=True))))
        return Step(ends[0], ends[1], (errors[0], errors[1]) if errors else None)


def phi_of(h: Factor, decay: Factor) -> Phi:
    without = not isinstance(decay, Tensor) and decay == 0  # then a tensor h needs no series

    def p(k: int, c: float = 1.0) -> Factor:
        return phi(k, 0.0 if without else -c * h * decay)

    return p


def _combine(start: Tensor | None, h: Factor, terms: Sequence[tuple[Factor, Tensor]]) -> Tensor:
    total = start
    for factor, value in terms:
        if isinstance(factor, float) and factor == 0:
            continue
        total = scaled(h * factor, value) if total is None else added(total, h * factor, value)
    assert total is not None
    return total


class ExponentialEuler(ExponentialRungeKutta):
    """s + h phi_1(z) rate: stiff order 1, exact for constant n."""

    order = 1


class ETD2RK(ExponentialRungeKutta):
    """Cox & Matthews' second-order method (their equation 22), exponential Euler embedded: stiff order 2; Heun's at decay 0."""

    order = 2
    error_order = 1
    nodes = (0.0, 1.0)

    def weights(self, p: Phi) -> Sequence[Factor]:
        return (p(2),)

    def error_weights(self, p: Phi) -> Sequence[Factor]:
        return (p(2),)


class ETD3RK(ExponentialRungeKutta):
    """Hochbruck & Ostermann's method (5.8) with c_2 = 1/3, and the second-order method of its first two stages embedded.

    Stiff order 3; Heun's third-order method at decay 0.
    """

    order = 3
    error_order = 2
    nodes = (0.0, 1 / 3, 2 / 3)

    def row(self, stage: int, p: Phi) -> Sequence[Factor]:
        return () if stage == 1 else (4 / 3 * p(2, 2 / 3),)

    def weights(self, p: Phi) -> Sequence[Factor]:
        return (0.0, 3 / 2 * p(2))

    def error_weights(self, p: Phi) -> Sequence[Factor]:
        return (-3.0 * p(2), 3 / 2 * p(2))
