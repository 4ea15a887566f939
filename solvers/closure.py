"""The tensors that a field reads beside (t, x, y), and a solve whose gradient is computed by a function of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

R = TypeVar("R")


def registered(system: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, by name."""
    return {**dict(system.named_parameters()), **dict(system.named_buffers())}


class Called(nn.Module):
    """A function as a module that holds the system, for `functional_call`."""

    def __init__(self, function: Callable[..., Any], system: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.system = system

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class _Watch(TorchFunctionMode):
    """Notes in `sources` each tensor that requires grad, is an argument of a torch function, and is no result of one in here."""

    def __init__(self, sources: dict[int, Tensor]) -> None:
        self.sources = sources
        self.inside = WeakIdKeyDictionary()  # such as views, which may require grad without a graph too

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor not in self.inside:
                self.sources.setdefault(id(tensor), tensor)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in self.sources:
                self.inside[tensor] = True
        return result


class _Substitution(TorchFunctionMode):
    """Gives torch functions the stand-ins for their arguments."""

    def __init__(self, stand_ins: dict[int, Tensor]) -> None:
        self.stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: self.stand_ins.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


class Closure:
    """What a field reads beside its arguments, and stand-ins for it in a later evaluation.

    The tensors registered on the system, as they are when this is made (`functional_call` may have put them there for the
    time being), and whatever else that requires grad is an argument of a torch function while the field is `watched`.
    Stand-ins are leaves of their own, so a derivative with respect to one does not go through another, and hooks on the
    tensors themselves see the finished gradient alone.
    """

    def __init__(self, system: nn.Module, device: torch.device) -> None:
        self.system = system
        self.held = registered(system)
        self.sources = {id(t): t for t in self.held.values() if t.requires_grad}
        self.autocast: dict[str, Any] = {
            "device_type": device.type,
            "dtype": torch.get_autocast_dtype(device.type),
            "enabled": torch.is_autocast_enabled(device.type),
            "cache_enabled": False,  # a cached cast would belong to the graph of one evaluation
        }
        self.stand_ins: dict[int, Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Evaluations in here are without graph."""
        with torch.no_grad(), torch.autocast(**self.autocast), _Watch(self.sources):
            yield

    def call(self, function: Callable[[], R]) -> R:
        """function(), with stand-ins for what is registered."""
        self.stand_ins = {key: t.detach().requires_grad_() for key, t in self.sources.items()}
        held = {f"system.{name}": self.stand_ins.get(id(t), t) for name, t in self.held.items()}
        try:
            return functional_call(Called(function, self.system), held, ())
        finally:
            self.stand_ins = {}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside `call`: evaluations in here read stand-ins."""
        with torch.autocast(**self.autocast), _Substitution(self.stand_ins):
            yield

    def check(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError where the graph of an evaluation ends in a tensor that has no stand-in."""
        known = {id(t) for t in (*inputs, *self.stand_ins.values())}
        nodes, seen = [t.grad_fn for t in outputs if t.grad_fn is not None], set()
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise RuntimeError(
                    f"the field reads a tensor of shape {tuple(leaf.shape)} through a custom autograd function, where no "
                    "stand-in reaches: register it on the system as a parameter or buffer, or use Backprop() or Checkpointed()"
                )
            nodes += [parent for parent, _ in node.next_functions if parent is not None]


Pullback = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]]


class Attached(torch.autograd.Function):
    """`values`, with the gradient pullback(cotangents, stored) with respect to `sources`."""

    @staticmethod
    def forward(
        ctx: Any, name: str, pullback: Pullback, values: Sequence[Tensor], stored: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.pullback, ctx.n_stored = name, pullback, len(stored)
        ctx.save_for_backward(*stored, *sources)  # the sources only so that a change in place is noticed
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{ctx.name} has no second derivatives (create_graph=True): use Backprop()")
        return None, None, None, None, *ctx.pullback(cotangents, ctx.saved_tensors[: ctx.n_stored])
