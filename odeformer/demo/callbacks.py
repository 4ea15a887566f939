"""What the demo does inside the main training run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from odeformer.data import Batch
from odeformer.discretisation import to_continuous
from odeformer.training.module import FastSlowModule, evaluate
from solvers import AdaptiveSteps, Dopri5, SolveError


class SaveFirst(Callback):
    """`train` wants an empty folder, so what was found before it is saved as soon as it has made the folder."""

    def __init__(self, save: Callable[[], None]) -> None:
        self.save = save

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.save()


class ExactFlow(Callback):
    """Just before the switch at `step`, compares the solver of training with the exact flow of the same weights.

    Args:
        batches: (B, T) inputs and targets; a few, since the exact flow takes many steps.
        rtol, atol: of the Dormand-Prince solution that counts as exact.
    """

    def __init__(self, step: int, batches: Sequence[Batch], rtol: float = 1e-4, atol: float = 1e-6) -> None:
        self.step = step
        self.batches = batches
        self.steps = AdaptiveSteps(rtol, atol)
        self.seconds = 0.0
        """Spent here, inside what the run counts as training time."""
        self.found: dict[str, Any] | None = None
        """loss_by_training_solver and loss_by_exact_flow, nats per token on the same batches; the latter None where it failed."""

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self.step:
            return
        assert isinstance(module, FastSlowModule)
        start = time.perf_counter()
        self.found = {"loss_by_training_solver": evaluate(module.model, self.batches), "loss_by_exact_flow": None}
        try:
            exact = to_continuous(module.model, Dopri5(), self.steps)
            self.found["loss_by_exact_flow"] = evaluate(exact, self.batches)
        except SolveError as error:
            self.found["error"] = str(error)
        self.seconds += time.perf_counter() - start
