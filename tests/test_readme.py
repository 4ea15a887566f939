"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_ten_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(blocks[0], names)
    printed = capsys.readouterr().out
    assert "holds" in printed and "Causal: all" in printed
    assert names["logits"].shape == (4, 65, 256)  # type: ignore[attr-defined]


def test_every_file_that_it_shows_is_there() -> None:
    text = README.read_text(encoding="utf-8")
    for name in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(
        r"`((?:solvers|odeformer|experiments|tests)/[\w/.]*)`", text
    ):
        if "://" not in name:
            assert (README.parent / name).exists(), name
