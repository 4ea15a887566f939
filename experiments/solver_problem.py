"""The stiff fast-slow transformer field on which solvers are compared: one layer, 256 tokens of width 32, pool size 16.

epsilon is set on its own; lambda = kappa = 1, the gate is open, the input u is injected, x0 and y0 start off the manifold, and
the span is one unit of slow time. Random weights of PyTorch's default scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from odeformer import FastSlowConfig
from odeformer.fields import FastSlowField, FastSlowLayer
from solvers import AdaptiveSteps, Checkpointed, ExponentialAdams, solve

EPSILONS = (1, 1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024)
TOKENS, WIDTH, HEADS, POOL = 256, 32, 4, 16


@dataclass
class Problem:
    """The field, where it starts, and a loss <x_cotangent, x> + <y_cotangent, y> at its end."""

    field: FastSlowField
    x0: Tensor
    y0: Tensor
    x_cotangent: Tensor
    y_cotangent: Tensor

    @property
    def epsilon(self) -> float:
        return float(self.field.epsilon)

    def leaves(self) -> list[Tensor]:
        """What gradients are taken of: x0, y0, u and the parameters."""
        return [self.x0, self.y0, self.field.u, *self.field.layer.parameters()]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.x_cotangent * x).sum() + (self.y_cotangent * y).sum()

    def gradient(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(x, y), self.leaves()))


def problem(epsilon: float, dtype: torch.dtype = torch.float64, seed: int = 0, tokens: int = TOKENS) -> Problem:
    """The same numbers in every dtype."""
    config = FastSlowConfig(
        n_layer=1,
        vocab_size=1,
        d_model=WIDTH,
        n_head=HEADS,
        pool_size=POOL,
        epsilon=float(epsilon),
        leak=1.0,
        relaxation=1.0,
        context=tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = FastSlowLayer(config)
        torch.nn.init.ones_(layer.gate)
        shapes = [(1, tokens, WIDTH)] * 2 + [(1, tokens // POOL, WIDTH)]
        u, x0, y0 = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        cotangents = [torch.randn(state.shape, dtype=torch.float64) for state in (x0, y0)]
    u, x0, y0 = (state.to(dtype).requires_grad_() for state in (u, x0, y0))
    return Problem(FastSlowField(layer.to(dtype), u), x0, y0, *(c.to(dtype) for c in cotangents))


@dataclass
class Reference:
    """The end state and the gradient in float64."""

    x: Tensor
    y: Tensor
    gradient: Sequence[Tensor]

    def state_error(self, x: Tensor, y: Tensor) -> float:
        """The larger of x's and y's relative errors, in the Euclidean norm."""
        return max(relative_error([x], [self.x]), relative_error([y], [self.y]))

    def gradient_error(self, gradient: Sequence[Tensor]) -> float:
        """Relative error of the gradient of all leaves together, in the Euclidean norm."""
        return relative_error(gradient, self.gradient)


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    difference = sum(float((a.detach().double() - b).square().sum()) for a, b in zip(found, exact, strict=True))
    return (difference / sum(float(b.square().sum()) for b in exact)) ** 0.5


def reference(epsilon: float, seed: int = 0, tokens: int = TOKENS, rtol: float = 1e-7) -> Reference:
    """By ExponentialAdams(4) with the discrete gradient of its steps."""
    p = problem(epsilon, torch.float64, seed, tokens)
    end = solve(
        p.field,
        p.x0,
        p.y0,
        t1=1.0,
        method=ExponentialAdams(4),
        steps=AdaptiveSteps(rtol, rtol),
        gradient=Checkpointed(),
    )
    gradient = p.gradient(end.xs[-1], end.ys[-1])
    return Reference(end.xs[-1].detach(), end.ys[-1].detach(), gradient)
