"""The report's figures, from plain numbers: metrics.csv and results.json. PNG, written whole or not at all.

Every function takes numbers and a path, and returns the path. Titles state what the numbers show.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from odeformer.files import replacing

Series = tuple[list[int], list[float]]
"""(optimiser steps, values)."""

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#6B7280",
)
"""The colours of Okabe and Ito, which colour-blind readers can tell apart."""
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
DPI = 150
WIDE = (8.4, 4.6)
"""Size of a figure in inches, as wide as the report."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.titlesize": 13.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9CA3AF",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E7EB",
    "grid.linewidth": 0.8,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "lines.linewidth": 2.2,
    "mathtext.default": "regular",
}


def read_metrics(path: Path | str) -> dict[str, Series]:
    """Column -> (steps, values) of a run's metrics.csv, empty fields left out. Raises OSError or ValueError naming the file."""
    found: dict[str, Series] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                step = int(row["step"])
                for name, text in row.items():
                    if name and name != "step" and text:
                        steps, values = found.setdefault(name, ([], []))
                        steps.append(step)
                        values.append(float(text))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r} in a row of metrics") from error
    return found


def loss_figure(metrics: Mapping[str, Series], switch: Mapping[str, Any] | None, path: Path) -> Path:
    """Training loss (faint) and validation loss (strong) against steps; the switch is marked, and enlarged on the right."""
    validation = metrics.get("validation/loss")
    title = f"Validation loss falls to {validation[1][-1]:.2f} nats per token" if validation else "Training loss"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=WIDE, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2 if switch else 1, squeeze=False, width_ratios=[3.6, 1] if switch else None)[0]
        axes = panels[0]
        _loss_panel(axes, metrics, switch)
        if switch:
            _switch_panel(panels[1], switch)
        axes.set_title(title)
        return _save(figure, path)


def _loss_panel(axes: Axes, metrics: Mapping[str, Series], switch: Mapping[str, Any] | None) -> None:
    if "train/loss" in metrics:
        axes.plot(*metrics["train/loss"], color=SKY, alpha=0.55, linewidth=1.2, label="training batch")
    if "validation/loss" in metrics:
        axes.plot(*metrics["validation/loss"], color=BLUE, marker="o", markersize=4, label="validation")
    if switch:
        step, after = switch["step"], switch["validation_loss_after"]
        axes.axvline(step, color=RED, linestyle="--", linewidth=1.5, label=f"switch at step {step}")
        axes.plot([step], [after], color=RED, marker="D", markersize=7, linewidth=0, zorder=5)
    axes.set(xlabel="optimiser step", ylabel="cross-entropy (nats per token)")
    axes.legend(loc="upper right")


def _switch_panel(axes: Axes, switch: Mapping[str, Any]) -> None:
    before, after = switch["validation_loss_before"], switch["validation_loss_after"]
    axes.plot([0, 1], [before, after], color=RED, marker="D", markersize=8)
    for x, value, other in ((0, before, after), (1, after, before)):
        place = (0, 16 if value >= other else -16)  # on the side that the line does not cross
        axes.annotate(
            f"{value:.3f}", (x, value), xytext=place, textcoords="offset points", ha="center", va="center", color=RED
        )
    room = max(abs(after - before), 0.01)
    axes.set_ylim(min(before, after) - room, max(before, after) + room)
    axes.set_xlim(-0.5, 1.5)
    axes.set_xticks([0, 1], ["before", "after"])
    axes.set_xlabel("continuous → discrete")
    axes.set_title(f"Switch: {switch['gap']:+.3f}")
    axes.yaxis.tick_right()
    axes.spines["right"].set_visible(True)
    axes.spines["left"].set_visible(False)


def gate_figure(metrics: Mapping[str, Series], switch: Mapping[str, Any] | None, path: Path) -> Path:
    """Norm of the gate vector of each layer against steps."""
    gates = {name: series for name, series in metrics.items() if name.startswith("gate/")}
    largest = max((values[-1] for _, values in gates.values()), default=0.0)
    opened = largest > 1e-6
    title = "The gates start closed and open during training" if opened else "The gates stay closed"
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas()
        for (name, series), color in zip(gates.items(), CYCLE * len(gates), strict=False):
            axes.plot(*series, color=color)
            axes.annotate(
                name.removeprefix("gate/").replace("_", " "),
                (series[0][-1], series[1][-1]),
                xytext=(6, 0),
                textcoords="offset points",
                color=color,
                va="center",
                fontsize=11,
            )
        if switch is not None:
            axes.axvline(switch["step"], color=RED, linestyle="--", linewidth=1.5)
            axes.annotate("switch", (switch["step"], 0), xytext=(5, 3), textcoords="offset points", color=RED)
        axes.set(xlabel="optimiser step", ylabel="norm of the gate vector", title=title)
        axes.set_ylim(bottom=0, top=None if opened else 1)
        axes.margins(x=0.09)
        axes.set_xlim(left=0)
        _spread_labels(axes)
        return _save(figure, path)


def _spread_labels(axes: Axes) -> None:
    """Moves the labels at the line ends apart, so that none covers another."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    labels = sorted((text for text in axes.texts if text.get_text().startswith("layer")), key=lambda text: text.xy[1])  # type: ignore[attr-defined]
    previous = -math.inf
    for text in labels:
        _, y = text.xy  # type: ignore[attr-defined]
        placed = max(y, previous + gap)
        text.set_y((placed - y) / (high - low) * 0.77 * 72 * WIDE[1])
        previous = placed


def defect_figure(defects: Sequence[float], path: Path, where: str = "at the switch") -> Path:
    """Euler defect per layer, as bars on a logarithmic axis."""
    worst = max(range(len(defects)), key=lambda index: defects[index])
    rest = [defect for index, defect in enumerate(defects) if index != worst]
    title = f"One Euler step misses most in layer {worst}" + (
        f"; elsewhere by at most {100 * max(rest):.0f} %" if rest and max(rest) < 1 else ""
    )
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas()
        names = [f"layer {index}" for index in range(len(defects))]
        bars = axes.bar(names, defects, width=0.55, color=BLUE)
        axes.bar_label(bars, [f"{defect:.3g}" for defect in defects], padding=3)
        axes.set_yscale("log")
        axes.set_ylim(min(defects) / 3, max(defects) * 3)
        axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            "as large as the incoming state", (1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            xytext=(0, 3), textcoords="offset points", color=GREY, fontsize=11,
        )  # fmt: skip
        axes.grid(axis="x", visible=False)
        axes.set(ylabel="|Flow(z) - Block(z)| / |z|", xlabel=f"Euler defect per layer, {where}", title=title)
        return _save(figure, path)


def stability_figure(study: Mapping[str, Any], path: Path) -> Path:
    """Outcome of long runs for each epsilon (x) and step in slow time (y), with predictions drawn over; a panel a method.

    `study` is `StabilityStudy.to_dict()` with at least one limit; raises ValueError for one without.
    """
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for limit in study["limits"]:
        by_method.setdefault(limit["method"], []).append(limit)
    if not by_method:
        raise ValueError("the study has no limits to draw")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(by_method), sharey=True, squeeze=False)[0]
        for axes, (name, limits) in zip(panels, by_method.items(), strict=True):
            _stability_panel(axes, limits)
            axes.set_title(name, fontsize=12.5)
            axes.set_xlabel("stiffness ε")
        panels[0].set_ylabel("step ds (slow time)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, columnspacing=1.2)
        figure.suptitle(
            "Where ε is small, the largest usable step is proportional to it",
            x=0.01, ha="left", fontsize=13.5, fontweight="bold",
        )  # fmt: skip
        return _save(figure, path)


def overview_figure(
    metrics: Mapping[str, Series], switch: Mapping[str, Any], study: Mapping[str, Any], path: Path
) -> Path:
    """The project in one picture: the loss of a run that switches, and the stability map of the study's first method."""
    first = study["limits"][0]["method"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.4, 5.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _loss_panel(left, metrics, switch)
        left.set_title("Continuous training, then discrete: same weights")
        _stability_panel(right, [limit for limit in study["limits"] if limit["method"] == first])
        right.set(xlabel="stiffness ε", ylabel="step ds (slow time)")
        right.set_title(f"Which steps {first} can take on the trained field")
        low, high = right.get_ylim()
        right.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
        right.legend(loc="upper left", fontsize=10, ncols=2, columnspacing=1.0)
        return _save(figure, path)


def _stability_panel(axes: Axes, limits: Sequence[Mapping[str, Any]]) -> None:
    kinds = (
        ("settles at rest", BLUE, "o", lambda cell: cell["settles"]),
        ("bounded, does not settle", ORANGE, "D", lambda cell: cell["bounded"] and not cell["settles"]),
        ("unbounded", RED, "x", lambda cell: not cell["bounded"]),
    )
    for label, color, marker, belongs in kinds:
        points = [(limit["epsilon"], cell["step"]) for limit in limits for cell in limit["cells"] if belongs(cell)]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.scatter(xs, ys, s=34, color=color, marker=marker, label=label, zorder=3)
    epsilons = sorted(limit["epsilon"] for limit in limits)
    near = max(limit["predicted_settles"] / limit["epsilon"] for limit in limits)
    far = max(limit["predicted_bounded"] / limit["epsilon"] for limit in limits)
    slow = max(
        limit["predicted_bounded"] for limit in limits
    )  # reached where kappa binds; elsewhere the last point itself
    line = [epsilons[0] * (epsilons[-1] / epsilons[0]) ** (k / 100) for k in range(101)]
    axes.plot(line, [near * x for x in line], color=BLUE, label="predicted: cε / |μ|")
    axes.plot(
        line, [min(far * x, slow) for x in line], color="black", linestyle="--", label="predicted: min(cε / λ, c / κ)"
    )
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(epsilons, [f"1/{round(1 / epsilon)}" if epsilon < 1 else "1" for epsilon in epsilons])
    axes.minorticks_off()


def arms_figure(runs: Mapping[str, Mapping[str, Series]], path: Path) -> Path:
    """Validation (strong) and training (faint) loss of each arm against steps."""
    finals = [series["validation/loss"][1][-1] for series in runs.values() if "validation/loss" in series]
    spread = f" end within {max(finals) - min(finals):.2g} nats of each other" if len(finals) > 1 else ""
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas()
        for index, (name, series) in enumerate(runs.items()):
            color, width = CYCLE[index % len(CYCLE)], max(1.6, 7 - 2.7 * index)  # curves may lie on one another
            if "train/loss" in series:
                axes.plot(*series["train/loss"], color=color, alpha=0.3, linewidth=width / 2)
            if "validation/loss" in series:
                last = series["validation/loss"][1][-1]
                axes.plot(*series["validation/loss"], color=color, linewidth=width, label=f"{name}: {last:.4f}")
        axes.legend(title="final validation loss", loc="upper right")
        axes.set(xlabel="optimiser step", ylabel="cross-entropy (nats per token)", title=f"Equal short runs{spread}")
        return _save(figure, path)


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=WIDE, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
    return path
