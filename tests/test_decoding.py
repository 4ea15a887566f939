"""Generation: what is sampled, what the model sees, and what is refused."""

from typing import Any

import pytest
import torch

from odeformer.decoding import generate, visible
from tests.helpers import open_model, random_tokens


@pytest.mark.parametrize("settings", [{}, {"coupling": "dense"}, {"positions": "learned", "context": 12}])
def test_greedy_decoding_takes_the_likeliest_token_of_a_full_forward_pass(settings: dict[str, Any]) -> None:
    model = open_model(pool_size=3, **settings)
    tokens = random_tokens(5)
    found = generate(model, tokens, 6, temperature=0)
    assert found.shape == (2, 11)
    assert torch.equal(found[:, :5], tokens)
    logits = model(found[:, :-1])
    # Causality: the logits of the whole text at t are those that chose token t + 1.
    assert torch.equal(logits[:, 4:].argmax(-1), found[:, 5:])


def test_sampling_is_a_function_of_the_generator() -> None:
    model, tokens = open_model(), random_tokens(5)
    state = torch.get_rng_state()
    first, second, other = (
        generate(model, tokens, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampled_frequencies_follow_the_tempered_probabilities() -> None:
    model = open_model(vocab_size=5)
    count, temperature = 4000, 2.0
    tokens = random_tokens(6, 1, 5)
    generator = torch.Generator().manual_seed(0)
    drawn = generate(model, tokens.expand(count, -1), 1, temperature=temperature, generator=generator)[:, -1]
    expected = (model(tokens)[0, -1] / temperature).softmax(-1)
    frequency = torch.bincount(drawn, minlength=5) / count
    # Five standard deviations of a binomial share.
    assert ((frequency - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_top_k_excludes_all_but_the_k_likeliest() -> None:
    model, tokens = open_model(), random_tokens(6, 1)
    allowed = set(model(tokens)[0, -1].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    drawn = generate(model, tokens.expand(300, -1), 1, temperature=5.0, top_k=3, generator=generator)[:, -1]
    assert set(drawn.tolist()) == allowed
    greedy = generate(model, tokens, 5, temperature=0)
    assert torch.equal(generate(model, tokens, 5, temperature=3.0, top_k=1), greedy)
    assert torch.equal(generate(model, tokens, 5, temperature=1e-300), greedy)


def test_only_known_ids_are_chosen() -> None:
    model, tokens = open_model(), random_tokens(6, 50, 5)
    found = generate(model, tokens, 8, temperature=10.0, known=5, generator=torch.Generator().manual_seed(0))
    assert set(found.flatten().tolist()) == set(range(5))


@pytest.mark.parametrize(("size", "context"), [(1, 7), (4, 16), (4, 18), (5, 5), (16, 10)])
def test_the_cut_is_a_multiple_of_the_block_and_keeps_what_it_can(size: int, context: int) -> None:
    model = open_model(pool_size=size, context=context)
    for length in range(1, 60):
        tokens = torch.arange(length)[None]
        seen = visible(model, tokens)
        cut = length - seen.shape[1]
        assert 1 <= seen.shape[1] <= context
        assert torch.equal(seen, tokens[:, cut:])
        if context >= size:
            assert cut % size == 0
            assert cut == 0 or seen.shape[1] > context - size
        else:
            assert seen.shape[1] == min(length, context)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_generation_goes_on_beyond_the_context(positions: str) -> None:
    model = open_model(pool_size=4, context=10, positions=positions)
    found = generate(model, random_tokens(3), 30, temperature=0)
    assert found.shape == (2, 33)
    assert torch.equal(found[:, -1], model(visible(model, found[:, :-1]))[:, -1].argmax(-1))


def test_nothing_to_add_returns_the_input_and_the_mode_is_kept() -> None:
    model, tokens = open_model(), random_tokens(5)
    model.train()
    assert torch.equal(generate(model, tokens, 0), tokens)
    assert model.training


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "x"}, TypeError, "model"),
        ({"tokens": [[1]]}, TypeError, "tokens"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, ValueError, "tokens"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, ValueError, "not empty"),
        ({"tokens": torch.zeros(1, 3)}, ValueError, "tokens"),
        ({"tokens": torch.full((1, 3), 31)}, ValueError, "31"),
        ({"count": -1}, ValueError, "count"),
        ({"count": 1.5}, TypeError, "count"),
        ({"temperature": -0.1}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 2.0}, TypeError, "top_k"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"model": open_model(), "tokens": random_tokens(4), "count": 2, **changes}
    with pytest.raises(error, match=words):
        generate(arguments.pop("model"), arguments.pop("tokens"), arguments.pop("count"), **arguments)
