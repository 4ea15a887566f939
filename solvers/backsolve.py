"""torchdiffeq's adjoint, for comparison: state and adjoint integrated backwards together."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from solvers.gradients import Gradient
from solvers.method import Method
from solvers.stepping import Steps
from solvers.system import FastTimeProblem

PRODUCTS = 12
"""With J^T, for one estimate."""


class Backsolve(Gradient):
    """`odeint_adjoint` of torchdiffeq (Chen et al., arXiv:1806.07366); goes with `TorchDiffEq` only.

    Backwards in time a contraction is an explosion: an error of the state grows by exp(mu |span|), mu the rate at which the
    field contracts in fast time. A UserWarning says so where that is more than tenfold. No second derivatives.
    """

    def check(self, method: Method, steps: Steps) -> None:
        raise ValueError(
            f"{self!r} is torchdiffeq's, so it goes with TorchDiffEq(name), got {method!r}; use StoredAdjoint()"
        )


def warn_of_growth(
    problem: FastTimeProblem, span: float, start: tuple[Tensor, Tensor], end: tuple[Tensor, Tensor]
) -> None:
    """Estimates mu at both ends, and takes the mean."""
    mu = (contraction(problem, 0.0, *start, span) + contraction(problem, span, *end, span)) / 2
    exponent = mu * abs(span)
    if exponent > math.log(10):
        decades = exponent / math.log(10)
        warnings.warn(
            f"Backsolve() integrates a contracting field backwards: errors of the state grow about 1e{decades:.0f}-fold "
            f"(exp(mu |span|) with mu = {mu:.3g} over the fast time {abs(span):.6g}), and the gradient with them; use "
            "StoredAdjoint() or Checkpointed() with a method of this library, or Backprop()",
            UserWarning,
            stacklevel=2,
        )


def contraction(problem: FastTimeProblem, tau: float, x: Tensor, y: Tensor, direction: float) -> float:
    """-min Re of J's eigenvalues (the largest, negated, for a span backwards in time) in fast time, about.

    By power iteration with J^T, shifted by the largest stretching seen so far so that this eigenvalue dominates, and its
    Rayleigh quotient. Not where a state is not finite, nor where the field is not differentiable: 0.
    """
    sign = math.copysign(1.0, direction)
    x, y = (part.detach().requires_grad_() for part in (x, y))
    with torch.enable_grad():
        outputs = problem.rates(tau, x, y)
    generator = torch.Generator(x.device).manual_seed(0)
    v = [torch.randn(part.shape, dtype=part.dtype, device=x.device, generator=generator) for part in (x, y)]
    quotient = shift = torch.zeros((), dtype=torch.float64, device=x.device)
    for _ in range(PRODUCTS):
        length = _inner(v, v).sqrt()
        v = [part / length.to(part.real.dtype) for part in v]
        product = [torch.zeros_like(part) for part in v]
        pairs = [(rate, part) for rate, part in zip(outputs, v, strict=True) if rate.requires_grad]
        if pairs:
            found = torch.autograd.grad(
                [rate for rate, _ in pairs], (x, y), [part for _, part in pairs], retain_graph=True, allow_unused=True
            )
            product = [zero if g is None else sign * g for zero, g in zip(product, found, strict=True)]
        quotient = _inner(v, product)
        shift = torch.maximum(shift, _inner(product, product).sqrt())
        v = [p - shift.to(part.real.dtype) * part for p, part in zip(product, v, strict=True)]
    mu = -float(quotient)
    return mu if math.isfinite(mu) else 0.0


def _inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return sum(
        ((p.conj() * q).real.sum().double() for p, q in zip(a, b, strict=True)),
        start=torch.zeros((), device=a[0].device),
    )
