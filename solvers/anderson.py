"""Anderson acceleration of x <- x + r(x), for roots of r and for linear systems, safeguarded.

Source: Walker & Ni, SIAM J. Numer. Anal. 49 (2011) 1715, type II, in its unconstrained form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MEMORY = 5
"""Differences that are kept."""
REGULARISATION = 100
"""Of the Gram matrix of normalised differences, in units of round-off: parallel ones, or one that is zero, then do no harm."""


class NotConverged(ArithmeticError):
    """`residual` (largest entry, relative to 1 + |x|) is what `iterations` evaluations have left; nan if r was not finite."""

    def __init__(self, residual: float, iterations: int) -> None:
        super().__init__(f"residual {residual:.3g} after {iterations} evaluations")
        self.residual = residual


def find_root(r: Callable[[Tensor], Tensor], x: Tensor, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor]:
    """(x, r(x)) with max |r(x)| <= tolerance (1 + max |x|), by at most `max_iterations` evaluations of r.

    x is without gradient; r(x) has that of what else r depends on.
    The model of r is always built at the best x found, so the residual never grows; a step that is worse enters the model as
    data, halves the mixing, and is not taken. Reads the host once an evaluation. Raises `NotConverged`.
    """
    x = x.detach()
    best, best_r, best_size, mixing = x, None, math.nan, 1.0
    steps: list[Tensor] = []
    changes: list[Tensor] = []
    for iteration in range(max_iterations):
        found = r(x)
        value = found.detach()
        size, better = _judge(value, x, best_r)
        if size <= tolerance:
            return x, found
        if not math.isfinite(size):
            if best_r is None:
                raise NotConverged(math.nan, iteration + 1)
            steps, changes = [], []
        elif best_r is not None:
            steps, changes = [*steps, x - best][-MEMORY:], [*changes, value - best_r][-MEMORY:]
        if better:
            best, best_r, best_size, mixing = x, value, size, min(1.0, 2 * mixing)
        else:
            mixing /= 2
        assert best_r is not None
        x = _next(best, best_r, steps, changes, mixing)
    raise NotConverged(best_size, max_iterations)


def _judge(r: Tensor, x: Tensor, best_r: Tensor | None) -> tuple[float, bool]:
    """(max |r| / (1 + max |x|), whether |r| < |best_r|) by one read: the sign of what is read holds the second."""
    if r.numel() == 0:
        return 0.0, True
    size = r.abs().max() / (1 + x.abs().max())
    if best_r is not None:
        size = torch.where(_flat(r).norm() < _flat(best_r).norm(), size, -size)
    read = float(size)
    return abs(read), 0 <= read < math.inf


def _next(x: Tensor, r: Tensor, steps: list[Tensor], changes: list[Tensor], mixing: float) -> Tensor:
    """x + mixing r - (dX + mixing dR) gamma with gamma = argmin |r - dR gamma|."""
    if not changes:
        return x + mixing * r
    residual = _flat(r)
    dx, dr = (torch.stack([_flat(d) for d in columns], 1) for columns in (steps, changes))
    limits = torch.finfo(dr.dtype)
    scale = dr.norm(dim=0).clamp_min(limits.tiny)
    dx, dr = dx / scale, dr / scale
    gram = dr.T @ dr + REGULARISATION * limits.eps * torch.eye(dr.shape[1], dtype=dr.dtype, device=dr.device)
    gamma = torch.linalg.solve(gram, dr.T @ residual)
    shift = mixing * residual - (dx + mixing * dr) @ gamma
    return x + _like(shift.to(x.real.dtype), x)


def _flat(x: Tensor) -> Tensor:
    """The entries as real numbers, in float32 at least."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _like(flat: Tensor, x: Tensor) -> Tensor:
    return torch.view_as_complex(flat.reshape(*x.shape, 2)) if x.is_complex() else flat.reshape(x.shape)
