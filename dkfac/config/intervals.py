"""Which steps measure factors and which decompose them: functions of the step alone, the same on all ranks."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable


def plain(step: int, factor_every: int, inverse_every: int) -> tuple[bool, bool]:
    return step % factor_every == 0, step % inverse_every == 0


def denser(step: int, early: tuple[int, int], factor_every: int, inverse_every: int) -> tuple[bool, bool]:
    """``early``: decompose every so many steps before a step, and measure in the same proportion as later."""
    every, until = early
    if step < until and every < inverse_every:
        factor_every = max(1, factor_every * every // inverse_every)
        inverse_every = max(1, every // factor_every) * factor_every
    return plain(step, factor_every, inverse_every)


def growing(step: int, ratio: float, factor_every: int, inverse_every: int, shortest: int) -> tuple[bool, bool]:
    """Each refresh comes at ``ratio`` times the step of the one before, until they are ``inverse_every`` steps apart;
    measured in the same proportion as later. No two are less than ``shortest`` steps apart."""
    starts, end = early_refreshes(ratio, inverse_every, shortest)
    if step >= end:
        return plain(step, factor_every, inverse_every)
    here = bisect.bisect(starts, step) - 1
    begin, until = starts[here], (*starts, end)[here + 1]
    every = min(factor_every, max(1, factor_every * (until - begin) // inverse_every))
    return (step - begin) % every == 0, step == begin


@functools.cache
def early_refreshes(ratio: float, inverse_every: int, shortest: int) -> tuple[tuple[int, ...], int]:
    """Return the steps of the early refreshes, and the multiple of ``inverse_every`` at which the plain ones begin,
    not too soon after the last of them."""
    starts, step, soon = list[int](), 0, 0
    while (interval := max(1, shortest, int(step * (ratio - 1)))) < inverse_every:
        starts.append(step)
        soon, step = step + max(1, shortest, interval // 2), step + interval
    return tuple(starts), next(n for n in itertools.count(0, inverse_every) if n >= soon)


def slices(step: int, rhythm: Callable[[int], tuple[bool, bool]], most: int) -> tuple[list[int], int]:
    """Return the steps, at most so many, that carry out the refresh that was due last, and when the next is due.

    Steps that measure factors are left out where there are others: they are long enough.
    """
    begin = next(n for n in range(step, -1, -1) if rhythm(n)[1])
    end = next(n for n in itertools.count(begin + 1) if rhythm(n)[1])
    if most == 1:
        return [begin], end
    quiet = [n for n in range(begin, end) if not rhythm(n)[0]] or list(range(begin, end))
    return quiet[:most], end
