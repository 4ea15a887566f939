"""The certificate holds for every kind of model, and fails for every planted mistake."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import odeformer.blocks
import odeformer.coupling
import odeformer.fields
import odeformer.layers
import odeformer.model
from odeformer import FastSlowConfig, FastSlowLM, certify, euler_defect, to_continuous
from odeformer.blocks import DiscreteBlock
from odeformer.coupling import lift, pool
from odeformer.discretisation.graphs import normal_form
from odeformer.layers import Attention, causal_mask
from solvers import Dopri5, FixedSteps
from tests.helpers import open_model, random_tokens

SMALL = {"vocab_size": 11, "n_layer": 1, "d_model": 8, "n_head": 2, "pool_size": 3, "leak": 0.3, "relaxation": 0.7}


@pytest.mark.parametrize(
    "settings",
    [
        {"sublayers": "parallel"},
        {"sublayers": "sequential", "mlp": "gelu_tanh"},
        {"sublayers": "sequential", "coupling": "frozen", "leak": 0.0},
        {"coupling": "dense", "horizon": 2},
        {"pool_size": 1, "horizon": 0.5, "positions": "learned", "norm": "layer", "bias": True},
        {"pool_size": 49, "mlp": "swiglu", "window": 5, "leak": 0.0, "relaxation": 0.0},
        {"attention": "explicit", "tied": True, "n_layer": 3, "epsilon": 1.0},
    ],
)
def test_the_certificate_holds(settings: dict[str, object]) -> None:
    certificate = certify(FastSlowConfig(**{**SMALL, **settings}))
    assert certificate.ok, str(certificate)
    assert certificate.graphs_identical and certificate.graph_differences == []
    assert certificate.max_forward_difference == 0.0
    assert certificate.max_gradient_difference <= 1e-12
    assert abs(certificate.observed_order - 1) < 0.1
    assert "holds" in str(certificate)
    assert json.loads(certificate.to_json())["ok"] is True


def _block(**methods: Callable[..., object]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for name, method in methods.items():
            patch.setattr(DiscreteBlock, name, method)

    return plant


def _both(name: str, mistake: Callable[..., Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """The same mistake in the block and in the field: only the literal transcription can tell."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(odeformer.blocks, name, mistake)
        patch.setattr(odeformer.fields, name, mistake)

    return plant


def _lift_early(v: Tensor, length: int, size: int) -> Tensor:
    """Token t reads block floor((t + 2) / P) - 1: one token too soon."""
    lifted = lift(v, length, size)
    return torch.cat([lifted[:, 1:], v[:, -1:] if v.shape[1] else lifted[:, :1]], dim=1)


def _lift_onto_own_block(v: Tensor, length: int, size: int) -> Tensor:
    own = v.repeat_interleave(size, dim=1)
    return torch.cat([own, own.new_zeros(v.shape[0], length - own.shape[1], v.shape[2])], dim=1)


def _lift_late(v: Tensor, length: int, size: int) -> Tensor:
    lifted = lift(v, length, size)
    return torch.cat([torch.zeros_like(lifted[:, :1]), lifted[:, :-1]], dim=1)


def _pool_with_tail(x: Tensor, size: int) -> Tensor:
    blocks = x.shape[1] // size
    pooled = pool(x, size)
    if blocks and x.shape[1] % size:
        pooled = torch.cat([pooled[:, :-1], x[:, (blocks - 1) * size :].mean(1, keepdim=True)], dim=1)
    return pooled


def _pool_sum(x: Tensor, size: int) -> Tensor:
    return pool(x, size) * size


def _exchange(gate_power: int = 1, leak_sign: float = 1.0, to_input: bool = True, normed: bool = True):
    def exchange(self: DiscreteBlock, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        p, c = self.layer, self.layer.config
        phi = p.manifold(p.manifold_norm(y) if normed else y)
        read = lift(p.gate**gate_power * phi, x.shape[1], c.pool_size)
        return read - leak_sign * c.leak * (x - u if to_input else x)

    return exchange


def _slow_update(epsilon_power: int = 1, kappa_sign: float = 1.0, swap: bool = False, fast_weights: bool = False):
    def update(self: DiscreteBlock, x: Tensor, y: Tensor) -> Tensor:
        p, c = self.layer, self.layer.config
        first, second = p.slow_attention_norm, p.slow_mlp_norm
        if swap:
            first, second = second, first
        attention = p.attention if fast_weights else p.slow_attention
        rate = attention(first(y)) + p.slow_mlp(second(y)) + kappa_sign * c.relaxation * (pool(x, c.pool_size) - y)
        return c.resolved_epsilon**epsilon_power * rate

    return update


def _fast_update(swap: bool = False, sequential: bool = False):
    def update(self: DiscreteBlock, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        p = self.layer
        first, second = (p.mlp_norm, p.attention_norm) if swap else (p.attention_norm, p.mlp_norm)
        attended = p.attention(first(x))
        return attended + p.mlp(second(x + attended if sequential else x)) + self._exchange(x, y, u)

    return update


def _y_before_x(self: DiscreteBlock, x: Tensor, y: Tensor, u: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
    y = y + self._slow_update(x, y)
    return x + self._fast_update(x, y, u), y


PLANTED = {
    "lift one token early": lambda patch: patch.setattr(odeformer.blocks, "lift", _lift_early),
    "lift one token late": lambda patch: patch.setattr(odeformer.blocks, "lift", _lift_late),
    "lift onto its own block": lambda patch: patch.setattr(odeformer.blocks, "lift", _lift_onto_own_block),
    "a pooled tail": lambda patch: patch.setattr(odeformer.blocks, "pool", _pool_with_tail),
    "pool sums": lambda patch: patch.setattr(odeformer.blocks, "pool", _pool_sum),
    "gate applied twice": _block(_exchange=_exchange(gate_power=2)),
    "gate not applied": _block(_exchange=_exchange(gate_power=0)),
    "phi without its norm": _block(_exchange=_exchange(normed=False)),
    "leak's sign": _block(_exchange=_exchange(leak_sign=-1.0)),
    "leak without injection": _block(_exchange=_exchange(to_input=False)),
    "epsilon missing": _block(_slow_update=_slow_update(epsilon_power=0)),
    "epsilon twice": _block(_slow_update=_slow_update(epsilon_power=2)),
    "kappa's sign": _block(_slow_update=_slow_update(kappa_sign=-1.0)),
    "slow norms swapped": _block(_slow_update=_slow_update(swap=True)),
    "slow path with the fast attention": _block(_slow_update=_slow_update(fast_weights=True)),
    "fast norms swapped": _block(_fast_update=_fast_update(swap=True)),
    "MLP after attention": _block(_fast_update=_fast_update(sequential=True)),
    "y updated before x": _block(forward=_y_before_x),
    "lift early in block and field": _both("lift", _lift_early),
    "lift late in block and field": _both("lift", _lift_late),
    "pool sums in block and field": _both("pool", _pool_sum),
    "rotary positions off": lambda patch: patch.setattr(odeformer.layers, "rotate", lambda qk: qk),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_every_planted_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[mistake](monkeypatch)
    certificate = certify(FastSlowConfig(**SMALL))
    assert not certificate.ok
    assert "FAILS" in str(certificate)
    assert certificate.max_reference_difference > 1e-6
    if "and field" not in mistake and mistake != "rotary positions off":
        assert not certificate.graphs_identical
        assert max(certificate.max_forward_difference, certificate.max_gradient_difference) > 1e-6


def test_the_planted_pieces_are_right_without_their_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    _block(_exchange=_exchange(), _slow_update=_slow_update(), _fast_update=_fast_update())(monkeypatch)
    certificate = certify(FastSlowConfig(**SMALL))
    assert certificate.max_reference_difference <= 1e-12
    assert certificate.max_forward_difference <= 1e-12


@pytest.mark.parametrize("order", ["mlp first", "y first"])
def test_a_wrong_order_of_the_sequential_parts_is_caught(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mlp_first(self: DiscreteBlock, x: Tensor, y: Tensor, u: Tensor, length: float) -> Tensor:
        p = self.layer
        x = x + p.mlp(p.mlp_norm(x))
        x = x + p.attention(p.attention_norm(x))
        return x + self._exchange(x, y, u)

    def y_first(self: DiscreteBlock, x: Tensor, y: Tensor, u: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
        y = self._slow_step(x, y, 1.0)
        return self._fast_step(x, y, u, 1.0), y

    name, wrong = ("_fast_step", mlp_first) if order == "mlp first" else ("forward", y_first)
    monkeypatch.setattr(DiscreteBlock, name, wrong)
    assert not certify(FastSlowConfig(**SMALL, sublayers="sequential")).ok


def _wider(length: int, window: int | None, device: torch.device) -> Tensor:
    return causal_mask(length, (window or 0) + 1, device)


@pytest.mark.parametrize(
    ("settings", "module", "name", "mistake"),
    [
        ({"pool_size": 3, "window": 20}, odeformer.layers, "causal_mask", _wider),
        ({"pool_size": 16, "window": 64}, odeformer.layers, "causal_mask", _wider),
        ({"pool_size": 3, "window": 2}, odeformer.fields, "Attention", lambda c, w=None: Attention(c, c.window)),
        ({"pool_size": 3}, odeformer.model, "pool", _pool_sum),
        ({"pool_size": 3}, odeformer.blocks, "lift", lambda v, n, p: lift(v, n, p) * float(v.shape[1] < 3)),
    ],
    ids=["window off by one", "wide window off by one", "slow path with the window", "y starts as sums", "third block"],
)
def test_mistakes_that_need_a_long_sequence_are_caught(
    settings: dict[str, object], module: object, name: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mistake)
    assert not certify(FastSlowConfig(**{**SMALL, **settings})).ok


def test_a_gradient_lost_in_the_last_layer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DiscreteBlock.forward

    def wrong(self: DiscreteBlock, x: Tensor, y: Tensor, u: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
        return right(self, x, y.detach() if last else y, u, last)

    monkeypatch.setattr(DiscreteBlock, "forward", wrong)
    assert not certify(FastSlowConfig(**SMALL)).ok


@pytest.mark.parametrize("settings", [{"leak": 50.0, "pool_size": 3}, {"relaxation": 30.0, "pool_size": 2}])
def test_a_stiff_config_is_certified_too(settings: dict[str, object]) -> None:
    certificate = certify(FastSlowConfig(**{**SMALL, **settings}))
    assert certificate.ok, str(certificate)


def test_a_model_is_certified_with_its_own_weights_and_left_untouched() -> None:
    model = open_model(leak=0.2, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    tokens = random_tokens(50)
    certificate = certify(model, tokens=tokens)
    assert certificate.ok
    assert certificate.euler_defect == pytest.approx(euler_defect(model.double(), tokens))
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name].float(), value)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_euler_defect_is_the_relative_distance_of_flow_and_block() -> None:
    model = open_model(leak=0.2, relaxation=0.4, n_layer=1)
    tokens = random_tokens(50)
    x, y, u = model.start(tokens)
    (x1, y1), (x2, y2) = (
        scheme.blocks[0](x, y, u) for scheme in (model, to_continuous(model, Dopri5(), FixedSteps(64)))
    )
    gap = ((x1 - x2).square().sum() + (y1 - y2).square().sum()).sqrt()
    expected = gap / (x.square().sum() + y.square().sum()).sqrt()
    assert euler_defect(model, tokens, 1e-9, 1e-11) == pytest.approx([expected.item()], rel=1e-6)


def test_the_defect_falls_with_the_horizon() -> None:
    """One step of length h misses the flow by O(h^2)."""
    defects = []
    for horizon in (0.1, 0.05, 0.025):
        torch.manual_seed(0)
        model = open_model(horizon=horizon, n_layer=1, leak=0.2)
        defects.append(euler_defect(model, random_tokens(30), 1e-10, 1e-12)[0])
    slopes = torch.tensor(defects[:-1]).div(torch.tensor(defects[1:])).log2()
    assert (slopes - 2).abs().max() < 0.1


def test_certify_refuses_other_arguments() -> None:
    with pytest.raises(TypeError, match="FastSlowLM or a FastSlowConfig, got dict"):
        certify({"d_model": 8})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="horizon"):
        certify(FastSlowConfig(**{**SMALL, "horizon": 1.5}))


class TestNormalForm:
    def test_ignores_what_changes_no_bit(self) -> None:
        a, b = torch.randn(3), torch.randn(3)
        first = normal_form(lambda a, b: a + b * 2.0, a, b)
        second = normal_form(lambda a, b: (b.clone() * 1.0 * 2.0).add(a.detach(), alpha=1.0) + 0 * 0, a, b)
        assert first.outputs == normal_form(lambda a, b: 2.0 * b + a, a, b).outputs
        assert first.outputs != normal_form(lambda a, b: b + a * 2.0, a, b).outputs
        assert second.nodes.keys() >= first.nodes.keys()

    def test_dead_code_and_repeated_work_do_not_count(self) -> None:
        a = torch.randn(3)

        def repeated(a: Tensor) -> Tensor:
            a.exp()
            return a.sin() + a.sin()

        def once(a: Tensor) -> Tensor:
            s = a.sin()
            return s + s

        assert normal_form(repeated, a) == normal_form(once, a)

    def test_constants_count_by_value(self) -> None:
        a, c = torch.randn(3), torch.tensor([1.0, 2.0, 3.0])
        assert normal_form(lambda a: a + c, a) == normal_form(lambda a: a + c.clone(), a)
        assert normal_form(lambda a: a + c, a) != normal_form(lambda a: a + c.flip(0), a)

    def test_names_the_operation_that_differs(self) -> None:
        a = torch.randn(3)
        difference = normal_form(lambda a: a.sin(), a).differences(normal_form(lambda a: a.cos(), a))
        assert len(difference) == 2
        assert difference[0].startswith("- aten.sin") and difference[1].startswith("+ aten.cos")


def test_a_model_without_vocabulary_cannot_be_certified_as_a_model() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        certify(FastSlowLM(FastSlowConfig()))
