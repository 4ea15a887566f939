"""The leak proof: no logit depends on a later token (mathematics, causality theorem).

Two independent ways. By perturbation: every suffix of the tokens is changed in turn, and all logits before it must stay
bit-equal. By Jacobian: the derivative of a random functional of logits_t with respect to the embedding of token s must be
exactly 0 for every s > t. The gate is opened for the check, since behind a closed gate the slow path could leak unseen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from odeformer.blocks import FlowBlock
from odeformer.model import FastSlowLM
from solvers import AdaptiveSteps, Backprop, Dopri5, FixedSteps, TorchDiffEq

ROWS = 32
"""Sequences per forward pass."""
LONGEST = 512
"""Length up to which the default sequences grow to exceed a sliding window."""
FIXED_STEPS = 8
"""Steps per layer that stand in for error control."""


class CausalityError(RuntimeError):
    """A logit depends on a later token. `report` says which."""

    def __init__(self, report: CausalityReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class CausalityReport:
    """The largest effect of a later token on an earlier logit, by each way. Sizes are absolute, in logits."""

    length: int
    """T of the longest sequence tested."""
    pairs: int
    """Pairs (t, s), t < s, covered."""
    perturbation_leak: float
    jacobian_leak: float
    worst_pair: tuple[int, int] | None
    """(t, s): the logits at t depend on token s > t; None without a leak."""
    note: str = ""

    @property
    def ok(self) -> bool:
        """No logit depends on a later token, bit for bit."""
        return self.worst_pair is None

    @property
    def worst_size(self) -> float:
        return max(self.perturbation_leak, self.jacobian_leak)

    def __str__(self) -> str:
        if self.ok:
            text = (
                f"Causal: all {self.pairs} pairs of an earlier logit and a later token, T up to {self.length}, by perturbation "
                "(bit-equal) and by Jacobian (exactly 0), with the gate open"
            )
        else:
            t, s = self.worst_pair or (0, 0)
            text = (
                f"LEAK: the logits at token {t} depend on token {s}, which comes later: largest effect "
                f"{self.perturbation_leak:.3g} by perturbation, {self.jacobian_leak:.3g} by Jacobian (T = {self.length})"
            )
        return f"{text}. {self.note}" if self.note else text


def check_causality(
    model: FastSlowLM, tokens: Tensor | None = None, *, seed: int = 0, raise_on_leak: bool = False
) -> CausalityReport:
    """Tests every pair (t, s > t) of `tokens` (1, T) or (T,); by default random ones: two sequences of three blocks, with and
    without an incomplete block behind them, longer than a sliding window (of up to LONGEST tokens).

    The model is left as it was. A flow under error control is tested with equal steps: error control looks at one number
    per solve, so a later token moves earlier logits within the tolerance, which is not a leak of the field.
    Raises CausalityError with `raise_on_leak`, TypeError and ValueError for unsuitable arguments.
    """
    if not isinstance(model, FastSlowLM):
        raise TypeError(f"model must be a FastSlowLM, got {type(model).__name__}")
    tested, note = _testable(model)
    sequences = _base_tokens(model, tokens, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    opened = _open_gates(model, generator)
    was_training = model.training
    tested.eval()
    try:
        found = [
            (*_perturbation(tested, opened, base, generator), *_jacobian(tested, opened, base, generator))
            for base in sequences
        ]
    finally:
        tested.train(was_training)
    lengths = [base.shape[0] for base in sequences]
    report = CausalityReport(
        length=max(lengths),
        pairs=sum(length * (length - 1) // 2 for length in lengths),
        perturbation_leak=max(by_value for by_value, _, _, _ in found),
        jacobian_leak=max(by_gradient for _, _, by_gradient, _ in found),
        worst_pair=next((pair for _, first, _, second in found for pair in (first, second) if pair), None),
        note=note,
    )
    if raise_on_leak and not report.ok:
        raise CausalityError(report)
    return report


def _testable(model: FastSlowLM) -> tuple[FastSlowLM, str]:
    """The model as it is tested: a flow by equal steps, and without replays, which would see the gates closed again."""
    block = next(iter(model.blocks))
    if not isinstance(block, FlowBlock):
        return model, ""
    method, steps, note = block.method, block.steps, ""
    if isinstance(steps, AdaptiveSteps):
        method = Dopri5() if isinstance(method, TorchDiffEq) else method
        steps = FixedSteps(FIXED_STEPS)
        note = f"Error control was replaced by {FIXED_STEPS} equal steps of {method!r} per layer"
    return model.with_blocks(lambda layer: FlowBlock(layer, method, steps, Backprop())), note


def _base_tokens(model: FastSlowLM, tokens: Tensor | None, seed: int) -> list[Tensor]:
    config = model.config
    device = model.embedding.weight.device
    if tokens is not None:
        flat = tokens.flatten() if tokens.dim() == 2 and tokens.shape[0] == 1 else tokens
        if flat.dim() != 1 or flat.shape[0] < 2:
            raise ValueError(f"tokens must be one sequence of at least 2, got shape {tuple(tokens.shape)}")
        return [flat.to(device)]
    size = config.pool_size
    longest = max(4, 3 * size + max(1, size // 2), min((config.window or 0) + 2, LONGEST))
    if config.positions == "learned":
        longest = min(longest, config.context)
    whole = longest // size * size  # ends on a block boundary
    tail = longest if longest > whole else longest - 1
    generator = torch.Generator().manual_seed(seed)
    lengths = sorted({length for length in (whole, tail) if length >= 2}, reverse=True) or [longest]
    return [torch.randint(config.vocab_size or 1, (n,), generator=generator).to(device) for n in lengths]


def _open_gates(model: FastSlowLM, generator: torch.Generator) -> dict[str, Tensor]:
    """Random gates in place of the model's own, as overrides for `functional_call`."""
    return {
        name: torch.randn(parameter.shape, generator=generator).to(parameter)
        for name, parameter in model.named_parameters()
        if name.endswith(".gate")
    }


@torch.no_grad()
def _perturbation(
    model: FastSlowLM, opened: dict[str, Tensor], base: Tensor, generator: torch.Generator
) -> tuple[float, tuple[int, int] | None]:
    """(largest change, its pair) of logits before a changed suffix. The compared batches have one shape, so bits can agree."""
    length, vocabulary = base.shape[0], model.config.vocab_size or 1
    if vocabulary == 1:
        return 0.0, None
    largest, pair = 0.0, None
    index = torch.arange(length, device=base.device)
    for first in range(1, length, ROWS):
        starts = torch.arange(first, min(first + ROWS, length), device=base.device)
        # An offset in 1 .. V - 1 changes every token of the suffix, and in particular its first.
        offset = torch.randint(1, vocabulary, (len(starts), length), generator=generator).to(base.device)
        changed = torch.where(index >= starts[:, None], (base + offset) % vocabulary, base)
        before = functional_call(model, opened, (base.expand(len(starts), -1).contiguous(),))
        after = functional_call(model, opened, (changed,))
        difference = _size(after - before).masked_fill(index >= starts[:, None], 0.0)
        value = float(difference.max())
        if value > largest:
            row, t = divmod(int(difference.argmax()), length)
            largest, pair = value, (t, int(starts[row]))
    return largest, pair


def _jacobian(
    model: FastSlowLM, opened: dict[str, Tensor], base: Tensor, generator: torch.Generator
) -> tuple[float, tuple[int, int] | None]:
    """(largest derivative, its pair) of a random functional of logits_t with respect to the embeddings of tokens s > t."""
    length = base.shape[0]
    index = torch.arange(length, device=base.device)
    largest, pair = 0.0, None
    captured: list[Tensor] = []

    def capture(module: Any, inputs: Any, output: Tensor) -> Tensor:
        captured.append(output.detach().requires_grad_())
        return captured[-1]

    handle = model.embedding.register_forward_hook(capture)
    try:
        for first in range(0, length, ROWS):
            rows = torch.arange(first, min(first + ROWS, length), device=base.device)
            with torch.inference_mode(False), torch.enable_grad():
                tokens = base.clone().expand(len(rows), -1).contiguous()
                logits = functional_call(model, opened, (tokens,))
                weight = torch.randn(len(rows), logits.shape[2], generator=generator).to(logits)
                chosen = logits[torch.arange(len(rows), device=base.device), rows]
                (gradient,) = torch.autograd.grad((chosen * weight).sum(), captured[-1])
            later = _size(gradient).masked_fill(index <= rows[:, None], 0.0)
            value = float(later.max())
            if value > largest:
                row, s = divmod(int(later.argmax()), length)
                largest, pair = value, (int(rows[row]), s)
    finally:
        handle.remove()
    return largest, pair


def _size(values: Tensor) -> Tensor:
    """Largest magnitude over the last dimension; not-a-number counts as infinite."""
    return values.abs().amax(-1).nan_to_num(nan=math.inf, posinf=math.inf)
