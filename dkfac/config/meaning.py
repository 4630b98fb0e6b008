"""What a curvature and a solver mean to the rest of the library, so that few files name one.

Input: the values of settings. Output: properties of them. Owns: nothing.
"""

from __future__ import annotations

OWN_STEPS = ("adaptive", "adam-eigen")
"""Curvatures with which layers are stepped by K-FAC, not by the optimizer."""


class Meaning:
    __slots__ = ()
    curvature: str
    solver: str
    statistics_fraction: float | None

    @property
    def takes_steps(self) -> bool:
        """Whether layers are stepped by K-FAC, not by the optimizer."""
        return self.curvature in OWN_STEPS

    @property
    def measures_moments(self) -> bool:
        """Whether second moments of the gradient replace the eigenvalues: EKFAC."""
        return self.curvature == "ekfac"

    @property
    def adapts_damping(self) -> bool:
        """Whether the following gradients decide on damping and length."""
        return self.curvature == "adaptive"

    @property
    def uses_inverses(self) -> bool:
        """Whether factors are inverted, not brought to an eigenbasis."""
        return self.solver == "cholesky"

    @property
    def improves_bases(self) -> bool:
        """Whether a refresh improves the last basis."""
        return self.solver == "warm-eigen"

    @property
    def measure_every(self) -> int:
        """Return k, where one row in k is measured; 1 if each call decides."""
        return 1 if self.statistics_fraction is None else round(1 / self.statistics_fraction)
