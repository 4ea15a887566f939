"""What explicit methods can do on one layer of a trained model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from odeformer.discretisation import to_discrete
from odeformer.fields import FastSlowField
from odeformer.model import FastSlowLM
from odeformer.stability.limits import Limit, Rest, explicit_limits, settle
from odeformer.stability.spectra import fast_spectrum
from solvers import RK4, Euler, Method


@dataclass(frozen=True)
class StabilityStudy:
    """What explicit methods can do on one layer's field, for plain words, figures and JSON."""

    layer: int
    tokens: int
    steps: int
    """Steps of each long run."""
    leak: float
    at_input: complex
    """Leftmost eigenvalue of J where the layer starts."""
    settled: bool
    fast_time: float
    """Fast time after which the flow was at rest, or was given up."""
    restless: list[int]
    """Layers tried before, or this one, whose flow did not come to rest."""
    note: str
    """What was found, or why nothing could be measured."""
    at_rest: complex | None = None
    largest_at_rest: complex | None = None
    residual: float | None = None
    """Of the eigenvalue at rest."""
    limits: list[Limit] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; complex numbers as [real, imaginary]."""
        return _plain(dataclasses.asdict(self))


def study_layer(
    model: FastSlowLM,
    tokens: Tensor,
    layer: int | None = None,
    *,
    epsilons: Sequence[float] = (1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256),
    methods: Sequence[Method] | None = None,
    steps: int = 200,
    rounds: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> StabilityStudy:
    """Lets a layer run on from the state that the discrete model gives it for tokens (1, T), and measures explicit methods.

    The model applies a layer for a fast time of `horizon` only; here its field acts until it settles, since stability is
    a statement about many steps.

    Args:
        layer: None takes the deepest layer that settles.
        methods: explicit Runge-Kutta methods; None: Euler and RK4.
        steps, rounds: of `explicit_limits`.
        progress: is told what is being done.

    Raises ValueError for tokens of another shape or a layer that does not exist.
    """
    if tokens.dim() != 2 or tokens.shape[0] != 1:
        raise ValueError(f"tokens must be (1, T), got {tuple(tokens.shape)}")
    if layer is not None and not 0 <= layer < model.config.n_layer:
        raise ValueError(f"layer must lie in [0, {model.config.n_layer}), got {layer}")
    twin, leak = to_discrete(copy.deepcopy(model)).double().requires_grad_(False), model.config.leak
    x, y, u = twin.start(tokens)
    inputs = []
    for block in twin.depth():
        inputs.append((FastSlowField(block.layer, u), x, y))
        x, y = block(x, y, u)
    restless: list[int] = []
    for chosen in [layer] if layer is not None else reversed(range(model.config.n_layer)):
        progress(f"layer {chosen}: following the flow until it settles")
        rest = settle(*inputs[chosen], rate=leak or 0.1, attempts=8 if leak else 1)
        if leak == 0 or rest.settled:
            break
        restless.append(chosen)
    field = inputs[chosen][0]
    study = StabilityStudy(
        layer=chosen,
        tokens=tokens.shape[1],
        steps=steps,
        leak=leak,
        at_input=fast_spectrum(*inputs[chosen]).leftmost,
        settled=rest.settled and leak > 0,
        restless=restless,
        fast_time=rest.fast_time,
        note=_why_not(leak, rest, restless),
    )
    if not study.settled:
        return study
    progress("spectrum at rest")
    spectrum = fast_spectrum(field, rest.x, rest.y)
    single = copy.deepcopy(field.layer).float()
    push = 0.01 * rest.x.norm() * spectrum.direction
    limits = explicit_limits(
        lambda count: FastSlowField(single, u.float().expand(count, *u.shape[1:])),
        dataclasses.replace(rest, x=rest.x.float(), y=rest.y.float()),
        push.float(),
        eigenvalues=(spectrum.leftmost, spectrum.largest),
        decay=leak,
        slow_decay=model.config.relaxation,
        methods=methods or (Euler(), RK4()),
        epsilons=epsilons,
        steps=steps,
        rounds=rounds,
        progress=progress,
    )
    return dataclasses.replace(
        study,
        note=f"Layer {chosen} is at rest after a fast time of {rest.fast_time:.0f}; mu = {_number(spectrum.leftmost)} there."
        + (f" Layers that do not come to rest: {', '.join(map(str, restless))}." if restless else ""),
        at_rest=spectrum.leftmost,
        largest_at_rest=spectrum.largest,
        residual=spectrum.leftmost_residual,
        limits=limits,
    )


def _why_not(leak: float, rest: Rest, restless: Sequence[int]) -> str:
    if leak == 0:
        return (
            "Without a leak (lambda = 0) the fast subsystem does not attract: the state keeps growing, so there is no state of "
            "rest, and no step limit to measure."
        )
    return (
        f"No state of rest in layers {', '.join(map(str, restless))}: the last one tried still moved by {rest.speed:.1e} of its "
        f"size per unit after a fast time of {rest.fast_time:.0f}. So no step limit is reported."
    )


def _number(value: complex) -> str:
    return f"{value.real:.3g}" if abs(value.imag) < 1e-9 else f"{value.real:.3g} {value.imag:+.3g}i"


def _plain(value: Any) -> Any:
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
