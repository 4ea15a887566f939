"""What is solved: a fast and a slow subsystem, and their view in fast time.

Symbols: x fast state, y slow state, f fast field, g slow field, eps = epsilon, t slow time, tau = (t - t0) / eps fast time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from solvers.solution import Stats, Status

Rate = Callable[[float | Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """One summand of f ("fast") or of g ("slow"), with its own sub-flow in a splitting method."""

    clock: Literal["fast", "slow"]
    rate: Rate


class FastSlowSystem(nn.Module):
    """The system eps dx/dt = f(t, x, y), dy/dt = g(t, x, y), with t the slow time. Subclasses define `fast` and `slow`.

    x and y are tensors of any shape; `fast` returns the shape of x, `slow` that of y. Where every sample has its own time
    (`AdaptiveSteps(per_sample=True)`), t is a tensor of shape (B, 1, ..., 1) and of x's dtype and number of dimensions in
    `fast`, of y's in `slow`; elsewhere it is a float or a scalar tensor.

    Attributes:
        epsilon: 0 < eps <= 1, a float or a scalar tensor, which may require grad. The default is 1.
        fast_decay: lambda >= 0 of the split f = -lambda x + n_f; broadcasts to x.
        slow_decay: kappa >= 0 of the split g = -kappa y + n_g; broadcasts to y.
    """

    epsilon: float | Tensor
    fast_decay: float | Tensor
    slow_decay: float | Tensor

    def __init__(self) -> None:
        super().__init__()
        # On the instance, because a class attribute would hide an nn.Parameter of the same name.
        for name, default in (("epsilon", 1.0), ("fast_decay", 0.0), ("slow_decay", 0.0)):
            if not hasattr(type(self), name):
                setattr(self, name, default)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """f, so that eps dx/dt = f."""
        raise NotImplementedError(f"{type(self).__name__} must define fast(t, x, y)")

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """g, so that dy/dt = g."""
        raise NotImplementedError(f"{type(self).__name__} must define slow(t, x, y)")

    def parts(self) -> Sequence[Part]:
        """Summands of f and g in the order in which a splitting method applies them; here f, then g."""
        return (Part("fast", self.fast), Part("slow", self.slow))


class StepFailed(ArithmeticError):
    """A step has no result; `status` says what it lacks. `residual` is nan where the field is not finite."""

    status: ClassVar[Status]

    def __init__(self, message: str, residual: float) -> None:
        super().__init__(message)
        self.residual = residual


class RootNotFound(StepFailed):
    """No x with f(t, x, y) = 0 was found at the slow time t."""

    status = Status.ROOT_NOT_FOUND

    def __init__(self, t: float, residual: float, cause: str) -> None:
        super().__init__(f"no root of f at t = {t:.6g}: {cause}", residual)


class StageNotSolved(StepFailed):
    """The linear system of a stage was not solved, in the step from the slow time t."""

    status = Status.LINEAR_SOLVE

    def __init__(self, t: float, residual: float, cause: str) -> None:
        super().__init__(f"no stage of the step from t = {t:.6g}: {cause}", residual)


@dataclass
class FastTimeProblem:
    """A system in fast time: dx/dtau = f, dy/dtau = eps g. Fast time keeps a unit step exactly 1.

    `fast_scale` is None, or eps' value over the tensor eps: it is 1, and carries the derivative of a solve over a fixed
    span of *slow* time, whose steps in fast time depend on eps.
    """

    constrained: ClassVar[bool] = False
    """Whether x is bound to y, by `settled`."""
    unit: ClassVar[float] = 1.0
    """Fast time over which the state changes by its own size, as a first guess."""

    system: FastSlowSystem
    t0: float = 0.0
    fast_scale: Tensor | None = None
    slow_scale: float | Tensor = 1.0
    stats: Stats = field(default_factory=Stats)
    counting: bool = True

    @staticmethod
    def over_fast_time(system: FastSlowSystem, t0: float = 0.0) -> FastTimeProblem:
        """The span in fast time is given: eps multiplies g only."""
        return FastTimeProblem(system, t0, None, _scalar(system.epsilon), Stats(), not torch.compiler.is_compiling())

    @staticmethod
    def over_slow_time(system: FastSlowSystem, t0: float = 0.0) -> FastTimeProblem:
        """The span in slow time is given: for a tensor eps, d/deps acts through the scale of f."""
        epsilon = _scalar(system.epsilon)
        if isinstance(epsilon, Tensor):
            value = float(epsilon.detach())
            return FastTimeProblem(system, t0, value / epsilon, value, Stats(), not torch.compiler.is_compiling())
        return FastTimeProblem(system, t0, None, epsilon, Stats(), not torch.compiler.is_compiling())

    def slow_time(self, tau: float | Tensor) -> float | Tensor:
        """t of the fast time tau."""
        return self.t0 + self.slow_scale * tau

    def fast(self, tau: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """dx/dtau, of x's shape."""
        if self.counting:
            self.stats.fast_evaluations += 1
        return self._scaled_fast(shaped("fast", self.system.fast(self.slow_time(tau), x, y), x))

    def slow(self, tau: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """dy/dtau, of y's shape."""
        if self.counting:
            self.stats.slow_evaluations += 1
        return self.slow_scale * shaped("slow", self.system.slow(self.slow_time(tau), x, y), y)

    def rates(self, tau: float | Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(dx/dtau, dy/dtau)."""
        return self.fast(tau, x, y), self.slow(tau, x, y)

    def settled(self, tau: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The x near the given one that a constrained problem has beside y; may raise `StepFailed`."""
        return x

    def decays(self) -> tuple[float | Tensor, float | Tensor]:
        """The diagonal linear parts' rates of decay in fast time: lambda of x and eps kappa of y."""
        fast, slow = self.system.fast_decay, self.system.slow_decay
        return fast if self.fast_scale is None else self.fast_scale * fast, self.slow_scale * slow

    def part_rates(self) -> list[Part]:
        """The system's parts as rates in fast time. All fast parts together count as one evaluation of f."""
        parts = self.system.parts()
        first = {clock: next((p for p in parts if p.clock == clock), None) for clock in ("fast", "slow")}
        return [Part(part.clock, self._part_rate(part, part is first[part.clock])) for part in parts]

    def _part_rate(self, part: Part, counted: bool) -> Rate:
        def rate(tau: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
            state = x if part.clock == "fast" else y
            value = shaped(f"a {part.clock} part", part.rate(self.slow_time(tau), x, y), state)
            if part.clock == "fast":
                if self.counting and counted:
                    self.stats.fast_evaluations += 1
                return self._scaled_fast(value)
            if self.counting and counted:
                self.stats.slow_evaluations += 1
            return self.slow_scale * value

        return rate

    def _scaled_fast(self, value: Tensor) -> Tensor:
        return value if self.fast_scale is None else self.fast_scale * value


def _scalar(epsilon: float | Tensor) -> float | Tensor:
    """Without dimensions, so that neither the shape nor the dtype of a state depends on it."""
    return epsilon.reshape(()) if isinstance(epsilon, Tensor) and epsilon.ndim else epsilon


def shaped(name: str, value: Tensor, state: Tensor) -> Tensor:
    """`value`, refused where adding it to the state would broadcast."""
    if value.shape != state.shape:
        raise ValueError(f"{name} must return its state's shape {tuple(state.shape)}, got {tuple(value.shape)}")
    return value
