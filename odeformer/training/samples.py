"""Text from a run folder: its model, its tokeniser, a prompt."""

from __future__ import annotations

from pathlib import Path

import torch

from odeformer.data import load_tokenizer
from odeformer.decoding import generate
from odeformer.training.checkpoints import load_model
from odeformer.training.configuration import TOKENIZER_FOLDER
from odeformer.training.switch import run_folder_of


def generate_text(
    run: Path | str,
    prompt: str,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """The continuation of `prompt` by `count` tokens, without the prompt.

    Raises ValueError for an empty prompt and for a checkpoint that lies outside a run folder, and as `load_model` and
    `generate` do.
    """
    model, folder = load_model(run), run_folder_of(run)
    if folder is None:
        raise ValueError(f"{run} lies outside a run folder, so its tokenizer is not known")
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise ValueError("prompt must hold at least one token, got an empty text")
    tokens = torch.tensor(ids.astype("int64"))[None]
    generator = torch.Generator().manual_seed(seed)
    found = generate(
        model, tokens, count, temperature=temperature, top_k=top_k, generator=generator, known=tokenizer.vocab_size
    )
    return tokenizer.decode(found[0, tokens.shape[1] :].tolist())
