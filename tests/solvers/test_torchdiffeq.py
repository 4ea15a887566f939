"""The torchdiffeq adapter."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torchdiffeq._impl.odeint import SOLVERS

from solvers import (
    AdaptiveSteps,
    Checkpointed,
    Dopri5,
    FixedSteps,
    Steps,
    TorchDiffEq,
    integrate,
    method_by_name,
    solve,
)
from tests.solvers.problems import Bernoulli, Field, Network, reference, slopes, states

FIXED = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}
ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
TIGHT = AdaptiveSteps(1e-8, 1e-8)


@pytest.fixture(autouse=True)
def _no_warnings() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("epsilon", [1.0, 1 / 8])
@pytest.mark.parametrize("t1", [1.0, -0.5])
def test_dopri5_agrees_with_ours(epsilon: float, t1: float) -> None:
    x, y = states()
    save_at = [0.0, 0.25 * t1, 0.7 * t1, t1]
    system = Network(epsilon)
    x_end, y_end = reference(system, x, y, [0.0, t1])
    with torch.no_grad():
        for method in (Dopri5(), TorchDiffEq("dopri5")):
            solution = solve(system, x, y, t1=t1, method=method, steps=TIGHT, save_at=save_at)
            assert torch.equal(solution.xs[0], x) and solution.ts.tolist() == save_at
            torch.testing.assert_close((solution.xs[-1], solution.ys[-1]), (x_end[0], y_end[0]), rtol=1e-6, atol=1e-6)
    span = t1 / epsilon
    ends = [
        integrate(system, x, y, span=span, method=method, steps=TIGHT) for method in (Dopri5(), TorchDiffEq("dopri5"))
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_solvers(name: str) -> None:
    x, y = Bernoulli.start()
    steps = AdaptiveSteps(1e-5, 1e-6)
    solution = solve(Bernoulli(0.5), x, y, t1=1.0, method=TorchDiffEq(name), steps=steps)
    exact = torch.tensor(Bernoulli.exact(1.0), dtype=torch.float64)
    torch.testing.assert_close(torch.cat([solution.xs[0], solution.ys[0]]), exact, rtol=0, atol=1e-3)
    stats = solution.stats
    assert stats.steps == stats.accepted + stats.rejected > 0 and stats.fast_evaluations == stats.slow_evaluations > 0


@pytest.mark.parametrize(("name", "order"), FIXED.items())
def test_order_of_fixed_grids(name: str, order: int) -> None:
    x, y = Bernoulli.start()
    exact = torch.tensor(Bernoulli.exact(1.0), dtype=torch.float64)
    errors = []
    for n in (16, 32, 64):
        solution = solve(Bernoulli(0.5), x, y, t1=1.0, method=TorchDiffEq(name), steps=FixedSteps(n))
        assert (solution.stats.steps, solution.stats.accepted, solution.stats.rejected) == (n, n, 0)
        assert solution.stats.fast_evaluations == n * order
        errors.append(float((torch.cat([solution.xs[0], solution.ys[0]]) - exact).abs().max()))
    assert slopes(errors)[-1] > order - 0.25, errors


@pytest.mark.parametrize("name", ["implicit_adams", "fixed_adams"])
def test_adams_methods(name: str) -> None:
    """explicit_adams is not tested: in torchdiffeq 0.2.5 it diverges on this problem, the more the finer its grid."""
    x, y = Bernoulli.start()
    for t1 in (1.0, -0.5):
        exact = torch.tensor(Bernoulli.exact(t1), dtype=torch.float64)
        solution = solve(Bernoulli(0.5), x, y, t1=t1, method=TorchDiffEq(name), steps=FixedSteps(40))
        torch.testing.assert_close(torch.cat([solution.xs[0], solution.ys[0]]), exact, rtol=0, atol=1e-6)


def test_step_bounds_reach_torchdiffeq() -> None:
    x, y = Bernoulli.start()
    steps = AdaptiveSteps(1e-2, 1e-2, first_step=0.01, max_step=0.02)
    solution = solve(Bernoulli(0.5), x, y, t1=1.0, method=TorchDiffEq("dopri5"), steps=steps)
    assert 50 <= solution.stats.steps <= 52


def test_empty_slow_states_and_float32() -> None:
    x = torch.ones(2, 3)
    y = torch.zeros(2, 0, 3)
    for name, steps in (("dopri5", AdaptiveSteps(1e-5, 1e-5)), ("rk4", FixedSteps(20))):
        solution = solve(Field(lambda t, x, y: -x), x, y, t1=1.0, method=TorchDiffEq(name), steps=steps)
        assert solution.xs.dtype == torch.float32 and solution.ys.shape == (1, 2, 0, 3)
        torch.testing.assert_close(solution.xs[0], x * torch.exp(torch.tensor(-1.0)), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no differentiable method 'rk5'.*dopri5"):
        TorchDiffEq("rk5")
    with pytest.raises(ValueError, match="no differentiable method 'scipy_solver'"):
        TorchDiffEq("scipy_solver")
    with pytest.raises(ValueError, match="option max_num_steps=3 is set by steps"):
        TorchDiffEq("dopri5", max_num_steps=3)
    with pytest.raises(ValueError, match="'nope'"):
        method_by_name("torchdiffeq:nope")
    assert TorchDiffEq("rk4", perturb=True).options == {"perturb": True}
    x, y = states()

    def f(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError("evaluated")

    cases: list[tuple[str, Steps, str]] = [
        ("rk4", TIGHT, r"TorchDiffEq\('rk4'\) takes FixedSteps, got AdaptiveSteps"),
        ("dopri5", FixedSteps(3), r"TorchDiffEq\('dopri5'\) takes AdaptiveSteps, got FixedSteps\(n=3\)"),
    ]
    for name, steps, message in cases:
        with pytest.raises(ValueError, match=message):
            solve(Field(f), x, y, t1=1.0, method=TorchDiffEq(name), steps=steps)
    with pytest.raises(ValueError, match=r"gradient is Backprop\(\) or Backsolve\(\), got Checkpointed\(\)"):
        solve(Field(f), x, y, t1=1.0, method=TorchDiffEq("dopri5"), steps=TIGHT, gradient=Checkpointed())
    with pytest.raises(ValueError, match=r"one dtype, got torch\.float32 and torch\.float64"):
        solve(Field(f), x.float(), y, t1=1.0, method=TorchDiffEq("dopri5"), steps=TIGHT)


def test_every_differentiable_solver_is_offered() -> None:
    for name in SOLVERS:
        if name != "scipy_solver":
            assert TorchDiffEq(name).fixed_grid == (name in FIXED or "adams" in name)
