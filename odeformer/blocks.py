"""Two ways to run one layer: the discrete block of pretraining, and the flow of the layer's field.

Both map (x, y, u) -> (x, y) with x, u (B, T, d) and y (B, S, d), and hold the same `FastSlowLayer`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from odeformer.config import FastSlowConfig
from odeformer.coupling import lift, pool
from odeformer.fields import FastSlowField, FastSlowLayer
from solvers import Gradient, Method, Steps, TorchDiffEq, check_scheme, integrate


def unit_steps(config: FastSlowConfig) -> tuple[int, float]:
    """(number, length) of the fast-time steps of the discrete twin of one layer.

    An integer horizon takes unit steps, one below 1 a single step of that length. Raises ValueError for others.
    """
    if config.horizon < 1:
        return 1, config.horizon
    if config.horizon == int(config.horizon):
        return int(config.horizon), 1.0
    raise ValueError(
        f"horizon={config.horizon} has no discrete twin: it must be an integer, or below 1; "
        "use to_continuous(model, method=..., steps=...)"
    )


class DiscreteBlock(nn.Module):
    """The block of pretraining, written out from the update formulas and not through the vector field.

    Parallel:    x+ = x + f(x, y; u), y+ = y + eps g(x, y).
    Sequential:  x <- x + A(n1 x);  x <- x + M(n2 x);  x <- x + gamma * Lift(phi(n3 y)) - lambda (x - u);
                 y <- y + eps S(m1 y);  y <- y + eps N(m2 y);  y <- y + eps kappa (Pool x - y).
    With `multirate` (parallel sublayers only) the layer's unit steps of x run under one step of y of the whole horizon.
    """

    def __init__(self, layer: FastSlowLayer, multirate: bool = False) -> None:
        super().__init__()
        if multirate and layer.config.sublayers != "parallel":
            raise ValueError(f"a multirate block needs sublayers='parallel', got {layer.config.sublayers!r}")
        self.layer = layer
        self.multirate = multirate

    def forward(self, x: Tensor, y: Tensor, u: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
        """(x, y) after the layer. With `last`, nobody reads y again, and its last step is left out."""
        number, length = unit_steps(self.layer.config)
        if self.multirate:
            y_end = y if last else self._slow_step(x, y, number * length)
            for _ in range(number):
                x = self._fast_step(x, y, u, length)
            return x, y_end
        parallel = self.layer.config.sublayers == "parallel"
        for remaining in reversed(range(number)):
            x_before, x = x, self._fast_step(x, y, u, length)
            if remaining or not last:
                y = self._slow_step(x_before if parallel else x, y, length)
        return x, y

    def _fast_step(self, x: Tensor, y: Tensor, u: Tensor, length: float) -> Tensor:
        p, config = self.layer, self.layer.config
        if config.sublayers == "parallel":
            return torch.add(x, self._fast_update(x, y, u), alpha=length)
        x = torch.add(x, p.attention(p.attention_norm(x)), alpha=length)
        x = torch.add(x, p.mlp(p.mlp_norm(x)), alpha=length)
        if config.coupling == "coupled" or config.leak:
            x = torch.add(x, self._exchange(x, y, u), alpha=length)
        return x

    def _slow_step(self, x: Tensor, y: Tensor, length: float) -> Tensor:
        p, config, epsilon = self.layer, self.layer.config, self.layer.config.resolved_epsilon
        if config.sublayers == "parallel":
            return torch.add(y, self._slow_update(x, y), alpha=length)
        if config.coupling == "dense":
            return y
        y = torch.add(y, epsilon * p.slow_attention(p.slow_attention_norm(y)), alpha=length)
        y = torch.add(y, epsilon * p.slow_mlp(p.slow_mlp_norm(y)), alpha=length)
        if config.relaxation:
            y = torch.add(y, epsilon * (config.relaxation * (pool(x, config.pool_size) - y)), alpha=length)
        return y

    def _fast_update(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        p, config = self.layer, self.layer.config
        update = p.attention(p.attention_norm(x)) + p.mlp(p.mlp_norm(x))
        if config.coupling == "coupled" or config.leak:
            update = update + self._exchange(x, y, u)
        return update

    def _exchange(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """What the gate lets in from y, and what leaks towards u."""
        p, config = self.layer, self.layer.config
        if config.coupling != "coupled":
            return -config.leak * (x - u)
        read = lift(p.gate * p.manifold(p.manifold_norm(y)), x.shape[1], config.pool_size)
        return read - config.leak * (x - u) if config.leak else read

    def _slow_update(self, x: Tensor, y: Tensor) -> Tensor:
        """eps g(x, y)."""
        p, config = self.layer, self.layer.config
        if config.coupling == "dense":
            return torch.zeros_like(y)
        update = p.slow_attention(p.slow_attention_norm(y)) + p.slow_mlp(p.slow_mlp_norm(y))
        if config.relaxation:
            update = update + config.relaxation * (pool(x, config.pool_size) - y)
        return config.resolved_epsilon * update


class FlowBlock(nn.Module):
    """The flow of the layer's field over a fast time of `horizon`; `steps` are per layer, their bounds in fast time."""

    def __init__(
        self, layer: FastSlowLayer, method: Method | TorchDiffEq, steps: Steps, gradient: Gradient | None = None
    ) -> None:
        super().__init__()
        check_scheme(method, steps, gradient)
        self.layer = layer
        self.method = method
        self.steps = steps
        self.gradient = gradient

    def forward(self, x: Tensor, y: Tensor, u: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
        """(x, y) after the layer; `last` changes nothing, since a solver's stages need y."""
        return integrate(
            FastSlowField(self.layer, u),
            x,
            y,
            span=self.layer.config.horizon,
            method=self.method,
            steps=self.steps,
            gradient=self.gradient,
        )
