"""Text to ids and back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from odeformer.data import (
    ByteTokenizer,
    CharacterTokenizer,
    FastTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)

TEXT = "The naïve café — 東京 — costs 3 €.\n\tdef f(x): return x\r\n" * 20
END = "<|endofdocument|>"


def tokenizers() -> list[Tokenizer]:
    return [make_tokenizer(kind, 300, [TEXT]) for kind in ("bytes", "characters", "bpe")]


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda t: t.kind)
def test_text_survives(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids.ndim == 1 and ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == TEXT
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""
    assert tokenizer.end_of_document not in ids
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.vocab_size, loaded.fingerprint, loaded.end_of_document) == (
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.fingerprint,
        tokenizer.end_of_document,
    )
    assert np.array_equal(loaded.encode(TEXT), ids)


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda t: t.kind)
@pytest.mark.parametrize("wrong", [-1, 100_000])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(
        ValueError, match=f"token id {wrong} is outside the vocabulary, 0 .. {tokenizer.vocab_size - 1}"
    ):
        tokenizer.decode([1, wrong])


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([0x61, 0xC3]) == "a\ufffd"
    with pytest.raises(ValueError, match="zero byte at character 2"):
        tokenizer.encode("ab\0")


def test_characters_are_numbered_as_in_nanogpt() -> None:
    tokenizer = make_tokenizer("characters", 300, ["hello "], ["world€"])
    chars = sorted(set("hello world€"))
    assert tokenizer.vocab_size == len(chars)
    assert tokenizer.encode("hold€").tolist() == [chars.index(c) for c in "hold€"]
    for stranger in "!x\U0001f600":
        with pytest.raises(ValueError, match=f"'{stranger}' at 2 is not in the vocabulary of 9 characters"):
            tokenizer.encode("ho" + stranger)


@pytest.mark.parametrize("characters", ["", "ba", "aa"])
def test_bad_character_sets(characters: str) -> None:
    with pytest.raises(ValueError, match="distinct and in order"):
        CharacterTokenizer(characters)


def test_byte_pair_encoding_is_trained_on_the_training_text_alone() -> None:
    train, other = "abab " * 50, "xyxy " * 500
    first, second = make_tokenizer("bpe", 300, [train], [other]), make_tokenizer("bpe", 300, [train], [])
    assert first.fingerprint == second.fingerprint
    assert len(first.encode("abab")) == 1 and len(first.encode("xyxy")) == 4


def test_byte_pair_encoding_expresses_every_text() -> None:
    tokenizer = FastTokenizer.trained_on(["plain"], 257)
    assert tokenizer.vocab_size == 257 and tokenizer.end_of_document is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([tokenizer.end_of_document]) == END
    spelled = tokenizer.encode(f"a{END}b")
    assert tokenizer.end_of_document not in spelled and tokenizer.decode(spelled) == f"a{END}b"
    with pytest.raises(ValueError, match="bpe_vocab_size must be at least 257, got 256"):
        FastTokenizer.trained_on(["plain"], 256)


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained = FastTokenizer.trained_on([TEXT], 300)
    # What a loaded tokeniser may bring along must not shorten or pad a document.
    trained.inner.enable_truncation(4)
    trained.inner.enable_padding(length=512)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=trained.inner, eos_token=END)
    wrapped.save_pretrained(tmp_path)
    loaded = make_tokenizer(f"hf:{tmp_path}", 300)
    assert loaded.end_of_document == trained.end_of_document
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    loaded.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint == loaded.fingerprint


def test_a_folder_that_needs_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    inner = FastTokenizer.trained_on([TEXT], 300).inner
    inner.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    loaded = make_tokenizer(f"hf:{tmp_path}", 300)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers: install odeformer-fastslow\[hf\]"):
        make_tokenizer(f"hf:{tmp_path}", 300)


def test_ids_with_gaps(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers.models import WordLevel

    Inner(WordLevel({"a": 0, "b": 7}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert make_tokenizer(f"hf:{tmp_path}", 300).vocab_size == 8


def test_unknown_and_missing_tokenizers(tmp_path: Path) -> None:
    for kind in ("words", "", "hf:"):
        with pytest.raises(ValueError, match=f"tokenizer must be .* got '{kind}'"):
            make_tokenizer(kind, 300)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make_tokenizer(f"hf:{tmp_path}/nowhere", 300)
    with pytest.raises(FileNotFoundError, match=r"holds no tokeniser: tokenizer_kind.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_kind.json").write_text('{"kind": "bpe", "end_of_document": 0}')
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a file of the tokenizers library"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_kind.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer_kind.json is damaged: KeyError\('kind'\)"):
        load_tokenizer(tmp_path)
