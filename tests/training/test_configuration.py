"""Run configs: what is read, what is refused, and in which words."""

from pathlib import Path

import pytest

from odeformer import DataConfig, FastSlowConfig, RunConfig
from odeformer.training import load_run_config
from odeformer.training.configuration import differing_keys, save_config


def test_no_file_and_no_overrides_is_the_default_config() -> None:
    assert load_run_config() == RunConfig()


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = RunConfig(
        model=FastSlowConfig(d_model=32, epsilon=0.25), data=DataConfig(source=["a", "b"], cache=tmp_path / "cache")
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config


def test_overrides_win_over_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  d_model: 32\n  pool_size: 4\ntraining:\ndata: {source: [x, y]}\n")
    config = load_run_config(path, ["model.pool_size=8", "training.learning_rate=1e-3", "flow.steps=null"])
    assert (config.model.d_model, config.model.pool_size) == (32, 8)
    assert config.training.learning_rate == 1e-3
    assert config.flow.steps is None
    assert config.data.source == ["x", "y"]


def test_every_problem_is_reported_at_once_in_plain_words() -> None:
    with pytest.raises(ValueError, match="4 problems") as caught:
        load_run_config(None, ["model.n_head=3", "model.pool_size=0", "model.epsilon=-1", "training.stepz=3"])
    text = str(caught.value)
    assert "model.n_head: n_head=3 must divide d_model=128 (got 3)" in text
    assert "model.pool_size: must be greater than or equal to 1 (got 0)" in text
    assert "model.epsilon: must be greater than 0 (got -1)" in text
    assert "training.stepz: unknown key; did you mean steps?" in text
    assert "http" not in text
    assert "pydantic" not in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.steps", "section.key=value"),
        ("=3", "section.key=value"),
        ("model=3", "model"),
        ("training.steps=1.5", "training.steps"),
        ("training.steps=true", "training.steps"),
        ("training.steps=${nothing}", "nothing"),
        ("training.steps=???", "training.steps"),
        ("modle.d_model=16", "did you mean model"),
        ("model.leak=-0.1", "model.leak"),
        ("model.leak=.nan", "model.leak"),
    ],
)
def test_a_bad_override_is_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_run_config(None, [override])
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        load_run_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("content", [b"model: [1, 2", b"- a\n- b\n", b"\xff\xfe\x00", b"just words\n"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.yaml"):
        load_run_config(path)


def test_differing_keys_name_both_values() -> None:
    found = differing_keys(RunConfig(), load_run_config(None, ["model.d_model=64", "training.progress=false"]))
    assert found == ["model.d_model: 128 there, 64 given", "training.progress: True there, False given"]
    assert not differing_keys(RunConfig(), RunConfig())
