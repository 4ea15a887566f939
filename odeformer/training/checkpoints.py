"""Checkpoints that are safe to load: `model.safetensors` (the weights) and `model.json` (what they are weights of).

The pair is prepared whole before either file is replaced, so that a full disk or an interruption keeps the previous pair.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

import odeformer
from odeformer.config import FastSlowConfig, FlowConfig
from odeformer.files import replacing
from odeformer.model import FastSlowLM
from odeformer.training.configuration import differing_keys, validated
from odeformer.training.flows import scheme_of, with_scheme

WEIGHTS_FILE = "model.safetensors"
DESCRIPTION_FILE = "model.json"
FOLDER = "checkpoints"
"""Where in a run folder its checkpoints are."""
FORMAT_VERSION = 1
_RESERVED = ("format_version", "odeformer_version", "config", "scheme", "flow", "weights_sha256")


def save_model(model: FastSlowLM, folder: Path | str, **extra: Any) -> Path:
    """Writes the model's weights, config and scheme into `folder`, replacing an older checkpoint there; returns the folder.

    Args:
        extra: more entries of the JSON file, for instance step=2000.

    Raises ValueError for reserved or unserialisable entries and for a flow that no `FlowConfig` expresses, and OSError naming
    the file; the files that were there before are then untouched.
    """
    folder = Path(folder)
    taken = [name for name in extra if name in _RESERVED]
    if taken:
        raise ValueError(f"extra entries must not be named {', '.join(taken)}, which the checkpoint itself uses")
    weights = safetensors.torch.save({name: t.detach().contiguous() for name, t in model.state_dict().items()})
    description = {
        "format_version": FORMAT_VERSION,
        "odeformer_version": odeformer.__version__,
        "config": model.config.to_dict(),
        **scheme_of(model),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        **extra,
    }
    try:
        text = json.dumps(description, indent=2) + "\n"
    except TypeError as error:
        raise ValueError(f"extra entries must be plain values: {error}") from error
    with replacing(folder / DESCRIPTION_FILE) as description_part:
        with open(description_part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with replacing(folder / WEIGHTS_FILE) as weights_part:
            weights_part.write_bytes(weights)
    return folder


def load_model(folder: Path | str, config: FastSlowConfig | None = None) -> FastSlowLM:
    """The model of a checkpoint folder, or of a run folder that has one, in the scheme and precision it was saved in.

    Args:
        config: what the checkpoint is expected to be.

    Raises FileNotFoundError where there is no checkpoint, and ValueError naming the file and the reason for one that is
    truncated, altered, unreadable, or of another config than `config`. Nothing in the files is executed.
    """
    folder = find_checkpoint(folder)
    description_path, weights_path = folder / DESCRIPTION_FILE, folder / WEIGHTS_FILE
    description = read_description(folder)
    saved = validated(FastSlowConfig, description["config"], f"{description_path}: config")
    if config is not None and (keys := differing_keys(saved, config)):
        raise ValueError(f"{description_path} is a checkpoint of another config: {'; '.join(keys)}")
    weights = _read_weights(weights_path, description["weights_sha256"])
    # A new model draws its weights from the global generator; the caller's is none of our business.
    with torch.random.fork_rng(devices=[]):
        try:
            model = FastSlowLM(saved)
        except ValueError as error:
            raise ValueError(f"{description_path}: config: {error}") from error
    _check_fit(weights_path, model, weights)
    dtype = next(iter(weights.values())).dtype
    model.to(dtype).load_state_dict(weights)
    try:
        flow = None if description["flow"] is None else FlowConfig(**description["flow"])
        return with_scheme(model, description["scheme"], flow)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{description_path}: {error}") from error


def find_checkpoint(path: Path | str) -> Path:
    """The folder of the checkpoint that `path` leads to: itself, one of its files, or a run folder. Raises FileNotFoundError."""
    path = Path(path)
    folder = path.parent if path.name in (WEIGHTS_FILE, DESCRIPTION_FILE) else path
    for candidate in (folder, folder / FOLDER):
        if (candidate / DESCRIPTION_FILE).is_file():
            if not (candidate / WEIGHTS_FILE).is_file():
                raise FileNotFoundError(f"{candidate / WEIGHTS_FILE} is missing beside {DESCRIPTION_FILE}")
            return candidate
        if (candidate / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(f"{candidate / DESCRIPTION_FILE} is missing beside {WEIGHTS_FILE}")
    raise FileNotFoundError(f"no checkpoint in {path}: neither {DESCRIPTION_FILE} nor {FOLDER}/{DESCRIPTION_FILE}")


def read_description(path: Path | str) -> dict[str, Any]:
    """The checked contents of a checkpoint's JSON file. Raises as `load_model` does."""
    file = find_checkpoint(path) / DESCRIPTION_FILE
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: not JSON ({error})") from error
    if not isinstance(description, dict):
        raise ValueError(f"{file} is damaged: it must hold an object, got {type(description).__name__}")
    missing = [name for name in _RESERVED if name not in description]
    if missing:
        raise ValueError(f"{file} is damaged or of another program: it lacks {', '.join(missing)}")
    if description["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {description['format_version']!r}, this program reads {FORMAT_VERSION}"
        )
    return description


def _read_weights(path: Path, digest: str) -> dict[str, torch.Tensor]:
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ValueError(
            f"{path} is truncated or altered: its SHA-256 is {found[:12]}..., {DESCRIPTION_FILE} says {str(digest)[:12]}..."
        )
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _check_fit(path: Path, model: FastSlowLM, weights: dict[str, torch.Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [f"no tensor {name}" for name in expected if name not in found]
    problems += [f"unexpected tensor {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name]}, the config needs {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path} does not fit its config: {'; '.join(problems[:5])}{more}")
