"""The optimiser, its schedule, and evaluation."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn import functional

from odeformer import TrainingConfig, to_continuous
from odeformer.model import SLOW_PATH
from odeformer.training import evaluate, learning_rate_at
from odeformer.training.module import gate_norms, make_optimizer, next_token_loss
from solvers import RK4, FixedSteps
from tests.helpers import open_model, random_tokens

SETTINGS = TrainingConfig(steps=50, warmup_steps=10, learning_rate=0.01, minimum_learning_rate=0.001, weight_decay=0.5)


def test_the_rate_rises_linearly_then_falls_by_a_cosine_to_the_minimum() -> None:
    rates = [learning_rate_at(step, SETTINGS) for step in range(50)]
    assert rates[:11] == pytest.approx([0.01 * (step + 1) / 11 for step in range(11)])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.001)
    # The cosine is symmetric about its middle: pairs of rates at equal distance have a constant sum.
    sums = [rates[10 + k] + rates[49 - k] for k in range(20)]
    assert sums == pytest.approx([0.011] * 20)


def test_a_warmup_longer_than_the_run_never_reaches_the_full_rate() -> None:
    settings = dataclasses.replace(SETTINGS, steps=5)
    assert max(learning_rate_at(step, settings) for step in range(5)) < settings.learning_rate


def test_only_matrices_decay() -> None:
    model = open_model(dtype=torch.float32, norm="layer", bias=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        # With a zero gradient AdamW's step is the decay alone: p (1 - rate * decay).
        kept = 1 - 0.01 * 0.5 if parameter.dim() >= 2 else 1.0
        assert torch.allclose(parameter, kept * before[name], rtol=1e-6, atol=0), name


@pytest.mark.parametrize("settings", [{"coupling": "frozen"}, {"pool_size": 16, "context": 8}])
def test_a_slow_path_that_cannot_learn_is_left_untouched(settings: dict[str, object]) -> None:
    model = open_model(dtype=torch.float32, **settings)
    if model.config.coupling == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in SLOW_PATH))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, SETTINGS)
    tokens = random_tokens(9)
    for _ in range(3):
        optimizer.zero_grad()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    slow = [name for name in before if any(part in name for part in SLOW_PATH)]
    assert len(slow) > 10
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in slow), name


def test_parameters_without_a_gradient_are_not_decayed() -> None:
    model = open_model(dtype=torch.float32, pool_size=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, SETTINGS)
    tokens = random_tokens(21)
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    optimizer.step()
    # y after the last layer is read by nothing, so what moves it there gets no gradient.
    idle = [
        name for name in before if name.startswith("blocks.1.") and ("slow_attention" in name or "slow_mlp" in name)
    ]
    assert len(idle) >= 6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in idle), name


@pytest.mark.parametrize("continuous", [False, True])
def test_evaluation_is_the_mean_over_all_tokens(continuous: bool) -> None:
    model = open_model(pool_size=4)
    if continuous:
        model = to_continuous(model, RK4(), FixedSteps(2))
    batches = [(t[:, :-1], t[:, 1:]) for t in (random_tokens(21, batch, seed=batch) for batch in (1, 2, 3))]
    losses = [
        -functional.log_softmax(model(x), -1)[b, t, y[b, t]].item()
        for x, y in batches
        for b in range(x.shape[0])
        for t in range(x.shape[1])
    ]
    assert evaluate(model, batches) == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)


def test_evaluation_draws_no_random_number_and_keeps_the_mode() -> None:
    model = open_model()
    model.train()
    tokens = random_tokens(9)
    state = torch.get_rng_state()
    evaluate(model, [(tokens[:, :-1], tokens[:, 1:])])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    with pytest.raises(ValueError, match="at least one batch"):
        evaluate(model, [])


def test_gate_norms_are_per_set_of_parameters() -> None:
    model = open_model(pool_size=4)
    gates = [block.layer.gate for block in model.blocks]  # type: ignore[union-attr]
    assert gate_norms(model) == {
        f"gate/layer_{i}": pytest.approx(gate.detach().norm().item()) for i, gate in enumerate(gates)
    }
    assert list(gate_norms(open_model(tied=True))) == ["gate/layer_0"]
    assert gate_norms(open_model(coupling="dense")) == {}
