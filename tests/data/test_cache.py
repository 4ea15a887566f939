"""Token files: whole, the same from every process, and made anew when damaged."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from odeformer.config import DataConfig
from odeformer.data import (
    Document,
    FastTokenizer,
    TextData,
    default_cache,
    load_data,
    make_tokenizer,
    split_documents,
)
from odeformer.data.cache import cached_tokens, digest_of, tokenise

TEXTS = ["one fish, " * 20, "two fish, " * 5, "rød fisk, " * 12, "blue fish. " * 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def load(folder: Path, **settings: object) -> TextData:
    defaults = {"source": str(folder / "texts"), "cache": folder / "cache", "bpe_vocab_size": 280}
    return load_data(DataConfig(**{**defaults, **settings}), context=8)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "cache").rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_tokens_are_the_texts(folder: Path, kind: str) -> None:
    data = load(folder, tokenizer=kind)
    assert isinstance(data.train, np.memmap) and not data.train.flags.writeable
    assert data.train.dtype == (np.uint16 if kind == "bpe" else np.uint8)
    end = data.tokenizer.end_of_document
    found = []
    for name, tokens in (("train", data.train), ("validation", data.validation)):
        assert tokens.max() < data.tokenizer.vocab_size
        text = data.tokenizer.decode(tokens)
        if end is not None:
            *texts, rest = text.split(data.tokenizer.decode([end]))
            assert rest == "" and len(texts) == data.description[name]["documents"]
            found += texts
        assert data.description[name]["tokens"] == len(tokens)
    assert end is None or sorted(found) == sorted(TEXTS)
    assert sum(data.description[n]["bytes"] for n in ("train", "validation")) == len("".join(TEXTS).encode())


def test_two_other_processes_at_once_write_the_same_files(folder: Path) -> None:
    for kind in ("bytes", "bpe"):
        load(folder, tokenizer=kind)
    first = files(folder)
    (folder / "cache").rename(folder / "earlier")
    program = (
        "import sys; from pathlib import Path\n"
        "from odeformer.config import DataConfig; from odeformer.data import load_data\n"
        "for kind in ('bytes', 'bpe'):\n"
        "    config = DataConfig(source=sys.argv[1], cache=Path(sys.argv[2]), tokenizer=kind,"
        " bpe_vocab_size=280)\n"
        "    load_data(config, context=8)"
    )
    command = [sys.executable, "-c", program, str(folder / "texts"), str(folder / "cache")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(command, env={**environment, "PYTHONHASHSEED": seed}) for seed in "12"]
    assert [process.wait() for process in processes] == [0, 0]
    assert files(folder) == first


def test_a_second_run_reads_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder, tokenizer="bpe")
    monkeypatch.setattr("odeformer.data.cache.tokenise", lambda *_: pytest.fail("tokenised again"))
    monkeypatch.setattr(FastTokenizer, "trained_on", lambda *_: pytest.fail("trained again"))
    second = load(folder, tokenizer="bpe")
    assert np.array_equal(first.train, second.train) and first.description == second.description


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_damaged_files_are_made_anew(folder: Path, damage: str) -> None:
    load(folder, tokenizer="bpe")
    whole = files(folder)
    for path in (p for p in (folder / "cache").rglob("*") if p.is_file()):
        content = bytearray(path.read_bytes())
        if damage == "flip" and path.suffix == ".npy":
            content[len(content) // 2] ^= 1
        other = b"\x93NUMPY not quite" * 9
        changed = {"cut": content[:-7], "flip": content, "empty": b"", "other": other}
        path.write_bytes(bytes(changed[damage]))
    load(folder, tokenizer="bpe")
    assert files(folder) == whole


def test_numpy_reads_the_files(folder: Path) -> None:
    data = load(folder)
    (path,) = (folder / "cache").glob("tokens-*-train.npy")
    assert np.array_equal(np.load(path, mmap_mode="r"), data.train)
    assert data.description["digest"] in path.name


def test_the_digest_covers_what_decides_the_tokens() -> None:
    documents = [Document(str(n), text) for n, text in enumerate(TEXTS)]
    renamed = [Document("x", TEXTS[0]), *documents[1:]]
    changed = [Document("0", TEXTS[0] + "!"), *documents[1:]]
    # The same characters, differently divided.
    moved = [Document("0", TEXTS[0] + TEXTS[1][:1]), Document("1", TEXTS[1][1:]), *documents[2:]]
    splits = [split_documents(d, 0.3) for d in (documents, renamed, changed, moved, documents[:3])]
    digests = [digest_of(split, "bytes") for split in [*splits, split_documents(documents, 0.7)]]
    digests.append(digest_of(splits[0], "characters:1"))
    assert len(set(digests)) == len(digests)


def test_ids_are_stored_in_the_smallest_type(tmp_path: Path) -> None:
    class Wide:
        kind, vocab_size, end_of_document, fingerprint = "wide", 70_000, 69_999, "wide"

        def encode(self, text: str) -> np.ndarray:
            return np.array([len(text)])

    documents = [Document("a", "x" * 300), Document("b", "y")]
    tokens = tokenise(documents, Wide())  # type: ignore[arg-type]
    assert tokens.dtype == np.uint32 and tokens.tolist() == [300, 69_999, 1, 69_999]
    with pytest.raises(ValueError, match=r"a: .* ids from 70000 to 70000, its vocabulary is 70000"):
        tokenise([Document("a", "x" * 70_000)], Wide())  # type: ignore[arg-type]


def test_an_empty_part_can_be_stored(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("characters", 300, ["a"])
    train, validation, _ = cached_tokens(split_documents([Document("a", "a")], 0.5), tokenizer, tmp_path)
    assert (len(train), len(validation)) == (0, 1)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_cache_that_cannot_be_made(folder: Path, kind: str) -> None:
    (folder / "file").touch()
    with pytest.raises(OSError, match=r"cannot write the token cache in .*/file/inside \(see data.cache\)"):
        load(folder, cache=folder / "file" / "inside", tokenizer=kind)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write the token cache in .*cache .*No space left") as caught:
        load(folder, tokenizer=kind)
    assert caught.value.errno == errno.ENOSPC
    assert files(folder) == {}


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "cache").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write the token cache in .*cache"):
        load(folder)
    assert (folder / "cache").read_text() == "in the way"


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "odeformer"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache() == tmp_path / ".cache" / "odeformer"


@pytest.mark.parametrize(
    ("settings", "context", "error", "message"),
    [
        ({}, 0, ValueError, "context must be >= 1, got 0"),
        ({"tokenizer": "words", "source": "nowhere"}, 8, ValueError, "tokenizer must be .* got 'words'"),
        ({"source": "nowhere"}, 8, FileNotFoundError, "nowhere"),
        ({}, 1000, ValueError, r"the training text has \d+ tokens, fewer than context \+ 1 = 1001"),
        ({}, 100, ValueError, r"the validation text has \d+ tokens, fewer than context \+ 1 = 101"),
    ],
)
def test_what_does_not_fit_is_named(
    folder: Path, settings: dict[str, str], context: int, error: type[Exception], message: str
) -> None:
    values = {"source": str(folder / "texts"), "cache": folder / "cache", **settings}
    with pytest.raises(error, match=message):
        load_data(DataConfig(**values), context=context)  # type: ignore[arg-type]


def test_the_document_that_cannot_be_encoded_is_named(folder: Path) -> None:
    (folder / "texts" / "4.txt").write_text("x" * 9000 + "\0")
    with pytest.raises(ValueError, match=r"4.txt: text holds a zero byte at character 9000"):
        load(folder)


def test_another_kind_of_config() -> None:
    with pytest.raises(TypeError, match="config must be a DataConfig, got dict"):
        load_data({}, context=8)  # type: ignore[arg-type]
