"""One self-contained HTML file from what a demo left in its folder: results.json, metrics.csv, figures/*.png, config.yaml.

    python -m odeformer.reporting.report RUN        # draws the figures and the report anew

Figures are embedded, nothing is loaded from elsewhere, every text is escaped, and what is not there is named as missing.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from odeformer.files import write_text
from odeformer.reporting import figures
from odeformer.stability import FAR

RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"
FIGURES_FOLDER = "figures"
ARMS_FOLDER = "arms"


@dataclass(frozen=True)
class Card:
    """A verdict at the top of the report."""

    title: str
    value: str
    note: str
    state: str
    """good, bad, plain or missing."""


@dataclass(frozen=True)
class Picture:
    """A figure with what to see in it; `data` is None where the PNG is missing."""

    name: str
    title: str
    caption: str
    data: str | None


def draw_figures(folder: Path | str) -> list[Path]:
    """Draws every figure for which the folder holds the numbers; returns their paths."""
    folder = Path(folder)
    results, target = read_results(folder), folder / FIGURES_FOLDER
    metrics = figures.read_metrics(folder / "metrics.csv") if (folder / "metrics.csv").is_file() else {}
    switch = (results.get("training") or {}).get("switch")
    drawn: list[Path] = []
    if "train/loss" in metrics or "validation/loss" in metrics:
        drawn.append(figures.loss_figure(metrics, switch, target / "loss.png"))
    if any(name.startswith("gate/") for name in metrics):
        drawn.append(figures.gate_figure(metrics, switch, target / "gates.png"))
    if switch and switch.get("euler_defect"):
        drawn.append(figures.defect_figure(switch["euler_defect"], target / "euler_defect.png"))
    if (results.get("stability") or {}).get("limits"):
        drawn.append(figures.stability_figure(results["stability"], target / "stability.png"))
        if switch:
            drawn.append(figures.overview_figure(metrics, switch, results["stability"], target / "overview.png"))
    runs = {}
    for arm in results.get("arms") or []:
        path = folder / ARMS_FOLDER / arm["folder"] / "metrics.csv"
        if path.is_file():
            runs[arm["name"]] = figures.read_metrics(path)
    if runs:
        drawn.append(figures.arms_figure(runs, target / "arms.png"))
    return drawn


def write_report(folder: Path | str) -> Path:
    """Writes report.html into the folder of a demo, finished or not, and returns its path.

    Raises ValueError for a results.json that is not JSON, and OSError where the file cannot be written.
    """
    folder = Path(folder)
    results = read_results(folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "significant": significant}
    config_path = folder / "config.yaml"
    text = environment.get_template("report.html.j2").render(
        name=folder.resolve().name,
        folder=folder.as_posix(),
        quick=results.get("quick", False),
        seconds=results.get("seconds"),
        finished=results.get("finished"),
        model=results.get("model"),
        data=results.get("data"),
        causality=results.get("causality"),
        certificate=results.get("certificate"),
        certificate_trained=results.get("certificate_trained"),
        training=results.get("training"),
        switch=(results.get("training") or {}).get("switch"),
        sample=results.get("sample"),
        stability=results.get("stability"),
        arms=results.get("arms"),
        arms_noise=results.get("arms_noise"),
        environment=results.get("environment"),
        stage_seconds=results.get("stage_seconds") or {},
        cards=cards(results),
        pictures=_pictures(folder, results),
        config=config_path.read_text(encoding="utf-8") if config_path.is_file() else None,
        files=_files(folder),
    )
    write_text(folder / REPORT_FILE, text)
    return folder / REPORT_FILE


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of the folder; empty where there is none. Raises ValueError for a damaged one."""
    path = folder / RESULTS_FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it must hold an object, got {type(found).__name__}")
    return found


def cards(results: Mapping[str, Any]) -> list[Card]:
    """The verdicts; one whose numbers are not there says so."""
    makers: list[tuple[str, str, Callable[[Any], Card]]] = [
        ("Causality", "causality", _causality_card),
        ("Certificate", "certificate", lambda _: _certificate_card(results)),
        ("Switch gap", "training", _switch_card),
        ("Validation loss", "training", _loss_card),
        ("Speed", "training", _speed_card),
    ]
    return [
        make(results[key]) if results.get(key) else Card(title, "missing", "this stage did not finish", "missing")
        for title, key, make in makers
    ]


def _causality_card(found: Mapping[str, Any]) -> Card:
    note = f"{found['pairs']} pairs (earlier output, later token) tested"
    return Card("Causality", "holds" if found["ok"] else "LEAK", note, "good" if found["ok"] else "bad")


def _certificate_card(results: Mapping[str, Any]) -> Card:
    trained = results.get("certificate_trained")
    ok = results["certificate"]["ok"] and (trained is None or trained["ok"])
    note = "discrete block = one solver step, " + (
        "checked before and after training" if trained else "checked before training"
    )
    return Card("Certificate", "holds" if ok else "FAILS", note, "good" if ok else "bad")


def _switch_card(training: Mapping[str, Any]) -> Card:
    switch = training.get("switch")
    if not switch:
        return Card("Switch gap", "missing", "this run did not switch", "missing")
    note = f"nats per token, {switch['validation_loss_before']:.3f} before, {switch['validation_loss_after']:.3f} after"
    return Card("Switch gap", f"{switch['gap']:+.3f}", note, "plain")


def _loss_card(training: Mapping[str, Any]) -> Card:
    bits = training.get("bits_per_byte")
    note = "nats per token" + (f" = {bits:.3f} bits per byte" if bits is not None else "")
    return Card("Validation loss", f"{training['validation_loss']:.3f}", note, "plain")


def _speed_card(training: Mapping[str, Any]) -> Card:
    return Card("Speed", f"{training['tokens_per_second']:,.0f}", "tokens trained on per second, whole run", "plain")


def _pictures(folder: Path, results: Mapping[str, Any]) -> list[Picture]:
    command = f"python -m odeformer.reporting.report {folder.as_posix()}"
    return [
        Picture(name, title, f"{caption(results)} Draw it again: {command}", _encoded(folder / FIGURES_FOLDER / name))
        for name, title, caption in _CAPTIONS
    ]


def _encoded(path: Path) -> str | None:
    return base64.b64encode(path.read_bytes()).decode("ascii") if path.is_file() else None


def _loss_caption(results: Mapping[str, Any]) -> str:
    chance = math.log((results.get("model") or {}).get("vocab_size") or 256)
    return (
        f"Lower is better; a model that knows nothing starts at {chance:.2f}. Left of the dashed line every layer "
        "is integrated as a differential equation, right of it every layer is one plain block with the very same "
        "weights. On the right, enlarged: the validation loss just before and just after, which is what the "
        "switch costs at that moment. Training then goes on."
    )


def _gate_caption(results: Mapping[str, Any]) -> str:
    return (
        "The gate is a vector in each layer that decides how much of the slow state y reaches the fast state x. "
        "It starts at exactly zero, so that the slow path changes nothing at first; a norm that grows means that "
        "the slow path is let in, not yet that it helps."
    )


def _defect_caption(results: Mapping[str, Any]) -> str:
    return (
        "How far one Euler step of length 1 ends from the true flow of the layer, relative to the size of the "
        "state that enters it. The first layer starts from the token embedding, which is small, so its defect is "
        "large in relative terms. The vertical axis is logarithmic."
    )


def _stability_caption(results: Mapping[str, Any]) -> str:
    study = results.get("stability") or {}
    return (
        f"Layer {study.get('layer', '?')} of the trained model is left to run until it comes to rest, is pushed "
        f"by 1 %, and takes {study.get('steps', '?')} equal steps. Blue circles: it comes back to rest. Orange "
        f"diamonds: it stays bounded but never settles. Red crosses: it grows {FAR:.0f} times larger than the "
        "flow and is lost. The lines are predictions, not fits: the solid one from the eigenvalue μ of the fast "
        "field at rest, the dashed one from leak λ and relaxation κ alone; c is the method's own constant, 2 for "
        "Euler and 2.785 for RK4 (at a complex μ a little less). Where ε is small, both fall in proportion to ε: "
        "an explicit method needs 1/ε times as many steps. Near ε = 1 the slow variable is as fast as the fast "
        "one, and the solid line, which knows the fast one alone, is too optimistic."
    )


def _arms_caption(results: Mapping[str, Any]) -> str:
    return (
        "Equal short discrete runs on the same batches. Coupled: the gate is trained. Frozen: the gate is held "
        "at zero. Dense: there is no slow path. One seed each: read the table before comparing."
    )


_CAPTIONS: list[tuple[str, str, Callable[[Mapping[str, Any]], str]]] = [
    ("loss.png", "Loss", _loss_caption),
    ("gates.png", "Gates", _gate_caption),
    ("euler_defect.png", "Euler defect per layer", _defect_caption),
    ("stability.png", "Stability map", _stability_caption),
    ("arms.png", "Three arms", _arms_caption),
]


_DESCRIPTIONS = {
    "config.yaml": "every setting of the run",
    "data.json": "what text it was",
    "metrics.csv": "losses, learning rate and gate norms by step",
    "results.json": "every number in this report",
    "result.json": "what the training run came to",
    "switch.json": "losses around the switch and Euler defect",
    "checkpoints": "model.safetensors + model.json to use, last.ckpt to resume",
    "tensorboard": "the metrics for TensorBoard",
    "tokenizer": "how text becomes tokens",
    "figures": "the figures as PNG",
    "arms": "run folders of the compared arms",
}


def _files(folder: Path) -> list[tuple[str, str]]:
    """(name, description) of what lies in the folder, those with a description only."""
    return [(name, text) for name, text in _DESCRIPTIONS.items() if (folder / name).exists()]


def number(value: Any, digits: int = 3) -> str:
    """A number with so many decimals; "missing" for None and not-a-number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "missing"
    return f"{value:,.{digits}f}"


def significant(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits; "not found" for None."""
    return "not found" if value is None else f"{value:.{digits}g}"


def main(arguments: list[str] | None = None) -> int:
    """Draws the figures and the report of a folder anew."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or not Path(words[0]).is_dir():
        print("usage: python -m odeformer.reporting.report RUN     (the folder of a demo)", file=sys.stderr)
        return 2
    for path in [*draw_figures(words[0]), write_report(words[0])]:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
