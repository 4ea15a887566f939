"""The fast-slow language model: tokens (B, T) -> u -> (x, y) through the layers -> logits (B, T, V)."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from odeformer.blocks import DiscreteBlock, FlowBlock
from odeformer.config import FastSlowConfig
from odeformer.coupling import pool
from odeformer.fields import FastSlowLayer
from odeformer.layers import make_norm

Block = DiscreteBlock | FlowBlock


class FastSlowLM(nn.Module):
    """A stack of fast-slow layers between a token embedding and an output projection.

    A new model is discrete; `to_continuous` and `to_discrete` give the same parameters another scheme. Weights are drawn from
    PyTorch's global generator, each from its own stream, so that coupled, frozen and dense models of one seed agree.
    Raises TypeError for a config of another type and ValueError for one without vocab_size.
    """

    def __init__(self, config: FastSlowConfig) -> None:
        super().__init__()
        if not isinstance(config, FastSlowConfig):
            raise TypeError(f"config must be a FastSlowConfig, got {type(config).__name__}")
        if config.vocab_size is None:
            raise ValueError("vocab_size must be given to build a model, got None")
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.d_model)
        layers = [FastSlowLayer(config) for _ in range(1 if config.tied else config.n_layer)]
        self.blocks = nn.ModuleList(DiscreteBlock(layer) for layer in layers)
        self.norm = make_norm(config)
        if not config.tie_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the next token, from tokens (B, T) int64 in [0, V)."""
        self._check_tokens(tokens)
        x, y, u = self.start(tokens)
        for index, block in enumerate(self.depth()):
            x, y = block(x, y, u, last=index == self.config.n_layer - 1)
        return self.read_out(x)

    def start(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x(0) = u (B, T, d), y(0) = Pool u (B, S, d), and u; y is empty (S = 0) in a dense model."""
        u = self.embedding(tokens)
        if self.config.positions == "learned":
            u = u + self.position_embedding.weight[: tokens.shape[1]]
        y = (
            u.new_empty(u.shape[0], 0, u.shape[2])
            if self.config.coupling == "dense"
            else pool(u, self.config.pool_size)
        )
        return u, y, u

    def depth(self) -> Iterator[Block]:
        """The blocks in the order of depth, n_layer of them; a tied model repeats its one block."""
        for index in range(self.config.n_layer):
            yield self.blocks[0 if self.config.tied else index]  # type: ignore[misc]

    def read_out(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) of the last fast state (B, T, d)."""
        weight = self.embedding.weight if self.config.tie_embeddings else self.head.weight
        return functional.linear(self.norm(x), weight)

    def with_blocks(self, make_block: Callable[[FastSlowLayer], Block]) -> FastSlowLM:
        """A model that shares every parameter tensor with this one and runs each layer by `make_block(layer)`."""
        twin = copy.copy(self)
        for shared in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
            setattr(twin, shared, copy.copy(getattr(self, shared)))  # what is registered on one is not on the other
        twin.blocks = nn.ModuleList(make_block(block.layer) for block in self.blocks)  # type: ignore[arg-type]
        return twin

    def _check_tokens(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
        if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
            raise ValueError(f"tokens must be (B, T) int64, got {tuple(tokens.shape)} {tokens.dtype}")
        if tokens.numel() == 0:
            raise ValueError(f"tokens must not be empty, got shape {tuple(tokens.shape)}")
        if self.config.positions == "learned" and tokens.shape[1] > self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens exceed context={self.config.context} of the learned positions")
        # Only where reading the values costs no device synchronisation; the embedding itself asserts on a GPU.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.embedding.num_embeddings:
                raise ValueError(f"token ids must lie in [0, {self.config.vocab_size}), got {int(low)} to {int(high)}")

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """GPT-2's: normal of deviation 0.02, residual outputs divided by sqrt(2 L), biases and gates zero, norms one."""
        for name, parameter in self.named_parameters():
            kind = name.rsplit(".", 2)[-2:]
            if name.endswith(("gate", "bias")):
                parameter.zero_()
            elif kind[0].endswith("norm"):
                parameter.fill_(1.0)
            else:
                deviation = 0.02
                if kind == ["out", "weight"] and "manifold" not in name:
                    deviation /= math.sqrt(2 * self.config.n_layer)
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * deviation)
        if self.config.coupling == "frozen":
            for name, parameter in self.named_parameters():
                if any(part in name for part in SLOW_PATH):
                    parameter.requires_grad_(False)


SLOW_PATH = (".slow_", ".manifold", ".gate")
"""Name fragments of the parameters of the slow path: S, N, m1, m2, phi_theta, n3 and the gate."""
