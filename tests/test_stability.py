"""Spectra, stability polynomials and long runs, against dense eigenvalues, known constants and linear systems."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from odeformer import FastSlowField
from odeformer.stability import (
    FAR,
    Rest,
    explicit_limits,
    fast_spectrum,
    long_runs,
    settle,
    stability_limit,
    stability_polynomial,
    study_layer,
)
from solvers import RK4, Dopri5, Euler, FastSlowSystem, FixedSteps, Heun, Method, MultirateEuler, integrate
from tests.helpers import open_model, random_tokens


class Quick(FastSlowSystem):
    """f = -rates x - bend tanh(x), g = -y, elementwise on (n, d)."""

    def __init__(self, rates: Tensor, bend: float = 0.0, epsilon: float = 1.0) -> None:
        super().__init__()
        self.rates, self.bend, self.epsilon = rates, bend, epsilon

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -self.rates * x - self.bend * torch.tanh(x)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -y


def at_origin(width: int) -> Rest:
    zero = torch.zeros(1, width, dtype=torch.float64)
    return Rest(zero, zero[:, :1], size=1.0, slow_size=1.0, fast_time=0.0, speed=0.0, settled=True)


@pytest.mark.parametrize("length", [2, 9])  # 32 numbers are treated densely, 144 by Arnoldi
def test_extreme_eigenvalues_are_those_of_the_dense_jacobian(length: int) -> None:
    torch.set_num_threads(1)
    model = open_model(pool_size=4, leak=0.3)
    x, y, u = model.start(random_tokens(length, batch=1))
    field = FastSlowField(next(model.depth()).layer, u)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dense = torch.autograd.functional.jacobian(lambda z: field.fast(0.0, z, y), x).reshape(x.numel(), x.numel())
    eigenvalues = torch.linalg.eigvals(dense)
    found = fast_spectrum(field, x, y, tolerance=1e-9)
    assert found.leftmost.real == pytest.approx(float(eigenvalues.real.min()), rel=1e-8)
    assert abs(found.largest) == pytest.approx(float(eigenvalues.abs().max()), rel=1e-8)
    assert max(found.leftmost_residual, found.largest_residual) < 1e-6
    assert found.direction.shape == x.shape
    assert float(found.direction.norm()) == pytest.approx(1.0)


def test_a_spectrum_needs_double_precision() -> None:
    with pytest.raises(ValueError, match="float64"):
        fast_spectrum(Quick(torch.ones(3)), torch.ones(1, 3), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("method", "interval"), [(Euler(), 2.0), (Heun(), 2.0), (RK4(), 2.785293563405282), (Dopri5(), 3.3065678926)]
)
def test_real_stability_intervals(method: Method, interval: float) -> None:
    assert stability_limit(method) == pytest.approx(interval, rel=1e-8)
    assert stability_limit(method, -5.0) == pytest.approx(interval / 5, rel=1e-8)


def test_stability_limits_off_the_real_axis() -> None:
    mu = -1 + 2j  # |1 + h mu| = 1 at h = -2 Re mu / |mu|^2
    assert stability_limit(Euler(), mu) == pytest.approx(0.4, rel=1e-8)
    assert stability_limit(RK4(), 1j) == pytest.approx(2 * math.sqrt(2), rel=1e-6)
    assert stability_limit(Euler(), 1j) == 0
    assert stability_limit(RK4(), 1.0) == 0
    assert stability_limit(Euler(), 0) == math.inf
    with pytest.raises(TypeError, match="Runge-Kutta"):
        stability_limit(MultirateEuler(2))


@pytest.mark.parametrize("method", [Euler(), Heun(), RK4(), Dopri5()])
def test_the_stability_polynomial_is_what_a_step_does(method: Method) -> None:
    h = 0.7
    system = Quick(torch.tensor([1.3, 4.0], dtype=torch.float64))
    x, _ = integrate(
        system, torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 1), span=h, method=method, steps=FixedSteps(1)
    )
    coefficients = stability_polynomial(method)
    for value, rate in zip(x[0].tolist(), (1.3, 4.0), strict=True):
        assert value == pytest.approx(sum(c * (-h * rate) ** k for k, c in enumerate(coefficients)), rel=1e-12)


@pytest.mark.parametrize("method", [Euler(), RK4()])
def test_measured_limits_of_a_linear_system_are_the_predicted_ones(method: Method) -> None:
    rates = torch.tensor([0.5, 3.0, 8.0], dtype=torch.float64)
    push = torch.full((1, 3), 0.01, dtype=torch.float64)
    found = explicit_limits(
        lambda count: Quick(rates),
        at_origin(3),
        push,
        eigenvalues=(-8.0,),
        decay=8.0,
        slow_decay=1.0,
        methods=[method],
        epsilons=(1 / 4, 1 / 64),
    )
    for limit in found:
        assert limit.predicted_settles == pytest.approx(stability_limit(method) * limit.epsilon / 8)
        assert limit.settles == pytest.approx(limit.predicted_settles, rel=0.02)
    assert found[0].settles / found[1].settles == pytest.approx(16)  # type: ignore[operator]


def test_near_and_far_limits_are_told_apart() -> None:
    # f = -0.1 x - 3 tanh x: mu = -3.1 at rest, -0.1 far away.
    rest, push = at_origin(1), torch.full((1, 1), 0.01, dtype=torch.float64)
    system = Quick(torch.tensor([0.1], dtype=torch.float64), bend=3.0)
    (limit,) = explicit_limits(
        lambda count: system,
        rest,
        push,
        eigenvalues=(-3.1,),
        decay=0.1,
        methods=[Euler()],
        epsilons=(1 / 8,),
        steps=600,
    )
    assert limit.settles == pytest.approx(2 / 3.1 / 8, rel=0.02)
    # Beyond rest Euler swings between +-b with b = 3 h / (2 - 0.1 h), which reaches FAR at h = 2 FAR / (0.1 FAR + 3) < 2 / 0.1.
    assert limit.bounded == pytest.approx(2 * FAR / (0.1 * FAR + 3) / 8, rel=0.01)
    outcomes = long_runs(lambda count: system, rest, push, Euler(), [0.6, 5.0, 21.0], [1.0] * 3, steps=600)
    assert outcomes == [(True, True), (False, True), (False, False)]


def test_the_slow_variable_has_its_own_limit() -> None:
    rest = at_origin(1)
    push = torch.full((1, 1), 0.01, dtype=torch.float64)
    shifted = Rest(rest.x, rest.y + 0.01, 1.0, 1.0, 0.0, 0.0, True)
    system = Quick(torch.tensor([1.0], dtype=torch.float64))
    # ds = h eps = 2.5 > 2 / kappa with h = 1.5 < 2 / |mu| would need eps > 1; the fast field is slowed instead.
    slow = Quick(torch.tensor([0.1], dtype=torch.float64))
    assert long_runs(lambda count: system, shifted, push, Euler(), [1.5], [1.0], steps=300) == [(True, True)]
    assert long_runs(lambda count: slow, shifted, push, Euler(), [2.5], [1.0], steps=300)[0][1] is False


def test_settle_finds_the_state_of_rest() -> None:
    class Pulled(Quick):
        def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
            return 0.2 * (1 - x) + y

    start = torch.full((1, 1), 5.0, dtype=torch.float64)
    found = settle(Pulled(torch.ones(1), epsilon=0.5), start, start, rate=0.2)
    assert found.settled
    assert found.speed <= 0.2e-4
    assert float(found.x) == pytest.approx(1.0, abs=1e-3)
    assert found.size > 5


def test_a_layer_with_a_leak_settles_and_euler_keeps_to_its_limit() -> None:
    torch.set_num_threads(1)
    model = open_model(pool_size=4, leak=0.5, relaxation=1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    study = study_layer(
        model, random_tokens(9, batch=1), 1, epsilons=(1 / 16, 1 / 64), methods=[Euler()], steps=300, rounds=2
    )
    assert study.settled
    assert study.residual is not None and study.residual < 1e-3
    assert study.at_rest is not None and study.at_rest.real < 0
    for limit in study.limits:
        assert limit.settles == pytest.approx(limit.predicted_settles, rel=0.03)
        assert limit.bounded == pytest.approx(2 * limit.epsilon / 0.5, rel=0.05)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads(json.dumps(study.to_dict()))["at_rest"] == [study.at_rest.real, study.at_rest.imag]


def test_without_a_leak_there_is_no_limit_and_the_study_says_so() -> None:
    study = study_layer(open_model(pool_size=4), random_tokens(9, batch=1), 0)
    assert not study.settled
    assert study.limits == []
    assert "does not attract" in study.note


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="layer"):
        study_layer(open_model(), random_tokens(4, batch=1), 2)
    with pytest.raises(ValueError, match="tokens"):
        study_layer(open_model(), random_tokens(4, batch=2), 0)
