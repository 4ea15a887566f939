"""Extreme eigenvalues of the fast field's Jacobian, matrix-free.

J = df/dx with y (and u) frozen, mu an eigenvalue of J, in units of 1 / fast time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from solvers import FastSlowSystem


@dataclass(frozen=True)
class Spectrum:
    """Extreme eigenvalues of J, in units of 1 / fast time; residuals |J v - mu v| / |mu| of the unit vectors v found."""

    leftmost: complex
    """The eigenvalue of most negative real part."""
    leftmost_residual: float
    largest: complex
    """The eigenvalue of largest magnitude."""
    largest_residual: float
    products: int
    """Jacobian-vector products spent."""
    direction: Tensor = dataclasses.field(repr=False)
    """Unit vector of x's shape: the real part of the leftmost eigenvalue's vector."""


@torch.no_grad()
def fast_spectrum(
    system: FastSlowSystem, x: Tensor, y: Tensor, *, vectors: int = 40, tolerance: float = 1e-4, seed: int = 0
) -> Spectrum:
    """Extreme eigenvalues of J = df/dx at (x, y), t = 0, matrix-free: ARPACK's implicitly restarted Arnoldi on forward-mode
    products. A state of no more than `vectors` numbers is treated densely.

    Args:
        x, y: float64 states; the system's parameters must be float64 too.
        vectors: dimension of the Krylov space.
        tolerance: relative accuracy asked of the eigenvalues.

    Raises ValueError for other dtypes, and RuntimeError where Arnoldi does not converge.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"x must be float64 for eigenvalues to be meaningful, got {x.dtype}")
    size, products = x.numel(), 0

    def product(vector: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        tangent = torch.from_numpy(np.ascontiguousarray(vector.real)).reshape(x.shape).to(x)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            return torch.func.jvp(lambda z: system.fast(0.0, z, y), (x,), (tangent,))[1].reshape(-1).cpu().numpy()

    def extreme(which: str) -> tuple[complex, np.ndarray]:
        if size <= vectors:
            values, found = np.linalg.eig(np.stack([product(column) for column in np.eye(size)], axis=1))
        else:
            start = np.random.default_rng(seed).standard_normal(size)
            operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
            try:
                values, found = eigs(operator, k=4, which=which, ncv=vectors, v0=start, tol=tolerance)
            except ArpackNoConvergence as error:
                if not len(error.eigenvalues):
                    raise RuntimeError(f"no eigenvalue converged in {products} Jacobian products: {error}") from error
                values, found = error.eigenvalues, error.eigenvectors
        best = int(values.real.argmin() if which == "SR" else np.abs(values).argmax())
        return complex(values[best]), found[:, best] / np.linalg.norm(found[:, best])

    def residual(value: complex, vector: np.ndarray) -> float:
        image = product(vector.real) + 1j * product(vector.imag)
        return float(np.linalg.norm(image - value * vector) / max(abs(value), 1e-300))

    leftmost, left_vector = extreme("SR")
    largest, large_vector = extreme("LM")
    part = left_vector.real if np.linalg.norm(left_vector.real) > 0.5 else left_vector.imag
    return Spectrum(
        leftmost,
        residual(leftmost, left_vector),
        largest,
        residual(largest, large_vector),
        products,
        torch.from_numpy(part / np.linalg.norm(part)).reshape(x.shape).to(x),
    )
