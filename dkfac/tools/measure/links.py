"""Time collectives on this cluster, through the same functions that K-FAC calls. All functions are collective calls.

Input: process groups, a device. Output: a latency-bandwidth line for each collective and group size. Owns: nothing.
"""

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
from dkfac.plan.spec import Ranks
from dkfac.tools.measure.fit import fit_line

BUFFER_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
NUM_REPEATS = 5
_MAX_CALL_SECONDS = 0.5
"""If a call takes longer than this, larger buffers are not measured."""

_COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")


def measure_links(groups: Groups, sets: Sequence[Ranks], device: torch.device) -> dict[int, dict[str, Line]]:
    """Return a line for each collective and set of ranks, by the size of the set. Ranks outside a set wait."""
    groups.make(sets)
    found: dict[int, dict[str, Line]] = {}
    for ranks in sets:
        found[len(ranks)] = {how: _line(how, groups, ranks, device) for how in _COLLECTIVES}
    return found


def _line(how: str, groups: Groups, ranks: Ranks, device: torch.device) -> Line:
    points: list[tuple[float, float]] = []
    for num_bytes in BUFFER_BYTES:
        elements = -(-num_bytes // 4 // len(ranks)) * len(ranks)
        work = _call(how, groups, ranks, elements, device) if groups.rank in ranks else None
        seconds = _timed(work, groups, device)
        points.append((4.0 * elements, seconds))
        if seconds > _MAX_CALL_SECONDS:
            break
    return fit_line(points)


def _call(how: str, groups: Groups, ranks: Ranks, elements: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the collective on a buffer of ``elements`` elements in total."""
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


def _timed(work: Callable[[], Any] | None, groups: Groups, device: torch.device, repeats: int = NUM_REPEATS) -> float:
    """Return the seconds of the slowest rank, median over the calls. All ranks return the same."""
    seconds = []
    for repeat in range(repeats + 1):
        _most(0.0, groups, device)  # a barrier
        begin = time.perf_counter()
        if work is not None:
            work()
            wait(device)
        mine = time.perf_counter() - begin
        slowest = _most(mine, groups, device)
        if repeat:  # the first call sets up connections
            seconds.append(slowest)
        if slowest > _MAX_CALL_SECONDS and seconds:
            break
    return statistics.median(seconds)


def _most(value: float, groups: Groups, device: torch.device) -> float:
    """Return the maximum of a value over all ranks."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(collectives.all_gather(mine, groups.everyone).wait().max())


def measure_slowdown(groups: Groups, device: torch.device, work: Callable[[], Any]) -> float:
    """Return how many times slower ``work`` is when all ranks run it at once.

    Compares the minima of alternating runs: other load on the machine can only make a run slower.
    """
    alone, at_once = [], []
    for _ in range(NUM_REPEATS):
        alone.append(_timed(work if groups.rank == 0 else None, groups, device, repeats=1))
        at_once.append(_timed(work, groups, device, repeats=1))
    return max(1.0, min(at_once) / min(alone))


def measure_hidden(groups: Groups, device: torch.device, work: Callable[[], Any]) -> float:
    """Return which fraction of a transfer is hidden when it overlaps with compute on all ranks."""
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

    overlapped = _timed(both, groups, device)
    return min(1.0, max(0.0, (alone + seconds - overlapped) / min(alone, seconds)))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
