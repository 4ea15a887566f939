"""Computation graphs in a normal form, so that two programs can be shown to be the same function of all their inputs.

A function is traced to ATen operations. In the normal form a node is identified by the digest of its operation and of its
arguments' digests, which removes common subexpressions and dead code; steps that change no bit (detach, clone, a factor 1,
the order of the operands of a sum or product) are dropped, and an
empty tensor is its shape and dtype. Equal outputs then mean: the same operations on the same inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

_ATEN = torch.ops.aten
_IDENTITIES = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN.lift_fresh_copy.default}
_COMMUTATIVE = {_ATEN.add.Tensor, _ATEN.mul.Tensor}


@dataclass(frozen=True)
class NormalForm:
    """Digests of the outputs, and what each reachable digest stands for (operation and argument digests)."""

    outputs: tuple[str, ...]
    nodes: dict[str, str]

    def differences(self, other: NormalForm) -> list[str]:
        """Operations that are in one graph only, as "- ..." (here) and "+ ..." (in the other); empty for equal graphs."""
        here = [f"- {text}" for key, text in self.nodes.items() if key not in other.nodes]
        there = [f"+ {text}" for key, text in other.nodes.items() if key not in self.nodes]
        return here + there or ([] if self.outputs == other.outputs else ["- outputs in another order"])


def normal_form(function: Callable[..., Any], *inputs: Any) -> NormalForm:
    """Traces function(*inputs) (tensors, or containers of tensors) and returns the normal form of its graph."""
    with torch.no_grad():
        function(
            *inputs
        )  # fills the caches of constant tables, which would otherwise be traced by the first caller only
    traced = make_fx(function)(*inputs)
    digests: dict[fx.Node, str] = {}
    texts: dict[str, str] = {}
    arguments: dict[str, tuple[str, ...]] = {}
    outputs: tuple[str, ...] = ()
    position = 0
    used: tuple[str, ...]
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            text, used = f"input {position}", ()
            position += 1
        elif node.op == "get_attr":
            text, used = f"constant {_tensor_digest(getattr(traced, node.target))}", ()
        elif node.op == "call_function":
            kept = _through_identity(node, digests)
            if kept is not None:
                digests[node] = kept
                continue
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.numel() == 0:
                text, used = f"empty {tuple(value.shape)} {value.dtype}", ()
            else:
                text, used = _call(node, digests)
        else:
            assert node.op == "output"
            outputs = _output_digests(node, digests)
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        digests[node], texts[digest], arguments[digest] = digest, text, used
    return NormalForm(outputs, _reachable(outputs, texts, arguments))


def _output_digests(node: fx.Node, digests: dict[fx.Node, str]) -> tuple[str, ...]:
    leaves, _ = torch.utils._pytree.tree_flatten(node.args[0])
    return tuple(digests[leaf] for leaf in leaves if isinstance(leaf, fx.Node))


def _through_identity(node: fx.Node, digests: dict[fx.Node, str]) -> str | None:
    """The digest of the argument that a bit-preserving operation returns, None for any other operation."""
    if node.target in _IDENTITIES:
        return digests[node.args[0]]  # type: ignore[index]
    if node.target in (_ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.div.Tensor) and _is_one(node.args[1]):
        return digests[node.args[0]]  # type: ignore[index]
    return None


def _is_one(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1


def _call(node: fx.Node, digests: dict[fx.Node, str]) -> tuple[str, tuple[str, ...]]:
    used = tuple(digests[argument] for argument in node.all_input_nodes)
    options = {name: value for name, value in node.kwargs.items() if not (name == "alpha" and _is_one(value))}
    operands = [_render(argument, digests) for argument in node.args]
    if node.target in _COMMUTATIVE and not options and len(operands) == 2:
        operands.sort()
    operands += [f"{name}={_render(value, digests)}" for name, value in sorted(options.items())]
    return f"{node.target}({', '.join(operands)})", used


def _render(value: Any, digests: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return f"%{digests[value]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_render(item, digests) for item in value)}]"
    return repr(value)


def _tensor_digest(value: Tensor) -> str:
    content = value.detach().cpu().contiguous()
    data = content.view(torch.uint8).numpy().tobytes() if content.numel() else b""
    return hashlib.sha256(f"{content.dtype}{tuple(content.shape)}".encode() + data).hexdigest()[:16]


def _reachable(
    outputs: tuple[str, ...], texts: dict[str, str], arguments: dict[str, tuple[str, ...]]
) -> dict[str, str]:
    found: dict[str, str] = {}
    pending = list(outputs)
    while pending:
        digest = pending.pop()
        if digest not in found:
            found[digest] = texts[digest]
            pending.extend(arguments[digest])
    return found
