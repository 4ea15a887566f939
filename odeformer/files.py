"""Files that are whole or absent: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path in the same folder; on success it becomes `path`, on any error it is removed.

    Raises OSError with the target's name, for instance on a full disk; an existing `path` is then untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"could not write {path}: {error.strerror or error}", str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any, default: Callable[[Any], Any] | None = None) -> None:
    write_text(path, json.dumps(value, indent=2, default=default) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
