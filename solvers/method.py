"""What a one-step method is: a map (tau, h, x, y) -> (x, y) in fast time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from solvers.system import FastTimeProblem

Pair = tuple[Tensor, Tensor]


@dataclass
class Step:
    """The state after one attempted step, its error estimate (x and y parts) and, where it is known, the rate there."""

    x: Tensor
    y: Tensor
    error: Pair | None = None
    end_rate: Pair | None = None


class Method:
    """A one-step method. `order` is its classical order; `error_order` that of its embedded solution, None without one."""

    order: ClassVar[int]
    error_order: ClassVar[int | None] = None
    first_same_as_last: ClassVar[bool] = False

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        """One step of fast time h from (x, y) at tau. `rate` is (dx/dtau, dy/dtau) there where the caller knows it."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))
