"""Between `FlowConfig`, which a YAML file can hold, and the solver objects that a continuous model is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from odeformer.blocks import DiscreteBlock, FlowBlock
from odeformer.config import FlowConfig
from odeformer.discretisation import to_continuous, to_discrete
from odeformer.model import FastSlowLM
from solvers import (
    METHODS,
    MULTIRATE,
    AdaptiveSteps,
    Backprop,
    Backsolve,
    Checkpointed,
    FixedSteps,
    Gradient,
    StoredAdjoint,
    TorchDiffEq,
    check_scheme,
    method_by_name,
)

GRADIENTS: dict[str, type[Gradient]] = {
    "backprop": Backprop,
    "checkpointed": Checkpointed,
    "stored_adjoint": StoredAdjoint,
    "backsolve": Backsolve,
}


def flow_from_config(flow: FlowConfig) -> dict[str, Any]:
    """The keyword arguments method, steps and gradient of `to_continuous`.

    Raises ValueError for an unknown method and for parts that do not fit together.
    """
    try:
        method = method_by_name(flow.method)
        steps = AdaptiveSteps(flow.rtol, flow.atol) if flow.steps is None else FixedSteps(flow.steps)
        gradient = GRADIENTS[flow.gradient]()
        check_scheme(method, steps, gradient)
    except (ValueError, TypeError) as error:
        raise ValueError(f"flow: {error}") from error
    return {"method": method, "steps": steps, "gradient": gradient}


def scheme_of(model: FastSlowLM) -> dict[str, Any]:
    """How the model runs, as plain values: {"scheme": "discrete" | "multirate" | "continuous", "flow": dict | None}.

    Raises ValueError for a flow that `FlowConfig` cannot express, such as a solver with options of its own.
    """
    block = model.blocks[0]
    if isinstance(block, DiscreteBlock):
        return {"scheme": "multirate" if block.multirate else "discrete", "flow": None}
    if not isinstance(block, FlowBlock):
        raise TypeError(f"the model's blocks must be DiscreteBlock or FlowBlock, got {type(block).__name__}")
    gradient = next((name for name, kind in GRADIENTS.items() if type(block.gradient) is kind), "backprop")
    settings: dict[str, Any] = {"method": _name_of(block.method), "gradient": gradient}
    if isinstance(block.steps, FixedSteps):
        settings["steps"] = block.steps.n
    else:
        settings |= {"steps": None, "rtol": float(block.steps.rtol), "atol": float(block.steps.atol)}
    flow = FlowConfig(**settings)
    # repr covers every setting, also of torchdiffeq's solvers, which do not compare by value.
    if {name: repr(part) for name, part in flow_from_config(flow).items()} != {
        "method": repr(block.method),
        "steps": repr(block.steps),
        "gradient": repr(block.gradient or Backprop()),
    }:
        raise ValueError(f"a FlowConfig cannot express {block.method!r} with {block.steps!r} and {block.gradient!r}")
    return {"scheme": "continuous", "flow": dataclasses.asdict(flow)}


def with_scheme(model: FastSlowLM, scheme: str, flow: FlowConfig | None) -> FastSlowLM:
    """The model's twin of that scheme, of the same tensors. Inverse of `scheme_of`; raises ValueError for other names."""
    if scheme == "continuous":
        return to_continuous(model, **flow_from_config(flow or FlowConfig()))
    if scheme not in ("discrete", "multirate"):
        raise ValueError(f"scheme must be 'discrete', 'multirate' or 'continuous', got {scheme!r}")
    return to_discrete(model, multirate=scheme == "multirate")


def _name_of(method: Any) -> str:
    if isinstance(method, TorchDiffEq):
        return f"torchdiffeq:{method.name}"
    for kind, multirate in MULTIRATE.items():
        if isinstance(method, multirate) and method == multirate(method.micro_steps):
            return f"{kind}:{method.micro_steps}"
    names = [name for name, kind in METHODS.items() if type(method) is kind and method == kind()]
    if not names:
        raise ValueError(f"{method!r} is not one of the named methods: {', '.join(METHODS)}")
    return names[0]
