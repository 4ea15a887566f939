"""What a method is: a map (tau, h, x, y) -> (x, y) in fast time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from solvers.system import FastTimeProblem

Pair = tuple[Tensor, Tensor]
Factor = float | Tensor


def added(state: Tensor, factor: Factor, change: Tensor) -> Tensor:
    """state + factor change, in the state's dtype."""
    if isinstance(factor, Tensor):
        return state + scaled(factor, change)
    return state.add(change, alpha=factor) if factor else state


def scaled(factor: Factor, change: Tensor) -> Tensor:
    """factor change, in the dtype of the change."""
    return (factor.to(change.real.dtype) if isinstance(factor, Tensor) else factor) * change


class SpectralRadius(NamedTuple):
    """An estimate of the spectral radius of the Jacobian in fast time, its eigenvector, and the steps for which it was kept."""

    value: float
    vector: Pair
    age: int = 0


class Past(NamedTuple):
    """What a method hands to its next step; n = (n_f, eps n_g) is the rate without its linear part."""

    values: tuple[tuple[float, Pair], ...] = ()
    """(length, n at the start) of the steps before, the latest first."""
    secants: tuple[tuple[Pair, Pair], ...] = ()
    """(change of the state, change of n) between evaluations, the latest first."""
    last: tuple[Pair, Pair] | None = None
    """The state of the latest evaluation, and n there."""
    radius: SpectralRadius | None = None


@dataclass
class Step:
    """The state after one attempted step, its error estimate (x and y parts) and, where it is known, the rate there."""

    x: Tensor
    y: Tensor
    error: Pair | None = None
    end_rate: Pair | None = None
    past: Past | None = None


class Method:
    """Advances a state by one step. `order` is the classical order; `error_order` that of the embedded solution, None without."""

    order: ClassVar[int]
    error_order: ClassVar[int | None] = None
    first_same_as_last: ClassVar[bool] = False
    multistep: ClassVar[bool] = False
    """Whether `step` takes the `past` that the step before returned, as one more argument."""
    reads_host: ClassVar[bool] = False
    """Whether `step` reads tensors on the host; equal steps then wait for the device, and do not compile whole."""
    takes_tensor_steps: ClassVar[bool] = False
    """Whether tau and h may be tensors that broadcast against x and y, as the steps of single samples are."""

    constrains: ClassVar[bool] = False
    """Whether `integrates` binds x to y."""
    splits: ClassVar[bool] = False
    """Whether `step` needs the system's parts."""

    def integrates(self, problem: FastTimeProblem) -> FastTimeProblem:
        """The problem whose rates and states the steps follow: the given one, or that with x bound to y."""
        return problem

    def step(
        self, problem: FastTimeProblem, tau: float, h: float, x: Tensor, y: Tensor, rate: Pair | None = None
    ) -> Step:
        """One step of fast time h from (x, y) at tau. `rate` is (dx/dtau, dy/dtau) there where the caller knows it."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def after_rejection(self, past: Past | None) -> Past | None:
        """The `past` for another attempt at a step that error control has rejected."""
        return past

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))
