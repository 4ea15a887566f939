"""From the continuous model to the discrete one and back, and the proof that they belong together.

One explicit Euler step of fast time 1 of the parallel field is the parallel block; one Lie-Trotter step is the sequential
block (mathematics, Propositions 1 and 2). `certify` shows it for a config or a model.
"""

from odeformer.discretisation.certificate import Certificate, certify
from odeformer.discretisation.schemes import (
    euler_defect,
    euler_step,
    lie_step,
    to_continuous,
    to_discrete,
    twin_method,
)

__all__ = [
    "Certificate",
    "certify",
    "euler_defect",
    "euler_step",
    "lie_step",
    "to_continuous",
    "to_discrete",
    "twin_method",
]
