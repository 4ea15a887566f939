"""From the continuous model to the discrete one and back, on the same parameter tensors, and what the switch loses."""

from __future__ import annotations

import torch
from torch import Tensor

from odeformer.blocks import DiscreteBlock, FlowBlock, unit_steps
from odeformer.config import FastSlowConfig
from odeformer.model import FastSlowLM
from solvers import (
    RK4,
    AdaptiveSteps,
    Backprop,
    Dopri5,
    Euler,
    FastSlowSystem,
    FixedSteps,
    Gradient,
    LieTrotter,
    Method,
    Steps,
    TorchDiffEq,
    integrate,
)


def euler_step(system: FastSlowSystem, x: Tensor, y: Tensor, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """One explicit Euler step of fast time `length`: (x + length f, y + length eps g), shapes kept."""
    return integrate(system, x, y, span=length, method=Euler(), steps=FixedSteps(1))


def lie_step(system: FastSlowSystem, x: Tensor, y: Tensor, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """One Lie-Trotter step of fast time `length`, each of the system's parts by one Euler step, in order."""
    return integrate(system, x, y, span=length, method=LieTrotter(), steps=FixedSteps(1))


def to_discrete(model: FastSlowLM, multirate: bool = False) -> FastSlowLM:
    """The discrete twin: the same parameter tensors, run by `DiscreteBlock`.

    With `multirate`, y takes one step per layer (the twin of `MultirateEuler(horizon)` over one step).
    Raises ValueError where the horizon has no discrete twin.
    """
    _check_model(model)
    unit_steps(model.config)
    return model.with_blocks(lambda layer: DiscreteBlock(layer, multirate))


def to_continuous(
    model: FastSlowLM,
    method: Method | TorchDiffEq | None = None,
    steps: Steps | None = None,
    gradient: Gradient | None = None,
) -> FastSlowLM:
    """The continuous twin: the same parameter tensors, each layer the flow of its field over a fast time of `horizon`.

    `steps` counts steps per layer; bounds of error control are fast times. Defaults: RK4(), FixedSteps(4), Backprop().
    Raises ValueError or TypeError, by name, for a method, steps and gradient that do not fit together.
    """
    _check_model(model)
    method, steps, gradient = method or RK4(), steps or FixedSteps(4), gradient or Backprop()
    return model.with_blocks(lambda layer: FlowBlock(layer, method, steps, gradient))


def _check_model(model: FastSlowLM) -> None:
    if not isinstance(model, FastSlowLM):
        raise TypeError(f"model must be a FastSlowLM, got {type(model).__name__}")


def twin_method(config: FastSlowConfig) -> Method:
    """The one-step method whose unit steps are the discrete block."""
    return Euler() if config.sublayers == "parallel" else LieTrotter()


@torch.no_grad()
def euler_defect(model: FastSlowLM, tokens: Tensor, rtol: float = 1e-5, atol: float = 1e-7) -> list[float]:
    """Per layer |Flow(z) - Block(z)| / |z| with z = (x, y) along the discrete trajectory of tokens (B, T).

    Flow is the layer's flow over its horizon (Dormand-Prince at the tolerances given), Block its discrete twin. It says how
    much the switch from continuous to discrete loses. Raises ValueError where there is no twin, `SolveError` where the
    flow fails.
    """
    flow = to_continuous(model, Dopri5(), AdaptiveSteps(rtol, atol))
    x, y, u = model.start(tokens)
    defects = []
    for exact, block in zip(flow.depth(), to_discrete(model).depth(), strict=True):
        (x_flow, y_flow), (x_block, y_block) = exact(x, y, u), block(x, y, u)
        gap, size = _norm(x_flow - x_block, y_flow - y_block), _norm(x, y)
        defects.append(float(gap / size))
        x, y = x_block, y_block
    return defects


def _norm(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(x.double().square().sum() + y.double().square().sum())
