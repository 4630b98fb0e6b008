"""Which factors are reduced in one bucket: fewer start-ups against waiting for the last factor of a bucket.

Input: ready times, transfer times and the latency. Output: bucket sizes. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def optimal(ready: Sequence[float], seconds: Sequence[float], latency: float) -> list[int]:
    """Return the sizes of consecutive buckets that finish earliest on one channel; exact.

    ``ready`` is when each item can be sent, in non-decreasing order; ``seconds`` its transfer time without the
    start-up. ``f(j) = min over i < j of max(f(i), ready_j) + latency + sum of seconds i+1..j``.
    """
    total = [0.0]
    for value in seconds:
        total.append(total[-1] + value)
    finish, last = [0.0], [0]
    for j in range(1, len(ready) + 1):
        best, cut = min(
            (max(finish[i], ready[j - 1]) + latency + total[j] - total[i], -i) for i in range(j)
        )  # of equals, the fewest buckets of the rest
        finish.append(best)
        last.append(-cut)
    sizes: list[int] = []
    j = len(ready)
    while j:
        sizes.append(j - last[j])
        j = last[j]
    return sizes[::-1]


def spd_buckets(ready: Sequence[float], seconds: Sequence[float], latency: float) -> list[int]:
    """Return the bucket sizes of SPD-KFAC's published rule: add the next item if it is ready before the bucket's
    start-up is over."""
    sizes: list[int] = []
    busy_until = 0.0
    start = 0
    while start < len(ready):
        end = start + 1
        begin = max(busy_until, ready[start])
        while end < len(ready) and ready[end] < begin + latency:
            end += 1
            begin = max(busy_until, ready[end - 1])
        busy_until = begin + latency + sum(seconds[start:end])
        sizes.append(end - start)
        start = end
    return sizes
