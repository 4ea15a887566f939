"""The whole story in one command: proofs, continuous training, the switch, a sample, stability, three arms, a report.

The output folder is the run folder of the main training run, with results.json, figures/, report.html and arms/ beside it.
What a stage found is on disk before the next begins; a demo that is interrupted leaves a report of what it got to.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scipy.stats import t as student

from odeformer.causality import CausalityError, check_causality
from odeformer.config import RunConfig
from odeformer.data import TextData, evaluation_batches, load_data
from odeformer.demo.callbacks import ExactFlow, SaveFirst
from odeformer.demo.plan import DemoPlan, demo_plan, environment, fastest_threads
from odeformer.discretisation import Certificate, certify
from odeformer.files import write_json
from odeformer.reporting.report import ARMS_FOLDER, RESULTS_FILE, draw_figures, write_report
from odeformer.stability import study_layer
from odeformer.training import TrainingResult, generate_text, train
from odeformer.training.module import trained_parameters
from odeformer.training.preparation import initial_model, with_vocabulary


@dataclass(frozen=True)
class DemoResult:
    """What a demo came to; `results` is results.json."""

    folder: Path
    report: Path
    causality_ok: bool
    certificate_ok: bool
    validation_loss: float
    """Nats per token at the end of the main run."""
    switch_gap: float
    """Validation loss just after the switch minus just before, nats per token."""
    seconds: float
    results: dict[str, Any] = field(repr=False)


def run_demo(
    output: Path | str, quick: bool = False, *, plan: DemoPlan | None = None, console: Console | None = None
) -> DemoResult:
    """Runs the demo into the folder `output` and prints its progress.

    Args:
        quick: the short form.
        plan: sizes of your own, instead of `demo_plan(quick)`.

    Raises FileExistsError, before any work, for a folder that is not empty; `CausalityError` where the model leaks, RuntimeError
    where the certificate fails; and as `odeformer.training.train` does.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder; choose another")
    demo = _Demo(output, plan or demo_plan(quick), console or Console(highlight=False))
    try:
        return demo.run()
    except BaseException:
        demo.leave()
        raise


STAGES = 7
EXACT_BATCHES = 2
"""Validation batches on which the exact flow is evaluated, once."""


class _Demo:
    """One demo in progress. `results` grows stage by stage."""

    def __init__(self, output: Path, plan: DemoPlan, console: Console) -> None:
        self.output = output
        self.plan = plan
        self.console = console
        self.begun = time.perf_counter()
        self.number = 0
        self.results: dict[str, Any] = {
            "quick": plan.quick,
            "finished": False,
            "environment": None,
            "stage_seconds": {},
        }

    def run(self) -> DemoResult:
        self.console.print(f"[bold]odeformer demo[/bold] -> {self.output}", soft_wrap=True)
        with self._status("reading the text"):
            data = load_data(self.plan.config.data, context=self.plan.config.model.context)
        config = with_vocabulary(self.plan.config, data.tokenizer.vocab_size)
        discrete = dataclasses.replace(config.training, scheme="discrete", switch_at=None)
        with fastest_threads(initial_model(dataclasses.replace(config, training=discrete)), discrete.batch_size):
            self.results["environment"] = environment()
            return self._stages(config, data)

    def _stages(self, config: RunConfig, data: TextData) -> DemoResult:
        with self._stage("Causality: no output may depend on a later token", "causality check"):
            self._causality(config, data)
        with self._stage("Certificate: the discrete block is one step of the equations", "certificate"):
            self._certificate("certificate", certify(config.model))
        training = config.training
        title = (
            f"Training: {training.switch_at} continuous steps, the switch, then discrete up to step {training.steps}"
        )
        with self._stage(title, "training"):
            result = self._train(config, data)
        with self._stage("A sample of what it writes", "sample and certificate of the trained weights"):
            self._sample()
            self._certificate("certificate_trained", certify(result.model))
        with self._stage("Stability: which steps explicit methods can take on the trained field", "stability"):
            self._stability(result, data)
        with self._stage(f"Three arms: {self.plan.arm_steps} equal discrete steps each, and two more seeds", "arms"):
            self._arms(config, data)
        with self._stage("Figures and report", "figures and report"):
            self.results["finished"] = True
            self.results["seconds"] = time.perf_counter() - self.begun
            self.save()
            draw_figures(self.output)
        self.results["seconds"] = time.perf_counter() - self.begun
        self.save()
        report = write_report(self.output)
        self._farewell(report)
        switch = result.switch or {}
        return DemoResult(
            folder=self.output,
            report=report,
            causality_ok=True,
            certificate_ok=True,
            validation_loss=result.validation_loss,
            switch_gap=switch.get("gap", math.nan),
            seconds=self.results["seconds"],
            results=self.results,
        )

    def save(self) -> None:
        """results.json, once the run folder exists."""
        if self.output.is_dir() and any(self.output.iterdir()):
            write_json(self.output / RESULTS_FILE, self.results)

    def leave(self) -> None:
        """After an interruption or an error: a report of what is there, as far as one can be written."""
        if not (self.output / RESULTS_FILE).is_file():
            return
        try:
            draw_figures(self.output)
            self.console.print(f"\nStopped. What was finished: {write_report(self.output)}", soft_wrap=True)
        except (OSError, ValueError) as error:
            self.console.print(f"\nStopped; no report could be written: {error}", soft_wrap=True)

    def _causality(self, config: RunConfig, data: TextData) -> None:
        model = initial_model(config)
        report = check_causality(model)
        self.results["model"] = {
            **config.model.to_dict(),
            "epsilon": config.model.resolved_epsilon,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        self.results["data"] = _plain_description(data)
        self.results["causality"] = {**dataclasses.asdict(report), "ok": report.ok, "text": str(report)}
        self._say(str(report))
        if not report.ok:
            raise CausalityError(report)

    def _certificate(self, key: str, certificate: Certificate) -> None:
        self.results[key] = {**certificate.to_dict(), "text": str(certificate)}
        if key == "certificate":
            self._say(str(certificate))
        else:
            self._say(f"Certificate of the trained weights: {'holds' if certificate.ok else 'FAILS'}")
        if not certificate.ok:
            raise RuntimeError(f"the certificate fails: {'; '.join(certificate.problems())}")

    def _train(self, config: RunConfig, data: TextData) -> TrainingResult:
        training, context = config.training, config.model.context
        batches = list(evaluation_batches(data.validation, training.batch_size, context, EXACT_BATCHES))
        exact = ExactFlow(training.switch_at or training.steps, batches)
        result = train(config, self.output, data=data, callbacks=[SaveFirst(self.save), exact])
        flow = config.flow
        validation = data.description["validation"]
        seconds = result.seconds - exact.seconds
        self.results["training"] = {
            **result.to_dict(),
            "seconds": seconds,
            "tokens_per_second": result.steps * training.batch_size * context / seconds,
            "flow": f"{flow.method}, {flow.steps} steps per layer, {flow.gradient} gradient",
            "bits_per_byte": result.validation_loss / math.log(2) * validation["tokens"] / validation["bytes"],
            "exact_flow": exact.found,
        }
        if result.switch is not None:
            before, after = result.switch["validation_loss_before"], result.switch["validation_loss_after"]
            self._say(f"Switch: validation loss {before:.4f} -> {after:.4f} ({after - before:+.4f} nats per token)")
        self._say(f"Validation loss {result.validation_loss:.4f} nats per token")
        return result

    def _sample(self) -> None:
        plan = self.plan
        settings: dict[str, Any] = {"temperature": plan.temperature, "top_k": plan.top_k, "seed": 0}
        with self._status("sampling"):
            text = generate_text(self.output, plan.prompt, plan.sample_tokens, **settings)
        self.results["sample"] = {"prompt": plan.prompt, "text": text, **settings}
        self.console.print(plan.prompt + text, style="cyan", markup=False)

    def _stability(self, result: TrainingResult, data: TextData) -> None:
        plan = self.plan
        start = len(data.validation) // 2
        tokens = torch.tensor(data.validation[start : start + plan.stability_tokens].astype("int64"))[None]
        with self._status("stability") as update:
            study = study_layer(
                result.model,
                tokens,
                epsilons=plan.stability_epsilons,
                methods=plan.stability_methods,
                steps=plan.long_steps,
                rounds=plan.stability_rounds,
                progress=update,
            )
        self.results["stability"] = study.to_dict()
        self._say(study.note)
        for limit in study.limits:
            if limit.epsilon == min(plan.stability_epsilons):
                measured = "outside the search" if limit.settles is None else f"{limit.settles:.3g}"
                where = f"{limit.method} at epsilon = {limit.epsilon:.3g}"
                self._say(f"{where}: settles up to ds = {measured}, predicted {limit.predicted_settles:.3g}")

    def _arms(self, config: RunConfig, data: TextData) -> None:
        seed = config.training.seed
        arms = [self._arm(config, data, coupling, seed) for coupling in ("coupled", "frozen", "dense")]
        repeats = [self._arm(config, data, "coupled", seed + extra) for extra in (1, 2)]
        losses = [arm["validation_loss"] for arm in (arms[0], *repeats)]
        self.results["arms"] = arms
        self.results["arms_noise"] = {"losses": losses, "threshold": noise_threshold(losses)}
        for arm in (*arms, *repeats):
            self._say(
                f"{arm['name']:18s} validation loss {arm['validation_loss']:.4f}   "
                f"{arm['milliseconds_per_step']:.0f} ms/step"
            )
        threshold = self.results["arms_noise"]["threshold"]
        self._say(f"One seed: no claim that one arm is better; differences below {threshold:.3f} are noise.")

    def _arm(self, config: RunConfig, data: TextData, coupling: Any, seed: int) -> dict[str, Any]:
        again = seed != config.training.seed
        steps = self.plan.arm_steps
        settings = dataclasses.replace(
            config.training, steps=steps, seed=seed, scheme="discrete", switch_at=None,
            warmup_steps=min(config.training.warmup_steps, steps // 4),
            evaluate_every=max(1, steps // 5), checkpoint_every=steps,
        )  # fmt: skip
        own = dataclasses.replace(config, model=dataclasses.replace(config.model, coupling=coupling), training=settings)
        name = f"{coupling}, seed {seed}" if again else coupling
        folder = f"{coupling}-{seed}" if again else coupling
        result = train(own, self.output / ARMS_FOLDER / folder, data=data, label=name)
        return {
            "name": name,
            "folder": folder,
            "seed": seed,
            "trained_parameters": sum(parameter.numel() for parameter in trained_parameters(result.model)),
            "milliseconds_per_step": 1e3 * result.seconds / result.steps,
            **result.to_dict(),
        }

    def _farewell(self, report: Path) -> None:
        show = self.console.print
        show(f"\n[bold]Done in {self.results['seconds']:.0f} s.[/bold]")
        show(f"Read the report:    {report}", markup=False, soft_wrap=True)
        show(f'Continue with:      odeformer generate {self.output} --prompt "class "', markup=False, soft_wrap=True)
        show(f"                    odeformer certify {self.output}", markup=False, soft_wrap=True)

    @contextmanager
    def _stage(self, title: str, key: str) -> Iterator[None]:
        self.number += 1
        self.console.print(f"\n[bold blue]{self.number}/{STAGES}[/bold blue] [bold]{title}[/bold]", soft_wrap=True)
        start = time.perf_counter()
        yield
        self.results["stage_seconds"][key] = time.perf_counter() - start
        self.save()

    @contextmanager
    def _status(self, text: str) -> Iterator[Callable[[str], None]]:
        """A spinner on a terminal; elsewhere plain lines."""
        if not self.console.is_terminal:
            yield self._say
            return
        with self.console.status(text) as status:
            yield status.update

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def noise_threshold(losses: Sequence[float]) -> float:
    """Two runs that differ in their seed alone have losses closer than this 19 times of 20, judged by `losses` of such runs.

    sqrt(2) s t with s their standard deviation and t Student's 0.975 quantile, losses taken as normal.
    """
    return math.sqrt(2) * statistics.stdev(losses) * float(student.ppf(0.975, len(losses) - 1))


def _plain_description(data: TextData) -> dict[str, Any]:
    source = data.description["source"]
    named = [str(part) for part in source] if isinstance(source, list | tuple) else str(source)
    return {**data.description, "source": named}
