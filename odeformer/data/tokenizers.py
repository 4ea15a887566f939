"""Text to token ids and back: bytes, characters, byte-pair encoding, or a Hugging Face tokeniser."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from odeformer.data.readers import check_path, import_extra
from odeformer.files import write_json, write_text

END_OF_DOCUMENT = "<|endofdocument|>"
FILE = "tokenizer.json"
KIND_FILE = "tokenizer_kind.json"


class Tokenizer(Protocol):
    """What the data layer asks of a tokeniser. Ids are in 0 .. vocab_size - 1."""

    kind: str
    vocab_size: int
    end_of_document: int | None
    """Token after each document; None where documents are simply joined. No text is encoded to it."""

    @property
    def fingerprint(self) -> str:
        """Names this tokeniser in the cache: equal fingerprints encode equally."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """(n,) token ids, nothing added. Raises ValueError for text that the vocabulary cannot express."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Raises ValueError for an id outside the vocabulary."""
        ...

    def save(self, folder: Path | str) -> None:
        """Writes what `load_tokenizer` needs."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; byte 0, which text must not hold, ends a document."""

    kind = "bytes"
    vocab_size = 256
    end_of_document: int | None = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """(n,) uint8, read-only. Raises ValueError for a zero byte."""
        if "\0" in text:
            at = text.index("\0")
            raise ValueError(f"text holds a zero byte at character {at}, which ends a document")
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8, as at the end of a cut text, become U+FFFD."""
        return bytes(_checked(ids, self.vocab_size)).decode(errors="replace")

    def save(self, folder: Path | str) -> None:
        write_json(Path(folder) / KIND_FILE, {"kind": self.kind})


class CharacterTokenizer:
    """One token per character, numbered in the order of their code points; documents are simply joined.

    Raises ValueError for characters that are not distinct and in that order, and for none.
    """

    kind = "characters"
    end_of_document: int | None = None

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = list(characters)
        if not self.characters or self.characters != sorted(set(self.characters)):
            raise ValueError(f"characters must be distinct and in order, and not none, got {characters!r}")
        self.vocab_size = len(self.characters)
        self._points = np.array([ord(c) for c in self.characters], dtype=np.uint32)

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharacterTokenizer:
        """For the characters of these texts: nanoGPT's rule where they are the whole corpus."""
        return cls(sorted(set().union(*map(set, texts))))

    @property
    def fingerprint(self) -> str:
        return "characters:" + hashlib.sha256(self._points.astype("<u4").tobytes()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """(n,) int64. Raises ValueError naming the first character that is not in the vocabulary."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = np.searchsorted(self._points, points)
        known = self._points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            at = int(np.argmin(known))
            size = self.vocab_size
            raise ValueError(f"character {text[at]!r} at {at} is not in the vocabulary of {size} characters")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in _checked(ids, self.vocab_size))

    def save(self, folder: Path | str) -> None:
        write_json(Path(folder) / KIND_FILE, {"kind": self.kind, "characters": "".join(self.characters)})


class FastTokenizer:
    """A tokeniser of the `tokenizers` library: byte-pair encoding trained here, or one that was loaded."""

    def __init__(self, inner: Any, kind: str, end_of_document: int | None) -> None:
        # Both may come with a loaded tokeniser, and would silently shorten or lengthen documents.
        inner.no_truncation()
        inner.no_padding()
        # A special token that is spelled out in a text is text.
        inner.encode_special_tokens = True
        self.inner = inner
        self.kind = kind
        self.end_of_document = end_of_document
        # The number of entries is too small where ids have gaps.
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    @classmethod
    def trained_on(cls, texts: Iterable[str], vocab_size: int) -> FastTokenizer:
        """Byte-level BPE, which can encode every text; deterministic.

        Short texts give fewer than `vocab_size` tokens. Raises ValueError for a `vocab_size` below 257: the
        bytes and the end of a document.
        """
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if vocab_size < 257:
            raise ValueError(f"bpe_vocab_size must be at least 257, got {vocab_size}")
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner, "bpe", inner.token_to_id(END_OF_DOCUMENT))

    @property
    def fingerprint(self) -> str:
        state = hashlib.sha256(self.inner.to_str().encode()).hexdigest()
        return f"{self.kind}:{self.end_of_document}:{state}"

    def encode(self, text: str) -> np.ndarray:
        """(n,) int64."""
        return np.array(self.inner.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(_checked(ids, self.vocab_size), skip_special_tokens=False)

    def save(self, folder: Path | str) -> None:
        write_text(Path(folder) / FILE, self.inner.to_str())
        write_json(Path(folder) / KIND_FILE, {"kind": self.kind, "end_of_document": self.end_of_document})


def check_kind(kind: str) -> None:
    """Raises ValueError for a `kind` that is unknown, FileNotFoundError for a path that is missing."""
    hugging_face = kind.startswith("hf:") and kind.removeprefix("hf:").strip()
    if kind not in ("bytes", "characters", "bpe") and not hugging_face:
        known = '"bytes", "characters", "bpe" or "hf:NAME_OR_FOLDER"'
        raise ValueError(f"tokenizer must be {known}, got {kind!r}")
    if hugging_face:
        check_path(kind)


def make_tokenizer(
    kind: str, bpe_vocab_size: int, train: Sequence[str] = (), validation: Sequence[str] = ()
) -> Tokenizer:
    """The tokeniser named `kind` for these texts: characters of all, byte-pair encoding of `train` alone.

    Raises as `check_kind` does, and ImportError naming the extra where transformers is needed and missing.
    """
    check_kind(kind)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        return CharacterTokenizer.of([*train, *validation])
    if kind == "bpe":
        return FastTokenizer.trained_on(train, bpe_vocab_size)
    return _hugging_face(kind.removeprefix("hf:"))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokeniser that `save` wrote to `folder`.

    Raises FileNotFoundError for a missing file, ValueError for a damaged one.
    """
    path, file = Path(folder) / KIND_FILE, Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no tokeniser: {path.name} is missing")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kind = stored["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "characters":
            return CharacterTokenizer(stored["characters"])
        end_of_document = stored["end_of_document"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no tokeniser: {file.name} is missing")
    return FastTokenizer(_from_file(file), kind, end_of_document)


def _from_file(file: Path) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} is not a file of the tokenizers library, or damaged: {error}") from error


def _hugging_face(name: str) -> Tokenizer:
    local = Path(name).expanduser()
    file = local / FILE if local.is_dir() else local
    if file.is_file():
        inner, end = _from_file(file), _stated_end(file.parent)
    else:
        transformers = import_extra("transformers", f"tokenizer 'hf:{name}'")
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(str(local) if local.is_dir() else name)
            inner, end = loaded.backend_tokenizer, loaded.eos_token
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise FileNotFoundError(f"tokenizer 'hf:{name}' cannot be loaded: {error}") from error
    candidates = (end, "<|endoftext|>", END_OF_DOCUMENT, "<|end_of_text|>", "</s>")
    known = (inner.token_to_id(token) for token in candidates if token)
    return FastTokenizer(inner, "hf", next((i for i in known if i is not None), None))


def _stated_end(folder: Path) -> str | None:
    """The eos_token that transformers writes beside tokenizer.json."""
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return stated.get("content") if isinstance(stated, dict) else stated


def _checked(ids: Iterable[int], vocab_size: int) -> list[int]:
    numbers = [int(i) for i in ids]
    for number in numbers:
        if not 0 <= number < vocab_size:
            raise ValueError(f"token id {number} is outside the vocabulary, 0 .. {vocab_size - 1}")
    return numbers
