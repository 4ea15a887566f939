"""Bad input is refused by the argument's name and value, before the field is evaluated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solvers import (
    MRIGARK22,
    RK4,
    RKC2,
    ROS2,
    AdaptiveSteps,
    Dopri5,
    Euler,
    FastSlowSystem,
    FixedSteps,
    Gradient,
    LieTrotter,
    Method,
    MultirateEuler,
    Part,
    Strang,
    integrate,
    method_by_name,
    solve,
)
from tests.solvers.problems import Field, states


class Untouchable(FastSlowSystem):
    """Raises when it is evaluated."""

    def __init__(self, epsilon: Any = 0.5) -> None:
        super().__init__()
        self.epsilon = epsilon

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("the field was evaluated")

    slow = fast


X, Y = states()
CONTROL = AdaptiveSteps(1e-3, 1e-3)
COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"system": nn.Linear(1, 1)}, TypeError, "system must be a FastSlowSystem, got Linear"),
    ({"x0": [1.0]}, TypeError, "x0 must be a tensor, got [1.0]"),
    ({"y0": 2.0}, TypeError, "y0 must be a tensor, got 2.0"),
    (
        {"x0": torch.zeros(2, dtype=torch.int64)},
        TypeError,
        "x0 must be a floating-point or complex tensor, got torch.int64",
    ),
    ({"y0": Y.to("meta")}, ValueError, "x0 and y0 must be on one device, got cpu and meta"),
    ({"method": Euler}, TypeError, "method must be a method such as Euler(), got <class"),
    ({"method": "euler"}, TypeError, "method must be a method such as Euler(), got 'euler'"),
    ({"steps": 3}, TypeError, "steps must be FixedSteps(n) or AdaptiveSteps(rtol, atol), got 3"),
    (
        {"gradient": "backprop"},
        TypeError,
        "gradient must be a gradient such as Backprop() or Checkpointed(), got 'backprop'",
    ),
    ({"steps": CONTROL, "method": RK4()}, ValueError, "RK4() has no error estimate"),
    ({"steps": CONTROL, "method": MultirateEuler(4)}, ValueError, "MultirateEuler(micro_steps=4) has no error"),
    ({"max_steps": 0}, ValueError, "max_steps must be at least 1, got 0"),
    ({"max_steps": -3}, ValueError, "max_steps must be at least 1, got -3"),
    ({"max_steps": 1e3}, TypeError, "max_steps must be an int, got 1000.0"),
    ({"max_steps": True}, TypeError, "max_steps must be an int, got True"),
    ({"system": Untouchable(0.0)}, ValueError, "0 < epsilon <= 1, got 0.0"),
    ({"system": Untouchable(1.5)}, ValueError, "0 < epsilon <= 1, got 1.5"),
    ({"system": Untouchable(math.nan)}, ValueError, "0 < epsilon <= 1, got nan"),
    ({"system": Untouchable(torch.tensor(-0.5))}, ValueError, "0 < epsilon <= 1, got -0.5"),
    ({"system": Untouchable(torch.ones(2))}, ValueError, "epsilon must be a scalar, got a tensor of shape (2,)"),
    ({"system": Untouchable("0.5")}, TypeError, "epsilon must be a number or a scalar tensor, got '0.5'"),
]
OF_SOLVE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"t0": math.inf}, ValueError, "t0 must be finite, got inf"),
    ({"t1": math.nan}, ValueError, "t1 must be finite, got nan"),
    ({"t1": "1"}, TypeError, "t1 must be a number, got '1'"),
    ({"t1": torch.ones(2)}, TypeError, "t1 must be a number, got tensor([1., 1.])"),
    ({"t1": torch.tensor(1.0, requires_grad=True)}, ValueError, "t1 must not require grad"),
    ({"t0": -1e308, "t1": 1e308}, ValueError, "t0=-1e+308 and t1=1e+308 are too far apart at epsilon=0.5"),
    ({"save_at": []}, ValueError, "save_at must name at least one time"),
    ({"save_at": 0.5}, TypeError, "save_at must be a sequence of times, got 0.5"),
    ({"save_at": ["a"]}, TypeError, "save_at must be a number, got 'a'"),
    ({"save_at": [0.5, 1.25]}, ValueError, "save_at holds 1.25, outside [0.0, 1.0]"),
    ({"save_at": [-0.25]}, ValueError, "save_at holds -0.25, outside [0.0, 1.0]"),
    ({"save_at": [math.nan]}, ValueError, "save_at must be finite, got nan"),
    ({"save_at": [0.5, 0.25]}, ValueError, "save_at must follow the direction of integration, from 0.0 to 1.0"),
    ({"t1": -1.0, "save_at": [-0.5, -0.25]}, ValueError, "direction of integration, from 0.0 to -1.0"),
    ({"save_at": torch.ones(2, 2)}, ValueError, "save_at must be 1-dimensional"),
    ({"save_at": torch.ones(1, requires_grad=True)}, ValueError, "without gradient"),
]


@pytest.mark.parametrize(("change", "error", "message"), COMMON + OF_SOLVE)
def test_solve_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"system": Untouchable(), "x0": X, "y0": Y, "t1": 1.0, "method": Euler(), "steps": FixedSteps(2)}
    with pytest.raises(error, match=re.escape(message)):
        solve(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *COMMON,
        ({"span": math.nan}, ValueError, "span must be finite, got nan"),
        ({"span": None}, TypeError, "span must be a number, got None"),
    ],
)
def test_integrate_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"system": Untouchable(), "x0": X, "y0": Y, "span": 1.0, "method": Euler(), "steps": FixedSteps(2)}
    with pytest.raises(error, match=re.escape(message)):
        integrate(**{**arguments, **change})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FixedSteps(0), ValueError, "n >= 1, got n=0"),
        (lambda: FixedSteps(2.0), TypeError, "got n=2.0"),
        (lambda: FixedSteps(True), TypeError, "got n=True"),
        (lambda: AdaptiveSteps(0, 1e-3), ValueError, "rtol must be > 0 and finite, got 0"),
        (lambda: AdaptiveSteps(math.nan, 1e-3), ValueError, "rtol must be > 0 and finite, got nan"),
        (lambda: AdaptiveSteps(math.inf, 1e-3), ValueError, "rtol must be > 0 and finite, got inf"),
        (lambda: AdaptiveSteps("1e-3", 1e-3), TypeError, "rtol must be a number, got '1e-3'"),
        (lambda: AdaptiveSteps(1e-3, -1e-3), ValueError, "atol must be >= 0 and finite, got -0.001"),
        (lambda: AdaptiveSteps(1e-3, 1e-3, first_step=0.0), ValueError, "first_step must be > 0 and finite, got 0.0"),
        (lambda: AdaptiveSteps(1e-3, 1e-3, min_step=-1.0), ValueError, "min_step must be >= 0 and finite, got -1.0"),
        (lambda: AdaptiveSteps(1e-3, 1e-3, max_step=0.0), ValueError, "max_step must be > 0, got 0.0"),
        (
            lambda: AdaptiveSteps(1e-3, 1e-3, min_step=1.0, max_step=0.5),
            ValueError,
            "min_step=1.0 must not exceed max_step=0.5",
        ),
        (lambda: MultirateEuler(0), ValueError, "micro_steps must be at least 1, got 0"),
        (lambda: MultirateEuler(2.0), TypeError, "micro_steps must be an int, got 2.0"),
        (lambda: MRIGARK22(0), ValueError, "micro_steps must be at least 1, got 0"),
        (lambda: MRIGARK22(2, 0.4), ValueError, "node must be in [1/2, 1], got 0.4"),
        (lambda: MRIGARK22(2, math.nan), ValueError, "node must be in [1/2, 1], got nan"),
        (lambda: method_by_name("midpoint"), ValueError, "unknown method 'midpoint'; known: euler"),
        (lambda: method_by_name("multirate_euler"), ValueError, "unknown method 'multirate_euler'"),
        (lambda: method_by_name("multirate_euler:\u00b2"), ValueError, "unknown method 'multirate_euler:\u00b2'"),
        (lambda: method_by_name("multirate_euler:0"), ValueError, "micro_steps must be at least 1, got 0"),
        (lambda: method_by_name("euler:2"), ValueError, "unknown method 'euler:2'"),
        (lambda: FastSlowSystem().fast(0.0, X, Y), NotImplementedError, "FastSlowSystem must define fast"),
        (lambda: FastSlowSystem().slow(0.0, X, Y), NotImplementedError, "FastSlowSystem must define slow"),
        (lambda: Method().step(None, 0.0, 1.0, X, Y), NotImplementedError, "Method must define step"),
        (lambda: Gradient().wrap(len, FastSlowSystem()), NotImplementedError, "Gradient must define wrap"),
    ],
)
def test_constructors_refuse(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_times_may_be_scalar_tensors_and_ints() -> None:
    system = Field(lambda t, x, y: x)
    times = torch.tensor([0.0, 0.5, 1.0])
    one = solve(system, X, Y, t0=times[0], t1=times[-1], method=RK4(), steps=FixedSteps(2), save_at=times)
    two = solve(system, X, Y, t0=0, t1=1, method=RK4(), steps=FixedSteps(2), save_at=[0, 0.5, 1])
    assert torch.equal(one.xs, two.xs) and one.ts.tolist() == two.ts.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "method",
    [Euler(), Dopri5(), LieTrotter(), Strang(), MultirateEuler(2), MRIGARK22(2), RKC2(), ROS2()],
    ids=repr,
)
def test_rates_of_another_shape_are_refused(method: Method) -> None:
    """Adding them would broadcast: a smaller one silently, a larger one by growing the state."""
    arguments: dict[str, Any] = {"t1": 1.0, "method": method, "steps": FixedSteps(2)}
    for wrong in (lambda t, x, y: x[:1], lambda t, x, y: x.expand(2, *x.shape), lambda t, x, y: x.sum()):
        with pytest.raises(ValueError, match=r"fast .*must return its state's shape \(2, 3\), got"):
            solve(Field(wrong), X, Y, **arguments)
        with pytest.raises(ValueError, match=r"slow .*must return its state's shape \(2, 3\), got"):
            solve(Field(lambda t, x, y: x, wrong), X, Y, **arguments)


def test_parts_of_one_clock_only() -> None:
    class Alone(Field):
        def parts(self) -> tuple[Part, ...]:
            return (Part("fast", self.fast),)

    solution = solve(Alone(lambda t, x, y: -x), X, Y, t1=1.0, method=Strang(), steps=FixedSteps(50))
    torch.testing.assert_close(solution.xs[0], X * math.exp(-1), rtol=1e-4, atol=0)
    assert torch.equal(solution.ys[0], Y) and solution.stats.slow_evaluations == 0
