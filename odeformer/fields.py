"""The vector fields of one layer.

    eps dx/ds = f(x, y; u) = A(n1 x) + M(n2 x) + gamma * Lift(phi(n3 y)) - lambda (x - u)
        dy/ds = g(x, y)    = S(m1 y) + N(m2 y) + kappa (Pool x - y)

x (B, T, d) fast state, y (B, S, d) slow state, u (B, T, d) input, s slow time. The formulas are this project's reading of
arXiv:2606.16730, of which only the abstract was available.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from odeformer.config import FastSlowConfig
from odeformer.coupling import lift, pool
from odeformer.layers import MLP, Attention, make_norm
from solvers import FastSlowSystem, Part


class FastSlowLayer(nn.Module):
    """The parameters theta_l of one layer, the same under every scheme. A dense layer has no slow path."""

    def __init__(self, config: FastSlowConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = make_norm(config)  # n1
        self.attention = Attention(config, config.window)  # A
        self.mlp_norm = make_norm(config)  # n2
        self.mlp = MLP(config)  # M
        if config.coupling == "dense":
            return
        self.slow_attention_norm = make_norm(config)  # m1
        self.slow_attention = Attention(config)  # S
        self.slow_mlp_norm = make_norm(config)  # m2
        self.slow_mlp = MLP(config)  # N
        self.manifold_norm = make_norm(config)  # n3
        self.manifold = MLP(config, hidden=config.manifold_width or config.d_model)  # phi_theta
        self.gate = nn.Parameter(torch.zeros(config.d_model))  # gamma

    @property
    def has_slow_path(self) -> bool:
        """Whether y evolves (coupled and frozen layers)."""
        return self.config.coupling != "dense"

    @property
    def is_coupled(self) -> bool:
        """Whether y is read by x; a frozen layer holds its gate at zero."""
        return self.config.coupling == "coupled"


class FastSlowField(FastSlowSystem):
    """f and g of one layer under the input u. `fast` and `slow` are the sums of `parts`."""

    def __init__(self, layer: FastSlowLayer, u: Tensor) -> None:
        super().__init__()
        config = layer.config
        self.layer = layer
        self.u = u
        self.epsilon = config.resolved_epsilon
        self.fast_decay = config.leak
        self.slow_decay = config.relaxation

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """f(x, y; u), (B, T, d)."""
        f = self.attend(t, x, y) + self.transform(t, x, y)
        return f + self.couple(t, x, y) if self._couples else f

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """g(x, y), (B, S, d); a dense layer's slow state is empty."""
        if not self.layer.has_slow_path:
            return torch.zeros_like(y)
        g = self.attend_slow(t, x, y) + self.transform_slow(t, x, y)
        return g + self.relax(t, x, y) if self.slow_decay else g

    def parts(self) -> Sequence[Part]:
        """The summands of f, then those of g, in the order of the sequential block."""
        parts = [Part("fast", self.attend), Part("fast", self.transform)]
        if self._couples:
            parts.append(Part("fast", self.couple))
        if self.layer.has_slow_path:
            parts += [Part("slow", self.attend_slow), Part("slow", self.transform_slow)]
            if self.slow_decay:
                parts.append(Part("slow", self.relax))
        return parts

    def attend(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """A(n1 x)."""
        return self.layer.attention(self.layer.attention_norm(x))

    def transform(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """M(n2 x)."""
        return self.layer.mlp(self.layer.mlp_norm(x))

    def couple(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """gamma * Lift(phi(n3 y)) - lambda (x - u)."""
        layer, config = self.layer, self.layer.config
        if not layer.is_coupled:
            return -self.fast_decay * (x - self.u)
        phi = layer.manifold(layer.manifold_norm(y))
        lifted = lift(layer.gate * phi, x.shape[1], config.pool_size)
        return lifted - self.fast_decay * (x - self.u) if self.fast_decay else lifted

    def attend_slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """S(m1 y)."""
        return self.layer.slow_attention(self.layer.slow_attention_norm(y))

    def transform_slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """N(m2 y)."""
        return self.layer.slow_mlp(self.layer.slow_mlp_norm(y))

    def relax(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """kappa (Pool x - y)."""
        return self.slow_decay * (pool(x, self.layer.config.pool_size) - y)

    @property
    def _couples(self) -> bool:
        return self.layer.is_coupled or self.layer.config.leak > 0
