"""Measured seconds as a function of a size."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size x: ``polynomial`` c0 + c1 x + c2 x^2 + c3 x^3, ``power`` c0 + c1 x^c2, ``exponential``
    c0 e^(c1 x)."""

    form: str
    coefficients: tuple[float, ...]
    error: float = 0.0
    """Root mean square of the relative errors at sizes left out of the fit."""

    def __call__(self, size: float) -> float:
        c = self.coefficients
        match self.form:
            case "polynomial":
                return sum(value * size**i for i, value in enumerate(c))
            case "power":
                return float(c[0] + c[1] * size ** c[2])
            case "exponential":
                return c[0] * math.exp(c[1] * size)
        raise ValueError(f"a curve's form is 'polynomial', 'power' or 'exponential', not {self.form!r}")
