"""What the message of a failed solve says: why, and what to try."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from solvers import (
    ETD2RK,
    RK4,
    AdaptiveSteps,
    AndersonAdams,
    Dopri5,
    Euler,
    FixedSteps,
    Heun,
    Method,
    Solution,
    Status,
    TorchDiffEq,
    integrate,
    solve,
)
from solvers.diagnosis import Site, examine
from solvers.explicit import ExplicitRungeKutta
from solvers.system import FastTimeProblem
from tests.solvers.problems import Field, nan_after, states

CONTROL = AdaptiveSteps(1e-4, 1e-4)


class Decay(Field):
    """eps dx/dt = -k (x - y), dy/dt = 0: the rate k / eps in slow time."""

    def __init__(self, k: float | Tensor, declared: bool = False, epsilon: float = 0.125) -> None:
        super().__init__(lambda t, x, y: -k * (x - y), epsilon=epsilon)
        self.fast_decay = k if declared else 0.0


def failed(
    system: Field, method: Method | TorchDiffEq, steps: Any, x: Tensor | None = None, **settings: Any
) -> Solution:
    x = states()[0] if x is None else x
    solution = solve(
        system, x, torch.zeros_like(x), method=method, steps=steps, raise_on_failure=False, **{"t1": 1.0, **settings}
    )
    assert solution.status is not Status.SUCCESS
    return solution


def numbers(pattern: str, message: str) -> list[float]:
    match = re.search(pattern.replace("#", r"(-?[\d.]+(?:e[+-]\d+)?)"), message)
    assert match, message
    return [float(number) for number in match.groups()]


@pytest.mark.parametrize(
    ("method", "interval"), [(Euler(), 2.0), (Heun(), 2.0), (RK4(), 2.785293563405282), (Dopri5(), 3.3065678)]
)
def test_stability_intervals(method: ExplicitRungeKutta, interval: float) -> None:
    """Hairer & Wanner II, section IV.2: of RK4 the real root of z^3 + 4 z^2 + 12 z + 24; and what a step of that length does."""
    assert method.stability_interval == pytest.approx(interval, abs=1e-5)
    x = torch.ones(1, dtype=torch.float64)
    for factor, grows in ((0.999, False), (1.001, True)):
        h = factor * method.stability_interval
        x_end, _ = integrate(Field(lambda t, x, y: -x), x, x, span=200 * h, method=method, steps=FixedSteps(200))
        assert (float(x_end.abs()) > 1) == grows


@pytest.mark.parametrize("k", [1e3, 1e5])
@pytest.mark.parametrize("method", [Dopri5(), Heun()], ids=repr)
def test_a_stiff_field_is_measured(method: ExplicitRungeKutta, k: float) -> None:
    message = failed(Decay(k), method, CONTROL, max_steps=50).message
    assert message.startswith("step limit reached at slow time t = ")
    assert "stiffness estimate: the fast field's rate is about" in message
    rate, limit = numbers("rate is about # per unit of slow time, .* is stable for steps below about #;", message)
    assert rate == pytest.approx(8 * k, rel=0.06)  # two digits
    assert limit == pytest.approx(method.stability_interval / (8 * k), rel=0.06)
    assert f"{method!r} is stable for steps below" in message and "raise max_steps" in message


@pytest.mark.parametrize(
    ("method", "declared", "advice"),
    [
        (Dopri5(), True, "try ETD2RK() or ExponentialAdams();"),
        (Dopri5(), False, "try AndersonAdams();"),
        (TorchDiffEq("dopri5"), True, "try ETD2RK() or ExponentialAdams();"),
        (ETD2RK(), False, "try AndersonAdams();"),
    ],
)
def test_a_stiff_method_is_named(method: Method | TorchDiffEq, declared: bool, advice: str) -> None:
    assert advice in failed(Decay(1e4, declared), method, CONTROL, max_steps=30).message


def test_no_method_is_named_twice() -> None:
    """What has failed is not what to try: n is stiff beside a decay that is not."""
    system = Field(lambda t, x, y: -1e4 * torch.sin(37 * x))
    for decay, method, advice in ((0.0, AndersonAdams(), "SlowManifold()"), (1.0, ETD2RK(), "AndersonAdams()")):
        system.fast_decay = decay
        assert f"try {advice}" in failed(system, method, CONTROL, max_steps=20).message


def test_a_slow_field_may_be_the_stiff_one() -> None:
    system, x = Field(lambda t, x, y: -x, lambda t, x, y: -5e4 * (y - torch.cos(torch.as_tensor(t))), 0.5), states()[0]
    message = failed(system, Heun(), CONTROL, x, max_steps=50).message
    assert numbers("the slow field's rate is about #", message) == [5e4]


def test_what_is_not_stiff_is_not_called_so() -> None:
    message = failed(Field(lambda t, x, y: -3 * x), Dopri5(), AdaptiveSteps(1e-13, 1e-13), max_steps=20).message
    assert numbers("not for stiffness: the fast field's rate is about #", message) == [3.0]
    assert "try" not in message
    jump = Field(lambda t, x, y: torch.full_like(x, 1e8 if t > 0.5 else 0.0))
    message = failed(jump, Dopri5(), AdaptiveSteps(1e-9, 1e-9, min_step=1e-3)).message
    assert "the field may jump" in message and "lower min_step" in message


@pytest.mark.parametrize("method", [Dopri5(), Heun(), TorchDiffEq("dopri5")], ids=repr)
@pytest.mark.parametrize("onset", [0.0, 0.3])
def test_a_field_that_is_not_finite_is_named(method: Method | TorchDiffEq, onset: float) -> None:
    message = failed(nan_after(onset), method, CONTROL).message
    (t,) = numbers("non-finite field at t = #, at a finite state; check the field there", message)
    assert onset - 1e-6 <= t <= onset + (0.13 if isinstance(method, TorchDiffEq) else 1e-5)


@pytest.mark.parametrize("method", [Euler(), Heun(), AndersonAdams(), TorchDiffEq("rk4")], ids=repr)
def test_equal_steps_into_a_field_that_is_not_finite(method: Method | TorchDiffEq) -> None:
    message = failed(nan_after(0.55), method, FixedSteps(20), save_at=[0.0, 0.5, 0.75, 1.0]).message
    (t,) = numbers("non-finite field at t = #, at a finite state", message)
    assert 0.55 <= t <= 0.55 + 0.25 / 8


def test_the_edge_of_where_a_field_is_defined() -> None:
    """x falls to 0, below which the field is nan: a step along the rate finds it."""
    x = torch.full((1,), 2.0, dtype=torch.float64)
    message = failed(Field(lambda t, x, y: -torch.sqrt(x) - 1), Dopri5(), CONTROL, x, t1=2.0).message
    exact = 2 * (math.sqrt(2) - math.log(1 + math.sqrt(2)))  # of dt = -dx / (1 + sqrt x)
    (t,) = numbers("non-finite field at t = #", message)
    assert t == pytest.approx(exact, abs=1e-3)


def test_unstable_equal_steps() -> None:
    message = failed(Decay(1e4), Heun(), FixedSteps(500)).message
    assert "the steps of 0.002 were unstable; stiffness estimate: the fast field's rate is about 8e+04" in message
    assert "Heun() is stable for steps below about 2.5e-05" in message and "take smaller steps" in message


def test_a_state_that_grows_without_bound() -> None:
    """x' = x^2 has no solution beyond t = 1 / x0; that is no stiffness."""
    x = torch.full((1,), 2.0, dtype=torch.float64)
    system = Field(lambda t, x, y: x * x)
    message = failed(system, Dopri5(), AdaptiveSteps(1e-4, 1e-6), x).message
    assert "the state grows without bound" in message and "stiff" not in message
    message = failed(system, Euler(), FixedSteps(100), x).message
    assert "the state grew without bound" in message and "non-finite field" not in message
    backwards = Field(lambda t, x, y: -1e4 * x)  # a decay, backwards
    message = failed(backwards, Dopri5(), CONTROL, x, t1=-1.0, max_steps=200).message
    assert "the state grows without bound" in message
    message = failed(backwards, Dopri5(), CONTROL, x, t1=-1.0, max_steps=2000).message  # until it overflows
    assert "the state grew without bound" in message and "non-finite field" not in message


def test_a_start_that_is_not_finite() -> None:
    x = torch.tensor([1.0, math.nan], dtype=torch.float64)
    for method, steps in ((Dopri5(), CONTROL), (Heun(), FixedSteps(3))):
        assert "the state itself is not finite at the start" in failed(Decay(1.0), method, steps, x).message


def test_each_sample_has_its_own_diagnosis() -> None:
    k = torch.tensor([[1.0], [1e4], [1e5], [1.0]], dtype=torch.float64)
    x = torch.ones(4, 2, dtype=torch.float64)
    x[3, 1] = math.inf
    steps = AdaptiveSteps(1e-4, 1e-4, per_sample=True)
    messages = failed(Decay(k), Dopri5(), steps, x, max_steps=60).messages
    assert messages[0] == "" and "the state itself is not finite at the start" in messages[3]
    for i, rate in ((1, 8e4), (2, 8e5)):
        assert numbers("the fast field's rate is about # per", messages[i]) == [rate]
        assert "try AndersonAdams(), without per_sample;" in messages[i]
    messages = failed(Decay(k, declared=True), Heun(), steps, x, max_steps=60).messages
    assert "try ETD2RK() or ETD3RK();" in messages[1]
    onset = torch.tensor([[0.2], [0.4], [2.0], [0.6]], dtype=torch.float64)
    x = torch.ones(4, 2, dtype=torch.float64)
    nan = Field(lambda t, x, y: torch.where(t < onset, -x, math.nan))
    messages = failed(nan, Heun(), steps, x).messages
    for i, t in ((0, 0.2), (1, 0.4), (3, 0.6)):
        assert numbers("non-finite field at t = #", messages[i])[0] == pytest.approx(t, abs=1e-5)


def test_the_estimate_is_the_spectral_radius() -> None:
    """Of df/dx and dg/dy, per sample; a rotation's too, whose eigenvalues are complex."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0]
    A = basis @ torch.diag(-torch.tensor([50.0, 9.0, 4.0, 1.0, 0.5, 0.0]).double()) @ basis.T
    turn = torch.tensor([[0.0, 30.0], [-30.0, 0.0]], dtype=torch.float64)
    x, y = states(0, (2, 6), (2, 2))
    system = Field(lambda t, x, y: x @ A * torch.tensor([[1.0], [3.0]]), lambda t, x, y: y @ turn)
    findings = examine(Site(FastTimeProblem.over_fast_time(system), 0.0, x, y, [], follow=False, rows=2))
    for finding, size in zip(findings, (50.0, 150.0), strict=True):
        assert finding.fast.size == pytest.approx(size, rel=1e-6)
        assert finding.fast.quotient == pytest.approx(-size, rel=1e-6)
        assert finding.slow.size == pytest.approx(30.0, rel=1e-6) and abs(finding.slow.quotient) < 1e-4
        assert finding.state_is_finite and finding.bad is None


def test_a_diagnosis_counts_nothing_and_raises_nothing() -> None:
    """A field that refuses to be asked again leaves the message without a diagnosis."""
    system, refuses = Decay(1e5), False
    f = system.f

    def moody(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        if refuses:
            raise RuntimeError("no more")
        return f(t, x, y)

    system.f = moody

    class Refusing(Dopri5):
        def step(self, problem, tau, h, x, y, rate=None):  # type: ignore[no-untyped-def]
            nonlocal refuses
            result = super().step(problem, tau, h, x, y, rate)
            refuses = problem.stats.steps == 30
            return result

    solution = failed(system, Refusing(), CONTROL, max_steps=30)
    assert solution.status is Status.STEP_LIMIT and solution.message.endswith(
        "rejected steps: raise max_steps, or loosen the tolerances"
    )
    assert solution.stats.fast_evaluations == 2 + 6 * 30
    plain = failed(Decay(1e5), Dopri5(), CONTROL, max_steps=30)
    assert plain.stats == solution.stats and "stiffness estimate" in plain.message
