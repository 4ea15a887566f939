"""Data: corpora, tokenisers and deterministic batches."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np

from odeformer.config import DataConfig
from odeformer.data.batches import Batch, Batches, TrainingBatches, check_length, evaluation_batches
from odeformer.data.cache import cached_bpe, cached_tokens, default_cache
from odeformer.data.corpora import Split, read_corpus, split_documents
from odeformer.data.readers import Document
from odeformer.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    FastTokenizer,
    Tokenizer,
    check_kind,
    load_tokenizer,
    make_tokenizer,
)


@dataclass(frozen=True)
class TextData:
    """A corpus as tokens: (n,) unsigned integers below the tokenizer's vocab_size, memory-mapped."""

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    description: dict[str, Any]
    """source, tokenizer, vocab_size, digest (of texts, split and tokeniser); python (its version) where the
    standard library is a source; for each of train and validation: documents, bytes, tokens."""


def load_data(config: DataConfig, *, context: int) -> TextData:
    """Reads, splits and tokenises a corpus, taking the tokens from the cache where it holds them.

    Args:
        context: tokens of a training sequence; each part must hold one and its next token.

    Raises TypeError for another kind of config; FileNotFoundError, ValueError or ImportError naming what is
    missing or wrong with a source, a text, the tokeniser or a length; OSError naming the folder where the
    cache cannot be written.
    """
    if not isinstance(config, DataConfig):
        raise TypeError(f"config must be a DataConfig, got {type(config).__name__}")
    if context < 1:
        raise ValueError(f"context must be >= 1, got {context}")
    check_kind(config.tokenizer)
    split = split_documents(read_corpus(config), config.validation_fraction)
    tokenizer = _tokenizer(config, split)
    train, validation, digest = cached_tokens(split, tokenizer, config.cache)
    check_length(train, context, "training")
    check_length(validation, context, "validation")
    description: dict[str, Any] = {
        "source": config.source,
        "tokenizer": config.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "digest": digest,
    }
    if "stdlib" in ([config.source] if isinstance(config.source, str) else config.source):
        description["python"] = platform.python_version()
    description["train"] = _sizes(split.train, train)
    description["validation"] = _sizes(split.validation, validation)
    return TextData(train, validation, tokenizer, description)


def _tokenizer(config: DataConfig, split: Split) -> Tokenizer:
    if config.tokenizer == "bpe":
        return cached_bpe(split.train, config.bpe_vocab_size, config.cache)
    train, validation = ([document.text for document in part] for part in (split.train, split.validation))
    return make_tokenizer(config.tokenizer, config.bpe_vocab_size, train, validation)


def _sizes(documents: list[Document], tokens: np.ndarray) -> dict[str, int]:
    return {"documents": len(documents), "bytes": sum(d.size for d in documents), "tokens": len(tokens)}


__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Document",
    "FastTokenizer",
    "Split",
    "TextData",
    "Tokenizer",
    "TrainingBatches",
    "default_cache",
    "evaluation_batches",
    "load_data",
    "load_tokenizer",
    "make_tokenizer",
    "read_corpus",
    "split_documents",
]
