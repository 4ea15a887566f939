"""One line of progress for a run: steps done, speed, time left, losses."""

from __future__ import annotations

import sys
import time
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from tqdm import tqdm


class ProgressLine(ProgressBar):
    """A tqdm bar over optimiser steps. It is refreshed by time, so that reading the loss costs nothing in most steps.

    Args:
        total: steps of the whole run.
        label: shown in front.
    """

    def __init__(self, total: int, label: str = "training") -> None:
        super().__init__()
        self.total = total
        self.label = label
        self.interval = 0.25 if sys.stderr.isatty() else 10.0
        self._bar: tqdm[Any] | None = None
        self._next = 0.0
        self._shown: dict[str, str] = {}

    def show(self, **values: float) -> None:
        """Values to show from now on, such as validation=1.93."""
        self._shown |= {name: f"{value:.3f}" for name, value in values.items()}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._bar = tqdm(
            total=self.total,
            initial=trainer.global_step,
            desc=self.label,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        if self._bar is None or (time.monotonic() < self._next and trainer.global_step < self.total):
            return
        self._next = time.monotonic() + self.interval
        self.show(loss=float(outputs["loss"]))
        self._refresh(trainer.global_step)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._close(trainer.global_step)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._close(trainer.global_step)

    def disable(self) -> None:
        """Lightning calls this on processes that show nothing."""
        self.total, self.interval = 0, float("inf")

    def _refresh(self, step: int) -> None:
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update(step - self._bar.n)

    def _close(self, step: int) -> None:
        if self._bar is not None:
            self._refresh(step)
            self._bar.close()
            self._bar = None
