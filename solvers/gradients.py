"""How a solve is differentiated: the interface, and the ways that give the exact gradient of the steps taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from solvers.closure import Called, registered
from solvers.replay import replayed

if TYPE_CHECKING:
    from solvers.method import Method
    from solvers.stepping import March, Steps, Trajectory

R = TypeVar("R")


class Gradient:
    """Defines the backward pass of a solve: step by step by `wrap`, or as a whole by `run`."""

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        """`step`, which evaluates `system`, as this gradient differentiates it."""
        raise NotImplementedError(f"{type(self).__name__} must define wrap")

    def run(self, march: March, x: Tensor, y: Tensor) -> Trajectory:
        """The march from (x, y), as this gradient differentiates it."""
        return march.run(x, y)

    def check(self, method: Method, steps: Steps) -> None:
        """Raises ValueError where this gradient does not fit."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class Backprop(Gradient):
    """Autograd through every step; keeps the activations of all steps."""

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        return step


def as_now(step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
    """`step` with the tensors that `system` has now, also where `functional_call` has put them in for its duration."""
    held = {} if torch.compiler.is_compiling() else registered(system)

    def with_held(*args: Any) -> R:
        if not held or all(now is then for now, then in zip(registered(system).values(), held.values(), strict=True)):
            return step(*args)
        return functional_call(Called(step, system), {f"system.{name}": t for name, t in held.items()}, args)

    return with_held


class Checkpointed(Gradient):
    """The discrete adjoint: replays one step at a time in the backward pass, which holds the activations of one step.

    Bit-equal to `Backprop` where the field is deterministic. The mesh is frozen: a replay uses the step sizes of the
    forward pass.

    Args:
        states: at most so many states are kept, and the others are computed again from them by Griewank & Walther's
            binomial schedule (see `solvers.replay`), each at most r times where binomial(states / 2 + r, r) exceeds the
            number of steps between two that are kept; then there are no second derivatives. None keeps the state before
            each step.

    Raises TypeError or ValueError for `states` that are not an int of at least 2.
    """

    def __init__(self, states: int | None = None) -> None:
        if states is not None and (not isinstance(states, int) or isinstance(states, bool)):
            raise TypeError(f"states must be an int or None, got {states!r}")
        if states is not None and states < 2:
            raise ValueError(f"states must be at least 2, got {states}")
        self.states = states

    def check(self, method: Method, steps: Steps) -> None:
        if self.states is not None and (method.constrains or getattr(steps, "per_sample", False)):
            raise ValueError(
                f"{self!r} does not fit {method!r} with {steps!r}: use Checkpointed(), which keeps every state"
            )

    def run(self, march: March, x: Tensor, y: Tensor) -> Trajectory:
        if self.states is None or march.span == 0 or not torch.is_grad_enabled():
            return march.run(x, y)
        return replayed(march, Backprop(), repr(self), self.states, x, y)

    def wrap(self, step: Callable[..., R], system: nn.Module) -> Callable[..., R]:
        with_held = as_now(step, system)

        def checkpointed(*args: Any) -> R:
            return checkpoint(with_held, *args, use_reentrant=False, preserve_rng_state=False)

        return checkpointed
