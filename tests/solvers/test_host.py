"""What a solve reads on the host, and whether it compiles whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from solvers import (
    MRIGARK22,
    RK4,
    RKC2,
    ROS2,
    ROS34PW2,
    AdaptiveSteps,
    Backprop,
    Checkpointed,
    Dopri5,
    Euler,
    FixedSteps,
    Gradient,
    Method,
    MultirateEuler,
    SlowManifold,
    Strang,
    integrate,
    solve,
)
from tests.solvers.problems import METHODS, Field, Network, states

READS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.item"}


class HostReads(TorchDispatchMode):
    """Counts the operations that a device would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name in READS:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def reads(call: Callable[[], object]) -> int:
    with HostReads() as mode:
        call()
    return sum(mode.reads.values())


def test_the_counter_counts() -> None:
    assert reads(lambda: bool(torch.ones(()) > 0)) == 1 and reads(lambda: float(torch.ones(()))) == 1


@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()], ids=repr)
@pytest.mark.parametrize("method", [method for method in METHODS if not method.reads_host], ids=repr)
def test_equal_steps_read_nothing(method: Method, gradient: Gradient) -> None:
    """Forward and backward."""
    system, (x, y) = Network(1 / 7), states()

    def call() -> None:
        x_end, y_end = integrate(system, x, y, span=3.0, method=method, steps=FixedSteps(4), gradient=gradient)
        (x_end.sum() + y_end.sum()).backward()

    assert reads(call) == 0


def test_the_methods_that_read_are_these() -> None:
    assert [method for method in METHODS if method.reads_host] == [RKC2(), ROS2(), ROS34PW2()]


def test_a_search_for_a_root_declares_its_reads() -> None:
    """A search for a root is stopped by its residual: one read an evaluation."""
    system, (x, y) = Field(lambda t, x, y: y - x, lambda t, x, y: -x, 1 / 7), states()
    steps, stats = FixedSteps(4), solve(system, x, y, t1=1.0, method=SlowManifold(), steps=FixedSteps(4)).stats
    read = reads(lambda: integrate(system, x, y, span=7.0, method=SlowManifold(), steps=steps))
    assert read == stats.fast_evaluations > 0
    assert SlowManifold.reads_host


def test_an_estimate_of_the_spectral_radius_declares_its_reads() -> None:
    """f = -x, g = 0: the estimate stands after three iterations, of which each is read, and holds for all steps."""
    system, (x, y) = Field(lambda t, x, y: -x), states()
    assert reads(lambda: integrate(system, x, y, span=7.0, method=RKC2(), steps=FixedSteps(4))) == 3


def test_a_solve_of_equal_steps_reads_once() -> None:
    system, (x, y) = Network(1 / 7), states()
    for n in (2, 20):
        settings: dict[str, Any] = {"method": RK4(), "steps": FixedSteps(n), "save_at": [0.0, 0.3, 1.0]}
        assert reads(lambda settings=settings: solve(system, x, y, t1=1.0, **settings)) == 1


def test_error_control_reads_once_per_attempted_step() -> None:
    system, (x, y) = Network(1 / 7), states()
    attempted = 0

    def call() -> None:
        nonlocal attempted
        steps = AdaptiveSteps(1e-6, 1e-6, first_step=0.5)
        attempted = solve(system, x, y, t1=1.0, method=Dopri5(), steps=steps).stats.steps

    assert reads(call) == attempted + 1  # and the check of the result


class Flow(nn.Module):
    def __init__(self, method: Method, gradient: Gradient, span: float = 1.5, epsilon: float = 0.25) -> None:
        super().__init__()
        self.method, self.gradient, self.span = method, gradient, span
        self.system = Network(epsilon)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return integrate(
            self.system, x, y, span=self.span, method=self.method, steps=FixedSteps(2), gradient=self.gradient
        )


@pytest.mark.parametrize(
    ("method", "gradient"),
    [
        (Euler(), Backprop()),
        (Euler(), Checkpointed()),
        (RK4(), Backprop()),
        (RK4(), Checkpointed()),
        (Strang(), Checkpointed()),
        (MultirateEuler(2), Backprop()),
        (MRIGARK22(2), Backprop()),
        (MRIGARK22(2, 0.5), Checkpointed()),
        (RKC2(3), Backprop()),
        (RKC2(3), Checkpointed()),
    ],
    ids=repr,
)
def test_equal_steps_compile_whole(method: Method, gradient: Gradient) -> None:
    """One graph, the same numbers, the same gradients; and so for a second flow of another span and epsilon."""
    torch._dynamo.reset()
    x, y = states()
    for span, epsilon in ((1.5, 0.25), (0.7, 0.3)):
        flow = Flow(method, gradient, span, epsilon)
        compiled = torch.compile(flow, fullgraph=True, backend="eager")
        gradients = []
        for run in (flow, compiled):
            flow.zero_grad()
            x_end, y_end = run(x, y)
            (x_end.sum() + y_end.square().sum()).backward()
            gradients.append((x_end.detach(), y_end.detach(), flow.system.w.grad))
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-14, atol=1e-14)
