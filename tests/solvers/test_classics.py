"""The classic stiff problems of Hairer & Wanner, Solving ODEs II, sections IV.1 and IV.10, against SciPy's Radau."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from solvers import ROS34PW2, AdaptiveSteps, ExponentialAdams, FastSlowSystem, Method, solve
from tests.solvers.problems import Field

Rate = Callable[[Tensor], list[Tensor]]


def robertson(z: Tensor) -> list[Tensor]:
    """Rates over nine orders of magnitude."""
    a, b, c = z.unbind(-1)
    slow, fast, pair = 0.04 * a, 1e4 * b * c, 3e7 * b * b
    return [-slow + fast, slow - fast - pair, pair]


def oregonator(z: Tensor) -> list[Tensor]:
    a, b, c = z.unbind(-1)
    return [77.27 * (b + a * (1 - 8.375e-6 * a - b)), (c - (1 + a) * b) / 77.27, 0.161 * (a - c)]


def hires(z: Tensor) -> list[Tensor]:
    a, b, c, d, e, f, g, h = z.unbind(-1)
    bound = 280 * f * h
    return [
        -1.71 * a + 0.43 * b + 8.32 * c + 0.0007,
        1.71 * a - 8.75 * b,
        -10.03 * c + 0.43 * d + 0.035 * e,
        8.32 * b + 1.71 * c - 1.12 * d,
        -1.745 * e + 0.43 * f + 0.43 * g,
        -bound + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
        bound - 1.81 * g,
        -bound + 1.81 * g,
    ]


CLASSICS = {
    "Robertson": (robertson, [1.0, 0.0, 0.0], 400.0),
    "Oregonator": (oregonator, [1.0, 2.0, 3.0], 30.0),
    "HIRES": (hires, [1.0, 0, 0, 0, 0, 0, 0, 0.0057], 321.8122),
}


def radau(rate: Callable[[float, np.ndarray], np.ndarray], start: list[float], t1: float) -> Tensor:
    found = solve_ivp(rate, (0.0, t1), start, method="Radau", rtol=1e-10, atol=1e-14)
    assert found.success
    return torch.from_numpy(found.y[:, -1])


@pytest.mark.parametrize("name", CLASSICS)
def test_chemistry(name: str) -> None:
    rate, start, t1 = CLASSICS[name]
    exact = radau(lambda t, z: torch.stack(rate(torch.from_numpy(z))).numpy(), start, t1)
    system = Field(lambda t, x, y: torch.stack(rate(x), -1))
    x0, y0 = torch.tensor(start, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    found = solve(system, x0, y0, t1=t1, method=ROS34PW2(), steps=AdaptiveSteps(1e-4, 1e-8, first_step=1e-4))
    torch.testing.assert_close(found.xs[-1], exact, rtol=1e-2, atol=1e-9)
    assert found.stats.steps < {"Robertson": 100, "Oregonator": 500, "HIRES": 300}[name]


class VanDerPol(FastSlowSystem):
    """eps x' = (1 - y^2) x - y, y' = x with eps = 1 / mu^2: Lienard's plane in slow time."""

    def __init__(self, mu: float, decay: float = 0.0) -> None:
        super().__init__()
        self.epsilon = mu**-2
        self.fast_decay = decay

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (1 - y * y) * x - y

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("method", "mu"),
    [
        (ExponentialAdams(3), 1e1),
        (ExponentialAdams(3), 1e3),
        (ExponentialAdams(3), 1e6),
        (ROS34PW2(), 1e1),
        (ROS34PW2(), 1e3),
    ],
    ids=repr,
)
def test_van_der_pol(mu: float, method: Method) -> None:
    """Up to t = 0.5, on the slow manifold; the decay 3 is that of x at the start."""
    decay = 3.0 if isinstance(method, ExponentialAdams) else 0.0
    exact = radau(lambda t, z: np.array([((1 - z[1] ** 2) * z[0] - z[1]) * mu**2, z[0]]), [-0.66, 2.0], 0.5)
    x0, y0 = torch.tensor([-0.66], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    found = solve(VanDerPol(mu, decay), x0, y0, t1=0.5, method=method, steps=AdaptiveSteps(1e-5, 1e-7))
    torch.testing.assert_close(torch.cat([found.xs[-1], found.ys[-1]]), exact, rtol=1e-3, atol=0.0)
    assert found.stats.steps < 400
