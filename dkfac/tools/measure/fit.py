"""Measured points as curves and lines: the form that predicts best what it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dkfac.plan.cluster import Line
from dkfac.plan.curves import Curve

Points = Sequence[tuple[float, float]]
"""Sizes and seconds."""


def fit_line(points: Points) -> Line:
    """Return ``latency + byte_seconds * bytes`` with the least squares of relative errors, and the points as knots."""
    latency, per_byte = polynomial(points, (0, 1))
    errors = [((latency + per_byte * size) / seconds - 1) ** 2 for size, seconds in points]
    return Line(latency, per_byte, math.sqrt(sum(errors) / len(errors)), _rising(points))


def _rising(points: Points) -> tuple[tuple[float, float], ...]:
    return tuple((size, max(seconds for other, seconds in points if other <= size)) for size, _ in sorted(points))


def fit(points: Points, degree: int = 3) -> Curve:
    """Return the curve of the form that predicts each size best from the others, and the points as knots.

    ``degree``: how fast it may grow; forms that grow faster tell nothing of sizes far from the measured ones.
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


def _left_out(name: str, points: Points, degree: int) -> float:
    """Return the error of each point predicted from the others: the relative ones' root mean square."""
    squares = []
    for i, (size, seconds) in enumerate(points):
        rest = [*points[:i], *points[i + 1 :]]
        if len(rest) >= 2:
            squares.append((Curve(name, _FORMS[name][0](rest, degree))(size) / seconds - 1) ** 2)
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def polynomial(points: Points, powers: Sequence[float] = (0, 1, 2, 3)) -> tuple[float, ...]:
    """Return coefficients that are not negative, with the least squares of relative errors."""
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


def _power(points: Points, degree: int) -> tuple[float, ...]:
    """Return ``c0 + c1 x^c2`` with the best exponent of a grid."""
    best, least = (0.0, 0.0, 1.0), math.inf
    for exponent in np.arange(0.5, 1.001 if degree == 1 else degree + 0.51, 0.1):
        c0, c1 = polynomial(points, (0.0, float(exponent)))
        squares = sum(((c0 + c1 * size**exponent) / seconds - 1) ** 2 for size, seconds in points)
        if squares < least:
            best, least = (c0, c1, float(exponent)), squares
    return best


def _exponential(points: Points, _degree: int) -> tuple[float, ...]:
    slope, start = np.polyfit([size for size, _ in points], [math.log(seconds) for _, seconds in points], 1)
    return (math.exp(float(start)), max(0.0, float(slope)))


_FORMS: dict[str, tuple[Callable[[Points, int], tuple[float, ...]], int]] = {
    "polynomial": (lambda points, degree: polynomial(points, range(degree + 1)), 2),
    "power": (_power, 4),
    "exponential": (_exponential, 3),
}
"""The forms, and how many points each needs more than."""
