"""Text: where documents come from, how many of them are used, and which are held out.

All of this depends on names (relative to the source) and texts alone, not on the file system or the locale.
Selection and hold-out go through the documents in the order of the SHA-256 of their names: a fixed shuffle,
so that a small part of a corpus is a mixture of it, and so that neighbours in the alphabet, which are often
alike, fall on both sides of the split.
"""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from odeformer.config import DataConfig
from odeformer.data.readers import Document, check_path, is_binary, read_file, read_hugging_face

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that are not in the embedded corpus."""


@dataclass(frozen=True)
class Split:
    """Training and validation documents, each in the order of their names.

    No document is in both, unless there is only one, which is cut.
    """

    train: list[Document]
    validation: list[Document]


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    explicit: bool
    """Named by the user (or matched by a glob), and not merely found in a folder."""


def read_corpus(config: DataConfig) -> list[Document]:
    """The documents of `config.source` in the order of their names, limited to `config.max_bytes`.

    Empty documents are left out, and a file that several sources name is read once. In folders, hidden files
    and binary ones (a zero byte early on) are passed over; every other file must be text.

    Raises FileNotFoundError for a source that is missing or has no files; ValueError for a corpus without
    text, for text that is not UTF-8 and for rows without `text_field`; ImportError naming the extra for a
    format whose package is missing.
    """
    sources = [config.source] if isinstance(config.source, str) else config.source
    if not sources or not all(source.removeprefix("hf:").strip() for source in sources):
        raise ValueError(f"source must name at least one place, and none empty, got {config.source!r}")
    # All are looked up before the first is read.
    places = {source: _places(source) for source in sources}
    seen: set[Path] = set()
    found: list[Document] = []
    for source, files in places.items():
        found += _documents(source, files, seen, config.text_field)
    documents = sorted((d for d in found if d.text), key=lambda d: (d.name, d.text))
    kept = documents if config.max_bytes is None else within(documents, config.max_bytes)
    if not kept:
        limit = "" if config.max_bytes is None or not documents else f" within max_bytes={config.max_bytes}"
        raise ValueError(f"source {config.source!r} holds no text{limit}")
    return kept


def within(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """Whole documents of at most `max_bytes` together, in the order given.

    They are taken in digest order, passing over those that no longer fit. Where not one fits, the first of
    that order is cut after the last whole character within the limit.
    """
    order = sorted(range(len(documents)), key=lambda i: documents[i].digest)
    chosen, used = [], 0
    for index in order:
        if used + documents[index].size <= max_bytes:
            chosen.append(index)
            used += documents[index].size
    if chosen or not order:
        return [documents[index] for index in sorted(chosen)]
    first = documents[order[0]]
    start = first.text.encode()[:max_bytes].decode(errors="ignore")
    return [Document(first.name, start)] if start else []


def split_documents(documents: Sequence[Document], validation_fraction: float) -> Split:
    """Holds out whole documents, so that their share of the bytes comes close to `validation_fraction`.

    They are taken in digest order, passing over those that would lead away from that share; at least one is
    held out and one is not. A single document is cut as nanoGPT does: the last `validation_fraction` of its
    characters is held out.

    Raises ValueError without documents and for a fraction outside (0, 1).
    """
    if not documents:
        raise ValueError("documents must hold at least one, got none")
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must be between 0 and 1, got {validation_fraction}")
    if len(documents) == 1:
        (only,) = documents
        cut = int((1 - validation_fraction) * len(only.text))
        return Split([Document(only.name, only.text[:cut])], [Document(only.name, only.text[cut:])])
    order = sorted(range(len(documents)), key=lambda i: documents[i].digest)
    target = validation_fraction * sum(document.size for document in documents)
    held: set[int] = set()
    missing = target
    for index in order:
        if len(held) < len(documents) - 1 and abs(missing - documents[index].size) < abs(missing):
            held.add(index)
            missing -= documents[index].size
    held = held or {min(order, key=lambda i: documents[i].size)}
    parts: tuple[list[Document], list[Document]] = ([], [])
    for index, document in enumerate(documents):
        parts[index in held].append(document)
    return Split(*parts)


def _places(source: str) -> list[_File]:
    """The files of a source; none for a Hugging Face data set. Raises FileNotFoundError for a missing one."""
    if source == "stdlib":
        return _standard_library()
    if source.startswith("hf:"):
        check_path(source)
        return []
    path = Path(source).expanduser()
    if path.is_dir():
        visible = (inside for inside in _inside(path) if not inside.name.startswith("."))
        files = [_File(path / inside, inside.as_posix(), False) for inside in visible]
    elif path.exists():
        files = [_File(path, path.name, True)]
    else:
        # Names are relative to the part of the pattern before the first wildcard.
        root = Path(*takewhile(lambda part: not re.search(r"[*?\[]", part), path.parts))
        matches = [match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file()]
        files = [_File(match, match.relative_to(root).as_posix(), True) for match in matches]
    if not files:
        raise FileNotFoundError(f"source {source!r}: no such file, or a folder or pattern without files")
    return sorted(files, key=lambda file: file.name)


def _standard_library() -> list[_File]:
    """The running Python's standard library with its reference topics, without tests: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    inside = _inside(root, LEFT_OUT) if root.is_dir() else ()
    files = [_File(root / path, path.as_posix(), True) for path in inside if path.suffix == ".py"]
    if not any(file.name == "os.py" for file in files):
        # A zipped or source-less installation has few .py files or none. Python itself looks for os.py.
        raise FileNotFoundError(
            "source 'stdlib': the sources of this Python's standard library are missing: "
            f"there is no {root / 'os.py'}; name another source"
        )
    return sorted(files, key=lambda file: file.name)


def _inside(root: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files in a folder and its sub-folders (links to folders are not followed), relative to it."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        yield from (path.relative_to(root) for name in names if (path := Path(folder, name)).is_file())


def _documents(source: str, files: Sequence[_File], seen: set[Path], text_field: str) -> Iterator[Document]:
    """Adds the files that it reads to `seen`, and passes over those that are there."""
    if source.startswith("hf:"):
        yield from read_hugging_face(source.removeprefix("hf:"), text_field)
    for file in files:
        real = file.path.resolve()
        if real not in seen:
            seen.add(real)
            if file.explicit or not is_binary(file.path):
                yield from read_file(file.path, file.name, text_field)
