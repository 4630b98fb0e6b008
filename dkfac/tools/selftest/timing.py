"""Seconds of each collective on these ranks, through the functions that K-FAC calls. All functions are collective.

Input: process groups, a device. Output: seconds by collective and size. Owns: nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dkfac import distributed
from dkfac.comm import collectives
from dkfac.comm.groups import Groups
from dkfac.tools.measure.links import wait

BUFFER_SIZES = (2**12, 2**18, 2**24)
"""Bytes of the whole buffer."""
_REPEATS = 5


def time_collectives(groups: Groups, device: torch.device, sizes: Sequence[int] = BUFFER_SIZES) -> list[dict[str, Any]]:
    """Return the seconds of the slowest rank, the median over some calls, for each collective and size."""
    found = []
    for size in sizes:
        for name, call in _calls(groups, device, size).items():
            seconds = []
            for _ in range(_REPEATS + 1):
                distributed.gather([0.0], device)  # a barrier
                begin = time.perf_counter()
                call()
                wait(device)
                mine = time.perf_counter() - begin
                seconds.append(max(row[0] for row in distributed.gather([mine], device)))
            found.append({"collective": name, "bytes": size, "seconds": statistics.median(seconds[1:])})
    return found


def _calls(groups: Groups, device: torch.device, size: int) -> dict[str, Callable[[], Any]]:
    """Return a function for each collective on a buffer of ``size`` bytes, and for alternatives to an all-to-all."""
    world, group = groups.world_size, groups.everyone
    share = max(1, size // 4 // world)
    whole, part = torch.ones(share * world, device=device), torch.ones(share, device=device)
    half, splits = torch.ones(2 * share * world, device=device, dtype=torch.bfloat16), [share] * world
    first = groups.global_rank(0)

    def broadcasts() -> None:
        for piece in [collectives.broadcast_from(part, groups.global_rank(r), group) for r in range(world)]:
            piece.wait()

    return {
        "all-reduce": lambda: collectives.all_reduce(whole, group).wait(),
        "reduce-scatter": lambda: collectives.reduce_scatter(whole, group, torch.float32).wait(),
        "reduce-scatter, bfloat16": lambda: collectives.reduce_scatter(half, group, torch.float32).wait(),
        "all-gather": lambda: collectives.all_gather(part, group).wait(),
        "all-to-all": lambda: collectives.exchange(whole, splits, splits, group).wait(),
        "broadcast of the whole": lambda: collectives.broadcast_from(whole, first, group).wait(),
        "broadcasts of each rank's part": broadcasts,
    }
