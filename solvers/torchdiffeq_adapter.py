"""torchdiffeq's solvers (Chen et al., arXiv:1806.07366) as methods of ours, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torchdiffeq
from torch import Tensor, nn
from torchdiffeq._impl.fixed_grid import FixedGridODESolver
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.scipy_wrapper import ScipyWrapperODESolver

from solvers.backsolve import Backsolve, warn_of_growth
from solvers.closure import Closure
from solvers.gradients import Backprop, Gradient
from solvers.method import Pair
from solvers.solution import Stats, Status
from solvers.stepping import AdaptiveSteps, FixedSteps, Steps, Trajectory
from solvers.system import FastTimeProblem

# torchdiffeq's names for what `Steps` and max_steps decide here.
_STEP_OPTIONS = ("first_step", "min_step", "max_step", "max_num_steps", "step_size", "grid_constructor")


class TorchDiffEq:
    """One of torchdiffeq's solvers, over whole spans, in fast time.

    Fixed-grid solvers take `FixedSteps`, the others `AdaptiveSteps`; the gradient is `Backprop` through the solver, or
    `Backsolve`, torchdiffeq's adjoint. `options` are torchdiffeq's, except those that `Steps` decides. After a failure no state
    is known but the first; and where torchdiffeq's own rules differ from ours they hold: it accepts any finite step of min_step,
    it does not step back from a non-finite one, and it steps past the end and interpolates.
    Raises ValueError for a name that the installed torchdiffeq does not have, and for SciPy's solvers, which it does not
    differentiate.
    """

    def __init__(self, name: str, **options: Any) -> None:
        names = [known for known, solver in SOLVERS.items() if not issubclass(solver, ScipyWrapperODESolver)]
        if name not in names:
            raise ValueError(f"torchdiffeq has no differentiable method {name!r}; it has {', '.join(sorted(names))}")
        for option in _STEP_OPTIONS:
            if option in options:
                raise ValueError(f"option {option}={options[option]!r} is set by steps and max_steps, not here")
        self.name = name
        self.options = options
        self.fixed_grid = issubclass(SOLVERS[name], FixedGridODESolver)

    def __repr__(self) -> str:
        return f"TorchDiffEq({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options.items())])})"

    def check(self, steps: Steps, gradient: Gradient | None) -> None:
        """Raises ValueError where steps or gradient do not fit this solver."""
        if isinstance(steps, FixedSteps) != self.fixed_grid:
            wanted = FixedSteps if self.fixed_grid else AdaptiveSteps
            raise ValueError(f"{self!r} takes {wanted.__name__}, got {steps!r}")
        if gradient is not None and not isinstance(gradient, Backprop | Backsolve):
            raise ValueError(
                f"{self!r} integrates whole spans, so its gradient is Backprop() or Backsolve(), got {gradient!r}"
            )

    def run(
        self,
        problem: FastTimeProblem,
        steps: Steps,
        span: float,
        gradient: Gradient,
        taus: tuple[float, ...],
        max_steps: int,
        x0: Tensor,
        y0: Tensor,
    ) -> Trajectory:
        """Integrates over the fast time [0, span], saving at `taus`."""
        if span == 0:
            return Trajectory(x0, y0, [(x0, y0)] * len(taus))
        grid = sorted({0.0, *taus, span}, reverse=span < 0)
        times = torch.tensor(grid, dtype=torch.float64, device=x0.device)
        field = (_Rates if self.fixed_grid else _RatesOfAttempts)(problem, max_steps)
        options, tolerances = self._settings(steps, span, interpolates=len(grid) > 2)
        settings: dict[str, Any] = {"method": self.name, "options": options, **tolerances}
        backsolve = isinstance(gradient, Backsolve) and torch.is_grad_enabled()
        try:
            if backsolve:
                xs, ys = self._backsolved(problem, field, (x0, y0), times, settings, max_steps)
            else:
                xs, ys = torchdiffeq.odeint(field, (x0, y0), times, **settings)
        except _StepLimitReached:
            return Trajectory(x0, y0, [], Status.STEP_LIMIT, field.tau)
        except AssertionError as error:
            status = field.status_of(str(error))
            if status is None:
                raise
            problem.stats.steps -= 1  # torchdiffeq asserts after its callback, before the attempt
            return Trajectory(x0, y0, [], status, field.tau)
        finally:
            problem.counting = False
        if backsolve:
            warn_of_growth(problem, span, (x0, y0), (xs[-1], ys[-1]))
        index = {tau: i for i, tau in enumerate(grid)}
        return Trajectory(xs[-1], ys[-1], [(xs[index[tau]], ys[index[tau]]) for tau in taus], Status.SUCCESS, span)

    def _backsolved(
        self,
        problem: FastTimeProblem,
        field: _Rates,
        start: Pair,
        times: Tensor,
        settings: dict[str, Any],
        max_steps: int,
    ) -> tuple[Tensor, Tensor]:
        """`odeint_adjoint` with the tensors that the field reads at the start; in its backward pass they are read again."""
        closure = Closure(problem.system, times.device)
        with closure.watched():
            replace(problem, counting=False).rates(0.0, *(part.detach() for part in start))
        backward = dict(settings["options"])
        if self.fixed_grid:
            mesh = settings["options"]["grid_constructor"](field, start, times)

            def reversed_mesh(func: Any, state: Any, t: Tensor) -> Tensor:
                """The forward mesh within [t[1], t[0]], backwards."""
                low, high = sorted((float(t[0]), float(t[-1])))
                inner = [m for m in mesh.tolist() if low < m < high]
                between = sorted(inner, reverse=bool(t[-1] < t[0]))
                return torch.tensor([float(t[0]), *between, float(t[-1])], dtype=t.dtype, device=t.device)

            backward["grid_constructor"] = reversed_mesh
        else:
            backward["max_num_steps"] = max_steps
            backward.pop("first_step", None)
        return torchdiffeq.odeint_adjoint(
            field,
            start,
            times,
            adjoint_params=tuple(closure.sources.values()),
            adjoint_options=backward,
            **settings,
        )

    def _settings(self, steps: Steps, span: float, interpolates: bool) -> tuple[dict[str, Any], dict[str, float]]:
        """torchdiffeq's options and tolerances."""
        if isinstance(steps, FixedSteps):
            mesh = [0.0, *steps.ends(span)]
            return {
                "interp": "cubic" if interpolates else "linear",  # which returns the last state itself
                "grid_constructor": lambda func, state, t: torch.tensor(mesh, dtype=t.dtype, device=t.device),
                **self.options,
            }, {}
        options = {**self.options, "min_step": steps.min_step, "max_step": steps.max_step}
        if steps.first_step is not None:
            options["first_step"] = steps.first_step
        return options, {"rtol": steps.rtol, "atol": steps.atol}


class _StepLimitReached(Exception):
    pass


class _Rates(nn.Module):
    """The problem as torchdiffeq's func(tau, state), with a callback that counts steps. A fixed grid accepts every step."""

    def __init__(self, problem: FastTimeProblem, max_steps: int) -> None:
        super().__init__()
        self.problem = problem
        self.max_steps = max_steps
        self.last: Pair | None = None
        self.step_start: Tensor | None = None

    def forward(self, tau: Tensor, state: Pair) -> Pair:
        self.last = self.problem.rates(tau, *state)
        return self.last

    def callback_step(self, tau: Tensor, state: Any, dt: Tensor) -> None:
        stats = self.problem.stats
        self.step_start = tau
        if stats.steps == self.max_steps:
            raise _StepLimitReached
        stats.steps += 1
        self._count_accepted(stats)

    def _count_accepted(self, stats: Stats) -> None:
        stats.accepted += 1

    @property
    def tau(self) -> float:
        """Start of the last attempted step."""
        return 0.0 if self.step_start is None else float(self.step_start.detach())

    def status_of(self, message: str) -> Status | None:
        """What torchdiffeq's assertion means; None for an assertion of the field. A nan rate makes the step size underflow."""
        if "non-finite values in state" in message:
            return Status.NON_FINITE
        if "underflow in dt" not in message:
            return None
        finite = self.last is not None and all(bool(torch.isfinite(rate).all()) for rate in self.last)
        return Status.STEP_UNDERFLOW if finite else Status.NON_FINITE


class _RatesOfAttempts(_Rates):
    """For the solvers that may reject a step; others warn about the callbacks."""

    def _count_accepted(self, stats: Stats) -> None:
        pass

    def callback_accept_step(self, tau: Tensor, state: Any, dt: Tensor) -> None:
        self.problem.stats.accepted += 1

    def callback_reject_step(self, tau: Tensor, state: Any, dt: Tensor) -> None:
        self.problem.stats.rejected += 1
