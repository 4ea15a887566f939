"""Run configs from YAML and `key=value` overrides, and errors that a person can act on."""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from odeformer.config import RunConfig
from odeformer.files import write_text

T = TypeVar("T")

CONFIG_FILE = "config.yaml"
TOKENIZER_FOLDER = "tokenizer"
"""Where in a run folder its tokeniser is."""
UNIMPORTANT = ("training.progress", "data.cache")
"""Settings that may differ between a run and its continuation, since no number depends on them."""


def load_run_config(path: Path | str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in the YAML file `path` (None: the defaults), changed by overrides such as "training.steps=100".

    Raises FileNotFoundError, and ValueError for anything unreadable, unknown or out of range, with every problem in it.
    """
    merged = OmegaConf.create({})
    origin = "overrides"
    try:
        if path is not None:
            origin = str(path)
            merged = _read(Path(path))
        if overrides:
            origin = ", ".join(overrides)
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(_checked(overrides))))  # type: ignore[assignment]
        origin = "config" if path is None else str(path)
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{origin}: {_reason(error)}") from error
    return validated(RunConfig, values, origin)


def validated(kind: type[T], values: Any, origin: str) -> T:
    """`values` as the config class `kind`. Raises ValueError that begins with `origin` and lists every problem."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        problems = describe_problems(error, kind)
        count = "" if len(problems) == 1 else f" {len(problems)} problems"
        separator = " " if len(problems) == 1 else "\n  "
        raise ValueError(f"{origin}:{count}{separator}" + "\n  ".join(problems)) from None


def describe_problems(error: ValidationError, kind: type | None = None) -> list[str]:
    """One line for each problem, such as "model.n_head: n_head=3 must divide d_model=128 (got 3)"."""
    return [_describe(problem, kind) for problem in error.errors(include_url=False, include_context=False)]


def save_config(config: RunConfig, path: Path | str) -> None:
    """Writes the whole config as YAML; `load_run_config(path)` restores it."""
    buffer = io.StringIO()
    OmegaConf.save(OmegaConf.create(plain(config)), buffer)
    write_text(path, buffer.getvalue())


def plain(config: Any) -> dict[str, Any]:
    """A config dataclass as nested plain values, paths as strings."""

    def simple(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: simple(entry) for key, entry in value.items()}
        return str(value) if isinstance(value, Path) else value

    return simple(dataclasses.asdict(config))


def differing_keys(saved: Any, given: Any, ignore: Sequence[str] = ()) -> list[str]:
    """Lines such as "model.d_model: 128 there, 64 given", for two configs of one class."""
    there, here = dict(_leaves(plain(saved))), dict(_leaves(plain(given)))
    return [
        f"{key}: {there.get(key)!r} there, {here.get(key)!r} given"
        for key in sorted({*there, *here})
        if key not in ignore and there.get(key) != here.get(key)
    ]


def _read(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no config file {path}")
    try:
        loaded = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not OmegaConf.is_dict(loaded):
        raise ValueError(f"{path} must hold sections such as 'model:' and 'training:', got {type(loaded).__name__}")
    return loaded


def _checked(overrides: Sequence[str]) -> Iterator[str]:
    for override in overrides:
        key, sign, _ = override.partition("=")
        if not sign or not key.strip():
            raise ValueError(f"an override has the form section.key=value, got {override!r}")
        yield override


def _describe(problem: ErrorDetails, kind: type | None) -> str:
    place = [str(part) for part in problem["loc"]]
    if problem["type"] == "unexpected_keyword_argument":
        known = _fields_at(kind, place[:-1])
        close = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}" if known else ""
        return f"{'.'.join(place)}: unknown key{hint}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    where = f"{'.'.join(place)}: " if place else ""
    return f"{where}{message} (got {problem['input']!r})"


def _fields_at(kind: type | None, place: Sequence[str]) -> list[str]:
    """Names of the fields of the section that `place` leads to; empty where there is none."""
    for name in place:
        section = getattr(kind, "__pydantic_fields__", {}).get(name)
        kind = section.default_factory if section is not None and isinstance(section.default_factory, type) else None
    return [f.name for f in dataclasses.fields(kind)] if kind else []


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _reason(error: Exception) -> str:
    """The first line of a message, with the key where OmegaConf knows it."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = getattr(error, "full_key", None)
    return f"{key}: {line}" if key else line
