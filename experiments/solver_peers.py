"""Solvers that are compared: ours, torchdiffeq's and, where they are installed (the `peers` extra), torchode's and diffrax's.

A solver maps (problem, tolerance) to the end state and the number of evaluations of f; `gradient` gives the gradient too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchdiffeq
from torch import Tensor, nn

from experiments.solver_problem import HEADS, POOL, Problem
from solvers import (
    ETD2RK,
    ETD3RK,
    RKC2,
    ROS34PW2,
    AdaptiveSteps,
    AndersonAdams,
    Backprop,
    Checkpointed,
    Dopri5,
    ExponentialAdams,
    Gradient,
    Method,
    StoredAdjoint,
    solve,
)

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Solver:
    """`forward` returns (x, y) at t = 1 and the evaluations of f; `gradient` differentiates the problem's loss by its leaves."""

    name: str
    forward: Callable[[Problem, float], tuple[State, int]]
    gradient: Callable[[Problem, float], list[Tensor]]


def ours(method: Method, gradient: Gradient | None = None) -> Solver:
    """One of our methods; its name without defaults."""
    gradient = gradient or Backprop()

    def run(p: Problem, tolerance: float) -> tuple[State, int]:
        end = solve(
            p.field,
            p.x0,
            p.y0,
            t1=1.0,
            method=method,
            steps=AdaptiveSteps(tolerance, tolerance),
            gradient=gradient,
        )
        return (end.xs[-1], end.ys[-1]), end.stats.fast_evaluations

    name = type(method).__name__
    if isinstance(method, ExponentialAdams):
        name = f"{name}({method.order})"
    suffix = "" if isinstance(gradient, Backprop) else f" + {type(gradient).__name__}"
    return Solver(name + suffix, run, lambda p, tolerance: p.gradient(*run(p, tolerance)[0]))


class _SlowTimeRates(nn.Module):
    """dz/dt = (f / eps, g) for torchdiffeq, counted."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        self.field = p.field
        self.evaluations = 0

    def forward(self, t: Tensor, z: State) -> State:
        self.evaluations += 1
        return self.field.fast(t, *z) / self.field.epsilon, self.field.slow(t, *z)


def torchdiffeq_solver(name: str, adjoint: bool = False) -> Solver:
    """odeint with backprop through it, or odeint_adjoint."""

    def run(p: Problem, tolerance: float) -> tuple[State, int]:
        rates = _SlowTimeRates(p)
        times = torch.tensor([0.0, 1.0], dtype=torch.float64)
        start, settings = (p.x0, p.y0), {"rtol": tolerance, "atol": tolerance, "method": name}
        if adjoint:
            wanted = tuple(p.leaves()[2:])
            xs, ys = torchdiffeq.odeint_adjoint(rates, start, times, adjoint_params=wanted, **settings)
        else:
            xs, ys = torchdiffeq.odeint(rates, start, times, **settings)
        return (xs[-1], ys[-1]), rates.evaluations

    title = f"torchdiffeq {name}{' + odeint_adjoint' if adjoint else ''}"
    return Solver(title, run, lambda p, tolerance: p.gradient(*run(p, tolerance)[0]))


def torchode_solver() -> Solver:
    """torchode's dopri5 with backprop through it."""
    import torchode as to

    def run(p: Problem, tolerance: float) -> tuple[State, int]:
        split, counted = p.x0.numel(), [0]

        def rates(t: Tensor, z: Tensor) -> Tensor:
            counted[0] += 1
            x, y = z[:, :split].view_as(p.x0), z[:, split:].view_as(p.y0)
            f, g = p.field.fast(0.0, x, y) / p.field.epsilon, p.field.slow(0.0, x, y)
            return torch.cat([f.reshape(1, -1), g.reshape(1, -1)], 1)

        term = to.ODETerm(rates)
        control = to.IntegralController(atol=tolerance, rtol=tolerance, term=term)
        adjoint = to.AutoDiffAdjoint(to.Dopri5(term=term), control)
        z0 = torch.cat([p.x0.reshape(1, -1), p.y0.reshape(1, -1)], 1)
        times = torch.tensor([[0.0, 1.0]], dtype=z0.dtype)
        z = adjoint.solve(to.InitialValueProblem(y0=z0, t_eval=times)).ys[:, -1]
        return (z[:, :split].view_as(p.x0), z[:, split:].view_as(p.y0)), counted[0]

    return Solver("torchode dopri5", run, lambda p, tolerance: p.gradient(*run(p, tolerance)[0]))


def diffrax_solver() -> Solver:
    """diffrax's Dopri5, compiled by jax; the compilation is not timed. Its implicit solvers factorise a dense Jacobian, for
    whose compilation 24 GiB are not enough at this size."""
    import diffrax
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def rates(t: Any, z: Any, args: Any) -> Any:
        x, y = z
        w, u, epsilon = args
        return _jax_fast(jnp, jax, x, y, u, w) / epsilon, _jax_slow(jnp, jax, x, y, w)

    def end(z0: Any, args: Any, tolerance: float) -> Any:
        control = diffrax.PIDController(rtol=tolerance, atol=tolerance, pcoeff=0.3, icoeff=0.4)
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(rates),
            diffrax.Dopri5(),
            0.0,
            1.0,
            None,
            z0,
            args,
            stepsize_controller=control,
            max_steps=100_000,
            adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=1000),
        )
        x, y = found.ys
        return (x[-1], y[-1]), found.stats["num_steps"]

    forward = jax.jit(end)

    def loss(z0: Any, args: Any, tolerance: float, cotangents: Any) -> Any:
        (x, y), _ = end(z0, args, tolerance)
        return (cotangents[0] * x).sum() + (cotangents[1] * y).sum()

    backward = jax.jit(jax.grad(loss, argnums=(0, 1)))

    def arguments(p: Problem) -> tuple[Any, Any]:
        weights = {key: jnp.asarray(w.detach().numpy()) for key, w in p.field.layer.named_parameters()}
        z0 = tuple(jnp.asarray(z.detach().numpy()) for z in (p.x0, p.y0))
        return z0, (weights, jnp.asarray(p.field.u.detach().numpy()), jnp.asarray(p.epsilon))

    def run(p: Problem, tolerance: float) -> tuple[State, int]:
        (x, y), steps = jax.block_until_ready(forward(*arguments(p), tolerance))
        stages = 6  # the seventh is the next step's first
        return (torch.from_numpy(np.array(x)), torch.from_numpy(np.array(y))), int(steps) * stages

    def gradient(p: Problem, tolerance: float) -> list[Tensor]:
        cotangents = tuple(jnp.asarray(c.numpy()) for c in (p.x_cotangent, p.y_cotangent))
        z, (weights, u, _) = jax.block_until_ready(backward(*arguments(p), tolerance, cotangents))
        names = [key for key, _ in p.field.layer.named_parameters()]
        return [torch.from_numpy(np.array(value)) for value in (*z, u, *(weights[key] for key in names))]

    return Solver("diffrax Dopri5", run, gradient)


def _jax_fast(jnp: Any, jax: Any, x: Any, y: Any, u: Any, w: Any) -> Any:
    """f of `odeformer.fields` with layer norms, GELU and rotary positions, in jax."""
    phi = _jax_mlp(jax, _jax_norm(jnp, y, w["manifold_norm.weight"]), w, "manifold")
    lifted = jnp.repeat(jnp.pad(w["gate"] * phi, ((0, 0), (1, 0), (0, 0))), POOL, axis=1)[:, 1 : x.shape[1] + 1]
    attended = _jax_attention(jnp, jax, _jax_norm(jnp, x, w["attention_norm.weight"]), w, "attention")
    return attended + _jax_mlp(jax, _jax_norm(jnp, x, w["mlp_norm.weight"]), w, "mlp") + lifted - (x - u)


def _jax_slow(jnp: Any, jax: Any, x: Any, y: Any, w: Any) -> Any:
    """g, in jax."""
    attended = _jax_attention(jnp, jax, _jax_norm(jnp, y, w["slow_attention_norm.weight"]), w, "slow_attention")
    transformed = _jax_mlp(jax, _jax_norm(jnp, y, w["slow_mlp_norm.weight"]), w, "slow_mlp")
    return attended + transformed + x.reshape(1, -1, POOL, x.shape[-1]).mean(2) - y


def _jax_norm(jnp: Any, x: Any, weight: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return weight * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _jax_mlp(jax: Any, x: Any, w: Any, name: str) -> Any:
    return jax.nn.gelu(x @ w[f"{name}.hidden.weight"].T, approximate=False) @ w[f"{name}.out.weight"].T


def _jax_attention(jnp: Any, jax: Any, x: Any, w: Any, name: str) -> Any:
    length, width = x.shape[1:]
    depth = width // HEADS
    q, k, v = (x @ w[f"{name}.qkv.weight"].T).reshape(1, length, 3, HEADS, depth).transpose(2, 0, 3, 1, 4)
    angle = jnp.outer(jnp.arange(length), 10000.0 ** (-jnp.arange(0, depth, 2) / depth))
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def turned(z: Any) -> Any:
        a, b = z[..., 0::2], z[..., 1::2]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(z.shape)

    scores = turned(q) @ turned(k).swapaxes(-1, -2) / depth**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf), -1)
    return (weights @ v).swapaxes(1, 2).reshape(1, length, width) @ w[f"{name}.out.weight"].T


def all_solvers() -> list[Solver]:
    """Every solver that is installed."""
    found = [
        ours(AndersonAdams(4)),
        ours(AndersonAdams(4), Checkpointed()),
        ours(AndersonAdams(4), StoredAdjoint()),
        ours(ExponentialAdams(4)),
        ours(ETD3RK()),
        ours(ETD2RK()),
        ours(ROS34PW2()),
        ours(RKC2()),
        ours(Dopri5()),
        torchdiffeq_solver("dopri5"),
        torchdiffeq_solver("bosh3"),
        torchdiffeq_solver("dopri5", adjoint=True),
    ]
    return [*found, *_installed_peers()]


def _installed_peers() -> Iterator[Solver]:
    if importlib.util.find_spec("torchode"):
        yield torchode_solver()
    if importlib.util.find_spec("diffrax"):
        yield diffrax_solver()
