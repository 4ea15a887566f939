"""Methods by the names that configs and the command line use."""

from __future__ import annotations

from solvers.explicit import RK4, Dopri5, Euler, Heun
from solvers.exponential import ETD2RK, ETD3RK, ExponentialEuler
from solvers.manifold import SlowManifold
from solvers.method import Method
from solvers.multirate import MRIGARK22, MultirateEuler
from solvers.multistep import AndersonAdams, ExponentialAdams
from solvers.rosenbrock import ROS2, ROS34PW2
from solvers.splitting import LieTrotter, Strang
from solvers.stabilised import RKC2
from solvers.torchdiffeq_adapter import TorchDiffEq

METHODS: dict[str, type[Method]] = {
    "euler": Euler,
    "heun": Heun,
    "rk4": RK4,
    "dopri5": Dopri5,
    "exponential_euler": ExponentialEuler,
    "etd2rk": ETD2RK,
    "etd3rk": ETD3RK,
    "exponential_adams": ExponentialAdams,
    "anderson_adams": AndersonAdams,
    "lie": LieTrotter,
    "strang": Strang,
    "rkc2": RKC2,
    "ros2": ROS2,
    "ros34pw2": ROS34PW2,
    "slow_manifold": SlowManifold,
}


MULTIRATE: dict[str, type[MultirateEuler] | type[MRIGARK22]] = {
    "multirate_euler": MultirateEuler,
    "mri_gark22": MRIGARK22,
}


def method_by_name(name: str) -> Method | TorchDiffEq:
    """The method of that name: one of METHODS, "multirate_euler:M", "mri_gark22:M" (M micro-steps) or "torchdiffeq:NAME".

    Raises ValueError for any other.
    """
    kind, _, argument = name.partition(":")
    if kind == "torchdiffeq" and argument:
        return TorchDiffEq(argument)
    if kind in MULTIRATE and argument.isdecimal():
        return MULTIRATE[kind](int(argument))
    if name in METHODS:
        return METHODS[name]()
    known = [*METHODS, *(f"{kind}:M" for kind in MULTIRATE), "torchdiffeq:NAME"]
    raise ValueError(f"unknown method {name!r}; known: {', '.join(known)}")
