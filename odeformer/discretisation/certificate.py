"""The certificate that the discrete block is one step of the continuous model.

Three things together: (a) structure: the traced graphs of one solver step of the field and of the hand-written block have
one normal form, for token counts on both sides of every block boundary; (b) numbers: values and all gradients agree on
random weights with an open gate, in float64 to 1e-12 and in float32 bit for bit, and the block agrees with the literal
transcription in `reference.py`; (c) order: the distance to the exact flow falls with slope 1 in the step (2 for Strang).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from odeformer.blocks import DiscreteBlock, FlowBlock, unit_steps
from odeformer.config import FastSlowConfig
from odeformer.discretisation.graphs import normal_form
from odeformer.discretisation.reference import reference_layer_step, reference_pool
from odeformer.discretisation.schemes import euler_defect, to_continuous, to_discrete, twin_method
from odeformer.fields import FastSlowField, FastSlowLayer
from odeformer.model import FastSlowLM
from solvers import AdaptiveSteps, Dopri5, FixedSteps, Method, Strang, integrate

TOLERANCE = 1e-12
"""Largest relative difference in float64."""
LONGEST = 128
"""Length up to which the compared sequences grow to exceed a sliding window: the literal transcription is slow."""
ORDER_MARGIN = 0.1
"""Largest distance of an observed order from its theoretical value."""

State = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Certificate:
    """What `certify` found. Differences are relative to the largest entry compared, in float64 unless named otherwise."""

    sublayers: str
    method: str
    """The one-step method that the block is claimed to be."""
    graphs_identical: bool
    graph_differences: list[str]
    """Operations found in one graph only, first few; empty when identical."""
    graph_lengths: list[int]
    """Token counts T at which the graphs were compared."""
    max_forward_difference: float
    max_gradient_difference: float
    float32_bit_equal: bool
    max_reference_difference: float
    """Block against the literal transcription: values and gradients."""
    model_logits_bit_equal: bool
    """The model's own weights, whole depth: discrete logits against those of its flow by one step per unit of fast time."""
    euler_defect: list[float]
    """Per layer |Flow(z) - Block(z)| / |z| on the model's own weights."""
    observed_order: float
    """Slope of the global error of the claimed method; theory: 1."""
    observed_strang_order: float
    """The same of Strang's splitting of the same field; theory: 2."""
    step_sizes: list[float]
    step_errors: list[float]
    """Global relative errors of the claimed method at `step_sizes`, in fast time."""

    @property
    def ok(self) -> bool:
        """Every one of the certificate's statements holds."""
        return not self.problems()

    def problems(self) -> list[str]:
        """The statements that do not hold, in words; empty for a valid certificate."""
        checks = [
            (self.graphs_identical, "the computation graphs differ"),
            (self.max_forward_difference <= TOLERANCE, "values of block and solver step differ"),
            (self.max_gradient_difference <= TOLERANCE, "gradients of block and solver step differ"),
            (self.float32_bit_equal, "block and solver step are not bit-equal in float32"),
            (self.max_reference_difference <= TOLERANCE, "the block differs from its literal transcription"),
            (self.model_logits_bit_equal, "the model's own discrete and one-step logits differ"),
            (abs(self.observed_order - 1) <= ORDER_MARGIN, "the step error does not fall with order 1"),
            (abs(self.observed_strang_order - 2) <= ORDER_MARGIN, "Strang's error does not fall with order 2"),
        ]
        return [text for holds, text in checks if not holds]

    def to_dict(self) -> dict[str, object]:
        """All fields, and `ok`, as plain values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        verdict = "holds" if self.ok else "FAILS: " + "; ".join(self.problems())
        rows = [
            f"Certificate ({self.sublayers} block = one {self.method} step of fast time 1) {verdict}",
            f"  (a) graphs identical           {self.graphs_identical}   at T = {', '.join(map(str, self.graph_lengths))}",
            *(f"        {line}" for line in self.graph_differences),
            f"  (b) values differ by at most   {self.max_forward_difference:.1e}   (float64, relative; allowed {TOLERANCE:.0e})",
            f"      gradients                  {self.max_gradient_difference:.1e}",
            f"      literal transcription      {self.max_reference_difference:.1e}",
            f"      float32 bit-equal          {self.float32_bit_equal}",
            f"      model logits bit-equal     {self.model_logits_bit_equal}",
            f"  (c) observed order             {self.observed_order:.3f}   (theory 1)",
            f"      Strang's order             {self.observed_strang_order:.3f}   (theory 2)",
            f"  Euler defect per layer         {', '.join(f'{defect:.2e}' for defect in self.euler_defect)}",
        ]
        return "\n".join(rows)


def certify(
    model_or_config: FastSlowLM | FastSlowConfig, *, tokens: Tensor | None = None, seed: int = 0
) -> Certificate:
    """Certifies a config, or a model with its own weights, which is left untouched.

    Args:
        tokens: (B, T) token ids for the Euler defect and the whole-model comparison; random ones by default.
        seed: of the random weights and inputs.

    Raises TypeError for other arguments and ValueError where the horizon has no discrete twin.
    """
    if isinstance(model_or_config, FastSlowLM):
        config = model_or_config.config
    elif isinstance(model_or_config, FastSlowConfig):
        config = model_or_config
    else:
        raise TypeError(f"certify takes a FastSlowLM or a FastSlowConfig, got {type(model_or_config).__name__}")
    unit_steps(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = FastSlowLayer(config).double()
        randomise_(layer, seed)
        if isinstance(model_or_config, FastSlowLM):
            own = copy.deepcopy(model_or_config).double()
        else:
            own = FastSlowLM(dataclasses.replace(config, vocab_size=config.vocab_size or 256)).double()
            randomise_(own, seed)
    return _certificate(own, layer, tokens, seed)


def _certificate(own: FastSlowLM, layer: FastSlowLayer, tokens: Tensor | None, seed: int) -> Certificate:
    config = own.config
    number, _ = unit_steps(config)
    method = twin_method(config)
    lengths = _lengths(config)
    if tokens is None:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(config.vocab_size or 1, (2, lengths[-1]), generator=generator)
    tokens = tokens.to(own.embedding.weight.device)
    differences = _graph_differences(layer, method, lengths, seed)
    numbers = [_compare(layer, method, _state(config, T, seed, torch.float64)) for T in lengths]
    single = copy.deepcopy(layer).float()
    equal32 = all(_bit_equal(single, method, _state(config, T, seed, torch.float32)) for T in lengths)
    sizes, errors, order = _observed_order(layer, method, seed)
    return Certificate(
        sublayers=config.sublayers,
        method=type(method).__name__,
        graphs_identical=not differences,
        graph_differences=differences[:8],
        graph_lengths=lengths,
        max_forward_difference=max(forward for forward, _, _ in numbers),
        max_gradient_difference=max(gradient for _, gradient, _ in numbers),
        max_reference_difference=max(_start_difference(own, tokens), *(reference for _, _, reference in numbers)),
        float32_bit_equal=equal32,
        model_logits_bit_equal=_logits_equal(own, method, number, tokens),
        euler_defect=euler_defect(own, tokens),
        observed_order=order,
        observed_strang_order=_observed_order(layer, Strang(), seed)[2],
        step_sizes=sizes,
        step_errors=errors,
    )


@torch.no_grad()
def randomise_(module: torch.nn.Module, seed: int) -> None:
    """Draws every parameter anew, none near a special value: matrices 0.7 / sqrt(fan in), an open gate, uneven norms."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "embedding" in name:
            value = noise
        elif parameter.dim() >= 2:
            value = 0.7 * noise / parameter.shape[-1] ** 0.5
        elif name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        else:
            value = (0.5 if name.endswith("gate") else 0.1) * noise
        parameter.copy_(value)


def _lengths(config: FastSlowConfig) -> list[int]:
    """Token counts below one block, on a boundary, and of three blocks with an incomplete tail (and longer than a sliding window
    of up to LONGEST tokens), within learned positions."""
    size = config.pool_size
    longest = max(3 * size + max(1, size // 2), min((config.window or 0) + 2, LONGEST))
    wanted = {max(1, size - 1), size, longest}
    if config.positions == "learned":
        wanted = {min(T, config.context) for T in wanted}
    return sorted(wanted)


def _state(config: FastSlowConfig, length: int, seed: int, dtype: torch.dtype) -> State:
    generator = torch.Generator().manual_seed(seed + length)
    blocks = 0 if config.coupling == "dense" else length // config.pool_size
    shapes = [(2, length, config.d_model), (2, blocks, config.d_model), (2, length, config.d_model)]
    x, y, u = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return x, y, u


def _block_and_step(layer: FastSlowLayer, method: Method) -> tuple[torch.nn.Module, torch.nn.Module]:
    number, _ = unit_steps(layer.config)
    return DiscreteBlock(layer), FlowBlock(layer, method, FixedSteps(number))


def _graph_differences(layer: FastSlowLayer, method: Method, lengths: Sequence[int], seed: int) -> list[str]:
    found: list[str] = []
    for T in lengths:
        state = _state(layer.config, T, seed, torch.float64)
        block, step = (
            normal_form(_functional(module), dict(module.named_parameters()), *state)
            for module in _block_and_step(layer, method)
        )
        found += [f"T = {T}: {line}" for line in block.differences(step)]
        block, step = (
            normal_form(_functional(module), dict(module.named_parameters()), *state)
            for module in map(_FastOnly, _block_and_step(layer, method))
        )
        found += [f"T = {T}, as the last layer: {line}" for line in block.differences(step)]
    return found


class _FastOnly(torch.nn.Module):
    """A block as the last layer of a model, from which x alone is read."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor]:
        return (self.block(x, y, u, last=True)[0],)


def _functional(module: torch.nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    def run(parameters: dict[str, Tensor], x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return functional_call(module, parameters, (x, y, u))

    return run


def _compare(layer: FastSlowLayer, method: Method, state: State) -> tuple[float, float, float]:
    """(forward, gradient) differences of block and solver step, and the block's from the literal transcription."""
    number, length = unit_steps(layer.config)

    def literal(x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(number):
            x, y = reference_layer_step(layer, layer.config, x, y, u, length)
        return x, y

    block, step = _block_and_step(layer, method)
    values, gradients = _values_and_gradients(layer, block, state)
    step_values, step_gradients = _values_and_gradients(layer, step, state)
    literal_values, literal_gradients = _values_and_gradients(layer, literal, state)
    last_values, last_gradients = _values_and_gradients(layer, _FastOnly(block), state)
    last_step_values, last_step_gradients = _values_and_gradients(layer, _FastOnly(step), state)
    return (
        _largest_difference(values + last_values, step_values + last_step_values),
        _largest_difference(gradients + last_gradients, step_gradients + last_step_gradients),
        max(_largest_difference(values, literal_values), _largest_difference(gradients, literal_gradients)),
    )


def _values_and_gradients(
    layer: FastSlowLayer, run: Callable[..., tuple[Tensor, ...]], state: State
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of a random functional of them with respect to x, y, u and every parameter."""
    inputs = [tensor.clone().requires_grad_() for tensor in state]
    outputs = run(*inputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outputs]
    functional = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    wanted = inputs + list(layer.parameters())
    gradients = torch.autograd.grad(functional, wanted, allow_unused=True)  # type: ignore[arg-type]
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, gradients, strict=True)]
    return [out.detach() for out in outputs], found


def _largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            scale = max(float(b.abs().max()), 1e-300)
            difference = float((a - b).abs().max()) / scale if not torch.equal(a, b) else 0.0
            largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def _bit_equal(layer: FastSlowLayer, method: Method, state: State) -> bool:
    block, step = _block_and_step(layer, method)
    with torch.no_grad():
        return all(torch.equal(a, b) for a, b in zip(block(*state), step(*state), strict=True))


@torch.no_grad()
def _start_difference(model: FastSlowLM, tokens: Tensor) -> float:
    """Of the initial states from x(0) = u and y(0) = Pool u, block mean after block mean."""
    x, y, u = model.start(tokens)
    pooled = u[:, :0] if model.config.coupling == "dense" else reference_pool(u, model.config.pool_size)
    return _largest_difference([x, y], [u, pooled])


@torch.no_grad()
def _logits_equal(model: FastSlowLM, method: Method, number: int, tokens: Tensor) -> bool:
    flow = to_continuous(model, method, FixedSteps(number))
    return torch.equal(to_discrete(model)(tokens), flow(tokens))


@torch.no_grad()
def _observed_order(layer: FastSlowLayer, method: Method, seed: int) -> tuple[list[float], list[float], float]:
    """(step sizes, relative global errors, slope) against a tight Dormand-Prince solution, over a fast time of 1, or as much less
    as lets the steps resolve the leak and the relaxation."""
    T = min(2 * layer.config.pool_size + 1, 33) if layer.config.positions == "rotary" else _lengths(layer.config)[-1]
    x, y, u = _state(layer.config, max(T, layer.config.pool_size), seed, torch.float64)
    field = FastSlowField(layer, u)
    config = layer.config
    span = 1.0 / max(1.0, config.leak, config.resolved_epsilon * config.relaxation)
    exact = integrate(field, x, y, span=span, method=Dopri5(), steps=AdaptiveSteps(1e-11, 1e-12))
    scale = float(torch.sqrt(x.square().sum() + y.square().sum()))
    sizes, errors = [], []
    for n in (16, 32, 64):
        found = integrate(field, x, y, span=span, method=method, steps=FixedSteps(n))
        gap = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5
        sizes.append(span / n)
        errors.append(gap / scale)
    slope = torch.tensor([errors[0] / errors[-1]]).log2().item() / 2 if errors[-1] > 0 else float("nan")
    return sizes, errors, slope
