"""What a solve returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor


class Status(enum.Enum):
    """How a solve ended."""

    SUCCESS = "success"
    NON_FINITE = "non-finite state or field"
    STEP_UNDERFLOW = "step size below the smallest allowed"
    STEP_LIMIT = "step limit reached"
    ROOT_NOT_FOUND = "no root of the fast field found"
    LINEAR_SOLVE = "linear system not solved"


@dataclass
class Stats:
    """Work done by the forward solve. An evaluation of a batch counts once."""

    steps: int = 0
    """Attempted steps."""
    accepted: int = 0
    rejected: int = 0
    fast_evaluations: int = 0
    """Evaluations of f."""
    slow_evaluations: int = 0
    """Evaluations of g."""
    jacobian_products: int = 0
    """Products of the Jacobian of (f, eps g) with a vector."""
    linear_iterations: int = 0


@dataclass
class SampleStats:
    """Steps of one sample of a batch."""

    steps: int = 0
    """Attempted steps."""
    accepted: int = 0
    rejected: int = 0


@dataclass
class Solution:
    """States at the saved times.

    Attributes:
        ts: (N,) slow times, float64.
        xs: (N, *x0.shape) fast states.
        ys: (N, *y0.shape) slow states.
        stats: the work done.
        status: how the solve ended; on a failure only the times reached are here.
        message: what failed, where (slow time) and what to try; empty on success.
        statuses, messages, sample_stats: the same of every sample, where each has its own steps (`AdaptiveSteps.per_sample`),
            and empty elsewhere. All times are then here, with nan from a sample's failure on; `status` is that of the first
            sample that failed, and `stats` counts batched steps: accepted if some sample accepts.
    """

    ts: Tensor
    xs: Tensor
    ys: Tensor
    stats: Stats
    status: Status = Status.SUCCESS
    message: str = ""
    statuses: tuple[Status, ...] = ()
    messages: tuple[str, ...] = ()
    sample_stats: tuple[SampleStats, ...] = ()


class SolveError(RuntimeError):
    """A solve failed and `raise_on_failure` was set. `solution` holds what was reached."""

    def __init__(self, solution: Solution) -> None:
        super().__init__(solution.message)
        self.solution = solution


_ADVICE = {
    Status.NON_FINITE: "check the field there, or take smaller steps",
    Status.STEP_UNDERFLOW: "loosen rtol and atol, or lower min_step",
    Status.STEP_LIMIT: "raise max_steps, or loosen the tolerances",
    Status.ROOT_NOT_FOUND: "raise max_iterations or the tolerance, or integrate x too where f has no attracting root",
    Status.LINEAR_SOLVE: "raise max_iterations or linear_tolerance, or take smaller steps; a fast_decay preconditions the system",
}


def failure_message(
    status: Status, where: str, scheme: str, stats: Stats | SampleStats, reason: str = "", why: str = ""
) -> str:
    """What failed, where, why as far as it is known, and what to try."""
    return (
        f"{status.value} {where} with {scheme} after {stats.accepted} accepted and "
        f"{stats.rejected} rejected steps{f' ({reason})' if reason else ''}: "
        f"{'; '.join(filter(None, [why, _ADVICE[status]]))}"
    )
