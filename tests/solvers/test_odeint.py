"""The drop-in for torchdiffeq: its methods to the last bit, ours against closed forms."""

from __future__ import annotations

import gc
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchdiffeq
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torchdiffeq._impl.fixed_grid import FixedGridODESolver
from torchdiffeq._impl.odeint import SOLVERS

import solvers
from solvers import (
    ETD2RK,
    AndersonAdams,
    Backprop,
    Checkpointed,
    Euler,
    ExponentialAdams,
    Heun,
    Method,
    MultirateEuler,
    SlowManifold,
    SolveError,
    Step,
    TorchDiffEq,
    odeint,
    odeint_adjoint,
    odeint_dense,
    odeint_event,
)
from tests.solvers.problems import ADAPTIVE, METHODS, slopes

DIFFERENTIABLE = tuple(name for name in SOLVERS if name != "scipy_solver")
CONTROLLED = tuple(name for name in DIFFERENTIABLE if not issubclass(SOLVERS[name], FixedGridODESolver))
OURS = ("etd2rk", "etd3rk", "exponential_adams", "anderson_adams", "exponential_euler", "heun", "lie", "strang")
TIMES = torch.tensor([0.0, 0.25, 0.7, 1.0], dtype=torch.float64)
double = torch.float64


class Pendulum(nn.Module):
    """A driven nonlinear field of a state (..., 2), or of a tuple of one (2,) and one (3, 2)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(2, 2, dtype=double, generator=generator))
        self.b = nn.Parameter(torch.randn(2, dtype=double, generator=generator))

    def rate(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.sin(z @ self.w + t) - 0.5 * z * self.b

    def forward(self, t: Tensor, z: Any) -> Any:
        if isinstance(z, tuple):
            return self.rate(t, z[0]) + z[1].sum(0), self.rate(2 * t, z[1])
        return self.rate(t, z)


def start(tupled: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2,), (3, 2)) if tupled else ((3, 2),)
    return tuple(torch.randn(*shape, dtype=double, generator=generator, requires_grad=True) for shape in shapes)


def outcome(interface: Callable[..., Any], tupled: bool, t: Tensor, **settings: Any) -> list[Tensor]:
    """Values, and gradients with respect to the states, t and the parameters."""
    func, z = Pendulum(), start(tupled)
    t = t.clone().requires_grad_()
    found = interface(func, z if tupled else z[0], t, **settings)
    outputs = list(found) if isinstance(found, tuple) else [found]
    loss = sum((i + output.sin()).square().sum() for i, output in enumerate(outputs))
    inputs = [*z, t, *func.parameters()]
    return [*outputs, *torch.autograd.grad(loss, inputs, allow_unused=True)]  # type: ignore[arg-type,list-item]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


# torchdiffeq's methods


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("tupled", [False, True])
@pytest.mark.parametrize("name", [*DIFFERENTIABLE, None])
def test_torchdiffeqs_methods_are_torchdiffeqs(name: str | None, tupled: bool, flip: bool) -> None:
    """Values and gradients, through the solver and by the adjoint, bit for bit."""
    t = TIMES.flip(0) if flip else TIMES
    settings = {"method": name, "rtol": 1e-4, "atol": 1e-5}
    for ours, theirs in ((odeint, torchdiffeq.odeint), (odeint_adjoint, torchdiffeq.odeint_adjoint)):
        assert_same(outcome(ours, tupled, t, **settings), outcome(theirs, tupled, t, **settings))


def test_scipys_solvers_are_torchdiffeqs() -> None:
    func, (z,) = Pendulum(), start(False)
    settings = {"method": "scipy_solver", "options": {"solver": "LSODA"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = (run(func, z.detach(), TIMES, **settings) for run in (odeint, torchdiffeq.odeint))
    assert torch.equal(found, expected)


def linf(z: Any) -> Tensor:
    return max(part.abs().max() for part in z) if isinstance(z, tuple) else z.abs().max()


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("tupled", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dopri5", {"jump_t": torch.tensor([0.3, 0.6]), "step_t": torch.tensor([0.5]), "first_step": 0.2}),
        ("bosh3", {"norm": linf, "max_step": 0.05, "safety": 0.8}),
        ("dopri8", {"min_step": 0.01, "dtype": torch.float64}),
        ("rk4", {"step_size": 0.03, "interp": "cubic"}),
        ("midpoint", {"grid_constructor": lambda f, z, t: torch.linspace(t[0], t[-1], 17, dtype=t.dtype)}),
        ("euler", {"step_size": 0.1, "perturb": True}),
        ("implicit_adams", {"step_size": 0.1, "max_order": 4}),
    ],
)
def test_options_are_torchdiffeqs(name: str, options: dict[str, Any], tupled: bool, flip: bool) -> None:
    t = TIMES.flip(0) if flip else TIMES
    settings: dict[str, Any] = {"method": name, "rtol": 1e-5, "atol": 1e-6, "options": options}
    assert_same(outcome(odeint, tupled, t, **settings), outcome(torchdiffeq.odeint, tupled, t, **settings))
    adjoint = {**settings, "adjoint_options": {k: v for k, v in options.items() if k != "norm"}, "adjoint_rtol": 1e-6}
    if name != "midpoint":
        found, expected = (outcome(f, tupled, t, **adjoint) for f in (odeint_adjoint, torchdiffeq.odeint_adjoint))
        assert_same(found, expected)


def test_tupled_tolerances_adjoint_params_and_seminorms() -> None:
    def run(interface: Callable[..., Any]) -> list[Tensor]:
        func, z = Pendulum(), start(True)
        found = interface(
            func,
            z,
            TIMES,
            rtol=(1e-3, 1e-6),
            atol=(torch.tensor(1e-3), 1e-6),
            adjoint_rtol=1e-4,
            adjoint_atol=1e-5,
            adjoint_method="bosh3",
            adjoint_params=(func.b,),
            adjoint_options={"norm": "seminorm"},
        )
        (found[0].sum() + found[1].square().sum()).backward()
        assert func.w.grad is None and func.b.grad is not None
        return [*found, func.b.grad, *(part.grad for part in z)]  # type: ignore[list-item]

    assert_same(run(odeint_adjoint), run(torchdiffeq.odeint_adjoint))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["dopri5", "rk4"])
def test_other_dtypes_are_torchdiffeqs(name: str, dtype: torch.dtype) -> None:
    z, t = torch.ones(3, dtype=dtype), torch.linspace(0, 1, 5)
    factor = 1j if dtype.is_complex else 1.0
    runs = [run(lambda t, z: factor * z, z, t, method=name) for run in (odeint, torchdiffeq.odeint)]
    assert torch.equal(runs[0], runs[1]) and runs[0].dtype is dtype


@pytest.mark.parametrize("name", ["dopri5", "adaptive_heun", "rk4"])
def test_callbacks_are_torchdiffeqs(name: str) -> None:
    class Spied(Pendulum):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []
            for callback in ("callback_step", "callback_accept_step", "callback_reject_step"):
                for suffix in ("", "_adjoint"):
                    setattr(self, callback + suffix, self.spy(callback + suffix))

        def spy(self, callback: str) -> Callable[..., None]:
            return lambda t, z, dt: self.calls.append((callback, t.item(), dt.item()))

    def run(interface: Callable[..., Any]) -> tuple[list[Any], list[str]]:
        func = Spied()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            interface(func, start(False)[0], TIMES, method=name, rtol=1e-4, atol=1e-4).sum().backward()
        return func.calls, [str(warning.message) for warning in caught]

    for ours, theirs in ((odeint, torchdiffeq.odeint), (odeint_adjoint, torchdiffeq.odeint_adjoint)):
        found = run(ours)
        assert found == run(theirs) and found[0]


def crossing(t: Tensor, z: Any) -> Tensor:
    """Changes sign once after t = 0.1 and once before, whatever z does."""
    return (t if t > 0 else -t) - 0.5 + 0.05 * torch.sin(z[0] if isinstance(z, tuple) else z).sum()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tupled", [False, True])
@pytest.mark.parametrize("interface", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize(("name", "options"), [("dopri5", None), ("rk4", {"step_size": 0.01})])
def test_events_are_torchdiffeqs(
    name: str, options: dict[str, Any] | None, interface: str, tupled: bool, reverse: bool
) -> None:
    def run(library: Any) -> list[Tensor]:
        func, z = Pendulum(), start(tupled)
        t0 = torch.tensor(0.1, dtype=double, requires_grad=True)
        event_t, states = library.odeint_event(
            func,
            z if tupled else z[0],
            t0,
            event_fn=crossing,
            reverse_time=reverse,
            odeint_interface=getattr(library, interface),
            method=name,
            options=options,
        )
        states = states if tupled else (states,)
        loss = event_t + sum(state.square().sum() for state in states)
        return [event_t, *states, *torch.autograd.grad(loss, [*z, t0, func.w], allow_unused=True)]

    assert_same(run(solvers), run(torchdiffeq))


def test_odeint_dense_is_torchdiffeqs() -> None:
    func, (z,) = Pendulum(), start(False)
    t0, t1 = TIMES[0], TIMES[-1]
    found, expected = (run(func, z, t0, t1, rtol=1e-5) for run in (odeint_dense, torchdiffeq.odeint_dense))
    for t in (0.1, 0.5, 0.95):
        time = torch.tensor(t, dtype=double)
        assert torch.equal(found(time), expected(time))
    with pytest.raises(ValueError, match=r"odeint_dense has torchdiffeq's 'dopri5' alone, got method='etd2rk'"):
        odeint_dense(func, z, t0, t1, method="etd2rk")


@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint", "odeint_event", "odeint_dense"])
def test_signatures_are_torchdiffeqs(name: str) -> None:
    """Every parameter of torchdiffeq's with its kind and default; ours beyond these are keywords with a default."""
    ours, theirs = (inspect.signature(getattr(library, name)).parameters for library in (solvers, torchdiffeq))
    for parameter, expected in theirs.items():
        found = ours[parameter]
        assert found.kind is expected.kind
        if expected.default is torchdiffeq.odeint:
            assert found.default is odeint
        else:
            assert found.default == expected.default
    for parameter in ours.keys() - theirs.keys():
        assert ours[parameter].kind is inspect.Parameter.KEYWORD_ONLY and ours[parameter].default is None


def test_what_torchdiffeq_refuses_of_its_methods() -> None:
    func, (z,) = Pendulum(), start(False)
    for run in (odeint, torchdiffeq.odeint):
        with pytest.raises(AssertionError, match="strictly increasing or decreasing"):
            run(func, z, torch.tensor([0.0, 1.0, 0.5]))
        with pytest.raises(ValueError, match="Invalid method"):
            run(func, z, TIMES, method="runge")
    for adjoint in (odeint_adjoint, torchdiffeq.odeint_adjoint):
        with pytest.raises(ValueError, match="func must be an"):
            adjoint(lambda t, z: z, z, TIMES)


# Our methods


class Growth(nn.Module):
    """dz/dt = a cos(t) z: z = z0 exp(a (sin t - sin t0))."""

    def __init__(self, a: float = 0.8) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=double))

    def forward(self, t: Tensor, z: Any) -> Any:
        if isinstance(z, tuple):
            return tuple(self.a * torch.cos(t) * part for part in z)
        return self.a * torch.cos(t) * z

    @staticmethod
    def exact(z0: Tensor, t: Tensor, a: float = 0.8) -> Tensor:
        return torch.exp(a * (torch.sin(t) - torch.sin(t[0]))).view(-1, *[1] * z0.ndim) * z0


def z0_of(shape: tuple[int, ...] = (3,)) -> Tensor:
    return torch.randn(shape, dtype=double, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_fixed_steps_converge_at_the_order_of_the_method(method: Method, flip: bool) -> None:
    """At all times of t, in both directions."""
    t, z0 = torch.tensor([0.0, 0.4, 1.2], dtype=double), z0_of()
    t, errors = t.flip(0) if flip else t, []
    for size in (0.2, 0.1, 0.05):
        with torch.no_grad():
            found = odeint(Growth(), z0, t, method=method, options={"step_size": size})
        assert torch.equal(found[0], z0)
        errors.append(float((found - Growth.exact(z0, t)).abs().max()))
    assert slopes(errors)[-1] > method.order - 0.3, errors


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", [n for n in OURS if n not in ("exponential_euler", "lie", "strang")])
def test_error_control_meets_closed_forms(name: str, shape: tuple[int, ...]) -> None:
    for t in (TIMES, TIMES.flip(0), TIMES.float()):
        with torch.no_grad():
            found = odeint(Growth(), z0_of(shape), t, method=name, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, Growth.exact(z0_of(shape), t.double()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_tuples_are_flattened(name: str) -> None:
    parts = (z0_of(()), z0_of((2, 3)), z0_of((0, 2)))
    func, options = Growth(), {"step_size": 0.1}
    found = odeint(func, parts, TIMES, method=name, options=options)
    flat = torch.cat([part.reshape(-1) for part in parts])
    together = odeint(func, flat, TIMES, method=name, options=options)
    assert [part.shape for part in found] == [(4,), (4, 2, 3), (4, 0, 2)]
    assert torch.equal(torch.cat([part.flatten(1) if part.ndim > 1 else part[:, None] for part in found], 1), together)


def test_one_step_between_times_without_a_step_size() -> None:
    """As torchdiffeq's fixed-grid methods do."""
    z0, func = z0_of(), Growth()
    found = odeint(func, z0, TIMES, method=Euler())
    expected = torchdiffeq.odeint(func, z0, TIMES, method="euler")
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
    once = odeint(func, z0, TIMES[[0, -1]], method="exponential_euler")
    torch.testing.assert_close(once[-1], z0 + Growth()(TIMES[0], z0), rtol=1e-15, atol=1e-15)
    assert torch.equal(odeint(func, z0, TIMES[:1], method="etd2rk"), z0[None])


def test_methods_by_name_and_torchdiffeqs_where_both_have_it() -> None:
    z0, func = z0_of(), Growth()
    settings: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    assert torch.equal(
        odeint(func, z0, TIMES, method="etd2rk", **settings), odeint(func, z0, TIMES, method=ETD2RK(), **settings)
    )
    options = {"step_size": 0.1}
    named = odeint(func, z0, TIMES, method="multirate_euler:3", options=options)
    assert torch.equal(named, odeint(func, z0, TIMES, method=MultirateEuler(3), options=options))
    for name in ("euler", "rk4", "dopri5"):
        assert torch.equal(odeint(func, z0, TIMES, method=name), torchdiffeq.odeint(func, z0, TIMES, method=name))


class Stiff(nn.Module):
    """dz/dt = -k (z - c): exact for exponential methods where decay is k."""

    def __init__(self, k: Any, c: Any) -> None:
        super().__init__()
        self.k, self.c, self.decay = k, c, k

    def forward(self, t: Tensor, z: Any) -> Any:
        if isinstance(z, tuple):
            return tuple(-k * (part - self.c) for k, part in zip(self.k, z, strict=True))
        return -self.k * (z - self.c)


@pytest.mark.parametrize("name", ["exponential_euler", "etd2rk", "etd3rk", "exponential_adams", "anderson_adams"])
def test_the_decay_of_func_is_integrated_exactly(name: str) -> None:
    """One step of any length; a number, a tensor, a parameter and a tuple."""
    t, z0 = torch.tensor([0.5, 1.5, 4.0], dtype=double), z0_of()
    elapsed = (t - t[0])[:, None]
    options = {"step_size": 10.0}
    for k in (50.0, torch.tensor([1.0, 30.0, 1e4], dtype=double), nn.Parameter(torch.tensor(50.0, dtype=double))):
        exact = 0.3 + torch.exp(-elapsed * k) * (z0 - 0.3)
        found = odeint(Stiff(k, 0.3), z0, t, method=name, options=options)
        torch.testing.assert_close(found, exact.detach().expand_as(found), rtol=1e-9, atol=1e-9, check_layout=False)
    pair = odeint(Stiff((2.0, torch.tensor(300.0)), 0.3), (z0, z0[:2]), t, method=name, options=options)
    torch.testing.assert_close(pair[0], 0.3 + torch.exp(-2 * elapsed) * (z0 - 0.3), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pair[1], 0.3 + torch.exp(-300 * elapsed) * (z0[:2] - 0.3), rtol=1e-9, atol=1e-9)
    with pytest.raises(TypeError, match=r"func\.decay must be a number, a tensor, or for a tuple of states a tuple"):
        odeint(Stiff("fast", 0.3), z0, t, method=name, options=options)


class Mesh(Method):
    """Takes no notice of the field, but of the steps (tau, h)."""

    order = 1

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []

    def step(self, problem, tau, h, x, y, rate=None):  # type: ignore[no-untyped-def]
        self._steps.append((tau, h))
        return Step(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("length", "size", "n"),
    [(5.9, 1e-4, 59_000), (0.3, 0.1, 3), (0.7, 0.1, 7), (1.0, 0.3, 4), (0.2, 5.0, 1), (2.0, 2 / 3, 3)],
)
def test_grids_end_exactly_and_without_slivers(
    length: float, size: float, n: int, sign: int, dtype: torch.dtype
) -> None:
    """5.9 / 1e-4 is more than 59 000 in floating point."""
    mesh, t = Mesh(), sign * torch.tensor([0.0, length], dtype=dtype)
    odeint(lambda t, z: z, z0_of(), t, method=mesh, options={"step_size": size})
    assert len(mesh._steps) == n
    ends = [tau + h for tau, h in mesh._steps]
    assert ends[-1] == t[-1].item()
    assert all(abs(h) == pytest.approx(length / n, rel=1e-6) for _, h in mesh._steps)


def test_a_grid_of_many_times_has_every_one_at_the_end_of_a_step() -> None:
    mesh, t = Mesh(), torch.linspace(1.0, 6.9, 59_001, dtype=double)
    odeint(lambda t, z: z, z0_of((1,)), t, method=mesh, options={"step_size": 1e-4})
    assert [tau for tau, _ in mesh._steps] == [time - 1.0 for time in t.tolist()[:-1]]


def test_grid_constructors_and_step_times() -> None:
    """The constructor gets func, the state and t as torchdiffeq's do; the times of t and of step_t are added to its grid."""

    def constructor(func: Any, z: Any, t: Tensor) -> Tensor:
        assert callable(func) and isinstance(z, tuple) and t[0] < t[-1]
        return torch.tensor([0.0, 0.125, 0.75, 1.0], dtype=double)

    mesh, t = Mesh(), torch.tensor([0.0, 0.5, 1.0], dtype=double)
    options: dict[str, Any] = {"grid_constructor": constructor}
    odeint(lambda t, z: z, (z0_of(),), t, method=mesh, options=options)
    assert [tau for tau, _ in mesh._steps] == [0.0, 0.125, 0.5, 0.75]
    mesh = Mesh()
    odeint(lambda t, z: z, z0_of(), t, method=mesh, options={"step_size": 0.5, "step_t": torch.tensor([0.25])})
    assert mesh._steps == [(0.0, 0.25), (0.0, 0.25), (0.25, 0.5)]  # times since the solve's new start


def test_a_multistep_method_keeps_its_past_over_the_times_of_t() -> None:
    errors, calls = [], 0

    def func(t: Tensor, z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.8 * torch.cos(t) * z

    for n in (20, 40, 80):
        t, calls = torch.linspace(0, 2, n + 1, dtype=double), 0
        found = odeint(func, z0_of(), t, method=ExponentialAdams(4), options={"step_size": 1.0})
        errors.append(float((found - Growth.exact(z0_of(), t)).abs().max()))
        assert calls <= 2 * n + 6
    assert slopes(errors)[-1] > 3.7, errors


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("method", [*ADAPTIVE, Euler(), MultirateEuler(2)], ids=repr)
def test_jumps(method: Method, sign: int) -> None:
    """z' = 1 up to a jump and 3 after it: exact for every method that never sees both sides in one step."""
    asked: list[float] = []

    def func(t: Tensor, z: Tensor) -> Tensor:
        asked.append(float(t))
        return torch.full_like(z, 1.0 if sign * t < 0.35 else 3.0)

    t = sign * torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=double)
    options: dict[str, Any] = {"jump_t": sign * torch.tensor([0.35, 5.0], dtype=double)}
    if method.error_order is None:
        options["step_size"] = 0.2
    found = odeint(func, torch.zeros(2, dtype=double), t, method=method, options=options, rtol=1e-6)
    exact = sign * torch.tensor([0.0, 0.2, 0.35 + 3 * 0.35, 0.35 + 3 * 0.65], dtype=double)
    torch.testing.assert_close(found, exact[:, None].expand(4, 2), rtol=0, atol=1e-12)
    assert sign * 0.35 not in asked


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradients_of_fixed_steps(method: Method) -> None:
    def run(z0: Tensor, a: Tensor) -> Tensor:
        return odeint(lambda t, z: torch.sin(a * z + t), z0, TIMES, method=method, options={"step_size": 0.3})

    inputs = (z0_of().requires_grad_(), torch.tensor(0.7, dtype=double, requires_grad=True))
    assert gradcheck(run, inputs, fast_mode=True)
    if not method.reads_host:  # those that solve equations by iteration have first derivatives alone
        assert gradgradcheck(run, inputs, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("tupled", [False, True])
@pytest.mark.parametrize("method", ADAPTIVE, ids=repr)
def test_odeint_adjoint_is_odeint_in_less_memory(method: Method, tupled: bool) -> None:
    """Bit-equal gradients by any exact gradient, and with the parameters given."""
    expected = outcome(odeint, tupled, TIMES, method=method, rtol=1e-4, atol=1e-4)
    for gradient in (None, Checkpointed(), Backprop()):
        assert_same(
            outcome(odeint_adjoint, tupled, TIMES, method=method, rtol=1e-4, atol=1e-4, gradient=gradient), expected
        )

    def restricted(func: Any, *args: Any, **settings: Any) -> Any:
        return odeint_adjoint(func, *args, adjoint_params=tuple(func.parameters()), **settings)

    assert_same(outcome(restricted, tupled, TIMES, method=method, rtol=1e-4, atol=1e-4), expected)


def test_adjoint_params_alone_get_gradients() -> None:
    func, z0, hidden = Pendulum(), start(False)[0], torch.ones(2, dtype=double, requires_grad=True)
    unused = torch.ones(4, requires_grad=True)

    def field(t: Tensor, z: Tensor) -> Tensor:
        return func(t, z) + hidden

    for params in ((), (func.b,), (p for p in (func.b, hidden, unused, torch.ones(1)))):
        for leaf in (func.w, func.b, hidden, z0, unused):
            leaf.grad = None
        given = list(params)
        out = odeint_adjoint(field, z0, TIMES, method="etd2rk", rtol=1e-3, atol=1e-3, adjoint_params=iter(given))
        out.sum().backward()
        assert func.w.grad is None and z0.grad is not None
        for leaf in (func.b, hidden):
            assert (leaf.grad is not None) == any(leaf is p for p in given)
        assert unused.grad is None or not unused.grad.any()
    with torch.no_grad():
        assert not odeint_adjoint(field, z0, TIMES, method="etd2rk", rtol=1e-3, adjoint_params=(func.b,)).requires_grad


def test_adjoint_params_may_come_from_a_network() -> None:
    """Their gradient flows on to what they were computed from, as through any function of them."""

    def gradients(interface: Callable[..., Any], restricted: bool) -> tuple[Tensor, ...]:
        source, z0 = torch.full((3,), 0.5, dtype=double, requires_grad=True), z0_of().requires_grad_()
        a = torch.exp(source)
        settings = {"adjoint_params": (a,)} if restricted else {}
        found = interface(lambda t, z: torch.sin(a * z), z0, TIMES, method="etd3rk", rtol=1e-3, **settings)
        found.square().sum().backward(retain_graph=True)
        found.sum().backward()
        assert source.grad is not None and z0.grad is not None
        return source.grad, z0.grad

    found, expected = gradients(odeint_adjoint, True), gradients(odeint, False)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("interface", [odeint, odeint_adjoint])
@pytest.mark.parametrize("flip", [False, True])
def test_gradients_with_respect_to_times(interface: Callable[..., Any], flip: bool) -> None:
    """Those of the exact flow: dz_i/dt_i = a cos(t_i) z_i, dz_i/dt_0 = -a cos(t_0) z_i."""
    t = (TIMES.flip(0) if flip else TIMES).clone().requires_grad_()
    z0, func = z0_of().requires_grad_(), Growth()
    weights = torch.randn(4, 3, dtype=double, generator=torch.Generator().manual_seed(2))
    found = interface(func, z0, t, method="exponential_adams", rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad((weights * found).sum(), (t, z0, func.a))
    a = torch.tensor(0.8, dtype=double, requires_grad=True)
    exact = torch.exp(a * (torch.sin(t) - torch.sin(t[0])))[:, None] * z0
    expected = torch.autograd.grad((weights * exact).sum(), (t, z0, a))
    torch.testing.assert_close(grads, expected, rtol=1e-7, atol=1e-7)
    with torch.no_grad():
        plain = interface(func, z0, t.detach(), method="exponential_adams", rtol=1e-10, atol=1e-10)
    assert torch.equal(found, plain)


# Events with our methods


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("method", [*ADAPTIVE, Euler(), MultirateEuler(2)], ids=repr)
def test_the_time_of_an_event(method: Method, sign: int) -> None:
    """z = 1 + t^2 is 3 at |t| = sqrt(2), many units of the given direction away."""
    options = {"step_size": 0.02} if method.error_order is None else None
    event_t, states = odeint(
        lambda t, z: 2 * t.expand_as(z),
        torch.ones(1, dtype=double),
        torch.tensor([0.0, sign * 0.1], dtype=double),
        method=method,
        options=options,
        rtol=1e-5,
        atol=1e-8,
        event_fn=lambda t, z: z[0] - 3,
    )
    accuracy = 0.04 if method.order == 1 else 1e-3
    assert event_t.item() == pytest.approx(sign * math.sqrt(2), abs=accuracy) and event_t.dtype is double
    assert states.shape == (2, 1) and states[0] == 1 and states[1].item() == pytest.approx(3.0, abs=1e-4)


def test_events_among_several_and_within_a_step() -> None:
    """The first of several entries to change sign, of a tuple; bouncing twice between the given times is seen."""
    func = lambda t, z: (z[1], -z[0])  # noqa: E731
    state = (torch.ones(1, dtype=double), torch.zeros(1, dtype=double))
    t = torch.tensor([0.0, 100.0], dtype=double)
    event_t, (x, v) = odeint(
        func, state, t, method="exponential_adams", rtol=1e-8, atol=1e-9,
        event_fn=lambda t, z: torch.cat([z[0] + 2, z[1] + 0.5, z[0]]),
    )  # fmt: skip
    assert event_t.item() == pytest.approx(math.asin(0.5), abs=1e-6)
    torch.testing.assert_close(
        torch.cat([x[1], v[1]]), torch.tensor([math.cos(math.pi / 6), -0.5]).double(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("interface", [odeint, odeint_adjoint])
@pytest.mark.parametrize("settings", [{"method": "etd3rk"}, {"method": "strang", "options": {"step_size": 0.001}}])
def test_gradients_of_event_times(interface: Callable[..., Any], settings: dict[str, Any]) -> None:
    """z' = a z reaches c at t = t0 + ln(c / z0) / a."""
    a = nn.Parameter(torch.tensor(0.8, dtype=double))

    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = a

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            return self.a * z

    z0 = torch.tensor([0.5], dtype=double, requires_grad=True)
    c = 1.5
    event_t, states = odeint_event(
        Exponential(), z0, torch.tensor(0.25, dtype=double), event_fn=lambda t, z: z[0] - c,
        odeint_interface=interface, rtol=1e-9, atol=1e-10, **settings,
    )  # fmt: skip
    exact = 0.25 + torch.log(c / z0[0]) / a
    assert event_t.item() == pytest.approx(exact.item(), abs=1e-6)
    grads = torch.autograd.grad(event_t, (z0, a), retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad(exact, (z0, a)), rtol=1e-5, atol=1e-6)
    fixed = torch.autograd.grad(states[1].sum(), z0)[0]  # the state at the event is c, whatever z0
    assert abs(float(fixed)) < 1e-5


def test_an_event_that_never_comes_and_one_at_the_start() -> None:
    z, t = torch.ones(1, dtype=double), torch.tensor([0.0, 1.0], dtype=double)
    options: dict[str, Any] = {"max_num_steps": 50}
    with pytest.raises(SolveError, match="step limit"):
        odeint(lambda t, z: -z, z, t, method="etd2rk", event_fn=lambda t, z: z[0] + 1, options=options, rtol=1e-3)
    options["step_size"] = 0.5
    with pytest.raises(RuntimeError, match=r"no event in 63 steps, up to t = 31\.5"):
        odeint(lambda t, z: -z, z, t, method="etd2rk", event_fn=lambda t, z: z[0] + 1, options=options)
    event_t, states = odeint(lambda t, z: -z, z, t, method="etd2rk", event_fn=lambda t, z: z[0] - 1)
    assert event_t == 0 and torch.equal(states, torch.ones(2, 1, dtype=double))
    with pytest.raises(ValueError, match="needs a step_size in options"):
        odeint(lambda t, z: -z, z, t, method=Euler(), event_fn=lambda t, z: z[0])
    with pytest.raises(ValueError, match=r"of length 2, beside event_fn; got length 4"):
        odeint(lambda t, z: -z, z, TIMES, method="etd2rk", event_fn=lambda t, z: z[0])


# Failures, warnings, dtypes


def nan_from(onset: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda t, z: torch.full_like(z, math.cos(t) if t < onset else math.nan)


@pytest.mark.parametrize("interface", [odeint, odeint_adjoint])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_field_that_turns_nan(method: Method, interface: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {} if interface is odeint else {"adjoint_params": ()}
    cases = [{"step_size": 0.1}] + ([{}] if method.error_order is not None else [])
    for options in cases:
        with pytest.raises(SolveError, match=r"non-finite state or field .*t = 0\.[2-5]") as caught:
            interface(nan_from(0.4), z0_of(), TIMES, method=method, options=options, rtol=1e-4, atol=1e-4, **settings)
        assert "underflow" not in str(caught.value) and repr(method) in str(caught.value)


def test_the_step_limit() -> None:
    with pytest.raises(SolveError, match="step limit reached at slow time"):
        odeint(Growth(), z0_of(), TIMES, method="heun", rtol=1e-8, options={"max_num_steps": 5})


@pytest.mark.parametrize("interface", [odeint, odeint_adjoint])
@pytest.mark.parametrize("name", [*CONTROLLED, "etd2rk", "anderson_adams"])
def test_a_tolerance_below_round_off_warns(name: str, interface: Callable[..., Any]) -> None:
    """Once; torchdiffeq's default and fixed steps do not."""
    z0, t = torch.zeros(2), torch.tensor([0.0, 0.1])
    settings: dict[str, Any] = {"method": name, **({} if interface is odeint else {"adjoint_params": ()})}
    with pytest.warns(UserWarning) as caught:
        interface(lambda t, z: torch.ones_like(z), z0, t, rtol=1e-8, atol=1e-3, **settings)
    assert ["rtol=1e-08 is below the epsilon 1.19e-07 of torch.float32" in str(w.message) for w in caught] == [True]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interface(lambda t, z: torch.ones_like(z), z0, t, atol=1e-3, **settings)
        interface(lambda t, z: torch.ones_like(z), z0.double(), t, rtol=1e-8, atol=1e-3, **settings)
        for fixed in ("rk4", Euler()):
            interface(lambda t, z: torch.ones_like(z), z0, t, rtol=1e-12, **{**settings, "method": fixed})


def test_callbacks_of_our_methods_warn() -> None:
    class Field(Growth):
        def callback_step(self, t: Tensor, z: Tensor, dt: Tensor) -> None:
            raise AssertionError("called")

    with pytest.warns(UserWarning, match=r"ETD2RK\(\) does not support callbacks callback_step"):
        odeint(Field(), z0_of(), TIMES, method="etd2rk", rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_half_precision_with_time_in_float64(method: Method, dtype: torch.dtype) -> None:
    """z' = cos(t) z around t = 1000, where bfloat16 cannot tell the given times apart; states and gradients keep the dtype."""
    epsilon, t = torch.finfo(dtype).eps, 1000 + TIMES
    z0 = torch.tensor([0.5, 1.0, -1.0], dtype=dtype, requires_grad=True)
    exact = Growth.exact(z0.detach().double(), t, 1.0)
    runs: list[dict[str, Any]] = [{"options": {"step_size": 0.125}}]
    if method.error_order is not None:
        runs.append({"rtol": 8 * epsilon, "atol": 8 * epsilon})
    for settings in runs:
        found = odeint_adjoint(lambda t, z: torch.cos(t) * z, z0, t, method=method, adjoint_params=(), **settings)
        assert found.dtype is dtype
        discretisation = 0.1 if method.order == 1 else 0.01
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=discretisation + 40 * epsilon)
        (grad,) = torch.autograd.grad(found.sum(), z0)
        assert grad.dtype is dtype and torch.isfinite(grad).all() and grad.all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_complex_states(method: Method) -> None:
    z0 = torch.tensor([1.0, 0.5j], dtype=torch.complex128)
    found = odeint(lambda t, z: 1j * z, z0, TIMES, method=method, options={"step_size": 1e-2})
    exact = torch.exp(1j * TIMES)[:, None] * z0
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-2 if method.order == 1 else 1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y0": [1.0]}, TypeError, r"y0 must be a tensor or a tuple of tensors, got \[1\.0\]"),
        ({"y0": torch.ones(2, dtype=torch.int64)}, TypeError, "y0 must be floating-point or complex, got torch.int64"),
        ({"t": [0.0, 1.0]}, TypeError, "t must be a floating-point tensor"),
        ({"t": torch.tensor([0, 1])}, TypeError, "t must be a floating-point tensor"),
        ({"t": torch.zeros(2, 2)}, ValueError, r"t must be one dimensional and not empty, got shape \(2, 2\)"),
        ({"t": torch.zeros(0)}, ValueError, "t must be one dimensional and not empty"),
        ({"t": torch.tensor([0.0, 0.0])}, ValueError, "t must be finite and strictly increasing or decreasing"),
        ({"t": torch.tensor([0.0, 2.0, 1.0])}, ValueError, "strictly increasing or decreasing"),
        ({"t": torch.tensor([0.0, math.inf])}, ValueError, "t must be finite"),
        ({"rtol": (1e-3, 1e-3)}, TypeError, r"rtol must be a number, got \(0\.001, 0\.001\)"),
        ({"atol": -1.0}, ValueError, r"atol must be >= 0 and finite, got -1\.0"),
        ({"options": {"norm": linf}}, ValueError, r"options of ETD2RK\(\) here are first_step, .*; got 'norm'"),
        ({"options": {"step_size": 0.0}}, ValueError, r"step_size must be > 0 and finite, got 0\.0"),
        ({"options": {"step_size": 0.1, "grid_constructor": linf}}, ValueError, "mutually exclusive"),
        ({"options": {"step_size": 0.1, "first_step": 0.1}}, ValueError, "got 'first_step'"),
        ({"method": SlowManifold()}, ValueError, r"SlowManifold.*integrates the slow part .* use solve"),
        ({"method": "slow_manifold"}, ValueError, r"SlowManifold.*integrates the slow part"),
        ({"method": "etd9rk"}, ValueError, r"Invalid method 'etd9rk'\. Must be a Method or one of .*dopri5.*etd2rk"),
        ({"method": TorchDiffEq("dopri5")}, ValueError, r"Invalid method TorchDiffEq\('dopri5'\)"),
    ],
)
def test_our_methods_refuse(change: dict[str, Any], error: type[Exception], message: str) -> None:
    def func(t: Tensor, z: Tensor) -> Tensor:
        raise RuntimeError("evaluated")

    given: dict[str, Any] = {"y0": z0_of(), "t": TIMES, "method": "etd2rk", **change}
    with pytest.raises(error, match=message):
        odeint(func, given.pop("y0"), given.pop("t"), **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gradient": Checkpointed()},
            r"gradient=Checkpointed\(\) is for our methods; 'dopri5' has torchdiffeq's adjoint",
        ),
        ({"adjoint_method": "etd2rk"}, r"adjoint_method must be one of dopri8, .*, got 'etd2rk'"),
        (
            {"method": "etd2rk", "adjoint_rtol": 1e-3},
            r"adjoint_rtol=0\.001 is for torchdiffeq's methods; ETD2RK\(\) has",
        ),
        ({"method": "etd2rk", "adjoint_method": "dopri5"}, r"adjoint_method='dopri5' is for torchdiffeq's methods"),
        ({"method": "etd2rk", "adjoint_options": {}}, r"adjoint_options=\{\} is for torchdiffeq's methods"),
    ],
)
def test_odeint_adjoint_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        odeint_adjoint(Growth(), z0_of(), TIMES, **settings)
    with pytest.raises(TypeError, match="gradient must be"):
        odeint_adjoint(Growth(), z0_of(), TIMES, method="etd2rk", gradient="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"func must be an nn\.Module, or adjoint_params must be given"):
        odeint_adjoint(lambda t, z: z, z0_of(), TIMES, method="etd2rk")


@pytest.mark.parametrize("interface", [odeint, odeint_adjoint])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("method", ["etd2rk", AndersonAdams(), Heun()], ids=repr)
def test_an_output_kept_on_the_module_does_not_grow_memory(
    method: Any, restricted: bool, interface: Callable[..., Any]
) -> None:
    func, z0 = Growth(), z0_of().requires_grad_()
    settings: dict[str, Any] = {"adjoint_params": (func.a,)} if restricted and interface is odeint_adjoint else {}
    counts = []
    for _ in range(4):
        func.kept = interface(func, z0, TIMES, method=method, rtol=1e-3, atol=1e-3, **settings)
        func.kept.sum().backward()
        gc.collect()
        counts.append(sum(issubclass(type(found), Tensor) for found in gc.get_objects()))
    assert counts[1] == counts[2] == counts[3]
