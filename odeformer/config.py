"""Validated configuration. Every problem of a section is reported at once; unknown keys are refused.

`FastSlowConfig` describes the model (mathematics: symbols in brackets); `RunConfig` adds data, training and the flow
(which solver integrates a layer). All are frozen dataclasses: change one with `dataclasses.replace`, which validates again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]

_SECTION = ConfigDict(extra="forbid", validate_default=True)


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class FastSlowConfig:
    """One fast-slow language model. Raises ValueError (pydantic's ValidationError) naming every bad field."""

    vocab_size: Int | None = Field(default=None, ge=1)
    """V. None: taken from the tokenizer by a training run; `FastSlowLM` itself needs a number."""
    n_layer: Int = Field(default=4, ge=1)
    """L, the number of layers in sequence."""
    d_model: Int = Field(default=128, ge=1)
    """d, the width of x and y."""
    n_head: Int = Field(default=4, ge=1)
    """H, heads of the fast and of the slow attention; divides d_model."""
    pool_size: Int = Field(default=16, ge=1)
    """P, tokens per slow block. 1 is the limit without separation."""
    epsilon: Float | None = Field(default=None, gt=0, le=1)
    """Stiffness in 0 < epsilon <= 1. None: 1 / pool_size."""
    leak: Float = Field(default=0.0, ge=0)
    """[lambda] rate, in fast time, at which x decays to the input u. 0: the residual form of pretraining."""
    relaxation: Float = Field(default=0.0, ge=0)
    """[kappa] rate, in slow time, at which y relaxes to Pool x."""
    horizon: Float = Field(default=1.0, gt=0)
    """Fast time for which each layer acts; pool_size is one unit of slow time when epsilon = 1 / P."""
    tied: Bool = False
    """One set of parameters for all layers (an autonomous field)."""
    sublayers: Literal["parallel", "sequential"] = "parallel"
    """parallel: Euler's block; sequential: Lie-Trotter's, the pre-norm GPT block at zero gate and leak."""
    coupling: Literal["coupled", "frozen", "dense"] = "coupled"
    """coupled: the gate is trained; frozen: it is held at zero; dense: there is no slow path."""
    window: Int | None = Field(default=None, ge=1)
    """Sliding window of the fast attention: a token sees itself and the window - 1 before it. None: all before it."""
    context: Int = Field(default=256, ge=1)
    """T of training. A hard limit for learned positions only."""
    positions: Literal["rotary", "learned"] = "rotary"
    """rotary: token index on the fast path, block index on the slow path; learned: a table added to the embedding u."""
    norm: Literal["rms", "layer"] = "layer"
    """Layer norm is one fused kernel on every device; RMS norm is not on a CPU, where it takes three times as long."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """gelu: hidden width 4 d; gelu_tanh: the same with GPT-2's approximation, which takes twice the time on a CPU; swiglu: gated,
    hidden width 8 d / 3 rounded up to a multiple of 8."""
    manifold_width: Int | None = Field(default=None, ge=1)
    """Hidden width of phi_theta. None: d_model."""
    bias: Bool = False
    """Biases in linear maps (and in layer norm), as GPT-2 has them."""
    tie_embeddings: Bool = True
    """The output projection is the token embedding."""
    attention: Literal["sdpa", "explicit"] = "sdpa"
    """sdpa: PyTorch's fused kernels; explicit: softmax(QK^T)V written out, which supports forward-mode AD everywhere."""

    @field_validator("n_head")
    @classmethod
    def _heads_divide_width(cls, n_head: int, info: ValidationInfo) -> int:
        d_model = info.data.get("d_model")
        if d_model is not None and d_model % n_head:
            raise ValueError(f"n_head={n_head} must divide d_model={d_model}")
        return n_head

    @field_validator("positions")
    @classmethod
    def _rotary_needs_even_heads(cls, positions: str, info: ValidationInfo) -> str:
        d_model, n_head = info.data.get("d_model"), info.data.get("n_head")
        if positions == "rotary" and d_model and n_head and (d_model // n_head) % 2:
            raise ValueError(
                f"rotary positions need an even head width, got d_model / n_head = {d_model // n_head}; "
                "use positions='learned' or another n_head"
            )
        return positions

    @property
    def resolved_epsilon(self) -> float:
        """The stiffness in use: `epsilon`, or 1 / pool_size where that is None."""
        return 1.0 / self.pool_size if self.epsilon is None else self.epsilon

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML; `FastSlowConfig(**d)` restores the config."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class FlowConfig:
    """How a continuous layer is integrated: method, steps (per layer), gradient. Times are fast time."""

    method: str = "rk4"
    """euler, heun, rk4, dopri5; exponential_euler, etd2rk, etd3rk, exponential_adams, for a large leak; lie, strang;
    rkc2, ros2, ros34pw2, for any stiffness: stabilised explicit and linearly implicit;
    slow_manifold, which takes an attracting fast subsystem to be at rest;
    multirate_euler:M or mri_gark22:M with M micro-steps; or torchdiffeq:NAME for one of torchdiffeq's solvers."""
    steps: Int | None = Field(default=4, ge=1)
    """Equal steps per layer. None: error control with rtol and atol."""
    rtol: Float = Field(default=1e-3, gt=0)
    atol: Float = Field(default=1e-5, gt=0)
    gradient: Literal["backprop", "checkpointed", "stored_adjoint", "backsolve"] = "checkpointed"
    """backprop, checkpointed: the exact gradient of the steps taken; checkpointed keeps one step's activations alive at a time.
    stored_adjoint: the adjoint equation along the stored states. backsolve: torchdiffeq's adjoint, for its methods; wrong where
    the fast subsystem contracts for long."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    source: str | list[str] = "stdlib"
    """"stdlib" (the embedded corpus), a file, a folder, a glob, a list of these, or "hf:PATH" for a Hugging Face data set."""
    text_field: str = "text"
    """Key of the text in JSONL rows, Parquet columns and Hugging Face data sets."""
    tokenizer: str = "bytes"
    """"bytes", "characters", "bpe" (trained on the training split), or "hf:NAME_OR_FOLDER"."""
    bpe_vocab_size: Int = Field(default=4096, ge=257)
    validation_fraction: Float = Field(default=0.1, gt=0, lt=1)
    """Share of the text that is held out, by whole documents where there are several."""
    cache: Path | None = None
    """Folder of the memory-mapped token files. None: the user's cache folder."""
    max_bytes: Int | None = Field(default=None, ge=1)
    """Use at most this much text (whole documents, a fixed mixture). None: all of it."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class TrainingConfig:
    """The optimiser, the schedule, and when things happen (in optimiser steps)."""

    steps: Int = Field(default=2000, ge=1)
    batch_size: Int = Field(default=12, ge=1)
    """Sequences of `model.context` tokens per step and process."""
    learning_rate: Float = Field(default=1e-3, gt=0)
    minimum_learning_rate: Float = Field(default=1e-4, ge=0)
    """Reached by a cosine at the last step."""
    warmup_steps: Int = Field(default=100, ge=0)
    weight_decay: Float = Field(default=0.1, ge=0)
    """Decoupled; on matrices only."""
    beta1: Float = Field(default=0.9, ge=0, lt=1)
    beta2: Float = Field(default=0.99, ge=0, lt=1)
    gradient_clip: Float = Field(default=1.0, ge=0)
    """Global norm; 0 for none."""
    # By Field, since pydantic validates fields with a bare default after these, and switch_at's check needs it.
    scheme: Literal["discrete", "continuous"] = Field(default="discrete")
    """Which of the two schemes training starts with."""
    switch_at: Int | None = Field(default=None, ge=1)
    """Step at which a continuous run becomes discrete. None: never."""
    evaluate_every: Int = Field(default=250, ge=1)
    evaluation_batches: Int = Field(default=20, ge=1)
    """Fixed batches, the same at every evaluation."""
    checkpoint_every: Int = Field(default=500, ge=1)
    log_every: Int = Field(default=10, ge=1)
    seed: Int = Field(default=1337, ge=0, lt=2**63)
    precision: Literal["32-true", "64-true", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    progress: Bool = True

    @field_validator("switch_at")
    @classmethod
    def _switch_is_inside_a_continuous_run(cls, switch_at: int | None, info: ValidationInfo) -> int | None:
        steps, scheme = info.data.get("steps"), info.data.get("scheme")
        if switch_at is None or steps is None or scheme is None:
            return switch_at
        if scheme != "continuous":
            raise ValueError(f"switch_at={switch_at} needs scheme='continuous', got {scheme!r}")
        if switch_at >= steps:
            raise ValueError(f"switch_at={switch_at} must be less than steps={steps}")
        return switch_at


def _section(value: Any) -> Any:
    return {} if value is None else value


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class RunConfig:
    """A training run: one YAML file."""

    model: Annotated[FastSlowConfig, BeforeValidator(_section)] = Field(default_factory=FastSlowConfig)
    data: Annotated[DataConfig, BeforeValidator(_section)] = Field(default_factory=DataConfig)
    training: Annotated[TrainingConfig, BeforeValidator(_section)] = Field(default_factory=TrainingConfig)
    flow: Annotated[FlowConfig, BeforeValidator(_section)] = Field(default_factory=FlowConfig)
