"""One training run: everything is checked first, then Lightning's Trainer does the loop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import TensorBoardLogger

from odeformer.causality import check_causality
from odeformer.config import RunConfig
from odeformer.data import Batch, Batches, TextData, evaluation_batches, load_data
from odeformer.discretisation import to_discrete
from odeformer.files import write_json
from odeformer.model import FastSlowLM
from odeformer.training.callbacks import (
    LAST_CHECKPOINT,
    Checkpoints,
    Evaluation,
    Metrics,
    Stopwatch,
    SwitchToDiscrete,
    read_switch,
)
from odeformer.training.checkpoints import FOLDER, save_model
from odeformer.training.errors import DivergedError, TrainingInterrupted
from odeformer.training.loggers import METRICS_FILE, MetricsFile
from odeformer.training.loop import Stop, Stream, WholeFiles, quiet, step_of, weights_of
from odeformer.training.module import FastSlowModule, evaluate
from odeformer.training.preparation import (
    check_config,
    check_folder,
    check_text,
    create_folder,
    initial_model,
    with_vocabulary,
)
from odeformer.training.progress import ProgressLine
from solvers import SolveError

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class TrainingResult:
    """What a run came to. Losses are in nats per token."""

    folder: Path
    model: FastSlowLM
    validation_loss: float
    """Of the last step, over the fixed evaluation batches."""
    train_loss: float
    """Of the last step's batch; not-a-number where a resumed run had nothing left to do."""
    steps: int
    """Optimiser steps done, over all parts of a resumed run."""
    seconds: float
    """Wall-clock time of the steps of this part, without evaluation, the switch and checkpoints."""
    tokens_per_second: float
    """Tokens trained on in `seconds`; 0 where there were none."""
    switch: dict[str, Any] | None = None
    """step, validation_loss_before, validation_loss_after, gap, euler_defect; None without a switch."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the model and the folder."""
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("folder", "model")}
        return {**kept, "parameters": sum(parameter.numel() for parameter in self.model.parameters())}


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    data: TextData | None = None,
    stop_after: int | None = None,
    callbacks: Sequence[Callback] = (),
    label: str = "training",
) -> TrainingResult:
    """Trains a model as `config` says and leaves everything about it in `folder`.

    The folder then holds config.yaml, data.json, tokenizer/, metrics.csv (step, train/loss, validation/loss, learning_rate,
    gate/layer_l, ...), tensorboard/, checkpoints/ (last.ckpt to resume from; model.safetensors and model.json to use),
    result.json and, after a switch, switch.json.

    Args:
        resume: continue the run in `folder` from its last checkpoint; every number is what an uninterrupted run gives.
        data: the tokens, where the caller has them; None loads what config.data describes.
        stop_after: stop after this step, to be resumed later; the schedule is still that of config.training.steps.
        callbacks: more of Lightning's, run before the built-in ones.
        label: shown in front of the progress bar.

    Raises, before any work and with nothing written: FileExistsError for a folder that is not empty, and ValueError, TypeError
    or OSError naming what does not fit, `CausalityError` for a model that leaks. While training: `DivergedError` naming the
    step, OSError (a full disk), `TrainingInterrupted` after Ctrl-C. The last good checkpoint then remains.
    """
    folder = Path(folder)
    check_config(config)
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after must be at least 1, got {stop_after}")
    check_folder(config, folder, resume)
    if data is None:
        data = load_data(config.data, context=config.model.context)
    if resume:
        check_text(folder, data)
    config = with_vocabulary(config, data.tokenizer.vocab_size)
    training, context = config.training, config.model.context
    batches = Batches(data.train, training.batch_size, context, training.seed)
    validation = list(evaluation_batches(data.validation, training.batch_size, context, training.evaluation_batches))
    first_step = step_of(folder / FOLDER / LAST_CHECKPOINT) if resume else 0
    if first_step >= training.steps:
        return _finish(config, folder, validation)
    model = initial_model(config)
    check_causality(model, raise_on_leak=True)
    if not resume:
        create_folder(folder, config, data)
    run = _Run(config, folder, batches, validation, first_step)
    result = run.fit(model, training.steps if stop_after is None else min(stop_after, training.steps), callbacks, label)
    write_json(folder / RESULT_FILE, result.to_dict())
    return result


def metric_columns(config: RunConfig) -> list[str]:
    """Columns of metrics.csv after "step"."""
    model = config.model
    sets = 1 if model.tied else model.n_layer
    columns = ["train/loss", "validation/loss", "learning_rate"]
    if model.coupling != "dense":
        columns += [f"gate/layer_{index}" for index in range(sets)]
    if config.training.switch_at is not None:
        columns += [f"switch/{name}" for name in ("validation_loss_before", "validation_loss_after", "gap")]
        columns += [f"euler_defect/layer_{index}" for index in range(model.n_layer)]
    return columns


def _finish(config: RunConfig, folder: Path, validation: Sequence[Batch]) -> TrainingResult:
    """The result of a run that has no step left to do; writes what an interruption of its last moments left unwritten."""
    switch, steps = read_switch(folder), config.training.steps
    model = initial_model(config)
    model.load_state_dict(weights_of(folder / FOLDER / LAST_CHECKPOINT))
    if switch is not None:
        model = to_discrete(model)
    result = TrainingResult(
        folder=folder,
        model=model,
        validation_loss=evaluate(model, validation),
        train_loss=float("nan"),
        steps=steps,
        seconds=0.0,
        tokens_per_second=0.0,
        switch=switch,
    )
    written = folder / RESULT_FILE
    if not written.is_file() or json.loads(written.read_text(encoding="utf-8")).get("steps") != steps:
        save_model(model, folder / FOLDER, step=steps)
        metrics = MetricsFile(folder / METRICS_FILE, metric_columns(config), steps)
        metrics.log_metrics({"validation/loss": result.validation_loss}, steps)
        metrics.finalize("success")
        write_json(folder / RESULT_FILE, result.to_dict())
    return result


@dataclass
class _Run:
    """A run whose inputs are checked and whose folder is there."""

    config: RunConfig
    folder: Path
    batches: Batches
    validation: Sequence[Batch]
    first_step: int

    def fit(self, model: FastSlowLM, last_step: int, callbacks: Sequence[Callback], label: str) -> TrainingResult:
        training = self.config.training
        last = self.folder / FOLDER / LAST_CHECKPOINT
        module, watch, stop = FastSlowModule(model, training), Stopwatch(), Stop()
        line = ProgressLine(training.steps, label) if training.progress else None
        metrics = Metrics(training.log_every, watch)
        switch = None
        if training.switch_at is not None:
            switch = SwitchToDiscrete(training.switch_at, self.validation, self.folder, watch)
        evaluation = Evaluation(training.evaluate_every, self.validation, watch, lambda: stop.requested, line)
        checkpoints = Checkpoints(training.checkpoint_every, self.folder, watch)
        parts = [*callbacks, metrics, switch, evaluation, checkpoints, line]
        with quiet(), stop.on_signals(trainer := self._trainer(last_step, [part for part in parts if part], line)):
            try:
                trainer.fit(
                    module,
                    Stream(self.batches, trainer),
                    ckpt_path=last if self.first_step else None,
                    weights_only=True,
                )
            except SolveError as error:
                step = trainer.global_step + 1
                raise DivergedError(f"a layer's flow could not be integrated in step {step}: {error}") from error
        if stop.requested:
            raise TrainingInterrupted(self._farewell(trainer.global_step))
        tokens = (trainer.global_step - self.first_step) * training.batch_size * self.config.model.context
        return TrainingResult(
            folder=self.folder,
            model=module.model,
            validation_loss=float("nan") if evaluation.loss is None else evaluation.loss,
            train_loss=float("nan") if metrics.loss is None else float(metrics.loss),
            steps=trainer.global_step,
            seconds=watch.seconds,
            tokens_per_second=tokens / watch.seconds if tokens else 0.0,
            switch=None if switch is None else switch.record,
        )

    def _trainer(self, last_step: int, callbacks: list[Callback], line: ProgressLine | None) -> Trainer:
        training = self.config.training
        metrics = MetricsFile(self.folder / METRICS_FILE, metric_columns(self.config), self.first_step)
        purge = self.first_step + 1 if self.first_step else None
        return Trainer(
            default_root_dir=self.folder,
            accelerator=training.accelerator,
            devices=1,
            precision=training.precision,
            max_epochs=-1,
            max_steps=last_step,
            gradient_clip_val=training.gradient_clip or None,
            logger=[metrics, TensorBoardLogger(self.folder, name="tensorboard", version="", purge_step=purge)],
            callbacks=callbacks,
            plugins=[WholeFiles()],
            enable_progress_bar=line is not None,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            log_every_n_steps=training.log_every,
            use_distributed_sampler=False,
        )

    def _farewell(self, step: int) -> str:
        """Says what an interrupted run has left."""
        last = self.folder / FOLDER / LAST_CHECKPOINT
        saved = step_of(last) if last.is_file() else 0
        text = f"interrupted after step {step} of {self.config.training.steps}"
        return f"{text}; {last} holds step {saved}" if saved else f"{text}, before any checkpoint"
