"""A drop-in for torchdiffeq: `odeint`, `odeint_adjoint`, `odeint_event` and `odeint_dense`, also with our methods.

What torchdiffeq's own methods do is torchdiffeq's (Chen et al., arXiv:1806.07366): they are called by their names, and so are
their options, norms, callbacks and errors. `method` may also be one of ours, as an object or by its name in
`solvers.registry` where torchdiffeq has none of that name: dz/dt = func(t, z) is then the fast part of a fast-slow system
with epsilon = 1 and no slow part. For our methods:

- `func.decay`, where func has it, is the decay lambda >= 0 of the split func = -lambda z + n: a number, a tensor that broadcasts
  to z, or for a tuple of states a tuple of these. Exponential methods integrate that part exactly.
- Error control follows rtol and atol, numbers here, where the method has an error estimate; options: first_step, min_step,
  max_step, max_num_steps.
- Fixed steps are taken with options={"step_size": h}, or by a method without error estimate: between two consecutive times
  of t the fewest equal steps of at most h, so that every time is a step's end; without step_size one step, as in
  torchdiffeq. With grid_constructor(func, y0, t) the steps end at its times, and at those of t.
- step_t and jump_t are times at which a step must end; there the method starts anew, and at those of jump_t func is not asked for
  the jump itself but for the nearest times before and after.
- func gets t in the state's dtype, but in float32 at least; time itself is kept in float64.
- A gradient with respect to t is the flow's, dz(t_i)/dt_i = func(t_i, z_i), and by the start dz/dt_0 = -dz/dz_0 func(t_0, z_0).
- Failures raise `SolveError`, bad arguments ValueError or TypeError. Callbacks of func are not called, which warns.

An rtol below the epsilon of the state's dtype warns, except torchdiffeq's default, which float32 states do not resolve; our
methods take a few epsilons for either.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torchdiffeq
from torch import Tensor, nn
from torchdiffeq._impl.adjoint import find_parameters
from torchdiffeq._impl.fixed_grid import FixedGridODESolver
from torchdiffeq._impl.odeint import SOLVERS

from solvers.general import DEFAULT_RTOL, Func, GeneralSolve, State
from solvers.gradients import Backprop, Checkpointed, Gradient
from solvers.method import Method
from solvers.registry import METHODS, MULTIRATE, method_by_name

Tolerance = float | Tensor | Iterable[float | Tensor]


def odeint(
    func: Func,
    y0: State,
    t: Tensor,
    *,
    rtol: Tolerance = DEFAULT_RTOL,
    atol: Tolerance = 1e-9,
    method: str | Method | None = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[[Tensor, Any], Tensor] | None = None,
) -> Any:
    """Solves dy/dt = func(t, y), y(t[0]) = y0, and differentiates through the solver, as `torchdiffeq.odeint` does.

    Args:
        func: of a scalar tensor t and the state; returns its rate, of the state's shape.
        y0: a tensor of any shape, or a tuple of tensors.
        t: (N,) times, strictly increasing or decreasing.
        rtol, atol: tolerances.
        method: None is torchdiffeq's "dopri5".
        options: of the method.
        event_fn: of (t, y); the solve then goes from t[0], in the direction of t[1], until it (or an entry of it) changes sign.

    Returns the states at t, (N, *shape) or a tuple of these; with event_fn the event's time, and the states at t[0] and then.
    """
    ours = _our_method(method)
    if ours is None:
        _warn_of(rtol, y0, method)
        return torchdiffeq.odeint(func, y0, t, rtol=rtol, atol=atol, method=method, options=options, event_fn=event_fn)
    return GeneralSolve.of(func, y0, t, rtol, atol, ours, options, Backprop()).run(y0, t, event_fn)


def odeint_adjoint(
    func: Func,
    y0: State,
    t: Tensor,
    *,
    rtol: Tolerance = DEFAULT_RTOL,
    atol: Tolerance = 1e-9,
    method: str | Method | None = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[[Tensor, Any], Tensor] | None = None,
    adjoint_rtol: Tolerance | None = None,
    adjoint_atol: Tolerance | None = None,
    adjoint_method: str | None = None,
    adjoint_options: dict[str, Any] | None = None,
    adjoint_params: Iterable[Tensor] | None = None,
    gradient: Gradient | None = None,
) -> Any:
    """`odeint` in the memory of an adjoint: `torchdiffeq.odeint_adjoint` for torchdiffeq's methods.

    Ours are differentiated by `gradient`, which is `Checkpointed()` by default, and have no adjoint equation: adjoint_rtol,
    adjoint_atol, adjoint_method and adjoint_options are refused. Gradients flow to y0, t and all that func depends on; with
    adjoint_params, to y0, t and these alone, and without second derivatives.
    Raises ValueError, as torchdiffeq does, where func is no module and adjoint_params is None.
    """
    ours = _our_method(method)
    if ours is None:
        if gradient is not None:
            raise ValueError(
                f"gradient={gradient!r} is for our methods; {method or 'dopri5'!r} has torchdiffeq's adjoint"
            )
        if adjoint_method is not None and adjoint_method not in SOLVERS:
            raise ValueError(f"adjoint_method must be one of {', '.join(SOLVERS)}, got {adjoint_method!r}")
        _warn_of(rtol, y0, method)
        return torchdiffeq.odeint_adjoint(
            func,
            y0,
            t,
            rtol=rtol,
            atol=atol,
            method=method,
            options=options,
            event_fn=event_fn,
            adjoint_rtol=adjoint_rtol,
            adjoint_atol=adjoint_atol,
            adjoint_method=adjoint_method,
            adjoint_options=adjoint_options,
            adjoint_params=adjoint_params,
        )
    gradient = Checkpointed() if gradient is None else gradient
    settings = (
        ("rtol", adjoint_rtol),
        ("atol", adjoint_atol),
        ("method", adjoint_method),
        ("options", adjoint_options),
    )
    for name, value in settings:
        if value is not None:
            raise ValueError(
                f"adjoint_{name}={value!r} is for torchdiffeq's methods; {ours!r} has gradient={gradient!r}"
            )
    if adjoint_params is None and not isinstance(func, nn.Module):
        raise ValueError(f"func must be an nn.Module, or adjoint_params must be given, got {func!r}")
    only = None if adjoint_params is None else tuple(p for p in adjoint_params if p.requires_grad)
    if only is None and getattr(func, "_is_replica", False):
        only = tuple(find_parameters(func))  # of DataParallel's replicas, which register none
    return GeneralSolve.of(func, y0, t, rtol, atol, ours, options, gradient).run(y0, t, event_fn, only)


def odeint_event(
    func: Func,
    y0: State,
    t0: Tensor,
    *,
    event_fn: Callable[[Tensor, Any], Tensor],
    reverse_time: bool = False,
    odeint_interface: Callable[..., Any] = odeint,
    **kwargs: Any,
) -> Any:
    """(time, states at t0 and then) of the event, with the gradient of the time by the implicit function theorem.

    As `torchdiffeq.odeint_event`; `odeint_interface` may be `odeint_adjoint`, and kwargs are its arguments.
    """
    return torchdiffeq.odeint_event(
        func, y0, t0, event_fn=event_fn, reverse_time=reverse_time, odeint_interface=odeint_interface, **kwargs
    )


def odeint_dense(
    func: Func,
    y0: Tensor,
    t0: Tensor,
    t1: Tensor,
    *,
    rtol: Tolerance = DEFAULT_RTOL,
    atol: Tolerance = 1e-9,
    method: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[[Tensor], Tensor]:
    """The solution over [t0, t1] as a function of the time, as `torchdiffeq.odeint_dense`, which has it for "dopri5"."""
    if _our_method(method) is not None:
        raise ValueError(f"odeint_dense has torchdiffeq's 'dopri5' alone, got method={method!r}")
    _warn_of(rtol, y0, method)
    return torchdiffeq.odeint_dense(func, y0, t0, t1, rtol=rtol, atol=atol, method=method, options=options)


def _our_method(method: object) -> Method | None:
    """Ours, by object or name; None for torchdiffeq's."""
    if isinstance(method, Method):
        return _refuse_constrained(method)
    if method is None or (isinstance(method, str) and method in SOLVERS):
        return None
    if isinstance(method, str) and (method in METHODS or method.partition(":")[0] in MULTIRATE):
        found = method_by_name(method)
        assert isinstance(found, Method)
        return _refuse_constrained(found)
    known = [*SOLVERS, *(name for name in METHODS if name not in SOLVERS), *(f"{name}:M" for name in MULTIRATE)]
    raise ValueError(f"Invalid method {method!r}. Must be a Method or one of {', '.join(known)}")


def _refuse_constrained(method: Method) -> Method:
    if type(method).integrates is not Method.integrates:
        raise ValueError(f"{method!r} integrates the slow part of a fast-slow system alone; odeint has none: use solve")
    return method


def _warn_of(rtol: Tolerance, y0: object, method: Any) -> None:
    """Warns, at the caller's caller, of an rtol that error control by torchdiffeq cannot meet in the state's dtype."""
    if issubclass(SOLVERS[method or "dopri5"], FixedGridODESolver):
        return
    tensors = [y for y in (y0 if isinstance(y0, tuple) else (y0,)) if isinstance(y, Tensor)]
    floats = [y.dtype for y in tensors if y.is_floating_point() or y.is_complex()]
    rtols = [rtol] if isinstance(rtol, int | float | Tensor) else list(rtol)
    smallest = min(
        (float(torch.as_tensor(tolerance, dtype=torch.float64).min()) for tolerance in rtols), default=math.inf
    )
    for dtype in floats[:1]:
        epsilon = torch.finfo(dtype).eps
        if smallest < epsilon and smallest != DEFAULT_RTOL:
            message = f"rtol={smallest:g} is below the epsilon {epsilon:.3g} of {dtype}: no step may be short enough"
            warnings.warn(message, UserWarning, stacklevel=3)
