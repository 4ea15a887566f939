"""Continuous-time fast-slow transformers: one set of parameters, a stiff flow and its discrete twin."""

from odeformer.causality import CausalityError, CausalityReport, check_causality
from odeformer.config import DataConfig, FastSlowConfig, FlowConfig, RunConfig, TrainingConfig
from odeformer.discretisation import (
    Certificate,
    certify,
    euler_defect,
    euler_step,
    lie_step,
    to_continuous,
    to_discrete,
)
from odeformer.fields import FastSlowField, FastSlowLayer
from odeformer.model import FastSlowLM

__version__ = "0.1.0"

__all__ = [
    "CausalityError",
    "CausalityReport",
    "Certificate",
    "DataConfig",
    "FastSlowConfig",
    "FastSlowField",
    "FastSlowLM",
    "FastSlowLayer",
    "FlowConfig",
    "RunConfig",
    "TrainingConfig",
    "certify",
    "check_causality",
    "euler_defect",
    "euler_step",
    "lie_step",
    "to_continuous",
    "to_discrete",
]
