"""The ordinary parts of a transformer: causal attention, MLP, norm, rotary positions.

Shape suffixes: B batch, T tokens (or blocks), d width, H heads, D = d / H.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from odeformer.config import FastSlowConfig

P = ParamSpec("P")
Table = TypeVar("Table")


def cached_table(make: Callable[P, Table]) -> Callable[P, Table]:
    """Caches constant tables by size, dtype and device; a compiled graph makes its own, as it can't see a Python cache."""
    cached = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> Table:
        return (make if torch.compiler.is_compiling() else cached)(*args, **kwargs)  # type: ignore[arg-type]

    return table


@cached_table
def rotary_angles(length: int, head_width: int, device: torch.device) -> Tensor:
    """(length, 1, 1, D/2) float64: position times 10000^(-2i/D) (Su et al., arXiv:2104.09864)."""
    with torch.inference_mode(False):
        frequency = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequency)
        return angle[:, None, None, :].to(device)


@cached_table
def rotary_factors(length: int, head_width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """e^(i angle), (length, 1, 1, D/2), complex of the real `dtype`; made outside inference mode, so that training may use it."""
    with torch.inference_mode(False):
        angle = rotary_angles(length, head_width, torch.device("cpu"))
        return torch.complex(angle.cos().to(dtype), angle.sin().to(dtype)).to(device)


def rotate(qk: Tensor) -> Tensor:
    """Rotary positions on qk (B, T, 2, H, D), by the index along T: each pair (2i, 2i + 1) of D turns by its angle.

    As complex products, which take a third of the time of the real formula; compiled code takes the latter, since Inductor
    fuses it and generates no complex kernels.
    """
    dtype = torch.float64 if qk.dtype == torch.float64 else torch.float32
    pairs = qk.to(dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        angle = rotary_angles(qk.shape[1], qk.shape[-1], qk.device)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        first, second = pairs.unbind(-1)
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    else:
        factors = rotary_factors(qk.shape[1], qk.shape[-1], dtype, qk.device)
        turned = torch.view_as_real(torch.view_as_complex(pairs) * factors)
    return turned.flatten(-2).to(qk.dtype)


@cached_table
def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """(length, length) bool: True where query i may see key j, that is 0 <= i - j (< window)."""
    with torch.inference_mode(False):
        index = torch.arange(length, device=device)
        distance = index[:, None] - index[None, :]
        allowed = distance >= 0
        return allowed if window is None else allowed & (distance < window)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over (B, H, T, D), written out; differentiable in forward mode on every device."""
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ v


class Attention(nn.Module):
    """Multi-head causal self-attention: (B, T, d) -> (B, T, d), optionally within a sliding window.

    On the slow path T counts blocks: the causal mask is then the block-causal one, and positions are block indices.
    """

    def __init__(self, config: FastSlowConfig, window: int | None = None) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.window = window
        self.rotary = config.positions == "rotary"
        self.implementation = config.attention
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length == 0:
            return x
        qkv = rearrange(self.qkv(x), "b t (three h d) -> b t three h d", three=3, h=self.n_head)
        # Splits, whose gradient is one concatenation, and not slices, each of whose gradients fills a tensor of all of qkv.
        if self.rotary:
            qk, v = qkv.split([2, 1], dim=2)
            q, k, v = *rotate(qk).unbind(2), v.squeeze(2)
        else:
            q, k, v = qkv.unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        windowed = self.window is not None and self.window < length
        if self.implementation == "explicit":
            heads = explicit_attention(q, k, v, causal_mask(length, self.window, x.device))
        elif windowed:
            heads = functional.scaled_dot_product_attention(q, k, v, causal_mask(length, self.window, x.device))
        else:
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(heads, "b h t d -> b t (h d)"))


class MLP(nn.Module):
    """(..., d) -> (..., d) by one hidden layer: GELU, exact or by GPT-2's tanh formula, or SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: FastSlowConfig, hidden: int | None = None) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        if hidden is None:
            hidden = 8 * math.ceil(config.d_model / 3) if self.gated else 4 * config.d_model
        self.hidden = nn.Linear(config.d_model, 2 * hidden if self.gated else hidden, bias=config.bias)
        self.out = nn.Linear(hidden, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            value, gate = self.hidden(x).chunk(2, dim=-1)
            return self.out(value * functional.silu(gate))
        return self.out(functional.gelu(self.hidden(x), approximate=self.approximate))


def make_norm(config: FastSlowConfig) -> nn.Module:
    """RMS norm or layer norm over the last dimension, d."""
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=1e-5)
    return nn.LayerNorm(config.d_model, eps=1e-5, bias=config.bias)
