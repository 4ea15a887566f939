"""Documents from files: plain text, JSON Lines, Parquet, and Hugging Face data sets.

A document's name is relative to the source that it came from, so that copies of a corpus are the same corpus.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

EXTRA = "odeformer-fastslow[hf]"
"""What to install for the formats whose packages are optional."""


@dataclass(frozen=True)
class Document:
    """A named text; it can be encoded in UTF-8."""

    name: str
    text: str

    @cached_property
    def size(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the name: a fixed order that is unrelated to the alphabet and to the text."""
        # A file name need not be UTF-8; the bytes that are not come to Python as surrogates.
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()


def read_file(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """The documents of one file: each row of .jsonl and .parquet, else the whole file; .gz is unpacked.

    Raises ValueError naming the file, the row and what is wrong in it: bytes that are not UTF-8, a row
    without `text_field` or with something else than text in it, a damaged file. ImportError where pyarrow is
    missing.
    """
    suffix = Path(path.stem if path.suffix == ".gz" else path.name).suffix
    if suffix == ".jsonl":
        texts = _json_lines(path, text_field)
    elif suffix == ".parquet":
        texts = _parquet(path, text_field)
    else:
        yield Document(name, read_text(path))
        return
    for number, text in texts:
        yield Document(f"{name}:{number:09d}", text)


def read_text(path: Path) -> str:
    """A UTF-8 file without its byte order mark. Raises ValueError naming the file and the first bad byte."""
    data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        found = data[error.start]
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is {found:#04x}") from error


def is_binary(path: Path) -> bool:
    """Whether a file of no known format has a zero byte early on, as pictures and archives have.

    UTF-16 is text: it must be refused, not passed over.
    """
    if path.name.endswith((".parquet", ".jsonl.gz", ".txt.gz")):
        return False
    with path.open("rb") as file:
        start = file.read(8192)
    return b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def read_hugging_face(name: str, text_field: str) -> Iterator[Document]:
    """The rows of all parts of a data set, saved by `save_to_disk` or known to `datasets.load_dataset`.

    Raises FileNotFoundError where it cannot be loaded, ValueError where it lacks `text_field`, ImportError
    where `datasets` is missing.
    """
    datasets = import_extra("datasets", f"source 'hf:{name}'")
    place = str(Path(name).expanduser()) if name.startswith("~") else name
    try:
        loaded = datasets.load_from_disk(place) if _is_saved(Path(place)) else datasets.load_dataset(place)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise FileNotFoundError(f"source 'hf:{name}' cannot be loaded: {error}") from error
    parts = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [("all", loaded)]
    base = Path(name).name
    for part, rows in parts:
        _check_column(f"source 'hf:{name}', part {part!r}", rows.column_names, text_field)
        for number, row in enumerate(rows.select_columns([text_field]), 1):
            text = _text(row[text_field], text_field, f"source 'hf:{name}', part {part!r}, row {number}")
            yield Document(f"{base}:{part}:{number:09d}", text)


def check_path(source: str) -> None:
    """Raises FileNotFoundError for an "hf:" name that is written as a path and is none.

    It must not be looked for on the network.
    """
    name = source.removeprefix("hf:")
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise FileNotFoundError(f"{source!r}: there is no {name}")


def import_extra(module: str, what: str) -> ModuleType:
    """An optional module. Raises ImportError that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs the package {module.split('.')[0]}: install {EXTRA}") from error


def _json_lines(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    # Only \n ends a line: str.splitlines also breaks at characters that JSON allows inside a string.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be an object with {text_field!r}, got {type(row).__name__}")
        if text_field not in row:
            raise ValueError(f"{where}: no key {text_field!r}; there are {_listed(row)}")
        yield number, _text(row[text_field], text_field, where)


def _parquet(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    parquet = import_extra("pyarrow.parquet", f"{path}")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(str(path), file.schema_arrow.names, text_field)
            batches = file.iter_batches(columns=[text_field])
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            for number, value in enumerate(values, 1):
                yield number, _text(value, text_field, f"{path}, row {number}")
    except import_extra("pyarrow", f"{path}").ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from error


def _check_column(where: str, columns: list[str], text_field: str) -> None:
    if text_field not in columns:
        raise ValueError(f"{where}: no column {text_field!r}; there are {_listed(columns)}")


def _text(value: Any, text_field: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {text_field!r} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {text_field!r} holds half a surrogate pair at {error.start}") from error
    return value


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names) or "none"


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file, or damaged: {error}") from error


def _is_saved(folder: Path) -> bool:
    return any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
