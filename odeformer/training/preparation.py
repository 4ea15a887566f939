"""What is checked and made before a run starts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.accelerators import CUDAAccelerator, MPSAccelerator

from odeformer.blocks import unit_steps
from odeformer.config import RunConfig
from odeformer.data import TextData
from odeformer.discretisation import to_continuous
from odeformer.files import write_json
from odeformer.model import FastSlowLM
from odeformer.training.callbacks import LAST_CHECKPOINT
from odeformer.training.checkpoints import FOLDER
from odeformer.training.configuration import (
    CONFIG_FILE,
    TOKENIZER_FOLDER,
    UNIMPORTANT,
    differing_keys,
    load_run_config,
    save_config,
)
from odeformer.training.flows import flow_from_config

DATA_FILE = "data.json"
"""What the text of a run is: source, sizes, digest."""


def initial_model(config: RunConfig) -> FastSlowLM:
    """The model of step 0, from config.training.seed alone, in the scheme that the run starts with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        model = FastSlowLM(config.model)
    if config.training.precision == "64-true":
        model.double()  # before a checkpoint is loaded into it, which Lightning would do in float32
    if config.training.scheme == "continuous":
        return to_continuous(model, **flow_from_config(config.flow))
    return model


def with_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """The config with model.vocab_size filled in. Raises ValueError where it is smaller than the tokenizer's."""
    given = config.model.vocab_size
    if given is None:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    if given < vocab_size:
        raise ValueError(
            f"model.vocab_size={given} is smaller than the {vocab_size} tokens of the tokenizer {config.data.tokenizer!r}"
        )
    return config


def check_config(config: RunConfig) -> None:
    """Raises TypeError, or ValueError with every problem that no single section of the config can see."""
    if not isinstance(config, RunConfig):
        raise TypeError(f"config must be a RunConfig, got {type(config).__name__}")
    training = config.training
    problems = []
    if training.scheme == "continuous":
        problems += _problem(lambda: flow_from_config(config.flow))
    if training.scheme == "discrete" or training.switch_at is not None:
        problems += _problem(lambda: unit_steps(config.model))
    if training.minimum_learning_rate > training.learning_rate:
        problems.append(
            f"training.minimum_learning_rate={training.minimum_learning_rate} must not exceed "
            f"training.learning_rate={training.learning_rate}"
        )
    if training.accelerator == "gpu" and not (CUDAAccelerator.is_available() or MPSAccelerator.is_available()):
        problems.append("training.accelerator='gpu', but PyTorch sees no GPU; use 'auto' or 'cpu'")
    if problems:
        raise ValueError("; ".join(problems))


def _problem(check: Callable[[], Any]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def check_folder(config: RunConfig, folder: Path, resume: bool) -> None:
    """A new run needs a folder that is empty or absent, a resumed one the folder of a run of the same config."""
    if not resume:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} exists and is not an empty folder; choose another, or resume the run in it"
            )
        return
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder} to resume")
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
    saved = load_run_config(folder / CONFIG_FILE)
    ignored = (*UNIMPORTANT, "model.vocab_size") if config.model.vocab_size is None else UNIMPORTANT
    if keys := differing_keys(saved, config, ignored):
        raise ValueError(f"{folder} is a run of another config: {'; '.join(keys)}")
    if not (folder / FOLDER / LAST_CHECKPOINT).is_file():
        raise ValueError(f"{folder} has no {FOLDER}/{LAST_CHECKPOINT} to resume from; start the run anew elsewhere")


def check_text(folder: Path, data: TextData) -> None:
    """Raises ValueError where the run in `folder` was started on another text or tokeniser than `data`."""
    path = folder / DATA_FILE
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    there, here = saved.get("digest"), data.description.get("digest")
    if there != here:
        raise ValueError(
            f"the text or its tokenizer has changed since the run in {folder} began: digest {there}, now {here}"
        )


def create_folder(folder: Path, config: RunConfig, data: TextData) -> None:
    """The run folder with its config, its tokeniser and what its text is; on an error, nothing."""
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_config(config, folder / CONFIG_FILE)
        data.tokenizer.save(folder / TOKENIZER_FOLDER)
        write_json(folder / DATA_FILE, data.description, default=str)
    except BaseException:
        for path in list(folder.iterdir()) if existed else [folder]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise
