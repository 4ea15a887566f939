"""Batches as pure functions: of (seed, step, rank) in training, of the tokens alone in evaluation.

Nothing here has a state, so a resumed run needs none, and evaluating touches no random generator.
B: rows of a batch, T: context, n: tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, each (B, T) int64; the targets are the inputs moved on by one token."""


class Batches:
    """Uniformly random windows of `tokens` (n,).

    Rank r of w sees rows r B .. (r + 1) B of the batch that one process of batch size w B would see, so that
    the number of processes does not change what a run is trained on.

    Raises ValueError for a text shorter than context + 1 tokens, and for impossible sizes, seeds and ranks.
    """

    def __init__(
        self, tokens: np.ndarray, batch_size: int, context: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        check_length(tokens, context, "training")
        if batch_size < 1 or seed < 0 or not 0 <= rank < world_size:
            raise ValueError(
                "batch_size must be >= 1, seed >= 0 and 0 <= rank < world_size, "
                f"got batch_size={batch_size}, seed={seed}, rank={rank}, world_size={world_size}"
            )
        self.tokens = np.asarray(tokens)  # the same memory; np.memmap itself makes every slice slow
        self.batch_size = batch_size
        self.context = context
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    def batch(self, step: int) -> Batch:
        """(B, T) inputs and targets of optimiser step `step`, from 0. Raises ValueError below 0."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        # NumPy promises these raw numbers for ever, which it does not for the integers of a Generator. The
        # remainder favours some starts over others by less than n / 2^64.
        generator = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(step,)))
        possible = len(self.tokens) - self.context
        starts = generator.random_raw(self.world_size * self.batch_size) % np.uint64(possible)
        mine = starts[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        return windows(self.tokens, mine.astype(np.int64), self.context)


class TrainingBatches(IterableDataset[Batch]):
    """The batches of steps `start_step` .. `steps` - 1, for `DataLoader(..., batch_size=None)`.

    The order is that of the steps for any number of workers.

    Args:
        start_step: the first step; of a resumed run, the number of steps done.
        steps: optimiser steps of the whole run.
    """

    def __init__(self, batches: Batches, start_step: int, steps: int) -> None:
        if not 0 <= start_step <= steps:
            raise ValueError(f"0 <= start_step <= steps must hold, got {start_step} and {steps}")
        self.batches = batches
        self.start_step = start_step
        self.steps = steps

    def __len__(self) -> int:
        return self.steps - self.start_step

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        # A DataLoader takes one batch from each worker in turn.
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(self.start_step + first, self.steps, stride):
            yield self.batches.batch(step)


def evaluation_batches(tokens: np.ndarray, batch_size: int, context: int, count: int) -> list[Batch]:
    """`count` fixed batches, their windows spread evenly over all `tokens` (n,), from the first to the last.

    Raises ValueError for a text shorter than context + 1 tokens and for sizes below 1.
    """
    check_length(tokens, context, "validation")
    if batch_size < 1 or count < 1:
        raise ValueError(f"batch_size and count must be >= 1, got batch_size={batch_size} and count={count}")
    starts = np.linspace(0, len(tokens) - context - 1, count * batch_size).round().astype(np.int64)
    # Neighbouring windows go to different batches, so that every batch samples the whole text.
    plain = np.asarray(tokens)
    return [windows(plain, rows, context) for rows in starts.reshape(batch_size, count).T]


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    """(inputs, targets), (B, T) int64 each, of the windows of `tokens` (n,) that begin at `starts` (B,)."""
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    joined = torch.from_numpy(rows)
    return joined[:, :-1].contiguous(), joined[:, 1:].contiguous()


def check_length(tokens: np.ndarray, context: int, what: str) -> None:
    """Raises ValueError naming both lengths where the tokens hold no window, and for a context below 1."""
    if context < 1:
        raise ValueError(f"context must be >= 1, got {context}")
    if len(tokens) < context + 1:
        raise ValueError(
            f"the {what} text has {len(tokens)} tokens, fewer than context + 1 = {context + 1}: "
            "take more text, another validation_fraction, or a smaller model.context"
        )
