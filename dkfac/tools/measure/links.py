"""What collectives take on this cluster, by the functions that K-FAC itself calls. All ranks call these together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.comm import collectives
from dkfac.comm.groups import Groups
from dkfac.plan.cluster import Line
from dkfac.plan.plan import Ranks
from dkfac.tools.measure.fit import fit_line

BYTES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
REPEATS = 5
LONG = 0.5
"""Seconds of a call from which on no larger buffer is tried."""

HOWS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")


def measure_links(groups: Groups, sets: Sequence[Ranks], device: torch.device) -> dict[int, dict[str, Line]]:
    """Return a line for each collective in each set of ranks, by the set's size. Ranks of no set wait."""
    groups.make(sets)
    found: dict[int, dict[str, Line]] = {}
    for ranks in sets:
        found[len(ranks)] = {how: _line(how, groups, ranks, device) for how in HOWS}
    return found


def _line(how: str, groups: Groups, ranks: Ranks, device: torch.device) -> Line:
    points: list[tuple[float, float]] = []
    for num_bytes in BYTES:
        elements = -(-num_bytes // 4 // len(ranks)) * len(ranks)
        work = _call(how, groups, ranks, elements, device) if groups.rank in ranks else None
        seconds = _timed(work, groups, device)
        points.append((4.0 * elements, seconds))
        if seconds > LONG:
            break
    return fit_line(points)


def _call(how: str, groups: Groups, ranks: Ranks, elements: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that moves a buffer of so many elements in all."""
    group, size = groups.get(ranks), len(ranks)
    whole, part = (torch.ones(n, device=device) for n in (elements, elements // size))
    splits = [elements // size] * size
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: collectives.all_reduce(whole, group).wait(),
        "reduce-scatter": lambda: collectives.reduce_scatter(whole, group, torch.float32).wait(),
        "all-gather": lambda: collectives.all_gather(part, group).wait(),
        "all-to-all": lambda: collectives.exchange(whole, splits, splits, group).wait(),
        "broadcast": lambda: collectives.broadcast_from(whole, groups.global_rank(ranks[0]), group).wait(),
    }
    return calls[how]


def _timed(work: Callable[[], Any] | None, groups: Groups, device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median over calls of the slowest rank's seconds; the same on all ranks."""
    seconds = []
    for repeat in range(repeats + 1):
        _most(0.0, groups, device)  # all begin together
        begin = time.perf_counter()
        if work is not None:
            work()
            wait(device)
        mine = time.perf_counter() - begin
        slowest = _most(mine, groups, device)
        if repeat:  # the first call connects
            seconds.append(slowest)
        if slowest > LONG and seconds:
            break
    return statistics.median(seconds)


def _most(value: float, groups: Groups, device: torch.device) -> float:
    """Return the largest of the ranks' values."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(collectives.all_gather(mine, groups.everyone).wait().max())


def crowding(groups: Groups, device: torch.device, work: Callable[[], Any]) -> float:
    """Return how much slower work is when all ranks do it at once: the best of each, by turns, since what else runs on
    a machine only ever makes it slower."""
    alone, together = [], []
    for _ in range(REPEATS):
        alone.append(_timed(work if groups.rank == 0 else None, groups, device, repeats=1))
        together.append(_timed(work, groups, device, repeats=1))
    return max(1.0, min(together) / min(alone))


def measure_hidden(groups: Groups, device: torch.device, work: Callable[[], Any]) -> float:
    """Return the speed of a transfer beside work of all ranks, to its speed alone."""
    everyone = tuple(range(groups.world_size))
    alone = _timed(work, groups, device)
    elements = 2**14
    while True:
        move = _call("all-reduce", groups, everyone, elements, device)
        seconds = _timed(move, groups, device)
        if seconds >= alone or elements >= 2**24:
            break
        elements *= 2
    buffer = torch.ones(elements, device=device)

    def both() -> Tensor:
        pending = collectives.all_reduce(buffer, groups.everyone)
        work()
        return pending.wait()

    together = _timed(both, groups, device)
    return min(1.0, max(0.0, (alone + seconds - together) / min(alone, seconds)))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
