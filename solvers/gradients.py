"""How a solve is differentiated. Both ways here give the exact gradient of the steps taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

R = TypeVar("R")


class Gradient:
    """Turns a method's step, or a lone evaluation of the field, into one whose backward pass this gradient defines."""

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        """`step`, which evaluates `system`, as this gradient differentiates it."""
        raise NotImplementedError(f"{type(self).__name__} must define wrap")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Backprop(Gradient):
    """Autograd through every step; keeps the activations of all steps."""

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        return step


def _tensors(system: nn.Module) -> dict[str, Tensor]:
    return {**dict(system.named_parameters()), **dict(system.named_buffers())}


class _Called(nn.Module):
    """A step as a module that holds the system, for `functional_call`."""

    def __init__(self, step: Callable[..., Any], system: nn.Module) -> None:
        super().__init__()
        self.step = step
        self.system = system

    def forward(self, *args: Any) -> Any:
        return self.step(*args)


def as_now(step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
    """`step` with the tensors that `system` has now, also where `functional_call` has put them in for its duration."""
    held = {} if torch.compiler.is_compiling() else _tensors(system)

    def with_held(*args: Any) -> R:
        if not held or all(now is then for now, then in zip(_tensors(system).values(), held.values(), strict=True)):
            return step(*args)
        return functional_call(_Called(step, system), {f"system.{name}": t for name, t in held.items()}, args)

    return with_held


class Checkpointed(Gradient):
    """The discrete adjoint: stores the state before each step and replays one step at a time in the backward pass.

    Bit-equal to `Backprop` where the field is deterministic. The mesh is frozen: a replay uses the step sizes of the
    forward pass.
    """

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        with_held = as_now(step, system)

        def replayed(*args: Any) -> R:
            return checkpoint(with_held, *args, use_reentrant=False, preserve_rng_state=False)

        return replayed
