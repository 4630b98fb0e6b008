"""Scales of charts: mapping of numbers to positions, ticks, and downsampling of long curves.

Input: numbers. Output: scales, ticks, points. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUM_POINTS = 500
LOG_RATIO = 50.0

Number = float | None


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``[low, high]`` to ``[begin, end]``."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.begin + (self.end - self.begin) * (at - low) / (high - low)

    def ticks(self, about: int = 5) -> list[float]:
        """Return about ``about`` round numbers in the range: multiples of 1, 2 or 5, or powers of ten."""
        return _decades(self.low, self.high, about) if self.is_log else _multiples(self.low, self.high, about)


def fit_scale(
    values: Iterable[Number], begin: float, end: float, *, is_log: bool = False, zero: bool = False
) -> Scale | None:
    """Return a scale that covers all values; None if there are none. ``zero``: it also covers zero."""
    known = [v for v in values if v is not None and (v > 0 or not is_log)]
    if not known:
        return None
    low, high = min(known), max(known)
    if zero and not is_log:
        low, high = min(low, 0.0), max(high, 0.0)
    if is_log:
        return Scale(low / 1.2, high * 1.2, begin, end, True)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(high) / 10 or 1.0
        return Scale(low - room, high + room, begin, end)
    return Scale(low, high, begin, end)


def wants_log(values: Iterable[Number]) -> bool:
    """Return whether all numbers are positive and their ratio exceeds ``LOG_RATIO``."""
    known = [v for v in values if v is not None]
    return bool(known) and min(known) > 0 and max(known) / min(known) > LOG_RATIO


def thin(xs: Sequence[Number], ys: Sequence[Number], most: int = NUM_POINTS) -> list[tuple[Number, Number]]:
    """Downsample to at most about ``most`` points: the minimum and the maximum of each interval, so that peaks remain.

    An interval without numbers becomes one point without a value, which is a gap in the curve.
    """
    points = list(zip(xs, ys, strict=True))
    if len(points) <= most:
        return points
    stretch = -(-2 * len(points) // (most - 2))
    kept = [points[0]]
    for start in range(1, len(points) - 1, stretch):
        inside = range(start, min(start + stretch, len(points) - 1))
        known = [i for i in inside if points[i][0] is not None and points[i][1] is not None]
        if not known:
            kept.append((points[start][0], None))
            continue
        ends = {min(known, key=lambda i: points[i][1] or 0.0), max(known, key=lambda i: points[i][1] or 0.0)}
        kept += [points[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def sample(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced indices of a sequence, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def labels(values: Sequence[float]) -> list[str]:
    """Return short labels for ticks, all in the same format."""
    sizes = [abs(value) for value in values if value]
    if not sizes or (max(sizes) < 1e4 and min(sizes) >= 1e-3):
        return [f"{value:.6g}" for value in values]
    if max(sizes) < 1e6 and min(sizes) >= 100:
        return [f"{value / 1000:g}k" if value else "0" for value in values]
    return [_power(value) for value in values]


def _power(value: float) -> str:
    if not value:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    front = f"{value / 10.0**power:.3g}"
    return f"1e{power}" if front == "1" else f"{front}e{power}"


def _multiples(low: float, high: float, about: int) -> list[float]:
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw * (1 - 1e-9)), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _decades(low: float, high: float, about: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 2:
        inside = [v for p in range(first - 1, last + 2) for m in (1, 2, 5) if low <= (v := m * 10.0**p) <= high]
        return inside if len(inside) > 1 else _multiples(low, high, about)
    stride = -(-(last - first + 1) // (about + 1))
    return [10.0**p for p in range(first, last + 1) if (p - first) % stride == 0]
