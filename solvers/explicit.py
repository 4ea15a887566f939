"""Explicit Runge-Kutta methods, as tableaus.

Sources: Euler; Heun's second-order method; Kutta's classical method (1901); Dormand & Prince, J. Comput. Appl. Math. 6
(1980) 19-26, RK5(4)7M. Notation of Hairer, Norsett & Wanner, Solving ODEs I, section II.1: nodes c, coefficients a, weights b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.method import Factor, Method, Pair, Step, scaled
from solvers.system import FastTimeProblem


@dataclass(frozen=True)
class Tableau:
    """Butcher tableau; `error` holds b minus the embedded weights."""

    nodes: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    error: tuple[float, ...] | None = None


def advance(state: Tensor, h: Factor, weights: tuple[float, ...], rates: list[Tensor]) -> Tensor:
    """state + h sum_i weights_i rates_i; a lone weight 1 at h = 1 adds the rate itself, bit for bit."""
    for weight, rate in zip(weights, rates, strict=False):
        if weight:
            state = _plus(state, h * weight, rate)
    return state


def _plus(state: Tensor, factor: Factor, rate: Tensor) -> Tensor:
    """state + factor rate, rounded alike for a number and for a tensor."""
    if isinstance(factor, Tensor):
        return torch.addcmul(state, factor.to(rate.dtype), rate)
    return state.add(rate, alpha=factor)


class ExplicitRungeKutta(Method):
    """One step: stages k_i = rate(tau + c_i h, z + h sum_j a_ij k_j), then z + h sum_i b_i k_i."""

    takes_tensor_steps = True
    tableau: ClassVar[Tableau]

    @property
    def stability_interval(self) -> float:
        """The r up to which dz/dtau = -z is not amplified by a step of r: a decay of rate k asks for h <= r / k.

        Hairer & Wanner, Solving ODEs II, section IV.2.
        """
        r, width = 0.0, 1.0
        while width > 1e-6:
            while self._amplification(r + width) <= 1 + 1e-12:
                r += width
            width /= 4
        return r

    def _amplification(self, r: float) -> float:
        """|R(-r)|, R the stability function."""
        rates: list[float] = []
        for row in ((), *self.tableau.coefficients):
            rates.append(-r * (1 + sum(a * k for a, k in zip(row, rates, strict=True))))
        return abs(1 + sum(b * k for b, k in zip(self.tableau.weights, rates, strict=True)))

    def step(
        self, problem: FastTimeProblem, tau: Factor, h: Factor, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        tableau = self.tableau
        first = problem.rates(tau, x, y) if rate is None else rate
        fast, slow = [first[0]], [first[1]]
        for node, row in zip(tableau.nodes[1:], tableau.coefficients, strict=True):
            stage = problem.rates(tau + node * h, advance(x, h, row, fast), advance(y, h, row, slow))
            fast.append(stage[0])
            slow.append(stage[1])
        x_end, y_end = advance(x, h, tableau.weights, fast), advance(y, h, tableau.weights, slow)
        error = None
        if tableau.error is not None:
            error = (combine(h, tableau.error, fast), combine(h, tableau.error, slow))
        end_rate = (fast[-1], slow[-1]) if self.first_same_as_last else None
        return Step(x_end, y_end, error, end_rate)


def combine(h: Factor, weights: tuple[float, ...], rates: list[Tensor]) -> Tensor:
    """h sum_i weights_i rates_i, where some weight is not zero."""
    terms = [(weight, rate) for weight, rate in zip(weights, rates, strict=True) if weight]
    total = scaled(h * terms[0][0], terms[0][1])
    for weight, rate in terms[1:]:
        total = _plus(total, h * weight, rate)
    return total


class Euler(ExplicitRungeKutta):
    """z + h k. One step of fast time 1 is the discrete block (mathematics, Proposition 1)."""

    order = 1
    tableau = Tableau(nodes=(0.0,), coefficients=(), weights=(1.0,))


class Heun(ExplicitRungeKutta):
    """Heun's second-order method with Euler embedded."""

    order = 2
    error_order = 1
    tableau = Tableau(nodes=(0.0, 1.0), coefficients=((1.0,),), weights=(0.5, 0.5), error=(-0.5, 0.5))


class RK4(ExplicitRungeKutta):
    """The classical fourth-order method."""

    order = 4
    tableau = Tableau(
        nodes=(0.0, 0.5, 0.5, 1.0),
        coefficients=((0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)),
        weights=(1 / 6, 1 / 3, 1 / 3, 1 / 6),
    )


class Dopri5(ExplicitRungeKutta):
    """Dormand and Prince's 5(4) pair; its last stage is the next step's first."""

    order = 5
    error_order = 4
    first_same_as_last = True
    tableau = Tableau(
        nodes=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
        coefficients=(
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
            (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        ),
        weights=(35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84, 0.0),
        error=(
            71 / 57600,
            0.0,
            -71 / 16695,
            71 / 1920,
            -17253 / 339200,
            22 / 525,
            -1 / 40,
        ),
    )
