"""Anderson-accelerated exponential Adams: steps that outgrow n's Lipschitz constant, and rows that stay apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from odeformer import check_causality, to_continuous
from solvers import AdaptiveSteps, AndersonAdams, ExponentialAdams, FastSlowSystem, FixedSteps, solve
from solvers.multistep import _combination, _minimiser, _normal_equations
from tests.helpers import open_model
from tests.solvers.problems import Network, reference, states


class StiffNonlinearity(FastSlowSystem):
    """eps dx/dt = -x + A tanh(x) + y, y' = x - y / 2, with A's eigenvalues -3 +- i in pairs: n is stiffer than the decay."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon, self.fast_decay, self.slow_decay = epsilon, 1.0, 0.5
        self.A = torch.tensor([[-3.0, 1.0], [-1.0, -3.0]], dtype=torch.float64)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -x + torch.tanh(x) @ self.A.T + y

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x - y / 2


def work(method: ExponentialAdams, epsilon: float) -> tuple[int, float]:
    """(evaluations of f, error) over one unit of slow time at tolerance 1e-3."""
    system, (x, y) = StiffNonlinearity(epsilon), states(2, (3, 2), (3, 2))
    x_end, y_end = reference(system, x, y, [0.0, 1.0], method="Radau")
    found = solve(system, x, y, t1=1.0, method=method, steps=AdaptiveSteps(1e-3, 1e-3))
    error = float(torch.maximum((found.xs - x_end).abs().max(), (found.ys - y_end).abs().max()))
    return found.stats.fast_evaluations, error


def test_the_work_grows_little_with_stiffness_though_n_is_stiff() -> None:
    few, many = work(AndersonAdams(), 1 / 64), work(AndersonAdams(), 1 / 4096)
    assert max(few[1], many[1]) < 1e-3
    assert many[0] < 4 * few[0]  # over 64 times the stiffness
    assert work(ExponentialAdams(3), 1 / 4096)[0] > 8 * many[0]  # which the Lipschitz constant of n limits


@pytest.mark.parametrize("rows", [False, True])
def test_two_evaluations_a_step(rows: bool) -> None:
    system, (x, y) = StiffNonlinearity(0.1), states(2, (3, 2), (3, 2))
    stats = solve(system, x, y, t1=1.0, method=AndersonAdams(rows=rows), steps=FixedSteps(20)).stats
    assert stats.fast_evaluations == 3 + 1 + 19 * 2  # a starting step of ETD3RK, the rate at its end, then two a step


def test_rows_do_not_depend_on_one_another() -> None:
    """Bit for bit, though each row's mixing coefficients come from its own history."""
    system, (x, y) = StiffNonlinearity(0.1), states(2, (4, 2), (4, 2))
    whole = solve(system, x, y, t1=1.0, method=AndersonAdams(rows=True), steps=FixedSteps(12))
    changed = x.clone()
    changed[2:] += 1.0
    other = solve(system, changed, y, t1=1.0, method=AndersonAdams(rows=True), steps=FixedSteps(12))
    assert torch.equal(whole.xs[0, :2], other.xs[0, :2]) and torch.equal(whole.ys[0, :2], other.ys[0, :2])
    assert not torch.equal(whole.xs[0, 2:], other.xs[0, 2:])


def test_inside_a_model_rows_are_causal_and_the_whole_state_is_not() -> None:
    model = open_model(pool_size=4, leak=1.0, relaxation=0.5, horizon=4)
    assert check_causality(to_continuous(model, AndersonAdams(rows=True), FixedSteps(4))).ok
    report = check_causality(to_continuous(model, AndersonAdams(), FixedSteps(4)))
    assert not report.ok


@pytest.mark.parametrize("rows", [False, True])
def test_least_squares_explains_what_lies_in_its_span(rows: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    weights = torch.randn(5 if rows else 1, 3, generator=generator, dtype=torch.float64)
    residual = torch.einsum("rm, mrd -> rd", weights.expand(5, 3), columns)
    found = _minimiser(*_normal_equations(columns, residual, rows))
    torch.testing.assert_close(found, weights if rows else weights[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(_combination(columns, found, rows), residual, rtol=1e-6, atol=1e-6)


def test_nothing_is_divided_by_zero() -> None:
    """Equal evaluations leave secants of zero; an exact fixed point leaves no residual."""
    x, y = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for method in (AndersonAdams(), AndersonAdams(rows=True)):
        found = solve(StiffNonlinearity(0.1), x, y, t1=1.0, method=method, steps=FixedSteps(6))
        assert torch.equal(found.xs[0], x) and torch.equal(found.ys[0], y)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"memory": 0}, ValueError, "memory must be at least 1, got 0"),
        ({"memory": 2.0}, TypeError, "memory must be an int, got 2.0"),
        ({"order": 5}, ValueError, "order must be 3 or 4, got 5"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AndersonAdams(**arguments)  # type: ignore[arg-type]


def test_gradients_by_rows_are_those_of_finite_differences() -> None:
    x, y = states(0, (2, 2), (2, 2))
    w = Network(width=2).w.detach().clone().requires_grad_()

    def run(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        system = Network(0.4, width=2)
        del system.w
        system.w = w
        return solve(system, x, y, t1=0.6, method=AndersonAdams(rows=True), steps=FixedSteps(4)).xs

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), y.requires_grad_(), w))
