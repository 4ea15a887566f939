"""The reduced system on the slow manifold: x = phi(y) solves f(t, x, y) = 0, and dy/dt = g(t, phi(y), y) is integrated alone.

Tikhonov: |x - phi(y)| = O(eps) after the initial layer. Fenichel's first correction phi + eps f_x^{-1} phi', phi' the
derivative of phi along the flow (mathematics, section 5; Fenichel, J. Differ. Equ. 31 (1979) 53), is taken without a Jacobian:
x solves f(t, x, y) = phi(t + eps, y + eps g) - phi(t, y), which is eps phi' + O(eps^2). Everything is in fast time here, where
eps is 1 and that difference is the change of phi over a unit step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solvers.anderson import NotConverged, find_root
from solvers.explicit import ExplicitRungeKutta, Heun, advance, combine
from solvers.gradients import as_now
from solvers.method import Method, Pair, Step
from solvers.system import FastTimeProblem, RootNotFound


class SlowManifold(Method):
    """An explicit Runge-Kutta method for y alone, with x on the slow manifold at every stage.

    The work and the sizes of the steps do not depend on eps. The distance to the full solution is O(eps), with `correction`
    O(eps^2) for three roots instead of one a stage; x0 only starts the search for x. A root is found by Anderson acceleration of
    x + f / (fast_decay or 1), from the last root extrapolated; an exact start costs one evaluation of f. The gradient is that of
    the implicit function theorem, by a linear solve with the transposed Jacobian, not through the iterations; it has no
    second derivatives. The search is one for the whole state: within the tolerance a sequence's result depends on its batch
    mates, and a token's on later tokens. Reads the host once an evaluation. A root that is not found fails the solve with its
    time and residual; under error control shorter steps are tried first.

    Args:
        method: of y; its order and its error estimate are this method's.
        tolerance: of max |f / decay| relative to 1 + max |x|. None: round-off of the dtype to the power 2/3.
        max_iterations: evaluations of f for one root, and products with the Jacobian for one gradient.

    Raises TypeError or ValueError for arguments that are none of these.
    """

    reads_host = True
    constrains = True

    def __init__(
        self,
        method: ExplicitRungeKutta | None = None,
        tolerance: float | None = None,
        max_iterations: int = 100,
        correction: bool = False,
    ) -> None:
        method = Heun() if method is None else method
        if not isinstance(method, ExplicitRungeKutta):
            raise TypeError(f"method must be an explicit Runge-Kutta method such as Heun(), got {method!r}")
        if tolerance is not None and not 0 < tolerance < 1:
            raise ValueError(f"tolerance must be in (0, 1), got {tolerance!r}")
        if not isinstance(max_iterations, int) or max_iterations < 1:
            raise ValueError(f"max_iterations must be an int of at least 1, got {max_iterations!r}")
        self.method = method
        self.tolerance = tolerance
        self.max_iterations = max_iterations
        self.correction = correction

    @property
    def order(self) -> int:  # type: ignore[override]
        return self.method.order

    @property
    def error_order(self) -> int | None:  # type: ignore[override]
        return self.method.error_order

    def integrates(self, problem: FastTimeProblem) -> ReducedProblem:
        return problem if isinstance(problem, ReducedProblem) else ReducedProblem(**vars(problem), settings=self)

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        reduced, tableau = self.integrates(problem), self.method.tableau
        drift, first = (0.0, problem.slow(tau, x, y)) if rate is None else rate
        rows = list(zip(tableau.nodes[1:], tableau.coefficients, strict=True))
        if not self.method.first_same_as_last:
            rows.append((1.0, tableau.weights))  # the rate at the end is wanted too: it starts the next step
        rates, root, root_tau = [first], x, tau
        for node, row in rows:
            stage_tau, y_stage = tau + node * h, advance(y, h, row, rates)
            root = reduced.settled(stage_tau, root + (stage_tau - root_tau) * drift, y_stage)
            root_tau = stage_tau
            rates.append(problem.slow(stage_tau, root, y_stage))
        error = None
        if tableau.error is not None:
            error = (torch.zeros_like(x), combine(h, tableau.error, rates[: len(tableau.error)]))
        return Step(root, y_stage, error, (((root - x) / h).detach(), rates[-1]))


@dataclass
class ReducedProblem(FastTimeProblem):
    """y alone evolves; x is kept on the manifold."""

    constrained = True
    settings: SlowManifold | None = None

    @property
    def unit(self) -> float:  # type: ignore[override]
        """One unit of slow time."""
        return 1 / float(torch.as_tensor(self.slow_scale).detach())

    def rates(self, tau: float | Tensor, x: Tensor, y: Tensor) -> Pair:
        """(0, dy/dtau), where x is near the manifold."""
        return torch.zeros_like(x), self.slow(tau, self.settled(tau, x, y), y)

    def settled(self, tau: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """x on the manifold, searched from x. Raises `RootNotFound`."""
        assert self.settings is not None
        phi = self._root(tau, x, y, None)
        if not self.settings.correction:
            return phi
        unit = 1.0 if self.fast_scale is None else 1 / self.fast_scale  # eps in fast time, with eps' derivative
        ahead = self._root(tau + unit, phi, y + unit * self.slow(tau, phi, y), None)
        return self._root(tau, phi, y, (ahead - phi) / unit)

    def _root(self, tau: Any, start: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
        """x with dx/dtau = target, 0 for None."""
        settings, decay = self.settings, torch.as_tensor(self.decays()[0]).detach()
        assert settings is not None
        scale = torch.where(decay == 0, 1.0, 1 / decay).to(start)
        tolerance = settings.tolerance or torch.finfo(start.dtype).eps ** (2 / 3)

        def residual(x: Tensor) -> Tensor:
            fast = self.fast(tau, x, y)
            return scale * (fast if target is None else fast - target)

        try:
            root, value = find_root(residual, start, tolerance, settings.max_iterations)
        except NotConverged as cause:
            t = float(torch.as_tensor(self.slow_time(tau)).detach())
            raise RootNotFound(t, cause.residual, str(cause)) from cause
        if not value.requires_grad:
            return root
        fast = as_now(replace(self, counting=False).fast, self.system)
        return _Root.apply(value, root, y, lambda x, y: fast(tau, x, y), scale, tolerance, settings.max_iterations)


class _Root(torch.autograd.Function):
    """The root as a function of the residual r = `scale` (f - target) that parameters, t and y give at it: dx = -r_x^{-1} dr."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        root: Tensor,
        y: Tensor,
        fast: Callable[[Tensor, Tensor], Tensor],
        scale: Tensor,
        tolerance: float,
        max_iterations: int,
    ) -> Tensor:
        ctx.save_for_backward(root, y)
        ctx.settings = (fast, scale, tolerance, max_iterations)
        return root.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        root, y = ctx.saved_tensors
        fast, scale, tolerance, max_iterations = ctx.settings
        if not grad.any():
            return (-grad, *[None] * 6)
        size = grad.abs().max()
        with torch.enable_grad():
            x = root.detach().requires_grad_()
            value = scale * fast(x, y.detach())
        grad = grad / size

        def residual(u: Tensor) -> Tensor:
            return torch.autograd.grad(value, x, u, retain_graph=True)[0] - grad

        try:
            solution, _ = find_root(residual, -grad, tolerance, max_iterations)
        except NotConverged as cause:
            raise RuntimeError(f"the gradient through a root of f was not found: {cause}") from cause
        return (-size * solution, *[None] * 6)
