"""How a run can end other than well."""

from __future__ import annotations


class DivergedError(RuntimeError):
    """Training cannot go on: the loss or a weight is not finite, or a layer's flow could not be integrated."""


class TrainingInterrupted(KeyboardInterrupt):
    """The run was interrupted (Ctrl-C) and left a checkpoint, from which `resume=True` continues it."""
