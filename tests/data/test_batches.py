"""Batches as pure functions."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from odeformer.data import Batches, TrainingBatches, evaluation_batches

TOKENS = np.arange(1000, dtype=np.uint16)


def same(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_targets_are_the_next_tokens() -> None:
    batches = [Batches(TOKENS, 4, 16, seed=0).batch(3), *evaluation_batches(TOKENS, 4, 16, 3)]
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (4, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs - inputs[:, :1], torch.arange(16).expand(4, 16))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first, second = Batches(TOKENS, 4, 16, seed=0), Batches(TOKENS, 4, 16, seed=0)
    forward = [first.batch(step) for step in range(5)]
    backward = [second.batch(step) for step in reversed(range(5))][::-1]
    assert all(same(a, b) for a, b in zip(forward, backward, strict=True))
    starts = {tuple(inputs[:, 0].tolist()) for inputs, _ in forward}
    starts |= {tuple(Batches(TOKENS, 4, 16, seed=s).batch(0)[0][:, 0].tolist()) for s in (1, 2**32, 2**64)}
    assert len(starts) == 8


def test_batches_are_what_they_were() -> None:
    # Runs are resumed on other machines and with other versions of NumPy.
    inputs, _ = Batches(TOKENS, 4, 16, seed=1337).batch(7)
    raw = np.random.Philox(np.random.SeedSequence(1337, spawn_key=(7,))).random_raw(4)
    assert inputs[:, 0].tolist() == [int(number) % 984 for number in raw]


def test_every_window_can_be_drawn_and_none_beyond() -> None:
    batches = Batches(TOKENS[:10], 64, 7, seed=0)
    starts = torch.cat([batches.batch(step)[0][:, 0] for step in range(20)])
    counts = torch.bincount(starts, minlength=3)
    # 1280 draws of 3: the standard deviation of each count is sqrt(1280 * 2 / 9) < 17.
    assert len(counts) == 3 and (counts - 1280 / 3).abs().max() < 5 * 17


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_one_global_batch(world_size: int) -> None:
    whole = Batches(TOKENS, 4 * world_size, 16, seed=5).batch(11)
    parts = [Batches(TOKENS, 4, 16, 5, rank, world_size).batch(11) for rank in range(world_size)]
    assert same(whole, (torch.cat([i for i, _ in parts]), torch.cat([t for _, t in parts])))


def test_evaluation_covers_the_text_evenly_and_always_alike() -> None:
    batches = evaluation_batches(TOKENS, 4, 16, 5)
    starts = torch.stack([inputs[:, 0] for inputs, _ in batches])
    ordered = starts.flatten().sort().values
    assert ordered[0] == 0 and ordered[-1] == 1000 - 17
    gaps = ordered.diff()
    assert gaps.max() - gaps.min() <= 1
    # Every batch samples the whole text, not a part of it.
    assert (starts.max(1).values - starts.min(1).values).min() > 700
    assert all(same(a, b) for a, b in zip(batches, evaluation_batches(TOKENS, 4, 16, 5), strict=True))


def test_no_global_generator_is_touched() -> None:
    before = global_states()
    evaluation_batches(TOKENS, 4, 16, 5)
    Batches(TOKENS, 4, 16, seed=0).batch(0)
    assert global_states() == before


def global_states() -> tuple[object, ...]:
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    return torch.get_rng_state().tolist(), pickle.dumps(numpy_state), random.getstate()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_keeps_the_order_of_the_steps(workers: int) -> None:
    batches = Batches(TOKENS, 4, 16, seed=0)
    stream = TrainingBatches(batches, 3, 8)
    loaded = list(DataLoader(stream, batch_size=None, num_workers=workers))
    assert len(stream) == len(loaded) == 5
    assert all(same(batch, batches.batch(step)) for batch, step in zip(loaded, range(3, 8), strict=True))
    assert all(same(a, b) for a, b in zip(loaded, stream, strict=True))


def test_the_shortest_text() -> None:
    for inputs, targets in [Batches(TOKENS[:9], 2, 8, 0).batch(0), *evaluation_batches(TOKENS[:9], 2, 8, 1)]:
        assert torch.equal(inputs, torch.arange(8).expand(2, 8)) and torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("context", [1000, 4000])
def test_a_text_that_is_too_short(context: int) -> None:
    numbers = rf"text has 1000 tokens, fewer than context \+ 1 = {context + 1}"
    with pytest.raises(ValueError, match=f"training {numbers}"):
        Batches(TOKENS, 1, context, 0)
    with pytest.raises(ValueError, match=f"validation {numbers}"):
        evaluation_batches(TOKENS, 1, context, 1)


def test_impossible_numbers() -> None:
    for wrong in ({"batch_size": 0}, {"seed": -1}, {"rank": 1}, {"rank": -1}, {"world_size": 0}):
        with pytest.raises(ValueError, match=r"{}={}".format(*next(iter(wrong.items())))):
            Batches(TOKENS, **{"batch_size": 2, "context": 8, "seed": 0, **wrong})
    with pytest.raises(ValueError, match="context must be >= 1, got 0"):
        Batches(TOKENS, 2, 0, 0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        Batches(TOKENS, 2, 8, 0).batch(-1)
    with pytest.raises(ValueError, match="count=0"):
        evaluation_batches(TOKENS, 2, 8, 0)
    with pytest.raises(ValueError, match="got 4 and 3"):
        TrainingBatches(Batches(TOKENS, 2, 8, 0), 4, 3)
