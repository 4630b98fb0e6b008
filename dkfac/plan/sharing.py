"""How jobs share a network or a machine's cores over time. Independent of K-FAC.

Input: start times and durations. Output: end times. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class NetworkJob:
    """A transfer during the passes."""

    stage: str
    name: str
    ready: float
    seconds: float
    """Duration if nothing else uses the network."""
    queue: int
    """Jobs in one queue run one after the other; queues share the network."""


def share_network(
    jobs: list[NetworkJob], turn: float, end: float, hidden: tuple[float, float]
) -> list[tuple[float, float, NetworkJob]]:
    """Return the begin and end of each job. One job of each queue runs at a time, and these share the network.

    ``turn`` and ``end`` are the ends of forward and backward, during which transfers have the relative speeds
    ``hidden``.
    """
    queues = [[job for job in jobs if job.queue == number] for number in sorted({job.queue for job in jobs})]
    left = [[job.seconds for job in queue] for queue in queues]
    place, begun = [0] * len(queues), [math.nan] * len(queues)
    found: list[tuple[float, float, NetworkJob]] = []
    now = 0.0
    while any(place[q] < len(queue) for q, queue in enumerate(queues)):
        heads = [q for q, queue in enumerate(queues) if place[q] < len(queue)]
        active = [q for q in heads if queues[q][place[q]].ready <= now]
        upcoming = [queues[q][place[q]].ready for q in heads if q not in active]
        upcoming += [moment for moment in (turn, end) if moment > now]
        speed = hidden[0] if now < turn else hidden[1] if now < end else 1.0
        rate = speed / len(active) if active else 0.0
        for q in active:
            begun[q] = now if math.isnan(begun[q]) else begun[q]
        until = {q: now + left[q][place[q]] / rate if rate > 0 else math.inf for q in active}
        later = min([*until.values(), *upcoming])
        for q in active:
            left[q][place[q]] -= rate * (later - now)
            if until[q] <= later:
                found.append((begun[q], later, queues[q][place[q]]))
                place[q], begun[q] = place[q] + 1, math.nan
        now = later
    return found


def share_cores(starts: list[float], seconds: list[float], slots: float | None) -> list[float]:
    """Return the end of each job if up to ``slots`` jobs run at full speed and more share it equally."""
    if slots is None or len(starts) <= slots:
        return [start + value for start, value in zip(starts, seconds, strict=True)]
    left, ends, now = list(seconds), list(starts), min(starts)
    while any(value > 0 for value in left):
        active = [i for i, value in enumerate(left) if value > 0 and starts[i] <= now]
        coming = [starts[i] for i, value in enumerate(left) if value > 0 and starts[i] > now]
        if not active:
            now = min(coming)
            continue
        rate = min(1.0, slots / len(active))
        until = {i: now + left[i] / rate for i in active}
        later = min([*until.values(), *coming])
        for i in active:
            left[i] -= rate * (later - now)
            if until[i] <= later:
                left[i], ends[i] = 0.0, later
        now = later
    return ends


def per_rank(shares: Iterable[tuple[Sequence[int], float]], world_size: int) -> list[float]:
    """Return the total of each rank; every rank in a set does, or holds, the whole amount of that set."""
    each, common = [0.0] * world_size, 0.0
    for ranks, amount in shares:
        if len(ranks) == world_size:
            common += amount
        else:
            for rank in ranks:
                each[rank] += amount
    return [amount + common for amount in each]
