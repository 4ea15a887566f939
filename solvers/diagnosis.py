"""Why a solve failed, from a few evaluations of the field where it came to rest. Nothing here runs in a solve that succeeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from solvers.explicit import advance
from solvers.exponential import ExponentialRungeKutta
from solvers.method import Factor, Method
from solvers.multistep import AndersonAdams, ExponentialAdams
from solvers.solution import Status
from solvers.stepping import AdaptiveSteps, FixedSteps, Steps
from solvers.system import FastTimeProblem

ITERATIONS = 15
"""Of the power method: enough for the size of a rate, not for its digits."""
STIFF = 100.0
"""Rate times span from which a field is called stiff: an explicit method then takes steps by the dozen only to be stable."""


@dataclass
class Site:
    """The last good states and what was tried from there: `rows` samples, in the problem's shapes and fast times."""

    problem: FastTimeProblem
    tau: Factor
    x: Tensor
    y: Tensor
    ahead: list[Factor]
    """Lengths of time after which the field is asked for as well."""
    follow: bool
    """Whether it is asked at states that have moved along the rate till then, or at the same."""
    rows: int = 1


@dataclass(frozen=True)
class Dominant:
    """The largest eigenvalue of a field's own Jacobian, per unit of fast time: its size, and a Rayleigh quotient for its sign."""

    size: float
    quotient: float


@dataclass(frozen=True)
class Finding:
    """Of one sample."""

    state_is_finite: bool
    state_is_huge: bool
    """Beyond the square root of its dtype's largest number."""
    bad: float | None
    """Fast time at which the field is not finite at a finite state, None if no such was met."""
    fast: Dominant
    slow: Dominant


def diagnose(
    site: Site, statuses: Sequence[Status], method: object, steps: Steps, times: tuple[float, float, float]
) -> list[str]:
    """Why each row failed, in words that are empty where nothing is known. `times` is (t0, t1, epsilon), t = t0 + epsilon tau."""
    try:
        if isinstance(method, Method) and method.integrates(site.problem).constrained:
            return [""] * site.rows  # it has its own failures, and its own steps
        with torch.no_grad():
            findings = examine(replace(site, problem=replace(site.problem, counting=False)))
        decays = any(bool(torch.as_tensor(decay).detach().any()) for decay in site.problem.decays())
        return [
            "" if status is Status.SUCCESS else explain(finding, status, method, decays, times, steps)
            for finding, status in zip(findings, statuses, strict=True)
        ]
    except Exception:  # a diagnosis must not take the place of the failure that it explains
        return [""] * site.rows


def examine(site: Site) -> list[Finding]:
    """A finding for each row, by about 30 evaluations of f and of g."""
    problem, rate = site.problem, site.problem.rates(site.tau, site.x, site.y)
    finite_state = _finite(site, site.x, site.y)
    huge = [big_x or big_y for big_x, big_y in zip(_huge(site, site.x), _huge(site, site.y), strict=True)]
    taus, finite = [_per_row(site, site.tau)], [_finite(site, *rate)]
    for h in site.ahead:
        step = h if site.follow else 0.0 * h
        x, y = advance(site.x, step, (1.0,), [rate[0]]), advance(site.y, step, (1.0,), [rate[1]])
        moved = zip(_finite(site, x, y), _finite(site, *problem.rates(site.tau + h, x, y)), strict=True)
        taus.append(_per_row(site, site.tau + h))
        finite.append([good or not known for known, good in moved])
    fast = _dominant(site, lambda x: problem.fast(site.tau, x, site.y), site.x, rate[0])
    slow = _dominant(site, lambda y: problem.slow(site.tau, site.x, y), site.y, rate[1])
    return [
        Finding(
            finite_state[i],
            huge[i],
            next((tau[i] for tau, good in zip(taus, finite, strict=True) if not good[i]), None),
            fast[i],
            slow[i],
        )
        for i in range(site.rows)
    ]


def _dominant(site: Site, field: Callable[[Tensor], Tensor], state: Tensor, rate: Tensor) -> list[Dominant]:
    """By power iteration on differences of the field, each row by itself."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(state.shape, dtype=torch.float64, generator=generator).to(state).reshape(site.rows, -1)
    v = v / v.norm(dim=1, keepdim=True)
    rows = state.reshape(site.rows, -1)
    delta = torch.finfo(state.dtype).eps ** 0.5 * (1 + rows.norm(dim=1, keepdim=True))
    size = quotient = torch.zeros(site.rows, device=state.device)
    for _ in range(ITERATIONS):
        w = (field((rows + delta * v).reshape(state.shape)) - rate).reshape(site.rows, -1) / delta
        size, quotient = w.norm(dim=1), (v.conj() * w).sum(1).real
        v = torch.where(size[:, None] > 0, w / size[:, None], v)
    return [Dominant(*pair) for pair in zip(size.tolist(), quotient.tolist(), strict=True)]


def _finite(site: Site, x: Tensor, y: Tensor) -> list[bool]:
    x, y = x.reshape(site.rows, -1), y.reshape(site.rows, -1)
    return (torch.isfinite(x).all(1) & torch.isfinite(y).all(1)).tolist()


def _huge(site: Site, state: Tensor) -> list[bool]:
    return (state.reshape(site.rows, -1).abs() > torch.finfo(state.dtype).max ** 0.5).any(1).tolist()


def _per_row(site: Site, tau: Factor) -> list[float]:
    return tau.reshape(-1).tolist() if isinstance(tau, Tensor) else [tau] * site.rows


def explain(
    finding: Finding,
    status: Status,
    method: object,
    decays: bool,
    times: tuple[float, float, float],
    steps: Steps,
) -> str:
    """The finding in words; `decays` tells whether the system declares any."""
    t0, t1, epsilon = times
    if status is Status.NON_FINITE and not finding.state_is_finite:
        return "the state itself is not finite at the start"
    if status is Status.NON_FINITE and finding.state_is_huge:
        return UNBOUNDED
    if status is Status.NON_FINITE and finding.bad is not None:
        return f"non-finite field at t = {t0 + epsilon * finding.bad:.6g}, at a finite state"
    name, dominant = max(("fast", finding.fast), ("slow", finding.slow), key=lambda item: item[1].size)
    rate = dominant.size / epsilon
    about = f"the {name} field's rate is about {rate:.2g} per unit of slow time"
    if not math.isfinite(rate):
        return UNBOUNDED if status is Status.NON_FINITE else ""
    if _grows(dominant, t1 - t0) and rate * abs(t1 - t0) > STIFF:
        return f"the state grows without bound: {about}, and it is one of growth"
    words = []
    stable = getattr(method, "stability_interval", None)
    h = abs(t1 - t0) / steps.n if isinstance(steps, FixedSteps) else 0.0
    unstable = stable is not None and h * rate > stable
    if status is Status.NON_FINITE:
        words.append(f"the steps of {h:.2g} were unstable" if unstable else UNBOUNDED)
    if unstable or rate * abs(t1 - t0) > STIFF:
        limit = f", {method!r} is stable for steps below about {stable / rate:.2g}" if stable else ""
        words.append(f"stiffness estimate: {about}{limit}; try {_stiff_method(method, decays, steps)}")
    elif status is Status.STEP_UNDERFLOW:
        words.append(f"not for stiffness ({about}): the field may jump")
    else:
        words.append(f"not for stiffness: {about}")
    return "; ".join(words)


UNBOUNDED = "the state grew without bound, or left where the field is defined"


def _grows(dominant: Dominant, span: float) -> bool:
    return dominant.quotient * math.copysign(1.0, span) > 0.5 * dominant.size


def _stiff_method(method: object, decays: bool, steps: Steps) -> str:
    alone = isinstance(steps, AdaptiveSteps) and steps.per_sample
    if decays and not isinstance(method, ExponentialRungeKutta | ExponentialAdams):
        return "ETD2RK() or ETD3RK()" if alone else "ETD2RK() or ExponentialAdams()"
    if not isinstance(method, AndersonAdams):
        return "AndersonAdams(), without per_sample" if alone else "AndersonAdams()"
    return "SlowManifold(), if f has an attracting root"
