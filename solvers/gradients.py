"""How a solve is differentiated. Both ways here give the exact gradient of the steps taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

R = TypeVar("R")


class Gradient:
    """Turns a method's step, or a lone evaluation of the field, into one whose backward pass this gradient defines."""

    def wrap(self, step: Callable[..., R]) -> Callable[..., R]:
        raise NotImplementedError(f"{type(self).__name__} must define wrap")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Backprop(Gradient):
    """Autograd through every step; keeps the activations of all steps."""

    def wrap(self, step: Callable[..., R]) -> Callable[..., R]:
        return step


class Checkpointed(Gradient):
    """The discrete adjoint: stores the state before each step and replays one step at a time in the backward pass.

    Bit-equal to `Backprop` where the field is deterministic. The mesh is frozen: a replay uses the step sizes of the
    forward pass.
    """

    def wrap(self, step: Callable[..., R]) -> Callable[..., R]:
        def replayed(*args: Any) -> R:
            return checkpoint(step, *args, use_reentrant=False, preserve_rng_state=False)

        return replayed
