"""Tokens on disk, memory-mapped; the file name carries a digest of the text, the split and the tokeniser.

A file is an ordinary .npy of (n,) unsigned integers, followed by the SHA-256 of all that is before it
(`np.load` passes over it), so that a damaged file is noticed and made anew. Files are whole or absent, and
two processes that make the same one write the same bytes. Nothing is ever deleted.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from odeformer.data.corpora import Document, Split
from odeformer.data.tokenizers import FastTokenizer, Tokenizer, load_tokenizer
from odeformer.files import replacing

_LAYOUT = "1"
"""Part of every digest: change it with the way in which tokens are made or stored."""


def default_cache() -> Path:
    """The user's cache folder for this package: odeformer in $XDG_CACHE_HOME or ~/.cache."""
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (stated if stated.is_absolute() else Path.home() / ".cache") / "odeformer"


def digest_of(documents: Split | Sequence[Document], *more: str) -> str:
    """16 hexadecimal digits that name these documents (names, texts, side of the split) and `more`.

    Fraction and size limit are covered by what they do: settings that give equal parts share their files.
    """
    state = hashlib.sha256("\0".join((_LAYOUT, *more)).encode())
    for part in (documents.train, documents.validation) if isinstance(documents, Split) else (documents,):
        state.update(f"\0part {len(part)}".encode())
        for document in part:
            name, text = document.name.encode("utf-8", "surrogateescape"), document.text.encode()
            state.update(b"\0%d %d " % (len(name), len(text)) + name)
            state.update(text)
    return state.hexdigest()[:16]


def cached_tokens(
    split: Split, tokenizer: Tokenizer, folder: Path | str | None = None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Tokens of the two parts, (n,) each, memory-mapped, and their digest; made where the cache lacks them.

    Args:
        folder: of the cache. None: `default_cache()`.

    Raises OSError naming the folder where it cannot be written, ValueError naming a document that cannot be
    encoded.
    """
    folder = default_cache() if folder is None else Path(folder).expanduser()
    digest = digest_of(split, tokenizer.fingerprint)
    train = _cached(folder / f"tokens-{digest}-train.npy", split.train, tokenizer)
    validation = _cached(folder / f"tokens-{digest}-validation.npy", split.validation, tokenizer)
    return train, validation, digest


def cached_bpe(documents: Sequence[Document], vocab_size: int, folder: Path | None) -> FastTokenizer:
    """Byte-pair encoding trained on these documents: now, which takes seconds, or by an earlier call.

    Raises OSError naming the folder where it cannot be written.
    """
    import tokenizers

    folder = default_cache() if folder is None else Path(folder).expanduser()
    digest = digest_of(documents, "bpe", str(vocab_size), tokenizers.__version__)
    place = folder / f"bpe-{digest}"
    try:
        loaded = load_tokenizer(place)
        if isinstance(loaded, FastTokenizer):
            return loaded
    except (ValueError, OSError):
        pass  # not there yet, or damaged
    with _naming(folder):
        # Noticed before the training, not after it.
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    trained = FastTokenizer.trained_on((document.text for document in documents), vocab_size)
    with _naming(folder):
        trained.save(place)
    return trained


def tokenise(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    """All documents one after another, each followed by the end-of-document token where there is one.

    Returns (n,) of the smallest of uint8, uint16 and uint32 that holds the vocabulary. Raises ValueError
    naming a document that cannot be encoded.
    """
    kind = next(k for k in (np.uint8, np.uint16, np.uint32) if tokenizer.vocab_size - 1 <= np.iinfo(k).max)
    end = [] if tokenizer.end_of_document is None else [np.array([tokenizer.end_of_document], dtype=kind)]
    pieces = [np.empty(0, dtype=kind)]
    for document in documents:
        try:
            ids = tokenizer.encode(document.text)
        except ValueError as error:
            raise ValueError(f"{document.name}: {error}") from error
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            raise ValueError(
                f"{document.name}: the tokeniser gave ids from {ids.min()} to {ids.max()}, "
                f"its vocabulary is {tokenizer.vocab_size}"
            )
        pieces += [ids.astype(kind), *end]
    return np.concatenate(pieces)


def _cached(path: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    tokens = _load(path)
    if tokens is None:
        with _naming(path.parent):
            _save(path, documents, tokenizer)
        tokens = _load(path)
    if tokens is None:
        raise OSError(f"{path} is not what was written to it: is the disk damaged?")
    return tokens


def _save(path: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
    # The file is opened before the work starts, so that a folder that cannot be written is noticed at once.
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.save(file, tokenise(documents, tokenizer))
        digest = _sha256(temporary, temporary.stat().st_size)
        with temporary.open("ab") as file:
            file.write(digest)


def _load(path: Path) -> np.ndarray | None:
    """The tokens of a whole file; None where it is absent or damaged."""
    size = hashlib.sha256().digest_size
    try:
        length = path.stat().st_size - size
        with path.open("rb") as file:
            file.seek(max(length, 0))
            stated = file.read()
        if length <= 0 or _sha256(path, length) != stated:
            return None
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None


def _sha256(path: Path, length: int) -> bytes:
    """Of the first `length` bytes, read piece by piece: the file may be larger than the memory."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while length > 0 and (piece := file.read(min(length, 2**20))):
            state.update(piece)
            length -= len(piece)
    return state.digest()


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Says of an OSError inside that it is the cache which cannot be written, and how to choose another."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write the token cache in {folder} (see data.cache): {error.strerror or error}"
        raise OSError(error.errno, reason) from error
