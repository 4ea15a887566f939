"""Rosenbrock methods: linearly implicit, L-stable, one linear system with the Jacobian of (f, eps g) a stage, by GMRES.

Symbols, as in Hairer & Wanner, Solving ODEs II, section IV.7: z = (x, y), F its rate in fast time, J = F_z, T = F_tau,

    k_i = F(tau + alpha_i h, z + h sum_j alpha_ij k_j) + h J sum_j gamma_ij k_j + h gamma_i T,    gamma_ii = gamma,
    z_end = z + h sum_i b_i k_i,    alpha_i = sum_j alpha_ij,    gamma_i = sum_j gamma_ij.

Both methods here are W-methods: they keep their order whatever matrix stands for J, and so whatever vector stands for T, which
is a further column of the Jacobian of the autonomous system. In place of T stands (F(tau + h, z) - F(tau, z)) / h. It costs one
evaluation, asks nothing of the field (a derivative in time would ask it to take t as a dual number), and makes the steps exact
in the limit of infinite stiffness: x = phi(t) is met at the end of the step, where T itself gives it to O(h^2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from solvers.explicit import advance, combine
from solvers.exponential import scaled
from solvers.gradients import as_now
from solvers.krylov import Linearisation, NotSolved, gmres
from solvers.method import Method, Pair, Step
from solvers.system import FastTimeProblem, StageNotSolved


@dataclass(frozen=True)
class RosenbrockTableau:
    """Rows are those of the second stage to the last, without the diagonal; `error` holds b minus the embedded weights."""

    gamma: float
    alphas: tuple[tuple[float, ...], ...]
    gammas: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    error: tuple[float, ...]


class Rosenbrock(Method):
    """The stages of `tableau`. GMRES is preconditioned by 1 / (1 + h gamma decay), from fast_decay and slow_decay.

    A step takes stages + 2 evaluations of the field, of which one is in place of its derivative in time and one for the
    Jacobian, and a product with the Jacobian for each iteration of GMRES; it reads the host as often. The field must be twice
    differentiable in reverse, and for gradients once in forward mode. The gradient is that of the stages' exact solutions, by a
    linear solve with the transposed Jacobian and not through the iterations; it has no second derivatives. A system that is not
    solved fails the solve; under error control shorter steps are tried first. The systems are of the whole state: within the
    tolerance a sequence's result depends on its batch mates, and a token's on later tokens.

    Args:
        linear_tolerance: of the residual of a linear system relative to its right-hand side, x and y each in units of its own
            size. None: round-off of the dtype to the power 2/3.
        max_iterations: of one linear system.

    Raises TypeError or ValueError for arguments that are none of these.
    """

    tableau: ClassVar[RosenbrockTableau]
    reads_host = True

    def __init__(self, linear_tolerance: float | None = None, max_iterations: int = 200) -> None:
        if linear_tolerance is not None and not 0 < linear_tolerance < 1:
            raise ValueError(f"linear_tolerance must be in (0, 1), got {linear_tolerance!r}")
        if not isinstance(max_iterations, int) or isinstance(max_iterations, bool):
            raise TypeError(f"max_iterations must be an int, got {max_iterations!r}")
        if max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
        self.linear_tolerance = linear_tolerance
        self.max_iterations = max_iterations

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        tableau, gamma = self.tableau, self.tableau.gamma
        first = problem.rates(tau, x, y) if rate is None else rate
        ahead = problem.rates(tau + h, x, y)
        drift = (ahead[0] - first[0], ahead[1] - first[1])  # h T
        matrix = StageMatrix(self, problem, tau, h, x, y)
        linear = matrix.linearised()
        fast: list[Tensor] = []
        slow: list[Tensor] = []
        for alphas, gammas in zip(((), *tableau.alphas), ((), *tableau.gammas), strict=True):
            rates = first
            if alphas:
                rates = problem.rates(tau + sum(alphas) * h, advance(x, h, alphas, fast), advance(y, h, alphas, slow))
            # For v_i = k_i + p_i with p_i = sum_j<i gamma_ij / gamma k_j the system needs no product with J on its right.
            couplings = tuple(value / gamma for value in gammas)
            previous = [combine(1.0, couplings, k) if k else None for k in (fast, slow)]
            right = [r.add(d, alpha=gamma + sum(gammas)) for r, d in zip(rates, drift, strict=True)]
            right = [r if p is None else r + p for r, p in zip(right, previous, strict=True)]
            v = matrix.solve(linear, (right[0], right[1]))
            for stages, solution, p in zip((fast, slow), v, previous, strict=True):
                stages.append(solution if p is None else solution - p)
        return Step(
            advance(x, h, tableau.weights, fast),
            advance(y, h, tableau.weights, slow),
            (combine(h, tableau.error, fast), combine(h, tableau.error, slow)),
        )


class ROS2(Rosenbrock):
    """The second-order method of Verwer, Spee, Blom & Hundsdorfer, SIAM J. Sci. Comput. 20 (1999) 1456, gamma = 1 - 1 / sqrt(2).

    z + h k_1, of order 1, is embedded.
    """

    order = 2
    error_order = 1
    tableau = RosenbrockTableau(
        gamma=1 - 0.5**0.5,
        alphas=((1.0,),),
        gammas=((-2 + 2 * 0.5**0.5,),),
        weights=(0.5, 0.5),
        error=(-0.5, 0.5),
    )


class ROS34PW2(Rosenbrock):
    """The stiffly accurate third-order method of Rang & Angermann, BIT 45 (2005) 761, with one of order 2 embedded."""

    order = 3
    error_order = 2
    tableau = RosenbrockTableau(
        gamma=4.3586652150845900e-1,
        alphas=(
            (8.7173304301691801e-1,),
            (8.4457060015369423e-1, -1.1299064236484185e-1),
            (0.0, 0.0, 1.0),
        ),
        gammas=(
            (-8.7173304301691801e-1,),
            (-9.0338057013044082e-1, 5.4180672388095326e-2),
            (2.4212380706095346e-1, -1.2232505839045147, 5.4526025533510214e-1),
        ),
        weights=(2.4212380706095346e-1, -1.2232505839045147, 1.5452602553351020, 4.3586652150845900e-1),
        error=(
            2.4212380706095346e-1 - 3.7810903145819369e-1,
            -1.2232505839045147 + 9.6042292212423178e-2,
            1.0452602553351020,
            2.1793326075422950e-1,
        ),
    )


class StageMatrix:
    """M = 1 - h gamma J at (tau, x, y). It holds no graph: backward passes hold it."""

    def __init__(
        self, method: Rosenbrock, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor
    ) -> None:
        self.method, self.problem, self.tau, self.x, self.y = method, problem, tau, x, y
        self.shift = h * method.tableau.gamma

    def linearised(self) -> Linearisation:
        """J, for all stages of a step."""
        return Linearisation(self._rates_by(self.problem.rates), self.x, self.y)

    def solve(self, linear: Linearisation, right: Pair) -> Pair:
        """M^{-1} right, differentiable once. Raises `StageNotSolved`."""
        stats, counting = self.problem.stats, self.problem.counting

        def product(v: Pair) -> Pair:
            stats.jacobian_products += counting
            return self._shifted(v, linear.product(v))

        units = [_unit(state, self.shift * r.detach()) for state, r in zip((self.x, self.y), right, strict=True)]
        try:
            v, iterations = self._gmres(product, right, units)
        except NotSolved as cause:
            t = float(torch.as_tensor(self.problem.slow_time(self.tau)).detach())
            raise StageNotSolved(t, cause.residual, str(cause)) from cause
        stats.linear_iterations += iterations * counting
        return self._with_gradient(v, right, units) if right[0].requires_grad or right[1].requires_grad else v

    def _with_gradient(self, v: Pair, right: Pair, units: list[Tensor]) -> Pair:
        """v as a function of what right and M depend on, by the residual right - M v."""
        uncounted = replace(self.problem, counting=False).rates
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            image = torch.func.jvp(self._rates_by(uncounted), (self.x, self.y), v)[1]
        product = self._shifted(v, image)
        rates = self._rates_by(as_now(uncounted, self.problem.system))
        return _Solved.apply(
            right[0] - product[0], right[1] - product[1], *v, lambda grad: self._solve_transposed(rates, grad, units)
        )

    def _solve_transposed(self, rates: Callable[[Tensor, Tensor], Pair], grad: Pair, units: list[Tensor]) -> Pair:
        """M^{-T} grad."""
        linear = Linearisation(rates, self.x, self.y)
        try:
            solution, _ = self._gmres(
                lambda u: self._shifted(u, linear.transposed_product(u)), grad, [1 / unit for unit in units]
            )
        except NotSolved as cause:
            raise RuntimeError(f"the gradient through a stage's linear system was not found: {cause}") from cause
        return solution

    def _rates_by(self, rates: Callable[..., Pair]) -> Callable[[Tensor, Tensor], Pair]:
        return lambda x, y: rates(self.tau, x, y)

    def _shifted(self, v: Pair, image: Pair) -> Pair:
        return v[0] - self.shift * image[0], v[1] - self.shift * image[1]

    @torch.no_grad()
    def _gmres(self, product: Callable[[Pair], Pair], right: Pair, units: list[Tensor]) -> tuple[Pair, int]:
        """The solution by GMRES on one real vector, with x and y in the given units and preconditioned from the right."""
        factors = [
            1 / (1 + abs(self.shift) * (d.detach() if isinstance(d, Tensor) else d)) for d in self.problem.decays()
        ]

        def flat(pair: Pair) -> Tensor:
            return torch.cat([_real(part / unit).reshape(-1) for part, unit in zip(pair, units, strict=True)])

        def preconditioned(vector: Tensor) -> Pair:
            parts = vector.split([_real(part).numel() for part in right])
            pair = [
                scaled(factor, unit * _like(part, state))
                for factor, unit, part, state in zip(factors, units, parts, right, strict=True)
            ]
            return pair[0], pair[1]

        tolerance = self.method.linear_tolerance
        if tolerance is None:
            tolerance = max(torch.finfo(part.dtype).eps for part in right) ** (2 / 3)
        solution, iterations = gmres(
            lambda vector: flat(product(preconditioned(vector))), flat(right), tolerance, self.method.max_iterations
        )
        return preconditioned(solution), iterations


class _Solved(torch.autograd.Function):
    """v as a function of the residual r = right - M v that right and M give at it: dv = M^{-1} dr."""

    @staticmethod
    def forward(
        ctx: Any, r_x: Tensor, r_y: Tensor, v_x: Tensor, v_y: Tensor, transposed: Callable[[Pair], Pair]
    ) -> Pair:
        ctx.transposed = transposed
        return v_x.clone(), v_y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.transposed((grad_x, grad_y)), None, None, None)


def _unit(state: Tensor, change: Tensor) -> Tensor:
    """Root mean square of the state or of its change, the larger; 1 where both are zero."""
    size = torch.maximum(state.detach().norm(), change.norm()) / max(1, state.numel()) ** 0.5
    return torch.where(size > 0, size, 1)


def _real(part: Tensor) -> Tensor:
    """As real numbers, in float32 at least."""
    part = torch.view_as_real(part) if part.is_complex() else part
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _like(vector: Tensor, state: Tensor) -> Tensor:
    if state.is_complex():
        return torch.view_as_complex(vector.to(state.real.dtype).reshape(*state.shape, 2))
    return vector.to(state.dtype).reshape(state.shape)
