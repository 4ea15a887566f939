"""Steps on a given mesh."""

from __future__ import annotations

import math

import pytest
import torch

from solvers import Dopri5, ExponentialAdams, FixedSteps, MeshSteps, Method, TorchDiffEq, integrate, solve
from tests.solvers.problems import METHODS, Bernoulli, Network, slopes, states
from tests.solvers.test_odeint import Mesh


@pytest.mark.parametrize("sign", [1, -1])
def test_steps_end_at_the_times(sign: int) -> None:
    """Slow times in `solve`, fast times in `integrate`; a save time of the mesh is the end of a step."""
    x, y = states()
    times = tuple(sign * t for t in (0.1, 0.4, 0.5))
    method = Mesh()
    solve(Network(0.25), x, y, t0=2.0, t1=2.0 + sign * 0.5, method=method, steps=MeshSteps(times), save_at=[2.0])
    assert [tau for tau, _ in method._steps] == [0.0, times[0] / 0.25, times[1] / 0.25]
    assert [tau + h for tau, h in method._steps] == [t / 0.25 for t in times]
    method = Mesh()
    integrate(Network(0.25), x, y, span=times[-1], method=method, steps=MeshSteps(times))
    assert [tau for tau, _ in method._steps] == [0.0, *times[:-1]]


@pytest.mark.parametrize("method", [*METHODS, TorchDiffEq("rk4")], ids=repr)
def test_equal_steps_are_a_mesh(method: Method | TorchDiffEq) -> None:
    x, y = states()
    equal = solve(Network(0.5), x, y, t1=1.0, method=method, steps=FixedSteps(4))
    mesh = solve(Network(0.5), x, y, t1=1.0, method=method, steps=MeshSteps((0.25, 0.5, 0.75, 1.0)))
    assert torch.equal(equal.xs, mesh.xs) and torch.equal(equal.ys, mesh.ys) and equal.stats == mesh.stats
    uneven = solve(Network(0.5), x, y, t1=1.0, method=method, steps=MeshSteps((0.125, 0.5, 0.75, 1.0)))
    assert not torch.equal(equal.xs, uneven.xs)


def test_a_multistep_method_keeps_its_order_on_an_uneven_mesh() -> None:
    x, y = Bernoulli.start()
    exact = torch.tensor(Bernoulli.exact(1.0), dtype=torch.float64)
    errors = []
    for n in (20, 40, 80):
        times = tuple((i / n) ** 1.5 for i in range(1, n + 1))
        found = solve(Bernoulli(0.5), x, y, t1=1.0, method=ExponentialAdams(4), steps=MeshSteps(times))
        errors.append(float((torch.cat([found.xs[0], found.ys[0]]) - exact).abs().max()))
    assert slopes(errors)[-1] > 3.7, errors


def test_meshes_that_are_none() -> None:
    for times in ((0.0, 1.0), (0.5, 0.5), (0.5, 0.2), (-0.5, 0.5), (0.5, math.nan), (0.5, math.inf)):
        with pytest.raises(ValueError, match="times must be finite and move away from 0 in one direction"):
            MeshSteps(times)
    with pytest.raises(ValueError, match="MeshSteps needs at least one time"):
        MeshSteps(())
    x, y = states()
    with pytest.raises(ValueError, match=r"the mesh ends after 0\.5, the solve after 1\.0"):
        solve(Network(), x, y, t1=1.0, method=Dopri5(), steps=MeshSteps((0.25, 0.5)))
