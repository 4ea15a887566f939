"""Order conditions of the tableaus, and agreement with SciPy and torchdiffeq where the formulas coincide."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import scipy.integrate
import torch
import torchdiffeq
from torchdiffeq._impl import adaptive_heun, dopri5, fixed_grid, rk_common

from solvers import RK4, Dopri5, Euler, FixedSteps, Heun, TorchDiffEq, integrate, solve
from solvers.explicit import ExplicitRungeKutta
from solvers.system import FastTimeProblem
from tests.solvers.problems import Network, states

RUNGE_KUTTA = (Euler(), Heun(), RK4(), Dopri5())
EMBEDDED = (Heun(), Dopri5())
Tree = tuple  # a rooted tree: the sorted tuple of its root's subtrees


@cache
def trees(order: int) -> tuple[Tree, ...]:
    """All rooted trees with `order` vertices."""
    if order == 1:
        return ((),)
    grafted = {
        tuple(sorted((*tree, branch), key=repr))
        for size in range(1, order)
        for tree in trees(order - size)
        for branch in trees(size)
    }
    return tuple(sorted(grafted, key=repr))


def size(tree: Tree) -> int:
    return 1 + sum(size(branch) for branch in tree)


def density(tree: Tree) -> int:
    return size(tree) * math.prod(density(branch) for branch in tree)


def matrix(method: ExplicitRungeKutta) -> np.ndarray:
    n = len(method.tableau.nodes)
    a = np.zeros((n, n))
    for i, row in enumerate(method.tableau.coefficients):
        a[i + 1, : len(row)] = row
    return a


def elementary_weights(a: np.ndarray, tree: Tree) -> np.ndarray:
    """Per stage: the product over the root's branches of A times the branch's weights."""
    return math.prod((a @ elementary_weights(a, branch) for branch in tree), start=np.ones(len(a)))


def residuals(method: ExplicitRungeKutta, weights: np.ndarray, order: int) -> list[float]:
    a = matrix(method)
    return [float(weights @ elementary_weights(a, tree)) - 1 / density(tree) for tree in trees(order)]


def test_numbers_of_rooted_trees() -> None:
    assert [len(trees(order)) for order in range(1, 7)] == [1, 1, 2, 4, 9, 20]


@pytest.mark.parametrize("method", RUNGE_KUTTA, ids=repr)
def test_order_conditions(method: ExplicitRungeKutta) -> None:
    """b . Phi(tree) = 1/gamma(tree) for all trees up to the order, and not for all of the next order."""
    b = np.array(method.tableau.weights)
    for order in range(1, method.order + 1):
        assert residuals(method, b, order) == pytest.approx([0.0] * len(trees(order)), abs=1e-14)
    assert max(map(abs, residuals(method, b, method.order + 1))) > 1e-4


@pytest.mark.parametrize("method", EMBEDDED, ids=repr)
def test_order_conditions_of_the_embedded_weights(method: ExplicitRungeKutta) -> None:
    assert method.tableau.error is not None and method.error_order is not None
    embedded = np.array(method.tableau.weights) - np.array(method.tableau.error)
    for order in range(1, method.error_order + 1):
        assert residuals(method, embedded, order) == pytest.approx([0.0] * len(trees(order)), abs=1e-14)
    assert max(map(abs, residuals(method, embedded, method.error_order + 1))) > 1e-4


@pytest.mark.parametrize("method", RUNGE_KUTTA, ids=repr)
def test_row_sums_are_the_nodes(method: ExplicitRungeKutta) -> None:
    assert matrix(method).sum(1) == pytest.approx(np.array(method.tableau.nodes), abs=1e-14)


def test_last_stage_of_dopri5_is_the_step() -> None:
    tableau = Dopri5.tableau
    assert Dopri5.first_same_as_last and tableau.nodes[-1] == 1
    assert (*tableau.coefficients[-1], 0.0) == tableau.weights


def test_dopri5_is_scipy_rk45() -> None:
    reference = scipy.integrate.RK45
    a = matrix(Dopri5())
    np.testing.assert_allclose(a[:6, :5], reference.A, rtol=1e-15)
    np.testing.assert_allclose(Dopri5.tableau.nodes[:6], reference.C, rtol=1e-15)
    np.testing.assert_allclose(Dopri5.tableau.weights[:6], reference.B, rtol=1e-15)
    assert Dopri5.tableau.error is not None  # SciPy's E is the embedded minus the main weights
    np.testing.assert_allclose(Dopri5.tableau.error, -reference.E, rtol=1e-13, atol=1e-17)


def test_torchdiffeq_rk4_is_the_three_eighths_rule() -> None:
    """So it is another method than RK4, of the same order; its classical formula is rk4_step_func."""
    x, y = states()
    system = Network(0.25)
    ours = torch.cat(integrate(system, x, y, span=0.5, method=RK4(), steps=FixedSteps(1)))
    theirs = torch.cat(integrate(system, x, y, span=0.5, method=TorchDiffEq("rk4"), steps=FixedSteps(1)))
    difference = float((ours - theirs).detach().abs().max())
    assert 1e-9 < difference < 1e-2

    class Classical(fixed_grid.RK4):
        def _step_func(self, func, t0, dt, t1, y0):  # type: ignore[no-untyped-def]
            f0 = func(t0, y0)
            return rk_common.rk4_step_func(func, t0, dt, t1, y0, f0=f0), f0

    classical = Classical(func=torchdiffeq_field(system), y0=torch.cat([x, y]), atol=0.0)
    classical.func.callback_step = lambda *_: None
    end = classical.integrate(torch.tensor([0.0, 0.5], dtype=torch.float64))[-1]
    torch.testing.assert_close(ours, end, rtol=1e-14, atol=1e-14)


def torchdiffeq_field(system):  # type: ignore[no-untyped-def]
    def field(tau, state, perturb=None):  # type: ignore[no-untyped-def]
        x, y = state.chunk(2)
        t = system.epsilon * tau
        return torch.cat([system.fast(t, x, y), system.epsilon * system.slow(t, x, y)])

    return field


@pytest.mark.parametrize(("ours", "theirs"), [(Euler(), "euler"), (Heun(), "heun2")])
def test_agrees_step_for_step_with_torchdiffeq_fixed(ours: ExplicitRungeKutta, theirs: str) -> None:
    x, y = states()
    times = torch.linspace(0, 3, 13, dtype=torch.float64)
    system = Network(0.25)
    expected = torchdiffeq.odeint(torchdiffeq_field(system), torch.cat([x, y]), 4 * times, method=theirs)
    solution = solve(system, x, y, t1=3.0, method=ours, steps=FixedSteps(12), save_at=times)
    torch.testing.assert_close(torch.cat([solution.xs, solution.ys], 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("ours", "tableau"),
    [(Dopri5(), dopri5._DORMAND_PRINCE_SHAMPINE_TABLEAU), (Heun(), adaptive_heun._ADAPTIVE_HEUN_TABLEAU)],
)
def test_one_step_and_its_error_agree_with_torchdiffeq_adaptive(ours: ExplicitRungeKutta, tableau) -> None:  # type: ignore[no-untyped-def]
    x, y = states()
    system = Network(0.25)
    field, start, h = torchdiffeq_field(system), torch.cat([x, y]), torch.tensor(0.3, dtype=torch.float64)
    tau = torch.tensor(0.5, dtype=torch.float64)
    end, end_rate, error, _ = rk_common._runge_kutta_step(field, start, field(tau, start), tau, h, tau + h, tableau)
    step = ours.step(FastTimeProblem.over_fast_time(system), 0.5, 0.3, x, y)
    assert step.error is not None
    torch.testing.assert_close(torch.cat([step.x, step.y]), end, rtol=1e-13, atol=1e-14)
    # Only the size is used. torchdiffeq takes Shampine's embedded weights, 2/3 of Dormand and Prince's estimate.
    ratio = 1.5 if isinstance(ours, Dopri5) else 1.0
    torch.testing.assert_close(torch.cat(step.error).abs(), ratio * error.abs(), rtol=1e-10, atol=1e-14)
    if step.end_rate is not None:
        torch.testing.assert_close(torch.cat(step.end_rate), end_rate, rtol=1e-13, atol=1e-14)
