"""Text from a model: one token at a time, by sampling or greedily."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from odeformer.model import FastSlowLM


@torch.no_grad()
def generate(
    model: FastSlowLM,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    known: int | None = None,
) -> Tensor:
    """Continues tokens (B, T) by `count` tokens each: (B, T + count), the input first.

    The model sees at most `config.context` tokens, as in training. What is cut off in front is a multiple of pool_size, so that
    the pooled blocks stay the same blocks from one token to the next (for context < pool_size, where no block is ever
    complete, exactly `context` tokens are kept).

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample among the k most likely tokens only.
        generator: of the draws, on the model's device; None draws from PyTorch's global one.
        known: only ids below it are chosen, for a tokeniser that is smaller than the model's vocabulary.

    Raises TypeError and ValueError that name the argument; token ids out of range are refused by the model.
    """
    _check(model, tokens, count, temperature, top_k, known)
    was_training = model.training
    model.eval()
    try:
        for _ in range(count):
            logits = model(visible(model, tokens))[:, -1, :known]
            chosen = _choose(logits, temperature, top_k, generator)
            tokens = torch.cat([tokens, chosen.to(tokens.dtype)], dim=1)
    finally:
        model.train(was_training)
    return tokens


def visible(model: FastSlowLM, tokens: Tensor) -> Tensor:
    """The end of tokens (B, T) that the model reads: at most context tokens, from a block boundary where that is possible."""
    context, size = model.config.context, model.config.pool_size
    excess = tokens.shape[1] - context
    if excess <= 0:
        return tokens
    start = math.ceil(excess / size) * size if context >= size else excess
    return tokens[:, start:]


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """(B, 1) token ids from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # Relative to the largest, so that a tiny temperature cannot overflow.
    logits = (logits.double() - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        index = torch.multinomial(kept.values.softmax(-1), 1, generator=generator)
        return kept.indices.gather(-1, index)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def _check(
    model: FastSlowLM, tokens: Tensor, count: int, temperature: float, top_k: int | None, known: int | None
) -> None:
    if not isinstance(model, FastSlowLM):
        raise TypeError(f"model must be a FastSlowLM, got {type(model).__name__}")
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32) or tokens.numel() == 0:
        raise ValueError(f"tokens must be (B, T) int64 and not empty, got {tuple(tokens.shape)} {tokens.dtype}")
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count must be an int, got {count!r}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if not isinstance(temperature, int | float) or isinstance(temperature, bool):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    for name, value in (("top_k", top_k), ("known", known)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} must be an int or None, got {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
