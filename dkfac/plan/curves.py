"""Measured seconds as a function of size.

Input: a size. Output: seconds. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for size x: ``polynomial`` c0 + c1 x + c2 x^2 + c3 x^3, ``power`` c0 + c1 x^c2, ``exponential`` c0 e^(c1
    x); corrected to pass through the measured ``knots``."""

    form: str
    coefficients: tuple[float, ...]
    error: float = 0.0
    """Root mean square of the relative errors at sizes left out of the fit."""
    knots: tuple[tuple[float, float], ...] = ()
    """Pairs of size and seconds, both increasing."""

    def __call__(self, size: float) -> float:
        if not self.knots:
            return self.form_at(size)
        place = bisect.bisect(self.knots, (size,))
        around = self.knots[max(0, place - 1) : place + 1]
        (a, first), (b, second) = ((end, seconds / self.form_at(end)) for end, seconds in (around[0], around[-1]))
        share = math.log(size / a) / math.log(b / a) if b > a else 0.0
        return float(self.form_at(size) * first ** (1 - share) * second**share)

    def form_at(self, size: float) -> float:
        c = self.coefficients
        match self.form:
            case "polynomial":
                return sum(value * size**i for i, value in enumerate(c))
            case "power":
                return float(c[0] + c[1] * size ** c[2])
            case "exponential":
                return c[0] * math.exp(c[1] * size)
        raise ValueError(f"a curve's form is 'polynomial', 'power' or 'exponential', not {self.form!r}")
