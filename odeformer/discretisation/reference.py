"""The discrete block as literally as possible: loops over tokens, heads and blocks, no shared code with the model.

It exists to be compared with. It knows only the parameter tensors of a `FastSlowLayer` and the formulas of section 4; a mistake
in the model's own pool, lift, attention or norm shows against it. Slow by intent: small shapes, float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from odeformer.config import FastSlowConfig

Map = Callable[[Tensor], Tensor]


def reference_pool(x: Tensor, pool_size: int) -> Tensor:
    """(B, T, d) -> (B, S, d), one block mean after another."""
    means = [x[:, j * pool_size : (j + 1) * pool_size].sum(1) / pool_size for j in range(x.shape[1] // pool_size)]
    return torch.stack(means, 1) if means else x[:, :0]


def reference_lift(v: Tensor, length: int, pool_size: int) -> Tensor:
    """(B, S, d) -> (B, length, d), token by token: the last block that ended at or before token t, or zero."""
    rows = []
    for t in range(length):
        k = (t + 1) // pool_size - 1
        rows.append(v[:, k] if k >= 0 else torch.zeros(v.shape[0], v.shape[2], dtype=v.dtype, device=v.device))
    return torch.stack(rows, 1)


def reference_layer_step(
    layer: nn.Module, config: FastSlowConfig, x: Tensor, y: Tensor, u: Tensor, length: float
) -> tuple[Tensor, Tensor]:
    """One discrete step of fast time `length`: parallel or sequential, coupled, frozen or dense."""
    p: dict[str, Tensor] = dict(layer.named_parameters())
    epsilon = config.epsilon if config.epsilon is not None else 1.0 / config.pool_size
    norm = {name: _norm(p, name, config) for name in ("attention_norm", "mlp_norm")}
    fast: list[Map] = [
        lambda z: _attention(p, "attention", config, norm["attention_norm"](z), config.window),
        lambda z: _mlp(p, "mlp", config, norm["mlp_norm"](z)),
    ]
    slow: list[Map] = []
    if config.coupling != "dense":
        for name in ("slow_attention_norm", "slow_mlp_norm", "manifold_norm"):
            norm[name] = _norm(p, name, config)
        slow = [
            lambda z: _attention(p, "slow_attention", config, norm["slow_attention_norm"](z), None),
            lambda z: _mlp(p, "slow_mlp", config, norm["slow_mlp_norm"](z)),
        ]

    def exchange(z: Tensor) -> Tensor:
        leaked = -config.leak * (z - u)
        if config.coupling != "coupled":
            return leaked
        phi = _mlp(p, "manifold", config, norm["manifold_norm"](y))
        return p["gate"] * reference_lift(phi, z.shape[1], config.pool_size) + leaked

    if config.sublayers == "parallel":
        fast_rate = fast[0](x) + fast[1](x) + exchange(x)
        if not slow:
            return x + length * fast_rate, y
        slow_rate = slow[0](y) + slow[1](y) + config.relaxation * (reference_pool(x, config.pool_size) - y)
        return x + length * fast_rate, y + length * epsilon * slow_rate
    for rate in (*fast, exchange):
        x = x + length * rate(x)
    for rate in slow:
        y = y + length * epsilon * rate(y)
    if slow:
        y = y + length * epsilon * config.relaxation * (reference_pool(x, config.pool_size) - y)
    return x, y


def _linear(p: dict[str, Tensor], name: str, z: Tensor) -> Tensor:
    product = torch.einsum("...i,oi->...o", z, p[f"{name}.weight"])
    return product + p[f"{name}.bias"] if f"{name}.bias" in p else product


def _norm(p: dict[str, Tensor], name: str, config: FastSlowConfig) -> Map:
    def apply(z: Tensor) -> Tensor:
        if config.norm == "layer":
            z = z - z.sum(-1, keepdim=True) / z.shape[-1]
        scaled = z / ((z * z).sum(-1, keepdim=True) / z.shape[-1] + 1e-5).sqrt() * p[f"{name}.weight"]
        return scaled + p[f"{name}.bias"] if f"{name}.bias" in p else scaled

    return apply


def _mlp(p: dict[str, Tensor], name: str, config: FastSlowConfig, z: Tensor) -> Tensor:
    hidden = _linear(p, f"{name}.hidden", z)
    if config.mlp == "swiglu":
        half = hidden.shape[-1] // 2
        value, gate = hidden[..., :half], hidden[..., half:]
        return _linear(p, f"{name}.out", value * gate / (1 + (-gate).exp()))
    if config.mlp == "gelu_tanh":
        share = (math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)).tanh()
    else:
        share = (hidden / math.sqrt(2)).erf()
    return _linear(p, f"{name}.out", 0.5 * hidden * (1 + share))


def _attention(p: dict[str, Tensor], name: str, config: FastSlowConfig, z: Tensor, window: int | None) -> Tensor:
    length, width, heads = z.shape[1], config.d_model, config.n_head
    if length == 0:
        return z
    qkv, depth = _linear(p, f"{name}.qkv", z), width // heads
    mixed = []
    for head in range(heads):
        q, k, v = (qkv[..., i * width + head * depth : i * width + (head + 1) * depth] for i in range(3))
        if config.positions == "rotary":
            q, k = _rotated(q), _rotated(k)
        rows = []
        for i in range(length):
            first = 0 if window is None else max(0, i - window + 1)
            score = torch.einsum("bd,bjd->bj", q[:, i], k[:, first : i + 1]) / math.sqrt(depth)
            weight = (score - score.amax(-1, keepdim=True)).exp()
            weight = weight / weight.sum(-1, keepdim=True)
            rows.append(torch.einsum("bj,bjd->bd", weight, v[:, first : i + 1]))
        mixed.append(torch.stack(rows, 1))
    return _linear(p, f"{name}.out", torch.cat(mixed, -1))


def _rotated(z: Tensor) -> Tensor:
    """Each pair (z_2i, z_2i+1) of the D columns turned by the angle position / 10000^(2i/D)."""
    depth = z.shape[-1]
    columns: list[Tensor] = []
    position = torch.arange(z.shape[1], dtype=torch.float64, device=z.device)
    for i in range(0, depth, 2):
        angle = position * 10000.0 ** (-i / depth)
        cos, sin = angle.cos().to(z.dtype), angle.sin().to(z.dtype)
        columns += [z[..., i] * cos - z[..., i + 1] * sin, z[..., i] * sin + z[..., i + 1] * cos]
    return torch.stack(columns, -1)
