"""Where explicit methods stop working on a fast field: its spectrum, stability polynomials, and long runs.

Symbols: J = df/dx with y (and u) frozen, mu an eigenvalue of J, lambda the leak, ds a step in slow time, h = ds / eps the same
step in fast time. Two limits are kept apart, because the norms make everything in f but the leak bounded:

- near the state (x, y) at which the flow settles, J decides: Euler settles there for h <= 2 / |mu| (mu real and the most
  negative), and oscillates around it beyond;
- far away J tends to -lambda I, so runs stay bounded for h < 2 / lambda, however they oscillate. (The slow variable has its
  own limit of this kind, ds < 2 / kappa, which binds when epsilon is near 1.)

With lambda = 0 nothing attracts from far away; then there is no settled state, and no limit is reported.
"""

from odeformer.stability.limits import (
    FAR,
    Limit,
    Rest,
    explicit_limits,
    long_runs,
    settle,
    stability_limit,
    stability_polynomial,
)
from odeformer.stability.spectra import Spectrum, fast_spectrum
from odeformer.stability.study import StabilityStudy, study_layer

__all__ = [
    "FAR",
    "Limit",
    "Rest",
    "Spectrum",
    "StabilityStudy",
    "explicit_limits",
    "fast_spectrum",
    "long_runs",
    "settle",
    "stability_limit",
    "stability_polynomial",
    "study_layer",
]
