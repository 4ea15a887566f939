"""From a continuous checkpoint to a discrete one: certify, measure what the switch loses, write."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odeformer.config import RunConfig
from odeformer.data import Batch, evaluation_batches, load_data
from odeformer.discretisation import Certificate, certify, to_discrete
from odeformer.files import write_json
from odeformer.model import FastSlowLM
from odeformer.training.callbacks import SWITCH_FILE, measured_defect
from odeformer.training.checkpoints import find_checkpoint, load_model, read_description, save_model
from odeformer.training.configuration import CONFIG_FILE, TOKENIZER_FOLDER, load_run_config, save_config
from odeformer.training.flows import with_scheme
from odeformer.training.module import evaluate


@dataclass(frozen=True)
class SwitchReport:
    """What the switch of one checkpoint came to. Losses are in nats per token, None where the run's text is not to be had."""

    certificate: Certificate
    step: int | None
    """Of the checkpoint, in optimiser steps."""
    validation_loss_before: float | None
    validation_loss_after: float | None
    euler_defect: list[float] | None
    """Per layer, on validation text, or on random tokens where there is none."""
    note: str = ""
    """Why something is missing, or what the continuous side is."""

    @property
    def ok(self) -> bool:
        return self.certificate.ok

    @property
    def gap(self) -> float | None:
        """Validation loss after the switch minus before."""
        if self.validation_loss_before is None or self.validation_loss_after is None:
            return None
        return self.validation_loss_after - self.validation_loss_before

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the certificate is its own file's business."""
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "certificate"}
        return {**kept, "gap": self.gap}

    def __str__(self) -> str:
        rows = [str(self.certificate)]
        if self.euler_defect is not None and self.gap is not None:  # otherwise it is the certificate's
            defects = ", ".join(f"{defect:.2e}" for defect in self.euler_defect)
            rows.append(f"Euler defect on the run's text   {defects}")
        if self.gap is not None:
            rows.append(
                f"Validation loss                  {self.validation_loss_before:.4f} continuous -> "
                f"{self.validation_loss_after:.4f} discrete (gap {self.gap:+.4f} nats per token)"
            )
        return "\n".join([*rows, *([f"Note: {self.note}"] if self.note else [])])


def switch_checkpoint(source: Path | str, output: Path | str) -> SwitchReport:
    """Writes the discrete twin of a checkpoint or run folder: the same weights, the scheme noted in model.json.

    `output` then holds model.safetensors, model.json, switch.json, and the run's config.yaml and tokenizer; nothing is written
    where the certificate fails. Raises FileExistsError for an output folder that is not empty, ValueError where the model's
    horizon has no discrete twin, and as `load_model` does.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder; choose another")
    folder = find_checkpoint(source)
    model, description = load_model(folder), read_description(folder)
    run = run_folder_of(folder)
    config = None if run is None else load_run_config(run / CONFIG_FILE)
    batches, note = _validation(config)
    report = _measure(model, description, config, batches, note)
    if report.ok:
        existed = output.exists()
        try:
            if run is not None and config is not None:
                save_config(config, output / CONFIG_FILE)
                shutil.copytree(run / TOKENIZER_FOLDER, output / TOKENIZER_FOLDER)
            write_json(output / SWITCH_FILE, report.to_dict())
            kept = {"step": report.step} if report.step is not None else {}
            save_model(to_discrete(model), output, switched_from=description["scheme"], **kept)
        except BaseException:
            _remove(output, keep_folder=existed)
            raise
    return report


def run_folder_of(checkpoint: Path | str) -> Path | None:
    """The run folder that a checkpoint lies in; None where it lies on its own."""
    folder = find_checkpoint(checkpoint)
    return next((place for place in (folder, folder.parent) if (place / CONFIG_FILE).is_file()), None)


def _validation(config: RunConfig | None) -> tuple[Sequence[Batch], str]:
    """(evaluation batches, why there are none)."""
    if config is None:
        return (), "the checkpoint lies outside a run folder, so there is no validation text"
    training, context = config.training, config.model.context
    try:
        data = load_data(config.data, context=context)
        return list(evaluation_batches(data.validation, training.batch_size, context, training.evaluation_batches)), ""
    except (OSError, ValueError) as error:
        return (), f"the run's text is not available ({error})"


def _measure(
    model: FastSlowLM, description: dict[str, Any], config: RunConfig | None, batches: Sequence[Batch], note: str
) -> SwitchReport:
    discrete, continuous = to_discrete(model), model
    if description["scheme"] != "continuous":
        continuous = with_scheme(model, "continuous", None if config is None else config.flow)
        note = "; ".join(
            filter(None, [note, "the checkpoint is discrete already: compared with the flow of its config"])
        )
    certificate = certify(model)
    before = after = None
    defects: list[float] | None = certificate.euler_defect
    if batches:
        before, after = evaluate(continuous, batches), evaluate(discrete, batches)
        defects = measured_defect(discrete, batches[0][0])["euler_defect"]
    return SwitchReport(certificate, description.get("step"), before, after, defects, note)


def _remove(folder: Path, keep_folder: bool) -> None:
    if not keep_folder:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
