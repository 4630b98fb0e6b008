"""Fit cost curves to measurements, choosing the form with the smallest leave-one-out error.

Input: pairs of size and seconds. Output: ``Curve`` and ``Line`` values for the planner. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dkfac.plan.cluster import Line
from dkfac.plan.curves import Curve

Measurements = Sequence[tuple[float, float]]
"""Pairs of size and seconds."""


def fit_line(points: Measurements) -> Line:
    """Return the line ``latency + byte_seconds * bytes`` by least squares of relative errors, with the points as
    knots."""
    latency, per_byte = polynomial(points, (0, 1))
    errors = [((latency + per_byte * size) / seconds - 1) ** 2 for size, seconds in points]
    return Line(latency, per_byte, math.sqrt(sum(errors) / len(errors)), _rising(points))


def _rising(points: Measurements) -> tuple[tuple[float, float], ...]:
    return tuple((size, max(seconds for other, seconds in points if other <= size)) for size, _ in sorted(points))


def fit_curve(points: Measurements, degree: int = 3) -> Curve:
    """Return the curve whose form predicts each point best from the other points, with the points as knots.

    ``degree`` limits how fast the curve may grow: forms that grow faster extrapolate badly.
    """
    if len(points) < 2 or any(size < 0 or seconds <= 0 for size, seconds in points):
        raise ValueError(f"a curve needs two or more sizes with seconds > 0, not {list(points)}")
    forms = [name for name, (_, least) in _FORMS.items() if len(points) > least]
    if degree < 3 and "exponential" in forms:
        forms.remove("exponential")
    forms = forms or ["polynomial"]
    errors = {name: _left_out(name, points, degree) for name in forms}
    name = min(errors, key=lambda form: errors[form])
    return Curve(name, _FORMS[name][0](points, degree), errors[name], _rising(points))


def _left_out(name: str, points: Measurements, degree: int) -> float:
    """Return the leave-one-out error: root mean square of the relative errors."""
    squares = []
    for i, (size, seconds) in enumerate(points):
        rest = [*points[:i], *points[i + 1 :]]
        if len(rest) >= 2:
            squares.append((Curve(name, _FORMS[name][0](rest, degree))(size) / seconds - 1) ** 2)
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def polynomial(points: Measurements, powers: Sequence[float] = (0, 1, 2, 3)) -> tuple[float, ...]:
    """Return nonnegative coefficients by least squares of relative errors."""
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    scale = max(float(sizes.max()), 1e-300)
    terms = np.stack([(sizes / scale) ** power for power in powers], axis=1) / seconds[:, None]
    kept = list(range(len(powers)))
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept], np.ones(len(seconds)), rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    result = [0.0] * len(powers)
    for place, value in zip(kept, found, strict=True):
        result[place] = max(0.0, float(value)) / scale ** powers[place]
    return tuple(result)


def _power(points: Measurements, degree: int) -> tuple[float, ...]:
    """Return the coefficients of ``c0 + c1 x^c2``, with the exponent chosen from a grid."""
    best, least = (0.0, 0.0, 1.0), math.inf
    for exponent in np.arange(0.5, 1.001 if degree == 1 else degree + 0.51, 0.1):
        c0, c1 = polynomial(points, (0.0, float(exponent)))
        squares = sum(((c0 + c1 * size**exponent) / seconds - 1) ** 2 for size, seconds in points)
        if squares < least:
            best, least = (c0, c1, float(exponent)), squares
    return best


def _exponential(points: Measurements, _degree: int) -> tuple[float, ...]:
    slope, start = np.polyfit([size for size, _ in points], [math.log(seconds) for _, seconds in points], 1)
    return (math.exp(float(start)), max(0.0, float(slope)))


_FORMS: dict[str, tuple[Callable[[Measurements, int], tuple[float, ...]], int]] = {
    "polynomial": (lambda points, degree: polynomial(points, range(degree + 1)), 2),
    "power": (_power, 4),
    "exponential": (_exponential, 3),
}
"""The forms: how to fit each one, and the number of points that it needs more than."""
