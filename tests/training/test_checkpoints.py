"""Checkpoints: whole, checked, safe, and never at the expense of an older one."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from odeformer import FastSlowLM, to_continuous, to_discrete
from odeformer.training import load_model, save_model
from solvers import (
    MRIGARK22,
    RK4,
    AdaptiveSteps,
    Backprop,
    Backsolve,
    Checkpointed,
    Dopri5,
    FixedSteps,
    LieTrotter,
    MultirateEuler,
    StoredAdjoint,
    TorchDiffEq,
)
from tests.helpers import open_model, random_tokens
from tests.training.helpers import fill_disk, same_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [{}, {"tied": True, "tie_embeddings": False}, {"coupling": "dense", "positions": "learned", "bias": True}],
)
def test_a_model_survives_its_files_bit_for_bit(tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = open_model(dtype=dtype, **settings)
    save_model(model, tmp_path, step=7)
    loaded = load_model(tmp_path, model.config)
    tokens = random_tokens(20)
    assert loaded.config == model.config
    assert same_weights(loaded, model)
    assert torch.equal(loaded(tokens), model(tokens))
    assert json.loads((tmp_path / "model.json").read_text())["step"] == 7


@pytest.mark.parametrize(
    "scheme",
    [
        (RK4(), FixedSteps(3), None),
        (LieTrotter(), FixedSteps(1), Checkpointed()),
        (Dopri5(), AdaptiveSteps(1e-4, 1e-6), None),
        (MultirateEuler(4), FixedSteps(1), None),
        (MRIGARK22(4), FixedSteps(1), None),
        (TorchDiffEq("midpoint"), FixedSteps(2), None),
        (Dopri5(), AdaptiveSteps(1e-4, 1e-6), StoredAdjoint()),
        (TorchDiffEq("midpoint"), FixedSteps(2), Backsolve()),
    ],
)
def test_a_continuous_model_is_loaded_as_the_same_flow(tmp_path: Path, scheme: tuple[Any, Any, Any]) -> None:
    model = to_continuous(open_model(pool_size=4), *scheme)
    save_model(model, tmp_path)
    tokens = random_tokens(20)
    loaded = load_model(tmp_path)
    assert repr(loaded.blocks[0].method) == repr(scheme[0])  # type: ignore[union-attr]
    assert loaded.blocks[0].gradient == (scheme[2] or Backprop())  # type: ignore[union-attr]
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_multirate_model_is_loaded_as_one(tmp_path: Path) -> None:
    model = to_discrete(open_model(pool_size=4, horizon=4), multirate=True)
    save_model(model, tmp_path)
    tokens = random_tokens(20)
    assert torch.equal(load_model(tmp_path)(tokens), model(tokens))
    assert not torch.equal(to_discrete(model)(tokens), model(tokens))


def test_a_flow_that_a_config_cannot_express_is_refused(tmp_path: Path) -> None:
    for method, steps in [
        (TorchDiffEq("midpoint", perturb=True), FixedSteps(2)),
        (Dopri5(), AdaptiveSteps(1e-3, 1e-5, 0.1)),
    ]:
        with pytest.raises(ValueError, match="cannot express"):
            save_model(to_continuous(open_model(), method, steps), tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_loading_draws_no_random_number(tmp_path: Path) -> None:
    save_model(open_model(), tmp_path)
    state = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_folder_and_the_files_themselves_lead_to_the_checkpoint(tmp_path: Path) -> None:
    model = open_model()
    save_model(model, tmp_path / "checkpoints")
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "model.safetensors"):
        assert same_weights(load_model(path), model)


def test_another_config_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    save_model(open_model(), tmp_path)
    with pytest.raises(ValueError, match=r"d_model: 16 there, 32 given; leak: 0.0 there, 0.5 given"):
        load_model(tmp_path, open_model(d_model=32, leak=0.5).config)


@pytest.mark.parametrize("missing", ["model.json", "model.safetensors"])
def test_a_missing_half_is_named(tmp_path: Path, missing: str) -> None:
    save_model(open_model(), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        load_model(tmp_path)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_model(tmp_path)


def test_truncated_and_altered_weights_are_refused(tmp_path: Path) -> None:
    path = save_model(open_model(), tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[-1] ^= 1
    for content in (whole[:-10], bytes(altered), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated or altered"):
            load_model(tmp_path)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    description = json.loads(path.read_text())
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(description.get(key), dict):
            description[key] |= value
        else:
            description[key] = value
    path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"d_modell": 3}}, "unknown key; did you mean d_model"),
        ({"config": {"n_head": 3}}, "n_head=3 must divide"),
        ({"config": {"vocab_size": None}}, "vocab_size"),
        ({"config": {"d_model": 32}}, "does not fit its config"),
        ({"config": {"coupling": "dense"}}, "unexpected tensor"),
        ({"config": {"n_layer": 3}}, "no tensor blocks.2"),
        ({"format_version": 99}, "format version 99"),
        ({"scheme": "quantum"}, "quantum"),
        ({"scheme": "continuous", "flow": {"method": "rk5"}}, "rk5"),
    ],
)
def test_a_wrong_description_is_refused_by_file_and_reason(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    save_model(open_model(), tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"model\.(json|safetensors)") as caught:
        load_model(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff\xff"])
def test_a_damaged_description_is_named(tmp_path: Path, content: bytes) -> None:
    save_model(open_model(), tmp_path)
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.json is damaged"):
        load_model(tmp_path)


def test_extra_entries_may_not_hide_the_checkpoints_own(tmp_path: Path) -> None:
    for extra in ({"config": {}}, {"step": object()}):
        with pytest.raises(ValueError, match="extra entries"):
            save_model(open_model(), tmp_path, **extra)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flushes", "file"), [(0, "model.json"), (1, "model.safetensors")])
def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushes: int, file: str
) -> None:
    old = open_model(seed=1)
    save_model(old, tmp_path)
    with monkeypatch.context() as patch:
        fill_disk(patch, flushes)
        with pytest.raises(OSError, match=file) as caught:
            save_model(open_model(seed=2), tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    assert same_weights(load_model(tmp_path), old)


def test_the_weights_file_is_plain_tensors(tmp_path: Path) -> None:
    model = open_model()
    assert isinstance(model, FastSlowLM)
    path = save_model(model, tmp_path) / "model.safetensors"
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    assert set(header) == set(model.state_dict())
