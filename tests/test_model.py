"""The model: two schemes of one set of weights, arms that agree, and input checks."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from odeformer import FastSlowConfig, FastSlowField, FastSlowLM, to_continuous, to_discrete
from odeformer.blocks import unit_steps
from solvers import (
    RK4,
    Backprop,
    Checkpointed,
    Dopri5,
    Euler,
    FixedSteps,
    LieTrotter,
    MultirateEuler,
)
from tests.helpers import open_model, random_tokens


@pytest.mark.parametrize("pool_size", [1, 3, 7, 16, 49])
@pytest.mark.parametrize("length", [2, 50, 101])
@pytest.mark.parametrize("coupling", ["coupled", "frozen", "dense"])
def test_one_euler_step_is_the_parallel_block_bit_for_bit(pool_size: int, length: int, coupling: str) -> None:
    model = open_model(pool_size=pool_size, coupling=coupling, leak=0.3, relaxation=0.7, sublayers="parallel")
    tokens = random_tokens(length)
    continuous = to_continuous(model, method=Euler(), steps=FixedSteps(1))
    assert torch.equal(continuous(tokens), to_discrete(model)(tokens))


@pytest.mark.parametrize("pool_size", [1, 3, 16])
@pytest.mark.parametrize(("leak", "relaxation"), list(itertools.product([0.0, 0.3], [0.0, 0.7])))
def test_one_lie_step_is_the_sequential_block_bit_for_bit(pool_size: int, leak: float, relaxation: float) -> None:
    model = open_model(pool_size=pool_size, leak=leak, relaxation=relaxation, sublayers="sequential", window=5)
    tokens = random_tokens(40)
    assert torch.equal(to_continuous(model, LieTrotter(), FixedSteps(1))(tokens), model(tokens))


@pytest.mark.parametrize("horizon", [0.5, 2, 3])
def test_a_horizon_is_discretised_by_unit_steps(horizon: float) -> None:
    model = open_model(horizon=horizon, leak=0.3)
    tokens = random_tokens(40)
    number, _ = unit_steps(model.config)
    assert torch.equal(to_continuous(model, Euler(), FixedSteps(number))(tokens), model(tokens))


@pytest.mark.parametrize("pool_size", [3, 7, 49])
def test_the_multirate_twin_updates_y_once_per_p_updates_of_x(pool_size: int) -> None:
    model = open_model(pool_size=pool_size, horizon=pool_size, leak=0.3, relaxation=0.5)
    tokens = random_tokens(pool_size + 5)
    flow = to_continuous(model, MultirateEuler(pool_size), FixedSteps(1))
    twin = to_discrete(model, multirate=True)(tokens)
    assert torch.equal(flow(tokens), twin)
    assert not torch.equal(twin, model(tokens))


@pytest.mark.parametrize("multirate", [False, True])
@pytest.mark.parametrize("horizon", [0.5, 1, 3])
@pytest.mark.parametrize("sublayers", ["parallel", "sequential"])
def test_leaving_out_the_last_slow_step_changes_no_bit_of_x(sublayers: str, horizon: float, multirate: bool) -> None:
    if multirate and sublayers == "sequential":
        with pytest.raises(ValueError, match="multirate"):
            to_discrete(open_model(sublayers=sublayers, horizon=horizon), multirate)
        return
    model = to_discrete(
        open_model(sublayers=sublayers, horizon=horizon, pool_size=4, leak=0.2, relaxation=0.5), multirate
    )
    x, y, u = model.start(random_tokens(19))
    x_full, y_full = model.blocks[0](x, y, u)
    x_last, y_last = model.blocks[0](x, y, u, last=True)
    assert torch.equal(x_full, x_last)
    assert not torch.equal(y_full, y_last)


def test_a_horizon_without_discrete_twin_is_refused_by_name() -> None:
    model = open_model(horizon=2.5)
    with pytest.raises(ValueError, match=r"horizon=2\.5 has no discrete twin"):
        to_discrete(model)
    with pytest.raises(ValueError, match=r"horizon=2\.5 has no discrete twin"):
        model(random_tokens(8))
    assert to_continuous(model, RK4(), FixedSteps(5))(random_tokens(8)).isfinite().all()


def test_schemes_share_parameter_tensors_and_state_dict() -> None:
    model = open_model()
    continuous = to_continuous(model)
    again = to_discrete(continuous)
    for other in (continuous, again):
        assert list(other.state_dict()) == list(model.state_dict())
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert mine is theirs


@pytest.mark.parametrize("sublayers", ["parallel", "sequential"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_arms_of_one_seed_agree_at_step_zero(sublayers: str, positions: str) -> None:
    logits = []
    for coupling in ("coupled", "frozen", "dense"):
        torch.manual_seed(5)
        config = FastSlowConfig(
            vocab_size=31, n_layer=3, d_model=32, sublayers=sublayers, positions=positions, coupling=coupling, leak=0.1
        )
        logits.append(FastSlowLM(config)(random_tokens(50)))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_the_gate_is_closed_but_its_gradient_is_not_zero() -> None:
    torch.manual_seed(0)
    model = FastSlowLM(FastSlowConfig(vocab_size=31, n_layer=3, d_model=32, pool_size=4))
    model(random_tokens(20)).logsumexp(-1).sum().backward()
    for block in model.blocks:
        assert torch.equal(block.layer.gate, torch.zeros(32))
        assert (block.layer.gate.grad != 0).all()


def test_a_frozen_gate_holds_even_where_its_parameter_is_open() -> None:
    frozen, dense = open_model(coupling="frozen"), open_model(coupling="dense")
    dense.load_state_dict(frozen.state_dict(), strict=False)
    assert torch.equal(frozen(random_tokens(40)), dense(random_tokens(40)))
    trained = {name for name, parameter in frozen.named_parameters() if parameter.requires_grad}
    assert trained == set(dense.state_dict())


def test_a_coupled_model_reads_the_slow_path() -> None:
    model = open_model(pool_size=4)
    tokens = random_tokens(20)
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks:
            block.layer.gate.zero_()
    after = model(tokens)
    assert torch.equal(before[:, :3], after[:, :3])  # no block has ended yet
    assert (before[:, 3:] != after[:, 3:]).any(-1).all()


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_explicit_attention_equals_the_fused_one(window: int | None, positions: str) -> None:
    fused = open_model(window=window, positions=positions)
    explicit = open_model(window=window, positions=positions, attention="explicit")
    torch.testing.assert_close(explicit(random_tokens(40)), fused(random_tokens(40)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_forward_mode_products_equal_reverse_mode(attention: str) -> None:
    model = open_model(attention=attention, leak=0.3, pool_size=3)
    layer = model.blocks[0].layer
    x, y, u, v, w = (torch.randn(2, n, 16, dtype=torch.float64) for n in (10, 3, 10, 10, 10))
    field = FastSlowField(layer, u)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        _, forward = torch.func.jvp(lambda z: field.fast(0.0, z, y), (x,), (v,))
    _, pull = torch.func.vjp(lambda z: field.fast(0.0, z, y), x)
    torch.testing.assert_close((forward * w).sum(), (pull(w)[0] * v).sum(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sublayers", ["parallel", "sequential"])
def test_global_error_falls_with_slope_one(sublayers: str) -> None:
    model = open_model(leak=0.3, relaxation=0.5, sublayers=sublayers)
    tokens = random_tokens(40)
    exact = to_continuous(model, Dopri5(), FixedSteps(256))(tokens)
    method = Euler() if sublayers == "parallel" else LieTrotter()
    errors = torch.stack([(to_continuous(model, method, FixedSteps(n))(tokens) - exact).norm() for n in (32, 64, 128)])
    slopes = (errors[:-1] / errors[1:]).log2()
    assert (slopes - 1).abs().max() < 0.1


def test_checkpointed_training_gradients_are_bit_equal_to_backprop() -> None:
    gradients = []
    for gradient in (Backprop(), Checkpointed()):
        model = open_model(leak=0.2, relaxation=0.5)
        to_continuous(model, RK4(), FixedSteps(3), gradient)(random_tokens(40)).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_fields_are_the_sums_of_their_parts() -> None:
    model = open_model(leak=0.2, relaxation=0.5, pool_size=3)
    x, y, u = (torch.randn(2, n, 16, dtype=torch.float64) for n in (10, 3, 10))
    field = FastSlowField(model.blocks[0].layer, u)
    for clock, whole in (("fast", field.fast(0.0, x, y)), ("slow", field.slow(0.0, x, y))):
        parts: list[Tensor] = [part.rate(0.0, x, y) for part in field.parts() if part.clock == clock]
        assert len(parts) == 3
        torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=1e-13)


def test_the_declared_linear_parts_are_those_of_the_field() -> None:
    """Along a direction in which the norms' outputs do not change, f falls by lambda and g by kappa."""
    model = open_model(leak=0.4, relaxation=0.6, pool_size=3, norm="rms", dtype=torch.float64)
    x, y, u = (1e6 * torch.randn(1, n, 16, dtype=torch.float64) for n in (9, 3, 9))
    field = FastSlowField(model.blocks[0].layer, u)
    for state, rate, decay in (
        (x, lambda s: field.fast(0.0, x * s, y), field.fast_decay),
        (y, lambda s: field.slow(0.0, x, y * s), field.slow_decay),
    ):
        slope = (rate(1.5) - rate(1.0)) / 0.5
        torch.testing.assert_close(slope, -decay * state, rtol=1e-8, atol=1e-3)


def test_tied_layers_are_one_autonomous_field() -> None:
    tied = open_model(tied=True, n_layer=4, leak=0.2)
    deep = open_model(tied=True, n_layer=1, horizon=4, leak=0.2)
    deep.load_state_dict(tied.state_dict())
    assert torch.equal(tied(random_tokens(40)), deep(random_tokens(40)))


@pytest.mark.parametrize("settings", [{}, {"mlp": "swiglu", "norm": "layer", "bias": True, "tie_embeddings": False}])
def test_a_batch_of_one_and_every_short_length_work(settings: dict[str, object]) -> None:
    model = open_model(pool_size=7, **settings)
    whole = model(random_tokens(30, batch=1))
    for length in (1, 6, 7, 8, 13, 14):
        logits = model(random_tokens(30, batch=1)[:, :length])
        torch.testing.assert_close(logits, whole[:, :length], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (torch.tensor([[0, 31]]), r"token ids must lie in \[0, 31\), got 0 to 31"),
        (torch.tensor([[-1, 3]]), "got -1 to 3"),
        (torch.zeros(2, 0, dtype=torch.int64), "must not be empty"),
        (torch.zeros(3, dtype=torch.int64), r"\(B, T\)"),
        (torch.zeros(1, 3), "float32"),
    ],
)
def test_bad_tokens_are_refused(tokens: Tensor, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        open_model()(tokens)


def test_learned_positions_refuse_more_tokens_than_context() -> None:
    with pytest.raises(ValueError, match="33 tokens exceed context=32"):
        open_model(positions="learned", context=32)(random_tokens(33))


def test_a_model_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        FastSlowLM(FastSlowConfig())
    with pytest.raises(TypeError, match="FastSlowConfig"):
        FastSlowLM({"vocab_size": 3})  # type: ignore[arg-type]


def test_rotary_tables_made_in_inference_mode_can_be_trained_with() -> None:
    model = open_model(d_model=12, n_head=1)
    with torch.inference_mode():
        model(random_tokens(23))
    model(random_tokens(23)).sum().backward()


@pytest.mark.parametrize("gradient", [Backprop(), Checkpointed()])
def test_discrete_and_fixed_step_models_compile_whole(gradient: Backprop | Checkpointed) -> None:
    model = open_model(n_layer=1, leak=0.2, relaxation=0.5)
    tokens = random_tokens(20)
    for scheme in (model, to_continuous(model, RK4(), FixedSteps(2), gradient)):
        compiled = torch.compile(scheme, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(tokens), scheme(tokens), rtol=1e-12, atol=1e-12)
