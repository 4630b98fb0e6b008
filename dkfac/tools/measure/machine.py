"""Measure a cluster for ``dkfac measure``.

Input: a device, and the ranks of torch.distributed if it is initialized. Output: a ``Cluster``, the same on all ranks.
Owns: the process groups that it times.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from dkfac.comm import agree
from dkfac.comm.groups import Groups, make_groups, only, world_size
from dkfac.plan.cluster import Cluster, Line, costs_of
from dkfac.plan.spec import Ranks
from dkfac.tools.measure.compute import measure_costs
from dkfac.tools.measure.links import measure_hidden, measure_links, measure_slowdown


def measure_cluster(
    device: torch.device,
    *,
    ranks_per_host: int | None = None,
    largest: int | None = None,
    autocast: torch.dtype | None = None,
    say: Callable[[str], Any] = print,
) -> Cluster:
    """Return the costs of this cluster's links and linear algebra. Under torch.distributed, a collective call."""
    if world_size() == 1:
        costs = measure_costs(device, largest=largest, autocast=autocast, say=say)
        return Cluster(socket.gethostname(), costs, environment=_environment(device, 1, autocast))
    groups = make_groups()
    try:
        quiet = say if groups.rank == 0 else lambda text: None
        return _measure(groups, device, ranks_per_host, largest, autocast, quiet)
    finally:
        groups.close()


def _measure(
    groups: Groups,
    device: torch.device,
    ranks_per_host: int | None,
    largest: int | None,
    autocast: torch.dtype | None,
    say: Callable[[str], Any],
) -> Cluster:
    world = groups.world_size
    names = agree.exchange_text(groups, socket.gethostname(), device)
    machine = names.count(names[0])
    per_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", machine))
    say(f"{world} ranks, {per_host} per host; measuring linear algebra on rank 0, then the links")
    mine = only(groups)
    costs = ""
    if groups.rank == 0:
        costs = json.dumps(asdict(measure_costs(device, mine, largest=largest, autocast=autocast, say=say)))
    costs = agree.tell(groups, costs, device)
    x = torch.randn(384, 384, device=device)

    def work() -> None:
        for _ in range(40):  # long compared with a time slice of the OS scheduler
            x @ x

    slow = measure_slowdown(groups, device, work)
    hidden = measure_hidden(groups, device, work)
    within: dict[str, dict[int, Line]] = {}
    between: dict[str, dict[int, Line]] = {}
    for one_host, ranks in _sets(world, per_host):
        say(f"links between {len(ranks)} ranks {'on one host' if one_host else 'on several hosts'}")
        for how, line in measure_links(groups, [ranks], device)[len(ranks)].items():
            (within if one_host else between).setdefault(how, {})[len(ranks)] = line
    crowded = slow > 1.1
    return Cluster(
        name=names[0],
        costs=costs_of(json.loads(costs)),
        within=within,
        between=between,
        ranks_per_host=per_host,
        slots=machine / slow if crowded else None,
        slot_ranks=machine if crowded else None,
        hidden=(hidden, hidden),
        environment=_environment(device, world, autocast),
    )


def _sets(world: int, per_host: int) -> list[tuple[bool, Ranks]]:
    """Return the sets of ranks to measure, and whether each is on one host. Sizes are halved from the largest."""
    sets: list[tuple[bool, Ranks]] = []
    size = min(per_host, world)
    while size > 1:
        sets.append((True, tuple(range(size))))
        size //= 2
    if world > per_host:
        size = world
        while size > per_host:
            sets.append((False, tuple(range(size))))
            size //= 2
        leaders = tuple(range(0, world, per_host))
        if per_host > 1 and len(leaders) not in (len(ranks) for host, ranks in sets if not host):
            sets.append((False, leaders))
    return sets


def _environment(device: torch.device, world: int, autocast: torch.dtype | None) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "ranks": world}
    found["products"] = str(autocast or torch.float32).removeprefix("torch.")
    found |= {"device": device.type, "machine": platform.machine(), "cores": os.cpu_count()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
