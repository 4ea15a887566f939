"""A sequential dense model is the pre-norm GPT block (mathematics, Proposition 2): Hugging Face's GPT-2, weight for weight."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from odeformer import FastSlowLM
from tests.helpers import open_model, random_tokens

GPT2 = {"sublayers": "sequential", "positions": "learned", "norm": "layer", "mlp": "gelu_tanh", "bias": True}


def gpt2_like(model: FastSlowLM) -> GPT2LMHeadModel:
    """Hugging Face's GPT-2 in float64 with the fast path's parameters of `model`."""
    config = model.config
    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.context, n_embd=config.d_model, n_layer=config.n_layer,
            n_head=config.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ).double().eval()  # fmt: skip
    state = {
        "transformer.wte.weight": model.embedding.weight,
        "transformer.wpe.weight": model.position_embedding.weight,
        "lm_head.weight": model.embedding.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
    }
    for index, block in enumerate(model.depth()):
        layer = block.layer
        for theirs, ours in (
            ("ln_1", layer.attention_norm),
            ("attn.c_attn", layer.attention.qkv),
            ("attn.c_proj", layer.attention.out),
            ("ln_2", layer.mlp_norm),
            ("mlp.c_fc", layer.mlp.hidden),
            ("mlp.c_proj", layer.mlp.out),
        ):
            name = f"transformer.h.{index}.{theirs}"
            state[f"{name}.weight"] = ours.weight.T if ours.weight.dim() == 2 else ours.weight  # stored as (in, out)
            state[f"{name}.bias"] = ours.bias
    missing, unexpected = peer.load_state_dict({name: value.detach() for name, value in state.items()}, strict=False)
    assert not unexpected and not [name for name in missing if not name.endswith("attn.bias")]
    return peer


@pytest.mark.parametrize("coupling", ["dense", "frozen", "coupled"])
def test_logits_and_gradients_are_those_of_gpt2(coupling: str) -> None:
    model = open_model(coupling=coupling, pool_size=4, **GPT2)
    if coupling != "dense":
        with torch.no_grad():
            for block in model.depth():
                block.layer.gate.zero_()  # a closed gate is the point here: adding the slow path changes no output
    peer, tokens = gpt2_like(model), random_tokens(29)
    ours, theirs = model(tokens), peer(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    for ours_at, theirs_at in (
        (model.embedding.weight, peer.transformer.wte.weight),
        (model.position_embedding.weight, peer.transformer.wpe.weight),
        (model.blocks[0].layer.attention.qkv.weight, peer.transformer.h[0].attn.c_attn.weight),
        (model.blocks[1].layer.mlp.hidden.bias, peer.transformer.h[1].mlp.c_fc.bias),
    ):
        expected = theirs_at.grad.T if theirs_at.shape != ours_at.shape else theirs_at.grad
        torch.testing.assert_close(ours_at.grad, expected, rtol=1e-11, atol=1e-11)


def test_an_open_gate_departs_from_gpt2() -> None:
    model = open_model(coupling="coupled", pool_size=4, **GPT2)
    tokens = random_tokens(29)
    difference = (model(tokens) - gpt2_like(model)(tokens).logits).abs().amax(-1)
    assert (difference[:, :3] < 1e-12).all()  # no block is complete before token 3
    assert (difference[:, 3:] > 1e-6).all()
