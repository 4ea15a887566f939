"""Small models with an open gate, and small inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from odeformer import FastSlowConfig, FastSlowLM
from odeformer.discretisation.certificate import randomise_


def open_model(seed: int = 0, dtype: torch.dtype = torch.float64, **settings: object) -> FastSlowLM:
    """A random model none of whose parameters is near a special value: open gate, uneven norms."""
    defaults: dict[str, object] = {"vocab_size": 31, "n_layer": 2, "d_model": 16, "n_head": 2, "context": 128}
    model = FastSlowLM(FastSlowConfig(**{**defaults, **settings})).to(dtype)  # type: ignore[arg-type]
    randomise_(model, seed)
    return model


def random_tokens(length: int, batch: int = 2, vocabulary: int = 31, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator)
