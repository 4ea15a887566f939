"""The Lightning module around a `FastSlowLM`: loss, optimiser and learning-rate schedule; and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from odeformer.config import TrainingConfig
from odeformer.data import Batch
from odeformer.model import SLOW_PATH, FastSlowLM


class FastSlowModule(LightningModule):
    """Next-token training of `model`, which a callback may replace by its twin of another scheme."""

    def __init__(self, model: FastSlowLM, settings: TrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T)."""
        return self.model(tokens)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Mean cross-entropy of one batch, in nats per token."""
        inputs, targets = batch
        return next_token_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.settings)
        base = self.settings.learning_rate
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_at(step, self.settings) / base
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits (B, T, V) against targets (B, T)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate_at(step: int, settings: TrainingConfig) -> float:
    """The rate of update number `step` (from 0): linear warmup, then a cosine down to the minimum at the last update."""
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    share = min(1.0, (step - warmup) / max(1, settings.steps - 1 - warmup))
    low, high = settings.minimum_learning_rate, settings.learning_rate
    return low + 0.5 * (1 + math.cos(math.pi * share)) * (high - low)


def make_optimizer(model: FastSlowLM, settings: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with decoupled decay on matrices only, of the parameters that can receive a gradient and of no others.

    A parameter outside stays bit for bit what it is: all of the slow path in a frozen model, and wherever no block is ever
    complete (context < pool_size), where its gradient is zero and decay would act alone. Parameters without a gradient in
    one step, such as the last layer's slow attention in a discrete model, are skipped by PyTorch in that step.
    """
    reachable = trained_parameters(model)
    groups = [
        {"params": [p for p in reachable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in reachable if p.dim() < 2], "weight_decay": 0.0},
    ]
    # Lightning refuses gradient clipping of a fused optimiser under autocast, where a scaler could be in use.
    fused = settings.precision != "bf16-mixed"
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused)


def trained_parameters(model: FastSlowLM) -> list[nn.Parameter]:
    """The parameters that training may change, in the order of `named_parameters`."""
    no_blocks = model.config.context < model.config.pool_size
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not (no_blocks and any(part in name for part in SLOW_PATH))
    ]


@torch.no_grad()
def evaluate(
    model: FastSlowLM,
    batches: Sequence[Batch],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Mean cross-entropy over all tokens of `batches`, in nats per token. Draws no random number.

    Args:
        context: makes the context of each forward pass, for instance autocast.

    Raises ValueError for no batches.
    """
    if not batches:
        raise ValueError("evaluate needs at least one batch")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, targets in batches:
            with context():
                logits = model(inputs.to(device))
            logits = logits.float() if logits.dtype == torch.bfloat16 else logits
            total += next_token_loss(logits, targets.to(device)) * targets.numel()
        return float(total) / sum(targets.numel() for _, targets in batches)
    finally:
        model.train(was_training)


def gate_norms(model: FastSlowLM) -> dict[str, float]:
    """{"gate/layer_l": Euclidean norm of the gate}, one for each set of parameters; empty for a dense model."""
    gates = [block.layer.gate for block in model.blocks if block.layer.has_slow_path]  # type: ignore[union-attr]
    if not gates:
        return {}
    norms = torch.stack([gate.detach().norm() for gate in gates]).tolist()  # type: ignore[operator]
    return {f"gate/layer_{index}": norm for index, norm in enumerate(norms)}
