"""No logit depends on a later token; and the check sees planted leaks."""

import pytest
import torch
from torch import Tensor

import odeformer.blocks
import odeformer.fields
import odeformer.layers
from odeformer import CausalityError, FastSlowLM, check_causality, to_continuous
from odeformer.coupling import lift
from solvers import (
    ETD2RK,
    RK4,
    AdaptiveSteps,
    Backprop,
    Checkpointed,
    Dopri5,
    Euler,
    ExponentialAdams,
    FixedSteps,
    Gradient,
    Strang,
    TorchDiffEq,
)
from tests.helpers import open_model, random_tokens
from tests.test_certificate import _lift_early, _lift_onto_own_block, _pool_with_tail

SETTINGS = [
    {"pool_size": 1},
    {"pool_size": 3, "sublayers": "sequential", "window": 4},
    {"pool_size": 7, "positions": "learned", "norm": "layer", "bias": True},
    {"pool_size": 16, "tied": True, "attention": "explicit"},
    {"pool_size": 49, "coupling": "frozen"},
    {"coupling": "dense"},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("method", [None, Euler(), RK4(), Strang(), ETD2RK(), ExponentialAdams()])
@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()])
def test_every_model_and_scheme_is_causal(settings: dict[str, object], method: object, gradient: Gradient) -> None:
    model = open_model(leak=0.3, relaxation=0.6, **settings)
    if method is not None:
        model = to_continuous(model, method, FixedSteps(2), gradient)  # type: ignore[arg-type]
    report = check_causality(model)
    assert report.ok, str(report)
    assert report.perturbation_leak == 0.0
    assert report.jacobian_leak == 0.0
    assert report.pairs > report.length * (report.length - 1) // 2  # of two lengths


@pytest.mark.parametrize("size", [1, 3, 7, 16, 49])
def test_changing_any_suffix_leaves_earlier_logits_bit_equal(size: int) -> None:
    model = open_model(pool_size=size, leak=0.3, relaxation=0.6, dtype=torch.float32)
    tokens = random_tokens(2 * size + 5)
    for scheme in (model, to_continuous(model, RK4(), FixedSteps(2))):
        before = scheme(tokens)
        for start in range(1, tokens.shape[1]):
            changed = tokens.clone()
            changed[:, start:] = (changed[:, start:] + 1) % 31
            assert torch.equal(scheme(changed)[:, :start], before[:, :start])


def test_a_closed_gate_does_not_hide_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(pool_size=4)
    with torch.no_grad():
        for block in model.blocks:
            block.layer.gate.zero_()
    monkeypatch.setattr(odeformer.blocks, "lift", _lift_onto_own_block)
    assert not check_causality(model).ok
    assert all(torch.equal(block.layer.gate, torch.zeros(16).double()) for block in model.blocks)


def _bidirectional_slow(self: torch.nn.Module, x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand_as(x) if x.shape[1] else x


LEAKS = {
    "lift early": lambda patch: patch.setattr(odeformer.blocks, "lift", _lift_early),
    "lift onto its own block": lambda patch: patch.setattr(odeformer.blocks, "lift", _lift_onto_own_block),
    "pooled tail": lambda patch: patch.setattr(odeformer.blocks, "pool", _pool_with_tail),
    "mean over all tokens": lambda patch: patch.setattr(odeformer.layers.Attention, "forward", _bidirectional_slow),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_planted_leaks_are_seen_both_ways(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(pool_size=4, relaxation=0.6)
    LEAKS[leak](monkeypatch)
    report = check_causality(model)
    assert not report.ok
    assert report.perturbation_leak > 1e-6 and report.jacobian_leak > 1e-6
    t, s = report.worst_pair or (0, 0)
    assert t < s
    assert "LEAK" in str(report) and f"token {t} depend" in str(report)
    with pytest.raises(CausalityError, match="LEAK"):
        check_causality(model, raise_on_leak=True)


@pytest.mark.parametrize(
    ("settings", "part", "mistake"),
    [
        ({"pool_size": 4, "window": 64}, (odeformer.layers, "causal_mask"), lambda n, w, d: torch.ones(n, n).bool()),
        (
            {"pool_size": 16, "window": 70, "context": 90},
            (odeformer.layers, "causal_mask"),
            lambda n, w, d: torch.ones(n, n).bool(),
        ),
        ({"pool_size": 2}, (odeformer.blocks, "pool"), _pool_with_tail),
        ({"pool_size": 4, "positions": "learned", "context": 8}, (odeformer.blocks, "pool"), _pool_with_tail),
    ],
)
def test_the_default_sequences_reach_windows_and_tails(
    settings: dict[str, object], part: tuple[object, str], mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*part, mistake)
    assert not check_causality(open_model(relaxation=0.6, **settings)).ok


def test_a_leak_at_whole_blocks_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(v: Tensor, length: int, size: int) -> Tensor:
        return lift(v, length, size) if length % size else _lift_onto_own_block(v, length, size)

    monkeypatch.setattr(odeformer.blocks, "lift", leaky)
    assert not check_causality(open_model(pool_size=4)).ok


def test_a_leak_of_one_pair_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(FastSlowLM):
        def read_out(self, x: Tensor) -> Tensor:
            shifted = x.clone()
            shifted[:, 2] = x[:, 2] + 1e-3 * x[:, 5]
            return super().read_out(shifted)

    report = check_causality(Leaky(open_model(pool_size=4).config))
    assert report.worst_pair is not None
    assert report.worst_pair[0] == 2 and report.worst_pair[1] <= 5


def test_error_control_is_tested_with_equal_steps() -> None:
    model = open_model(pool_size=3, leak=0.3)
    for method in (Dopri5(), TorchDiffEq("dopri5")):
        report = check_causality(to_continuous(model, method, AdaptiveSteps(1e-3, 1e-4)))
        assert report.ok
        assert "equal steps" in str(report)


def test_the_check_leaves_no_trace() -> None:
    model = open_model().train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    check_causality(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_tokens_of_ones_own() -> None:
    model = open_model(pool_size=3)
    assert check_causality(model, random_tokens(13, batch=1)).length == 13
    with pytest.raises(ValueError, match="at least 2"):
        check_causality(model, torch.tensor([3]))
    with pytest.raises(TypeError, match="FastSlowLM"):
        check_causality(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
