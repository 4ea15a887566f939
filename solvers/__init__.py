"""Integrate and differentiate fast-slow systems eps dx/dt = f(t, x, y), dy/dt = g(t, x, y)."""

from solvers.adjoint import StoredAdjoint
from solvers.backsolve import Backsolve
from solvers.explicit import RK4, Dopri5, Euler, Heun
from solvers.exponential import ETD2RK, ETD3RK, ExponentialEuler
from solvers.gradients import Backprop, Checkpointed, Gradient
from solvers.integrate import check_scheme, integrate, solve
from solvers.manifold import SlowManifold
from solvers.method import Method, Step
from solvers.multirate import MRIGARK22, MultirateEuler
from solvers.multistep import AndersonAdams, ExponentialAdams
from solvers.odeint import odeint, odeint_adjoint, odeint_dense, odeint_event
from solvers.registry import METHODS, MULTIRATE, method_by_name
from solvers.rosenbrock import ROS2, ROS34PW2
from solvers.solution import SampleStats, Solution, SolveError, Stats, Status
from solvers.splitting import LieTrotter, Strang
from solvers.stabilised import RKC2, stability_interval
from solvers.stepping import AdaptiveSteps, FixedSteps, MeshSteps, Steps
from solvers.system import FastSlowSystem, FastTimeProblem, Part
from solvers.torchdiffeq_adapter import TorchDiffEq

__all__ = [
    "ETD2RK",
    "ETD3RK",
    "METHODS",
    "MRIGARK22",
    "MULTIRATE",
    "RK4",
    "RKC2",
    "ROS2",
    "ROS34PW2",
    "AdaptiveSteps",
    "AndersonAdams",
    "Backprop",
    "Backsolve",
    "Checkpointed",
    "Dopri5",
    "Euler",
    "ExponentialAdams",
    "ExponentialEuler",
    "FastSlowSystem",
    "FastTimeProblem",
    "FixedSteps",
    "Gradient",
    "Heun",
    "LieTrotter",
    "MeshSteps",
    "Method",
    "MultirateEuler",
    "Part",
    "SampleStats",
    "SlowManifold",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "Step",
    "Steps",
    "StoredAdjoint",
    "Strang",
    "TorchDiffEq",
    "check_scheme",
    "integrate",
    "method_by_name",
    "odeint",
    "odeint_adjoint",
    "odeint_dense",
    "odeint_event",
    "solve",
    "stability_interval",
]
