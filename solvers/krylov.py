"""Linear systems by products with their matrix alone: GMRES, and the products with a field's Jacobian.

Source of GMRES: Saad & Schultz, SIAM J. Sci. Stat. Comput. 7 (1986) 856: modified Gram-Schmidt, Givens rotations, restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from solvers.method import Pair

RESTART = 50
"""Basis vectors that are kept at most."""


class NotSolved(ArithmeticError):
    """`residual` is what `iterations` have left, relative to the right-hand side."""

    def __init__(self, residual: float, iterations: int) -> None:
        super().__init__(f"relative residual {residual:.3g} after {iterations} iterations")
        self.residual = residual


@torch.no_grad()
def gmres(
    product: Callable[[Tensor], Tensor], b: Tensor, tolerance: float, max_iterations: int, restart: int = RESTART
) -> tuple[Tensor, int]:
    """(v, iterations) with |b - M v| <= tolerance |b|. b and v are real, (n,); `product` is v -> M v.

    An iteration is one product and one host read, a restart is one of each more; b = 0 takes no iteration. Where b or a product
    is not finite, v is nan. Raises `NotSolved` after `max_iterations`, and where M is singular and leaves a part of b.
    """
    v, residual, iterations = torch.zeros_like(b), b, 0
    size = norm = float(b.norm())
    target = tolerance * norm
    while size > target:
        length = min(restart, max_iterations - iterations)
        correction, size, dimension = _minimise(product, residual, size, target, length)
        v, iterations = v + correction, iterations + dimension
        if not size > target:
            return v, iterations
        if dimension < restart or iterations == max_iterations:
            raise NotSolved(size / norm, iterations)
        residual = b - product(v)
        size = float(residual.norm())
    return (v if math.isfinite(size) else v * math.nan), iterations


def _minimise(
    product: Callable[[Tensor], Tensor], r: Tensor, size: float, target: float, length: int
) -> tuple[Tensor, float, int]:
    """(v, |r - M v|, dimension), v minimal in the Krylov space of r, which is grown up to `length` or to the target.

    With M V_k = V_{k+1} H and r = |r| V_{k+1} e_1, |r - M V_k c| = ||r| e_1 - H c|. Each new column of H is turned by the
    rotations before it, and by one more that makes it a column of a triangle R; they turn |r| e_1 into g, whose last entry is
    the minimum.
    """
    basis, R, g = [r / size], list[list[float]](), [size]
    rotations: list[tuple[float, float]] = []
    negligible = 10 * torch.finfo(r.dtype).eps
    while len(R) < length and abs(g[-1]) > target:
        w = product(basis[-1])
        entries, whole = [], w.norm()
        for q in basis:
            entries.append(torch.dot(q, w))
            w = w - entries[-1] * q
        *column, below, scale = torch.stack([*entries, w.norm(), whole]).tolist()
        if not math.isfinite(scale):
            return r * math.nan, math.nan, len(R) + 1
        for k, (c, s) in enumerate(rotations):
            column[k], column[k + 1] = c * column[k] + s * column[k + 1], c * column[k + 1] - s * column[k]
        diagonal = math.hypot(column[-1], below)
        if diagonal <= negligible * scale:
            break  # M is singular on this space
        c, s = column[-1] / diagonal, below / diagonal
        rotations.append((c, s))
        R.append([*column[:-1], diagonal])
        g[-1:] = [c * g[-1], -s * g[-1]]
        if below > 0:
            basis.append(w / below)
    coefficients = list[float]()
    for i in reversed(range(len(R))):
        known = sum(R[j][i] * c for j, c in zip(range(i + 1, len(R)), coefficients, strict=True))
        coefficients.insert(0, (g[i] - known) / R[i][i])
    if not coefficients:
        return torch.zeros_like(r), abs(g[-1]), 0
    return torch.stack(basis[: len(R)], 1) @ r.new_tensor(coefficients), abs(g[-1]), len(R)


class Linearisation:
    """Products with the Jacobian J of (x, y) -> `rates` at one point, and with its transpose, from one evaluation.

    J v is the derivative of u -> J^T u: two passes backwards, without an evaluation of the field. (Forward mode evaluates it
    anew for each product, and took 3 to 14 times as long on an attention field.) Nothing here is differentiable.
    """

    def __init__(self, rates: Callable[[Tensor, Tensor], Pair], x: Tensor, y: Tensor) -> None:
        with _own_graph():
            self.inputs = tuple(state.detach().clone().requires_grad_() for state in (x, y))
            # The zeros give a graph to rates that do not depend on the state.
            self.rates = [rate + 0 * s for rate, s in zip(rates(*self.inputs), self.inputs, strict=True)]

    def product(self, v: Pair) -> Pair:
        """J v."""
        u, image = self._transposed
        with torch.inference_mode(False):
            return torch.autograd.grad(image, u, v, retain_graph=True)  # type: ignore[return-value]

    def transposed_product(self, u: Pair) -> Pair:
        """J^T u."""
        with torch.inference_mode(False):
            return torch.autograd.grad(self.rates, self.inputs, u, retain_graph=True)  # type: ignore[return-value]

    @cached_property
    def _transposed(self) -> tuple[Pair, Pair]:
        """(u, J^T u) with the graph between them."""
        with _own_graph():
            u = tuple(torch.zeros_like(rate, requires_grad=True) for rate in self.rates)
            return u, torch.autograd.grad(self.rates, self.inputs, u, create_graph=True)  # type: ignore[return-value]


def _own_graph() -> ExitStack:
    """For a graph apart from the solve's: whatever the mode, out of reach of a checkpoint's hooks, twice differentiable."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    # Detached, because a node that saves its own output would never be freed.
    stack.enter_context(saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor))
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the fused kernels have no second derivative
    return stack
