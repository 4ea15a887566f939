"""What passes between the two clocks: pool (tokens to blocks) and lift (blocks to tokens).

P block size, S = floor(T / P) complete blocks. Token t reads only blocks whose last token is <= t, so no future leaks in;
tokens of an incomplete tail block are pooled nowhere.
"""

from __future__ import annotations

from einops import reduce, repeat
from torch import Tensor
from torch.nn import functional


def pool(x: Tensor, pool_size: int) -> Tensor:
    """Causal block means: (B, T, d) -> (B, S, d), block j the mean of tokens jP .. jP + P - 1."""
    blocks = x.shape[1] // pool_size
    return reduce(x[:, : blocks * pool_size], "b (s p) d -> b s d", "mean", p=pool_size)


def lift(v: Tensor, length: int, pool_size: int) -> Tensor:
    """(B, S, d) -> (B, T, d) with T = `length`: token t reads block floor((t + 1) / P) - 1, and 0 before the first is whole.

    Copying commutes with a factor per channel: gamma * Lift(v) = Lift(gamma * v), bit for bit.
    Raises ValueError where S is not floor(T / P).
    """
    if v.shape[1] != length // pool_size:
        raise ValueError(
            f"lift to {length} tokens with pool_size={pool_size} needs {length // pool_size} blocks, got {v.shape[1]}"
        )
    padded = functional.pad(v, (0, 0, 1, 0))  # what is read before the first block: 0
    copies = repeat(padded, "b s d -> b (s p) d", p=pool_size)
    # A split, whose gradient is one concatenation; a slice's fills a tensor first.
    return copies.split([1, length, copies.shape[1] - length - 1], dim=1)[1]
