"""The discrete adjoint with a bounded number of kept states.

The forward pass runs without graph and keeps every 2^k-th state, k as small as the bound allows, since the number of
adaptive steps is not known before. The backward pass goes from step to step backwards, and advances from the nearest kept
state to the one it needs, keeping others on the way by the binomial schedule of Griewank & Walther (revolve, ACM Trans.
Math. Softw. 26 (2000) 19). Each step is replayed with its graph alone. The sums of gradients are continued, not added up
step by step: in the graph of a step the sum so far is the first cotangent of each tensor, so that autograd adds in the order
of the whole graph, and the result has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from solvers.closure import Attached, Closure
from solvers.method import Pair, Past, Step

if TYPE_CHECKING:
    from solvers.gradients import Gradient
    from solvers.stepping import March, Trajectory


class Carry(NamedTuple):
    """What one step hands to the next."""

    x: Tensor
    y: Tensor
    rate: Pair | None = None
    past: Past | None = None


class Interval(NamedTuple):
    """An accepted step in fast time; h is the length that the method was given."""

    tau: float
    h: float
    tau_end: float


@dataclass
class Recorder:
    """Observes a march: keeps its mesh, and the states at multiples of a stride that doubles when they get too many."""

    most: int
    mesh: list[Interval] = field(default_factory=list)
    kept: dict[int, Carry] = field(default_factory=dict)
    stride: int = 1

    def __call__(self, trajectory: Trajectory, h: float, tau_end: float, step: Step, rate: Pair | None) -> None:
        index = len(self.mesh)
        self.mesh.append(Interval(trajectory.tau, h, tau_end))
        if index % self.stride == 0:
            self.kept[index] = Carry(trajectory.x, trajectory.y, rate, trajectory.past)
            if len(self.kept) > self.most:
                self.stride *= 2
                self.kept = {i: carry for i, carry in self.kept.items() if i % self.stride == 0}


@torch.compiler.disable
def replayed(march: March, plain: Gradient, name: str, states: int, x: Tensor, y: Tensor) -> Trajectory:
    """The march from (x, y), differentiated by replays from at most `states` states."""
    closure, recorder = Closure(march.problem.system, x.device), Recorder(states)
    march = replace(march, gradient=plain)
    with closure.watched():
        trajectory = replace(march, observer=recorder).run(x.detach(), y.detach())
    sources = {id(t): t for t in (x, y)} | closure.sources
    closure.sources = sources = {key: t for key, t in sources.items() if t.requires_grad}
    if not sources:
        return trajectory
    leaves, spec = tree_flatten(recorder.kept)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    others = [None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]
    outputs = [(trajectory.x, trajectory.y), *trajectory.saved]
    places = [len(recorder.mesh), *(_place(recorder.mesh, tau) for tau in march.save_taus[: len(trajectory.saved)])]
    adjoint = _Backward(
        replace(march, problem=replace(march.problem, counting=False)), closure, recorder.mesh, places, states, (x, y)
    )

    def pullback(cotangents: Sequence[Tensor | None], stored: Sequence[Tensor]) -> list[Tensor | None]:
        tensors = iter(stored)
        kept = tree_unflatten([next(tensors) if t else o for t, o in zip(is_tensor, others, strict=True)], spec)
        if recorder.stride > 1:  # half of the bound at least is free for the replays
            kept = {i: carry for i, carry in kept.items() if i % (2 * recorder.stride) == 0}
        return closure.call(lambda: adjoint.run(kept, cotangents))

    flat = [part for pair in outputs for part in pair]
    attached = iter(
        Attached.apply(name, pullback, flat, [leaf for leaf in leaves if isinstance(leaf, Tensor)], *sources.values())
    )
    (trajectory.x, trajectory.y), *trajectory.saved = [(next(attached), next(attached)) for _ in outputs]
    return trajectory


def _place(mesh: Sequence[Interval], tau: float) -> int | float:
    """The number of the mesh point at tau, or between those of its neighbours."""
    if tau == 0:
        return 0
    for index, (_, _, tau_end) in enumerate(mesh):
        if abs(tau) <= abs(tau_end):
            return index + 1 if tau == tau_end else index + 0.5
    raise AssertionError("a state was saved outside of the mesh")


def reach(states: int, repeats: int) -> int:
    """Steps that can be reversed from `states` states (the start is one), each advanced at most `repeats` times."""
    return math.comb(states + repeats, states) if repeats >= 0 else 0


def next_kept(steps: int, states: int) -> int:
    """How far to advance before the next state is kept, to reverse so many steps with so many states; `steps` > 1."""
    if states == 1:
        return steps - 1
    repeats = next(r for r in range(1, steps + 1) if reach(states, r) >= steps)
    least = max(reach(states, repeats - 2), steps - reach(states - 1, repeats), 1)
    most = min(reach(states, repeats - 1), steps - reach(states - 1, repeats - 1))
    return min(max(steps // 2, least), most)


@dataclass
class _Backward:
    """Goes backwards over the mesh; gradients by the id of what they belong to."""

    march: March
    closure: Closure
    mesh: list[Interval]
    places: list[int | float]
    """Of the outputs."""
    states: int
    start: Pair

    def run(self, kept: dict[int, Carry], cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        stand_ins = self.closure.stand_ins
        x, y = (stand_ins.get(id(part), part) for part in self.start)
        given = dict(enumerate(zip(cotangents[::2], cotangents[1::2], strict=True)))
        later: list[tuple[Any, Tensor | None]] = []  # (position in the carry, cotangent)
        sums: dict[int, Tensor] = {}
        for index in reversed(range(len(self.mesh))):
            carry = self._carry(kept, index)
            # The first rate, where the loop knew it, is a function of the start.
            leaves, spec = tree_flatten(Carry(x, y, None, None) if index == 0 else carry)
            copies: dict[int, Tensor] = {}
            for leaf in leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in copies:
                    copies[id(leaf)] = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
            inputs = tree_unflatten([copies[id(t)] if isinstance(t, Tensor) else t for t in leaves], spec)
            inside = [n for n, place in enumerate(self.places) if place == index + 0.5]
            with torch.enable_grad(), self.closure.standing_in():
                end, saved = self._replay(inputs, index)
            # In the order of the whole graph: what was made last comes first.
            roots: list[tuple[Tensor, Tensor | None]] = [(stand_ins[key], total) for key, total in sums.items()]
            roots += self._at_mesh_point(given, end, index + 1) if index + 1 == len(self.mesh) else []
            roots += self._at_mesh_point(given, inputs, index)
            roots += [
                (part, g) for n, pair in zip(inside, saved, strict=True) for part, g in zip(pair, given[n], strict=True)
            ]
            ends = tree_flatten(end)[0]
            roots += [(ends[position], g) for position, g in later]
            wanted = list(copies.values()) + [s for s in stand_ins.values() if not any(s is c for c in copies.values())]
            found = self._grad(roots, wanted, check=index + 1 == len(self.mesh))
            sums = {key: found[id(s)] for key, s in stand_ins.items() if id(s) in found}
            seen: set[int] = set()
            later = []
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    later.append((position, found.get(id(copies[id(leaf)]))))
            kept.pop(index, None)
        return [sums.get(key) for key in self.closure.sources]

    def _at_mesh_point(
        self, given: dict[int, tuple[Tensor | None, Tensor | None]], carry: Carry, index: int
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Cotangents of the outputs that are the state at a mesh point."""
        return [
            (part, cotangent)
            for n, place in enumerate(self.places)
            if place == index
            for part, cotangent in zip(carry[:2], given[n], strict=True)
        ]

    def _grad(self, roots: list[tuple[Tensor, Tensor | None]], wanted: list[Tensor], check: bool) -> dict[int, Tensor]:
        roots = [(root, g) for root, g in roots if g is not None and root.requires_grad]
        if check:
            self.closure.check([root for root, _ in roots], wanted)
        if not roots:
            return {}
        found = torch.autograd.grad([r for r, _ in roots], wanted, [g for _, g in roots], allow_unused=True)
        return {id(t): g for t, g in zip(wanted, found, strict=True) if g is not None}

    def _carry(self, kept: dict[int, Carry], index: int) -> Carry:
        """The carry before step `index`, advanced from the last one kept, with others kept on the way."""
        at = max(i for i in kept if i <= index)
        carry = kept[at]
        with torch.no_grad(), self.closure.standing_in():
            while at < index:
                free = self.states - len(kept) + 1  # the one at `at` included
                for _ in range(next_kept(index + 1 - at, free)):
                    carry, at = self._replay(carry, at)[0], at + 1
                if free > 1:
                    kept[at] = carry
        return carry

    def _replay(self, carry: Carry, index: int) -> tuple[Carry, list[Pair]]:
        """The carry after step `index`, and the states interpolated in it."""
        trajectory, rate = self.march.replay(*self.mesh[index], carry.x, carry.y, carry.rate, carry.past)
        return Carry(trajectory.x, trajectory.y, rate, trajectory.past), trajectory.saved
