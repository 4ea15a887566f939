"""The phi functions of exponential integrators, for real arguments z <= 0.

phi_0(z) = e^z, phi_{k+1}(z) = (phi_k(z) - 1/k!) / z, phi_k(0) = 1/k!. The recurrence loses all digits near zero, where the
power series sum_j z^j / (j + k)! takes its place (Hochbruck & Ostermann, Acta Numerica 19 (2010) 209, section 2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SERIES_BELOW = 1.0
"""|z| below which the series is taken: there the recurrence would lose more digits than the series' last term."""
TERMS = 20
INVERSE_FACTORIALS = [1 / math.factorial(j) for j in range(TERMS + 20)]


def phi(k: int, z: float | Tensor) -> float | Tensor:
    """phi_k(z), a float for a float; a tensor is computed in float64, differentiably, and has that dtype."""
    if isinstance(z, Tensor):
        z = z.double()
        small = z.abs() < SERIES_BELOW
        # Each branch sees only arguments that it can take, so that neither value nor gradient of the other can spoil it.
        near, far = torch.where(small, z, 0.0), torch.where(small, -SERIES_BELOW, z)
        return torch.where(small, _series(k, near), _recurrence(k, far, far.exp()))
    return _series(k, z) if abs(z) < SERIES_BELOW else _recurrence(k, z, math.exp(z))


def _series(k: int, z):  # type: ignore[no-untyped-def]
    total = z * 0.0 + INVERSE_FACTORIALS[k + TERMS]
    for j in reversed(range(k, k + TERMS)):
        total = total * z + INVERSE_FACTORIALS[j]
    return total


def _recurrence(k: int, z, value):  # type: ignore[no-untyped-def]
    for j in range(k):
        value = (value - INVERSE_FACTORIALS[j]) / z
    return value
