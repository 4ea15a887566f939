"""A plain GPT in nanoGPT's form (github.com/karpathy/nanoGPT), written anew: the peer of the training benchmark.

Learned positions, layer norm without bias, exact GELU, tied embeddings, fused causal attention, and AdamW as nanoGPT sets it
on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainBlock(nn.Module):
    """Pre-norm attention, then pre-norm MLP: (B, T, d) -> (B, T, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = (z.view(B, T, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(d, dim=2))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).contiguous().view(B, T, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)

    def optimiser(self, learning_rate: float = 1e-3) -> torch.optim.Optimizer:
        """AdamW with decay on matrices; the default (not fused) implementation, as nanoGPT takes on a CPU."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99))
