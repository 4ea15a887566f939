"""What the Trainer needs around it: its batches, whole files, quiet, and a way to stop it between two steps."""

from __future__ import annotations

import io
import logging
import pickle
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor

from odeformer.data import Batch, Batches
from odeformer.files import replacing


class Stream:
    """The batches of all steps from the trainer's current one on. A batch depends on its step alone, so there is no state."""

    def __init__(self, batches: Batches, trainer: Trainer) -> None:
        self.batches = batches
        self.trainer = trainer

    def __iter__(self) -> Iterator[Batch]:
        step = self.trainer.global_step
        while True:
            yield self.batches.batch(step)
            step += 1


class Stop:
    """Turns Ctrl-C and SIGTERM into a request to stop after the current step; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def on_signals(self, trainer: Trainer) -> Iterator[None]:
        """Inside, signals ask `trainer` to stop. Only the main thread can receive them; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            trainer.should_stop = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except SystemExit:
            # Lightning exits the process on KeyboardInterrupt; the caller decides about that.
            if not self.requested:
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides Lightning's remarks about hardware, workers and its own products; its errors are shown."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for module in ("pytorch_lightning", "lightning_fabric", "lightning_utilities", "torch.utils._pytree"):
                warnings.filterwarnings("ignore", module=module.replace(".", r"\."))
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class WholeFiles(TorchCheckpointIO):
    """Writes Lightning's checkpoints beside their place and renames them, so that the last good one survives any failure."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        # Serialised in memory first: torch.save to a file reports a full disk as a RuntimeError without a name.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with replacing(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())


def step_of(checkpoint: Path) -> int:
    """Optimiser steps done in one of Lightning's checkpoints. Raises ValueError naming a file that is damaged."""
    return int(_content(checkpoint)["global_step"])


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """The model's state_dict in a checkpoint of `FastSlowModule`. Raises as `step_of` does."""
    state = _content(checkpoint)["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items()}


def _content(checkpoint: Path) -> dict[str, Any]:
    needed = ("global_step", "state_dict", "optimizer_states", "loops", "pytorch-lightning_version")
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if missing := [name for name in needed if name not in content]:
            raise KeyError(f"it lacks {', '.join(missing)}")
        return content
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{checkpoint} is damaged or not a checkpoint of a run: {reason}") from error
