"""MRI-GARK: its table, its order on the problem of the multirate literature, and what remains without coupling."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from solvers import MRIGARK22, FixedSteps, Heun, MultirateEuler, integrate, solve
from tests.solvers.problems import KPR, Field, Network, slopes, states

NODES = (0.5, 2 / 3, 1.0)


def kpr_errors(method: MRIGARK22 | MultirateEuler, omega: float, coupling: float, steps: list[int]) -> list[float]:
    system = KPR(omega, coupling)
    start = system.exact(0.0)
    errors = []
    for n in steps:
        found = solve(system, start[:1], start[1:], t1=2.5, method=method, steps=FixedSteps(n))
        errors.append(float((torch.cat([found.xs[0], found.ys[0]]) - system.exact(2.5)).abs().max()))
    return errors


@pytest.mark.parametrize("t", [0.0, 0.3, 2.0])
def test_the_closed_form_solves_kpr(t: float) -> None:
    system, step = KPR(20.0, 0.3), 1e-4
    x, y = system.exact(t)[:1], system.exact(t)[1:]
    rate = (system.exact(t + step) - system.exact(t - step)) / (2 * step)
    found = torch.cat([system.fast(t, x, y) / system.epsilon, system.slow(t, x, y)])
    torch.testing.assert_close(found, rate, rtol=0, atol=20**3 * step**2)


@pytest.mark.parametrize(
    ("node", "omega", "coupling"),
    [*((node, 20.0, 0.1) for node in NODES), *((1.0, omega, c) for omega in (5.0, 20.0, 50.0) for c in (0.0, 1.0))],
)
def test_order_two_with_micro_steps_fixed(node: float, omega: float, coupling: float) -> None:
    """As many micro-steps a step as the clocks differ by, and macro-steps refined from 1/16 of slow time."""
    errors = kpr_errors(MRIGARK22(int(omega), node), omega, coupling, [40, 80, 160])
    assert slopes(errors)[-1] == pytest.approx(2, abs=0.2), errors


def test_multirate_euler_is_of_order_one_there() -> None:
    errors = kpr_errors(MultirateEuler(20), 20.0, 0.1, [100, 200, 400])
    assert slopes(errors)[-1] == pytest.approx(1, abs=0.2), errors


@pytest.mark.parametrize("node", NODES)
def test_a_slow_rate_at_rest_leaves_the_inner_method(node: float) -> None:
    """The micro-steps of the two intervals are Heun's steps over them."""
    x, y = states()
    system = Field(lambda t, x, y: torch.sin(x * y) - t, epsilon=0.25)
    found = integrate(system, x, y, span=2.0, method=MRIGARK22(4, node), steps=FixedSteps(1))
    first = integrate(system, x, y, span=2.0 * node, method=Heun(), steps=FixedSteps(4))
    if node < 1:
        later = Field(lambda t, x, y: torch.sin(x * y) - (t + 0.5 * node), epsilon=0.25)
        first = integrate(later, *first, span=2.0 * (1 - node), method=Heun(), steps=FixedSteps(4))
    torch.testing.assert_close(found[0], first[0], rtol=1e-14, atol=1e-14)
    assert torch.equal(found[1], y)


@pytest.mark.parametrize("node", NODES)
def test_without_x_the_slow_method_is_the_two_stage_method_of_the_table(node: float) -> None:
    """y_end = y + h sum_j (gamma_1j + gamma_2j) k_j with Sandu's gamma in exact arithmetic."""
    c = Fraction(node).limit_denominator(10)
    gamma = [-(2 * c * c - 2 * c + 1) / (2 * c), 1 / (2 * c)]
    _, y = states()
    system, h = Field(lambda t, x, y: torch.zeros_like(x), lambda t, x, y: torch.cos(y) + t), 0.3
    _, found = integrate(system, torch.zeros(0).double(), y, span=h, method=MRIGARK22(2, node), steps=FixedSteps(1))
    k_1 = torch.cos(y)
    k_2 = torch.cos(y + h * float(c) * k_1) + h * float(c)
    torch.testing.assert_close(
        found, y + h * (float(c + gamma[0]) * k_1 + float(gamma[1]) * k_2), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("node", NODES)
def test_x_reads_y_on_a_line_to_its_next_stage(node: float) -> None:
    """f = y makes x the integral of what it reads: the trapezoids below that line, whatever the number of micro-steps."""
    x, y = states()
    system, h = Network(0.25), 0.8

    class Reader(Network):
        def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
            return y

    ends = [integrate(Reader(0.25), x, y, span=h, method=MRIGARK22(m, node), steps=FixedSteps(1)) for m in (1, 7)]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-13, atol=1e-13)
    stage = y + 0.25 * node * h * system.slow(0.0, x, y)
    area = node * h * (y + stage) / 2 + (1 - node) * h * (stage + ends[0][1]) / 2
    torch.testing.assert_close(ends[0][0], x + area, rtol=1e-13, atol=1e-13)
