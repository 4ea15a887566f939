"""Fast-slow test problems, non-autonomous and nonlinear, with closed forms or tight SciPy references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from solvers import (
    ETD2RK,
    ETD3RK,
    MRIGARK22,
    RK4,
    RKC2,
    ROS2,
    ROS34PW2,
    AndersonAdams,
    Backprop,
    Dopri5,
    Euler,
    ExponentialAdams,
    ExponentialEuler,
    FastSlowSystem,
    Heun,
    LieTrotter,
    Method,
    MultirateEuler,
    Part,
    Step,
    Strang,
)

METHODS: tuple[Method, ...] = (
    Euler(),
    Heun(),
    RK4(),
    Dopri5(),
    ExponentialEuler(),
    ETD2RK(),
    ETD3RK(),
    ExponentialAdams(3),
    ExponentialAdams(4),
    AndersonAdams(),
    LieTrotter(),
    Strang(),
    MultirateEuler(1),
    MultirateEuler(3),
    MRIGARK22(1),
    MRIGARK22(3),
    MRIGARK22(2, node=0.5),
    MRIGARK22(1, node=2 / 3),
    RKC2(),
    RKC2(5),
    ROS2(),
    ROS34PW2(),
)
ADAPTIVE: tuple[Method, ...] = (
    Heun(),
    Dopri5(),
    ETD2RK(),
    ETD3RK(),
    ExponentialAdams(),
    AndersonAdams(),
    RKC2(),
    ROS34PW2(),
)


def states(seed: int = 0, x_shape: Sequence[int] = (2, 3), y_shape: Sequence[int] = (2, 3)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in (x_shape, y_shape))
    return x, y


class Bernoulli(FastSlowSystem):
    """eps dx/dt = -eps (cos t) x^2 + y - 1/(1 + t), dy/dt = -y^2: nonlinear, non-autonomous, coupled, closed form.

    y = 1/(1 + t) for y(0) = 1, whence x' = -(cos t) x^2 and x = x0 / (1 + x0 sin t).
    """

    x0, y0 = 0.75, 1.0

    def __init__(self, epsilon: float = 1.0) -> None:
        super().__init__()
        self.epsilon = epsilon

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        cosine = torch.cos(torch.as_tensor(t, dtype=torch.float64))
        return -self.epsilon * cosine * x * x + y - 1 / (1 + t)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -y * y

    @classmethod
    def exact(cls, t: float) -> tuple[float, float]:
        return cls.x0 / (1 + cls.x0 * math.sin(t)), 1 / (1 + t)

    @classmethod
    def start(cls, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        return torch.full((1,), cls.x0, dtype=dtype), torch.full((1,), cls.y0, dtype=dtype)


class Network(FastSlowSystem):
    """A small random fast-slow network with five parts, none of which commutes with another, driven by the time."""

    def __init__(self, epsilon: float | Tensor = 1.0, width: int = 3, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.epsilon = epsilon
        self.fast_decay, self.slow_decay = 1.5, 0.5  # of any split n = f + lambda x the sum is f
        self.w = nn.Parameter(0.6 * torch.randn(5, width, width, dtype=torch.float64, generator=generator))

    def attend(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x @ self.w[0] + 2.0 * t)

    def transform(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x @ self.w[1]) * (1 + t) - x

    def couple(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y) @ self.w[2]

    def follow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y) @ self.w[3] - y * t

    def turn(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(y @ self.w[4] + t)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.attend(t, x, y) + self.transform(t, x, y) + self.couple(t, x, y)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.follow(t, x, y) + self.turn(t, x, y)

    def parts(self) -> Sequence[Part]:
        return (
            Part("fast", self.attend),
            Part("slow", self.follow),
            Part("fast", self.transform),
            Part("fast", self.couple),
            Part("slow", self.turn),
        )


class KPR(FastSlowSystem):
    """The Kvaerno-Prothero-Robinson problem (Sandu, SIAM J. Numer. Anal. 57 (2019), section 6) with eps = 1 / omega.

    (x, y)' = L ((x^2 - 3 - cos(omega t)) / (2 x), (y^2 - 2 - cos t) / (2 y)) - (omega sin(omega t) / (2 x), sin t / (2 y)) with
    L = (l_f, (1 - c) (l_f - l_s)), (-c (l_f - l_s), l_s), l_f = -10, l_s = -1; x = sqrt(3 + cos(omega t)), y = sqrt(2 + cos t).
    """

    def __init__(self, omega: float = 20.0, coupling: float = 0.1) -> None:
        super().__init__()
        self.omega, self.coupling, self.epsilon = omega, coupling, 1 / omega

    def residuals(self, t: float | Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.as_tensor(t, dtype=x.dtype)
        return (x * x - 3 - torch.cos(self.omega * t)) / (2 * x), (y * y - 2 - torch.cos(t)) / (2 * y)

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.residuals(t, x, y)
        wave = self.omega * torch.sin(self.omega * torch.as_tensor(t, dtype=x.dtype)) / (2 * x)
        return self.epsilon * (-10 * a - 9 * (1 - self.coupling) * b - wave)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.residuals(t, x, y)
        return 9 * self.coupling * a - b - torch.sin(torch.as_tensor(t, dtype=y.dtype)) / (2 * y)

    def exact(self, t: float) -> Tensor:
        return torch.tensor([math.sqrt(3 + math.cos(self.omega * t)), math.sqrt(2 + math.cos(t))], dtype=torch.float64)


class Field(FastSlowSystem):
    """f and g given as functions of (t, x, y)."""

    def __init__(
        self,
        f: Callable[[float | Tensor, Tensor, Tensor], Tensor],
        g: Callable[[float | Tensor, Tensor, Tensor], Tensor] = lambda t, x, y: torch.zeros_like(y),
        epsilon: float | Tensor = 1.0,
    ) -> None:
        super().__init__()
        self.f, self.g, self.epsilon = f, g, epsilon

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.f(t, x, y)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.g(t, x, y)


def nan_after(onset: float) -> Field:
    """dx/dt = cos t and y' = -y up to the onset, nan from there on."""

    def f(t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(x, math.cos(t) if t < onset else math.nan)

    return Field(f, lambda t, x, y: -y)


class Recorded(Dopri5):
    """Dopri5 that notes (tau, h) of every attempted step."""

    def __init__(self) -> None:
        self._attempts: list[tuple[float, float]] = []

    def step(self, problem, tau, h, x, y, rate=None):  # type: ignore[no-untyped-def]
        self._attempts.append((tau, h))
        return super().step(problem, tau, h, x, y, rate)


class Tampered(Backprop):
    """Backprop that passes each step through a function of (step, tau, h)."""

    def __init__(self, change: Callable[[Step, float, float], Step]) -> None:
        self.change = change

    def wrap(self, step, system):  # type: ignore[no-untyped-def]
        return lambda problem, tau, h, *state: self.change(step(problem, tau, h, *state), tau, h)


def reference(
    system: FastSlowSystem, x: Tensor, y: Tensor, times: Sequence[float], method: str = "DOP853"
) -> tuple[Tensor, Tensor]:
    """(N, *x.shape) and (N, *y.shape) at slow times after times[0], by SciPy at rtol 1e-13."""
    size, epsilon = x.numel(), float(system.epsilon)

    def field(t: float, z: np.ndarray) -> np.ndarray:
        state = torch.from_numpy(z)
        fast, slow = state[:size].view(x.shape), state[size:].view(y.shape)
        with torch.no_grad():
            f, g = system.fast(t, fast, slow) / epsilon, system.slow(t, fast, slow)
        return torch.cat([f.reshape(-1), g.reshape(-1)]).numpy()

    start = torch.cat([x.reshape(-1), y.reshape(-1)]).detach().numpy()
    solution = solve_ivp(field, (times[0], times[-1]), start, method=method, rtol=1e-13, atol=1e-14, t_eval=times[1:])
    assert solution.success
    z = torch.from_numpy(solution.y.T.copy())
    return z[:, :size].view(-1, *x.shape), z[:, size:].view(-1, *y.shape)


def slopes(errors: Sequence[float], factor: float = 2.0) -> list[float]:
    """Observed orders between successive errors, the step shrinking by `factor`."""
    return [math.log(a / b) / math.log(factor) for a, b in pairwise(errors)]
