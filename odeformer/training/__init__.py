"""Training with pytorch-lightning's Trainer: configuration, the module, callbacks, checkpoints.

Names are imported when first used: Lightning takes seconds to import, and reading a config or a checkpoint needs none of it.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Checkpoints": "callbacks",
    "DivergedError": "errors",
    "FastSlowModule": "module",
    "SwitchReport": "switch",
    "SwitchToDiscrete": "callbacks",
    "TrainingInterrupted": "errors",
    "TrainingResult": "run",
    "evaluate": "module",
    "flow_from_config": "flows",
    "generate_text": "samples",
    "learning_rate_at": "module",
    "load_model": "checkpoints",
    "load_run_config": "configuration",
    "save_model": "checkpoints",
    "switch_checkpoint": "switch",
    "train": "run",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
