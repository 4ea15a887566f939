"""Stiff solvers on a fast-slow transformer field: error against time, memory, and the ratios to torchdiffeq, all in one run.

    python -m experiments.solver_benchmark           # everything, about 15 minutes on two cores: table, JSON, three figures
    python -m experiments.solver_benchmark --ratios  # the ratios and the table of gradient errors, about 6 minutes
    python -m experiments.solver_benchmark --quick   # a small field and two epsilons, under a minute

Errors are against a float64 reference; `experiments.solver_problem` has the field, `experiments.solver_peers` the solvers.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.solver_peers import Solver, all_solvers, ours, torchdiffeq_solver
from experiments.solver_problem import EPSILONS, Problem, Reference, problem, reference
from odeformer.files import replacing, write_json
from odeformer.reporting.figures import CYCLE, DPI, GREY, STYLE
from solvers import AndersonAdams, Backprop, Checkpointed, Gradient, StoredAdjoint

TOLERANCES = (0.1, 1e-2, 1e-3, 1e-4, 1e-5)
FINE = tuple(10 ** (-k / 6) for k in range(31))
"""Among which the loosest tolerance that reaches an error is sought, from 1 down."""
SECONDS = 3.0
"""A solver that took longer at an epsilon is not asked for tighter tolerances there."""
BYTES_AT = 1e-2
"""The tolerance at which bytes are counted, which takes ten times as long as the solve, if that takes less than 2 seconds."""
METHOD = AndersonAdams(4)


@dataclass(frozen=True)
class Measurement:
    """One solve and its gradient. Seconds of wall time."""

    solver: str
    epsilon: float
    tolerance: float
    state_error: float
    gradient_error: float
    evaluations: int
    forward_seconds: float
    both_seconds: float
    """Forward and backward."""
    peak_bytes: int | None
    """Of live tensors that the solve and its backward pass made; None where it was not counted."""


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made within, and alive, have held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.alive | given:
                    self._watch(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def forget() -> None:
            self.alive.discard(key)
            self.now -= size

        weakref.finalize(storage, forget)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def forward(solver: Solver, p: Problem, tolerance: float) -> tuple[tuple[Tensor, Tensor], int]:
    with torch.no_grad():
        return solver.forward(p, tolerance)


def measure(solver: Solver, p: Problem, tolerance: float, exact: Reference) -> Measurement:
    """One forward pass, one forward and backward pass, and perhaps one more of these for the bytes."""
    forward_seconds, ((x, y), evaluations) = timed(lambda: forward(solver, p, tolerance))
    both_seconds, gradient = timed(lambda: solver.gradient(p, tolerance))
    peak = None
    if tolerance == BYTES_AT and both_seconds < 2 and "diffrax" not in solver.name:
        gc.collect()
        with PeakBytes() as watch:
            solver.gradient(p, tolerance)
        peak = watch.peak
    return Measurement(
        solver.name,
        p.epsilon,
        tolerance,
        exact.state_error(x, y),
        exact.gradient_error(gradient),
        evaluations,
        forward_seconds,
        both_seconds,
        peak,
    )


def work_precision(
    solvers: Sequence[Solver], epsilons: Sequence[float], exact: Mapping[float, Reference], tokens: int
) -> list[Measurement]:
    """Every solver at every epsilon and tolerance that `SECONDS` allows; failures are printed and left out."""
    found = []
    for solver in solvers:  # the first call pays for tables and compilations
        solver.gradient(problem(1, tokens=tokens), 0.1)
        forward(solver, problem(1, tokens=tokens), 0.1)
    for epsilon in epsilons:
        p = problem(epsilon, tokens=tokens)
        for solver in solvers:
            for tolerance in TOLERANCES:
                try:
                    m = measure(solver, p, tolerance, exact[epsilon])
                except Exception as error:
                    print(f"  1/{1 / epsilon:<5.0f} {solver.name:36s} {tolerance:7.0e}  failed: {str(error)[:60]}")
                    continue
                found.append(m)
                print(row(m), flush=True)
                if m.both_seconds > SECONDS:
                    break
    return found


def row(m: Measurement) -> str:
    peak = "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:9.0f} MiB"
    return (
        f"  1/{1 / m.epsilon:<5.0f} {m.solver:36s} {m.tolerance:7.0e}  state {m.state_error:7.1e}  gradient "
        f"{m.gradient_error:7.1e}  {m.evaluations:6d} f  {m.forward_seconds:8.3f} s  {m.both_seconds:8.3f} s {peak}"
    )


def loosest(error: Callable[[float], float], target: float, tolerances: Sequence[float] = FINE) -> float:
    """The first tolerance with an error within the target. Raises ValueError where none has."""
    for tolerance in tolerances:
        try:
            if error(tolerance) <= target:
                return tolerance
        except (RuntimeError, AssertionError):  # a step that torchdiffeq or we could not take
            continue
    raise ValueError(f"no tolerance down to {tolerances[-1]:.1e} reaches {target:.0e}")


def in_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns, so that a slow minute touches all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run)[0])
    return {name: statistics.median(values) for name, values in seconds.items()}


def gradient_error(exact: Reference, solver: Solver, p: Problem, tolerance: float) -> float:
    return exact.gradient_error(solver.gradient(p, tolerance))


def ratios(exact: Mapping[float, Reference], rounds: int = 5) -> dict[str, Any]:
    """The targets: each solver at the loosest tolerance that reaches the error, timed in turns."""
    mine, dopri5 = ours(METHOD), torchdiffeq_solver("dopri5")
    found: dict[str, Any] = {}

    def compare(title: str, runs: Mapping[str, tuple[Callable[[], Any], float, int]], rounds: int) -> None:
        seconds = in_turns({name: run for name, (run, _, _) in runs.items()}, rounds)
        found[title] = entry(seconds, runs)
        print(title)
        for name, e in found[title].items():
            work = f"{e['evaluations']:6d} f  tolerance {e['tolerance']:.1e}"
            print(f"  {name:36s} {1e3 * e['seconds']:9.1f} ms  {work}  {e['ratio']:6.2f} x", flush=True)

    def at(solver: Solver, epsilon: float) -> tuple[Callable[[], Any], float, int]:
        p = problem(epsilon)
        tolerance = loosest(lambda tol: exact[epsilon].state_error(*forward(solver, p, tol)[0]), 1e-3)
        return partial(forward, solver, p, tolerance), tolerance, forward(solver, p, tolerance)[1]

    for epsilon in (1, 1 / 256):
        runs = {solver.name: at(solver, epsilon) for solver in (mine, dopri5)}
        compare(f"forward, state error 1e-3, eps = 1/{1 / epsilon:.0f}", runs, rounds)
    runs = {f"eps = 1/{1 / epsilon:.0f}": at(mine, epsilon) for epsilon in (1 / 16, 1 / 1024)}
    compare(f"{mine.name}, state error 1e-3", runs, 3 * rounds)

    p, backwards = problem(1 / 256), {}
    for solver in (mine, *(torchdiffeq_solver(name) for name in ("dopri5", "bosh3"))):
        # A gradient of torchdiffeq's takes seconds here, and 1e-2 is far from enough (see the measurements).
        tolerances = FINE if solver is mine else FINE[12::2]
        try:
            tolerance = loosest(partial(gradient_error, exact[1 / 256], solver, p), 1e-2, tolerances)
        except ValueError as error:
            print(f"  {solver.name}: {error}")
            continue
        backwards[solver.name] = (partial(solver.gradient, p, tolerance), tolerance, forward(solver, p, tolerance)[1])
    compare("forward + backward, gradient error 1e-2, eps = 1/256", backwards, min(3, rounds))
    return found


def entry(seconds: Mapping[str, float], runs: Mapping[str, tuple[Any, float, int]]) -> dict[str, Any]:
    """Seconds, tolerance, evaluations, and the ratio to the first."""
    first = next(iter(seconds.values()))
    return {
        name: {
            "seconds": value,
            "tolerance": runs[name][1],
            "evaluations": runs[name][2],
            "ratio": value / first,
        }
        for name, value in seconds.items()
    }


def gradient_table(exact: Mapping[float, Reference], epsilons: Sequence[float], tokens: int) -> dict[str, Any]:
    """Relative gradient error of every gradient of ours at rtol = atol = 1e-5, and of torchdiffeq's adjoint at 1e-3 and 1e-6.

    The latter is left out below eps = 1/64, where it takes minutes. None stands for a solve that failed.
    """
    kinds: tuple[Gradient, ...] = (Backprop(), Checkpointed(), Checkpointed(8), StoredAdjoint())
    rows = [(repr(gradient), ours(METHOD, gradient), 1e-5, epsilons) for gradient in kinds]
    for tolerance in (1e-3, 1e-6):
        adjoint = torchdiffeq_solver("dopri5", adjoint=True)
        rows.append((f"odeint_adjoint {tolerance:.0e}", adjoint, tolerance, [e for e in epsilons if e >= 1 / 64]))
    table: dict[str, Any] = {}
    for name, solver, tolerance, wanted in rows:
        errors: dict[str, float | None] = {}
        for epsilon in wanted:
            try:
                error = gradient_error(exact[epsilon], solver, problem(epsilon, tokens=tokens), tolerance)
            except AssertionError:  # torchdiffeq's way to say that it cannot go on
                error = None
            errors[f"1/{1 / epsilon:.0f}"] = error
        table[name] = errors
        print(f"  {name:24s}" + "".join(f"  {math.nan if e is None else e:7.1e}" for e in errors.values()), flush=True)
    return table


def figure(measurements: Sequence[Measurement], error: str, seconds: str, title: str, x_label: str, path: Path) -> Path:
    """Error against time, one panel an epsilon, a line a solver."""
    epsilons = sorted({m.epsilon for m in measurements}, reverse=True)
    names = list(dict.fromkeys(m.solver for m in measurements))
    columns = min(3, len(epsilons))
    with matplotlib.rc_context(STYLE):
        rows = math.ceil(len(epsilons) / columns)
        drawing = Figure(figsize=(4.6 * columns, 3.7 * rows + 1.3), layout="constrained")
        FigureCanvasAgg(drawing)
        panels = drawing.subplots(rows, columns, sharey=True, squeeze=False)
        for panel, epsilon in zip(panels.flat, epsilons, strict=False):
            for index, name in enumerate(names):
                points = [m for m in measurements if m.solver == name and m.epsilon == epsilon]
                points = [m for m in points if math.isfinite(getattr(m, error))]
                peer = any(word in name for word in ("torch", "diffrax"))
                panel.plot(
                    [getattr(m, seconds) for m in points],
                    [max(getattr(m, error), 1e-8) for m in points],
                    color=CYCLE[index % len(CYCLE)]
                    if not peer
                    else (GREY, "black", "#9CA3AF", "#7C2D12", "#B45309")[index % 5],
                    linestyle="--" if peer else "-",
                    marker="osD^v<>P"[index % 8],
                    markersize=5,
                    label=name,
                )
            panel.set(
                xscale="log",
                yscale="log",
                title=f"$\\epsilon$ = 1/{1 / epsilon:.0f}" if epsilon < 1 else "$\\epsilon$ = 1",
            )
            panel.set_ylim(1e-8, 1e2)
        for panel in panels[-1]:
            panel.set_xlabel(x_label)
        for line in panels:
            line[0].set_ylabel("relative error")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        drawing.suptitle(title, x=0.01, ha="left", fontweight="bold")
        drawing.legend(handles, labels, loc="outside lower center", ncols=3 if columns > 2 else 2)
        with replacing(path) as temporary:
            drawing.savefig(temporary, dpi=DPI, format="png")
    return path


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 tokens, eps = 1/4 and 1/64")
    parser.add_argument("--ratios", action="store_true", help="the ratios to torchdiffeq and the gradient errors alone")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/solver_benchmark"), help="folder for the JSON and figures"
    )
    options = parser.parse_args(arguments)
    if options.quick and options.ratios:
        parser.error("--quick and --ratios exclude each other: ratios are measured on the whole field")
    epsilons = (1 / 4, 1 / 64) if options.quick else EPSILONS
    tokens = 64 if options.quick else 256
    exact = {epsilon: reference(epsilon, tokens=tokens) for epsilon in epsilons}
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": "float64"}
    if not options.quick:
        results["ratios"] = ratios(exact)
    print(f"Gradient error, eps = {', '.join(f'1/{1 / epsilon:.0f}' for epsilon in epsilons)}")
    results["gradient_error"] = gradient_table(exact, epsilons, tokens)
    write_json(options.output / "ratios.json", results)
    if not options.ratios:
        print("Work and precision")
        measurements = work_precision(all_solvers(), epsilons, exact, tokens)
        results["measurements"] = [asdict(m) for m in measurements]
        write_json(options.output / "solver_benchmark.json", results)
        figure(
            measurements,
            "state_error",
            "forward_seconds",
            "State error against time",
            "seconds, forward",
            options.output / "work_precision.png",
        )
        figure(
            measurements,
            "gradient_error",
            "both_seconds",
            "Gradient error against time",
            "seconds, forward and backward",
            options.output / "gradient_precision.png",
        )
    print(f"Written to {options.output}")
    return results


if __name__ == "__main__":
    main()
