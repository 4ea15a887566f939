"""A general initial value problem dz/dt = func(t, z) with a method of ours: a fast-slow system with epsilon = 1 and no slow part.

What `solvers.odeint` does where the method is not torchdiffeq's; its docstring says how.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solvers.gradients import Backprop, Gradient
from solvers.integrate import check_scheme, solve
from solvers.method import Method
from solvers.stepping import DEFAULT_MAX_STEPS, ROUND_OFFS, AdaptiveSteps, MeshSteps, Steps
from solvers.system import FastSlowSystem

State = Tensor | tuple[Tensor, ...]
Func = Callable[[Tensor, Any], Any]

DEFAULT_RTOL = 1e-7
"""torchdiffeq's."""
BOUNDS = ("first_step", "min_step", "max_step")
COMMON = ("max_num_steps", "step_t", "jump_t")
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")


class GeneralODE(FastSlowSystem):
    """dz/dt = func(t, z) as a fast part alone; z is flat where the state is a tuple of tensors of the given shapes."""

    def __init__(self, func: Func, shapes: tuple[torch.Size, ...] | None) -> None:
        super().__init__()
        self.func = func
        self.shapes = shapes
        self.first, self.last = -math.inf, math.inf
        """Times before and after which func is not asked."""

    @property
    def fast_decay(self) -> float | Tensor:  # type: ignore[override]
        decay = getattr(self.func, "decay", 0.0)
        if isinstance(decay, tuple) and self.shapes is not None:
            return self.flat([torch.as_tensor(d).expand(s) for d, s in zip(decay, self.shapes, strict=True)])
        if not isinstance(decay, int | float | Tensor):
            raise TypeError(f"func.decay must be a number, a tensor, or for a tuple of states a tuple, got {decay!r}")
        return decay

    def fast(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.rate(float(t), x)

    def slow(self, t: float | Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    def rate(self, t: float, z: Tensor) -> Tensor:
        t = min(max(t, self.first), self.last)
        return self.flat(self.func(time_for(t, z), self.unflat(z))).to(z.dtype)

    def flat(self, state: Any) -> Tensor:
        return state if self.shapes is None else torch.cat([part.reshape(-1) for part in state])

    def unflat(self, z: Tensor) -> Any:
        """Also of states stacked along leading dimensions."""
        if self.shapes is None:
            return z
        parts = z.split([shape.numel() for shape in self.shapes], dim=-1)
        return tuple(part.reshape((*z.shape[:-1], *shape)) for part, shape in zip(parts, self.shapes, strict=True))

    def between(self, first: float, last: float) -> GeneralODE:
        """The same, asked between these times only."""
        other = copy.copy(self)
        other.first, other.last = first, last
        return other


def time_for(t: float, z: Tensor) -> Tensor:
    """t in z's real dtype, in float32 at least."""
    return torch.full((), t, dtype=_time_dtype(z.dtype), device=z.device)


def _time_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype.to_real(), torch.float32)


@dataclass
class GeneralSolve:
    """One initial value problem, its method and its settings."""

    system: GeneralODE
    method: Method
    rtol: float
    atol: float
    options: dict[str, Any]
    gradient: Gradient

    @classmethod
    def of(
        cls,
        func: Func,
        y0: State,
        t: Tensor,
        rtol: Any,
        atol: Any,
        method: Method,
        options: dict[str, Any] | None,
        gradient: Gradient,
    ) -> GeneralSolve:
        """Refuses, before any work, what does not fit together. Warns of callbacks, and of an rtol below round-off."""
        shapes, dtype = _check_state(y0)
        _check_times(t)
        this = cls(GeneralODE(func, shapes), method, _number(rtol), _number(atol), dict(options or {}), gradient)
        this._check_options()
        check_scheme(method, this._steps([0.0, 1.0]), gradient)
        _ = this.system.fast_decay  # refuses what is none
        epsilon = torch.finfo(dtype).eps
        if not this.fixed and this.rtol < epsilon:
            given, this.rtol = this.rtol, ROUND_OFFS * epsilon
            if given != DEFAULT_RTOL:
                message = f"rtol={given:g} is below the epsilon {epsilon:.3g} of {dtype}: the solve takes rtol={this.rtol:.3g}"
                warnings.warn(message, UserWarning, stacklevel=3)
        callbacks = sorted(name for name in CALLBACKS if hasattr(func, name))
        if callbacks:
            warnings.warn(f"{method!r} does not support callbacks {', '.join(callbacks)}", UserWarning, stacklevel=3)
        return this

    @property
    def fixed(self) -> bool:
        given = self.options.keys() & {"step_size", "grid_constructor"}
        return self.method.error_order is None or bool(given)

    def run(
        self, y0: State, t: Tensor, event_fn: Callable[..., Tensor] | None, only: tuple[Tensor, ...] | None = None
    ) -> Any:
        """The states at t, or the event's time with those at t[0] and there. `only`: the parameters that get a gradient."""
        z0 = self.system.flat(y0)
        if event_fn is None:
            return self.system.unflat(self._states(z0, t, only))
        before, event = self._event(event_fn, z0.detach(), t)
        event_t = t.new_tensor(event)
        if event_t == t[0]:
            return event_t, self.system.unflat(torch.stack([z0, z0]))
        times = [t[0], *([t.new_tensor(before)] if t[0] != before else []), event_t]
        return event_t, self.system.unflat(self._states(z0, torch.stack(times), only)[[0, -1]])

    def _states(self, z0: Tensor, t: Tensor, only: tuple[Tensor, ...] | None) -> Tensor:
        """(N, *z0.shape) at the times t."""
        if only is not None and torch.is_grad_enabled():
            return _Only.apply(lambda z0, t: self._states(z0, t, None), z0, t, *only)
        times = t.tolist()
        if not t.requires_grad:
            return torch.stack([z0, *self._march(z0, times)])
        moved = (t - t.detach()).to(z0.dtype)  # zero, with the derivative of t
        start = z0 - moved[0] * self.system.rate(times[0], z0)
        zs = self._march(start, times)
        ends = [z + move * self.system.rate(time, z) for z, move, time in zip(zs, moved[1:], times[1:], strict=True)]
        return torch.stack([z0, *ends])

    def _march(self, z: Tensor, times: list[float]) -> list[Tensor]:
        """The states at times[1:]; the solve is cut, and starts anew, at the times of step_t and jump_t."""
        start, end = times[0], times[-1]
        jumps = self._option_times("jump_t", start, end)
        cuts = jumps | self._option_times("step_t", start, end)
        found: list[Tensor] = []
        for a, b in pairwise(sorted({start, *cuts, end}, reverse=end < start)):
            wanted = [time for time in times[1:] if min(a, b) <= time <= max(a, b) and time != a]
            first, last = (_after(a, b, z) if a in jumps else a), (_after(b, a, z) if b in jumps else b)
            system = self.system.between(min(first, last), max(first, last)) if jumps else self.system
            states = self._piece(system, z, [a, *wanted] if b in wanted else [a, *wanted, b])
            found.extend(states[: len(wanted)])
            z = states[-1]
        return found

    def _piece(self, system: GeneralODE, z: Tensor, times: list[float]) -> list[Tensor]:
        """The states at times[1:], in one solve."""
        steps = self._steps(self._grid(z, times) if self.fixed else times)
        solution = solve(
            system,
            z,
            z.new_zeros(0),
            t0=times[0],
            t1=times[-1],
            method=self.method,
            steps=steps,
            gradient=self.gradient,
            save_at=times[1:],
            max_steps=self.options.get("max_num_steps", steps.n if isinstance(steps, MeshSteps) else DEFAULT_MAX_STEPS),
        )
        return list(solution.xs)

    def _steps(self, grid: list[float]) -> Steps:
        if self.fixed:
            return MeshSteps(tuple(time - grid[0] for time in grid[1:]))
        bounds = {name: _number(self.options[name]) for name in BOUNDS if self.options.get(name) is not None}
        return AdaptiveSteps(self.rtol, self.atol, **bounds)

    def _grid(self, z: Tensor, times: list[float]) -> list[float]:
        """Where fixed steps end, the given times among it."""
        start, end = times[0], times[-1]
        constructor, size = self.options.get("grid_constructor"), self.options.get("step_size")
        if constructor is not None:
            t = torch.tensor(times, dtype=torch.float64, device=z.device)
            built = constructor(self.system.func, self.system.unflat(z), t).tolist()
            return sorted(
                {*times, *(time for time in built if min(start, end) < time < max(start, end))}, reverse=end < start
            )
        grid = [start]
        for a, b in pairwise(times):
            # A length that is a multiple of the step size up to round-off, in a t of single precision as well, is one.
            n = 1 if size is None else max(1, math.ceil(abs(b - a) / size * (1 - 1e-6)))
            grid += [*(a + (b - a) * (i / n) for i in range(1, n)), b]
        return grid

    @torch.no_grad()
    def _event(self, event_fn: Callable[..., Tensor], z: Tensor, t: Tensor) -> tuple[float, float]:
        """The end of a step after which an entry of event_fn changes sign first, and when it does, bisected to within atol."""
        if len(t) != 2:
            raise ValueError(f"t must be a start and a direction, of length 2, beside event_fn; got length {len(t)}")
        size = self.options.get("step_size")
        if self.fixed and size is None:
            raise ValueError(f"event_fn with fixed steps of {self.method!r} needs a step_size in options")
        start, window = t[0].item(), (t[1] - t[0]).item()
        window = window if size is None else math.copysign(size, window)

        def value(time: float, z: Tensor) -> Tensor:
            return event_fn(time_for(time, z), self.system.unflat(z))

        signs = torch.sign(value(start, z))
        if (signs == 0).any():
            return start, start
        watch = _Watch(lambda time, z: bool((signs * value(time, z) <= 0).any()), self.method, start, z)
        b = replace(self, gradient=watch)._passed(watch, window)
        a = watch.t
        while abs(b - a) > max(self.atol, 1e-15 * abs(b)):
            middle = (a + b) / 2
            passed = watch.passed(middle, self._march(watch.z, [watch.t, middle])[-1])
            a, b = (a, middle) if passed else (middle, b)
        return watch.t, (a + b) / 2

    def _passed(self, watch: _Watch, window: float) -> float:
        """The end of a step by which the event has passed; `watch` has the one before. Marches over longer and longer windows."""
        limit = self.options.get("max_num_steps", DEFAULT_MAX_STEPS)
        try:
            while watch.steps < limit and math.isfinite(watch.t + window):
                end = watch.t + window
                watch.look(end, self._march(watch.z, [watch.t, end])[-1])
                window *= 2
        except _Passed as passed:
            return passed.t
        raise RuntimeError(f"no event in {watch.steps} steps, up to t = {watch.t:.6g}")

    def _option_times(self, name: str, start: float, end: float) -> set[float]:
        """The times of an option, as torchdiffeq takes them a tensor, strictly within the solve."""
        given = self.options.get(name)
        times = given.tolist() if isinstance(given, Tensor) else list(given or [])
        return {time for time in times if min(start, end) < time < max(start, end)}

    def _check_options(self) -> None:
        allowed = (*(("step_size", "grid_constructor") if self.fixed else BOUNDS), *COMMON)
        for name in self.options:
            if name not in allowed:
                raise ValueError(f"options of {self.method!r} here are {', '.join(allowed)}; got {name!r}")
        if {"step_size", "grid_constructor"} <= self.options.keys():
            raise ValueError("step_size and grid_constructor are mutually exclusive")
        if self.options.get("step_size") is not None:
            size = self.options["step_size"] = _number(self.options["step_size"])
            if not 0 < size < math.inf:
                raise ValueError(f"step_size must be > 0 and finite, got {size!r}")


class _Passed(Exception):
    """The event has passed by the time t."""

    def __init__(self, t: float) -> None:
        super().__init__()
        self.t = t


class _Watch(Backprop):
    """Looks at the state before every step of `method`; t and z are the latest before the event."""

    def __init__(self, passed: Callable[[float, Tensor], bool], method: Method, t: float, z: Tensor) -> None:
        self.passed, self.method, self.t, self.z = passed, method, t, z
        self.steps = 0

    def look(self, t: float, z: Tensor) -> None:
        if self.passed(t, z):
            raise _Passed(t)
        self.t, self.z = t, z

    def wrap(self, step: Any, system: Any) -> Any:
        if step != self.method.step:
            return step

        def watched(problem: Any, tau: float, h: float, x: Tensor, *rest: Any) -> Any:
            self.steps += 1
            self.look(float(problem.slow_time(tau)), x)
            return step(problem, tau, h, x, *rest)

        return watched


class _Only(torch.autograd.Function):
    """compute(z0, t), with gradients to z0, t and the given parameters alone, whatever else it depends on."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor, Tensor], Tensor], z0: Tensor, t: Tensor, *only: Tensor) -> Tensor:
        z0_leaf, t_leaf = (leaf.detach().requires_grad_(leaf.requires_grad) for leaf in (z0, t))
        with torch.enable_grad():
            ctx.value = compute(z0_leaf, t_leaf)
        ctx.inputs = (z0_leaf, t_leaf, *only)
        return ctx.value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [leaf for leaf in ctx.inputs if leaf.requires_grad]
        found = iter(
            torch.autograd.grad(ctx.value, wanted, grad, retain_graph=True, allow_unused=True, materialize_grads=True)
        )
        return (None, *(next(found) if leaf.requires_grad else None for leaf in ctx.inputs))


def _after(t: float, towards: float, z: Tensor) -> float:
    """The first time after t, in the dtype that func gets."""
    a, b = (torch.tensor(time, dtype=_time_dtype(z.dtype)) for time in (t, towards))
    return float(torch.nextafter(a, b))


def _number(value: Any) -> Any:
    """A number given as a tensor; what is none is refused by whom it is for."""
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_state(y0: Any) -> tuple[tuple[torch.Size, ...] | None, torch.dtype]:
    """(shapes, or None for a tensor; dtype of the flat state)."""
    parts = y0 if isinstance(y0, tuple) else (y0,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"y0 must be a tensor or a tuple of tensors, got {y0!r}")
    dtype = parts[0].dtype
    for part in parts:
        if not (part.is_floating_point() or part.is_complex()):
            raise TypeError(f"y0 must be floating-point or complex, got {part.dtype}")
        dtype = torch.promote_types(dtype, part.dtype)
    return (tuple(part.shape for part in parts) if isinstance(y0, tuple) else None), dtype


def _check_times(t: Any) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise TypeError(f"t must be a floating-point tensor, got {t!r}")
    if t.ndim != 1 or not len(t):
        raise ValueError(f"t must be one dimensional and not empty, got shape {tuple(t.shape)}")
    steps = t.detach().diff()
    if not torch.isfinite(t).all() or not ((steps > 0).all() or (steps < 0).all()):
        raise ValueError(f"t must be finite and strictly increasing or decreasing, got {t!r}")
