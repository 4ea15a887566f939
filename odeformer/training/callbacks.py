"""What happens during a run besides the steps: metrics, evaluation, the switch, checkpoints.

"Step k" is the state after k optimiser steps. Every callback acts at `on_train_batch_end`, in the order of this file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, Checkpoint
from torch import Tensor

from odeformer.causality import check_causality
from odeformer.data import Batch
from odeformer.discretisation import euler_defect, to_discrete
from odeformer.files import write_json
from odeformer.model import FastSlowLM
from odeformer.training.checkpoints import FOLDER, save_model
from odeformer.training.errors import DivergedError
from odeformer.training.module import FastSlowModule, evaluate, gate_norms, learning_rate_at
from odeformer.training.progress import ProgressLine
from solvers import SolveError

SWITCH_FILE = "switch.json"
LAST_CHECKPOINT = "last.ckpt"


class Stopwatch:
    """Wall-clock time of training proper, in seconds: evaluation, the switch and checkpoints are left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    @contextmanager
    def paused(self, device: torch.device) -> Iterator[None]:
        """Leaves out what happens inside, after the work queued so far on an accelerator is done."""
        running = self._since is not None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()


class Metrics(Callback):
    """Logs the training loss, learning rate and gate norms of every `every`-th step, and stops a run that has diverged.

    Losses are looked at on a CPU in every step, elsewhere when they are logged, so as not to wait for the device.
    """

    def __init__(self, every: int, watch: Stopwatch) -> None:
        self.every = every
        self.watch = watch
        self.loss: Tensor | None = None
        self.first_step = 0
        self._recent: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.first_step = trainer.global_step
        self.watch.start()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self.loss = outputs["loss"]
        self._recent.append(self.loss)
        if step % self.every and self.loss.device.type != "cpu":
            return
        self._check(step)
        if step % self.every == 0:
            assert isinstance(module, FastSlowModule)
            log(
                trainer,
                {
                    "train/loss": float(self.loss),
                    "learning_rate": learning_rate_at(step - 1, module.settings),
                    **gate_norms(module.model),
                },
            )

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._check(trainer.global_step)
        self.watch.stop()

    def _check(self, step: int) -> None:
        if not self._recent:
            return
        finite = (
            torch.stack(self._recent).isfinite().tolist()
            if len(self._recent) > 1
            else [self._recent[0].isfinite().item()]
        )
        if not all(finite):
            first = step - len(finite) + 1 + finite.index(False)
            loss = float(self._recent[finite.index(False)])
            raise DivergedError(
                f"the training loss is {loss} in step {first}; try a smaller learning_rate, a gradient_clip, "
                "or, for a continuous run, more flow.steps"
            )
        self._recent.clear()


class SwitchToDiscrete(Callback):
    """At step `step` replaces the module's model by its discrete twin: the same tensors, the optimiser's state kept.

    The validation loss just before and just after, their gap (after - before, nats per token) and the Euler defect per layer
    on the first validation batch are logged and written to `folder`/switch.json. A run resumed after the switch is discrete.

    Args:
        batches: of validation, (B, T) inputs and targets.
        folder: None writes no file.
    """

    def __init__(
        self,
        step: int,
        batches: Sequence[Batch],
        folder: Path | str | None = None,
        watch: Stopwatch | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if step < 1:
            raise ValueError(f"step must be at least 1, got {step}")
        self.step = step
        self.batches = batches
        self.folder = None if folder is None else Path(folder)
        self.watch = watch or Stopwatch()
        self.say = say or (lambda text: None)
        self.record: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, FastSlowModule)
        if trainer.global_step >= self.step:
            module.model = to_discrete(module.model)
            self.record = None if self.folder is None else read_switch(self.folder)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            assert isinstance(module, FastSlowModule)
            with self.watch.paused(module.device):
                self._switch(trainer, module)

    def _switch(self, trainer: Trainer, module: FastSlowModule) -> None:
        context = trainer.precision_plugin.forward_context
        before = evaluate(module.model, self.batches, context)
        module.model = to_discrete(module.model)
        after = evaluate(module.model, self.batches, context)
        self.record = {
            "step": self.step,
            "validation_loss_before": before,
            "validation_loss_after": after,
            "gap": after - before,
            **measured_defect(module.model, self.batches[0][0].to(module.device)),
        }
        if self.folder is not None and trainer.is_global_zero:
            write_json(self.folder / SWITCH_FILE, self.record)
        metrics = {
            f"switch/{key}": self.record[key] for key in ("validation_loss_before", "validation_loss_after", "gap")
        }
        for index, defect in enumerate(self.record["euler_defect"] or ()):
            metrics[f"euler_defect/layer_{index}"] = defect
        log(trainer, metrics)
        self.say(
            f"step {self.step}: continuous -> discrete, validation loss {before:.4f} -> {after:.4f} ({after - before:+.4f})"
        )


class Evaluation(Callback):
    """Logs the validation loss of every `every`-th step and of the last one, there after another causality check."""

    def __init__(
        self,
        every: int,
        batches: Sequence[Batch],
        watch: Stopwatch,
        interrupted: Callable[[], bool] = lambda: False,
        line: ProgressLine | None = None,
    ) -> None:
        self.every = every
        self.batches = batches
        self.watch = watch
        self.interrupted = interrupted
        self.line = line
        self.loss: float | None = None
        """The latest, in nats per token."""

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every == 0 and trainer.global_step < trainer.max_steps:
            self._evaluate(trainer, module)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.interrupted():
            assert isinstance(module, FastSlowModule)
            check_causality(module.model, raise_on_leak=True)
            self._evaluate(trainer, module)

    def _evaluate(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, FastSlowModule)
        with self.watch.paused(module.device):
            self.loss = evaluate(module.model, self.batches, trainer.precision_plugin.forward_context)
        log(trainer, {"validation/loss": self.loss})
        if self.line is not None:
            self.line.show(validation=self.loss)


class Checkpoints(Checkpoint):
    """Writes checkpoints/last.ckpt, from which a run resumes, and the safetensors checkpoint beside it.

    At every `every`-th step, at the last one, and when the run is asked to stop. (Lightning's ModelCheckpoint saves neither at
    an arbitrary last step nor a second format.) Weights that are not finite are never written over good ones.

    Args:
        folder: the run folder.
        extra: more entries of model.json.
    """

    def __init__(self, every: int, folder: Path | str, watch: Stopwatch, extra: dict[str, Any] | None = None) -> None:
        self.every = every
        self.folder = Path(folder) / FOLDER
        self.watch = watch
        self.extra = extra or {}
        self.saved_step: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.every == 0 or step == trainer.max_steps or trainer.should_stop:
            self._save(trainer, module)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        # A stop can be asked for between a step's checkpoint and the end of the loop.
        if self.saved_step != trainer.global_step:
            self._save(trainer, module)

    def _save(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, FastSlowModule)
        step = trainer.global_step
        with self.watch.paused(module.device):
            check_finite(module.model, step)
            trainer.save_checkpoint(self.folder / LAST_CHECKPOINT)
            if trainer.is_global_zero:
                save_model(module.model, self.folder, step=step, **self.extra)
        self.saved_step = step


def check_finite(model: FastSlowLM, step: int) -> None:
    """Raises DivergedError naming the parameters that are not finite after `step` steps."""
    bad = [name for name, parameter in model.named_parameters() if not parameter.detach().isfinite().all()]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DivergedError(f"after step {step} these weights are not finite: {', '.join(bad[:3])}{more}")


def read_switch(folder: Path) -> dict[str, Any] | None:
    """The contents of switch.json in a run folder; None where there is none."""
    path = folder / SWITCH_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def measured_defect(model: FastSlowLM, tokens: Tensor) -> dict[str, Any]:
    """{"euler_defect": per layer}, or None with the reason where the flow to compare with could not be integrated."""
    try:
        return {"euler_defect": euler_defect(model, tokens)}
    except SolveError as error:
        return {"euler_defect": None, "euler_defect_error": str(error)}


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Sends metrics to every logger under the number of steps done (Lightning's own `log` counts from 0)."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
