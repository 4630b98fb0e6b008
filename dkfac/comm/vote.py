"""Let all ranks decide together, without a collective, whether K-FAC is attached.

Input: what this rank can do. Output: the reason not to, the same on all ranks. Owns: keys in torch.distributed's store.

A collective would hang if a rank never gets to the place where the others attach. Each rank writes what it can do to
the store and waits for the others, but not forever; the first one that knows the outcome writes it, and all read it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch.distributed as dist

from dkfac.comm import groups

PATIENCE = float(os.environ.get("DKFAC_RUN_PATIENCE", "300"))
"""Seconds to wait for a rank that has not got to where the others attach K-FAC."""
_POLL = 0.02
_YES = "yes"


def number_of_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def this_rank() -> int:
    """Return the rank, also where torch.distributed is not initialised yet."""
    return dist.get_rank() if number_of_ranks() > 1 else int(os.environ.get("RANK", "0"))


def common_reason(name: str, what: str, reason: str | None, group: Any = None) -> str | None:
    """Return why not all ranks of a group can attach; None if all can. ``name`` is the same on all, and used once.

    ``what`` describes what this rank would attach to, and must be the same too; ``reason`` is why it cannot.
    """
    if number_of_ranks() == 1:
        return reason
    own, store = dist.get_rank(), groups.store()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = f"{name}/{min(ranks)}"
    keys = {rank: f"dkfac/run/{name}/{rank}" for rank in ranks}
    outcome = f"dkfac/run/{name}/outcome"
    store.set(keys[own], json.dumps({"what": what, "reason": reason}))
    proposal = _proposal(store, keys, outcome, reason)
    found = store.compare_set(outcome, "", proposal).decode()
    return None if found == _YES else found


def decline(name: str, reason: str) -> None:
    """Tell the other ranks, without waiting for them, that this one will not attach."""
    if number_of_ranks() > 1:
        outcome = f"dkfac/run/{name}/0/outcome"
        groups.store().compare_set(outcome, "", f"rank {dist.get_rank()}: {reason}")


def _proposal(store: Any, keys: dict[int, str], outcome: str, reason: str | None) -> str:
    """Wait for the other ranks; return what they should agree on."""
    if reason is not None:
        return f"rank {dist.get_rank()}: {reason}"
    deadline = time.monotonic() + PATIENCE
    waiting = dict(keys)
    while waiting and not store.check([outcome]):
        waiting = {rank: key for rank, key in waiting.items() if not store.check([key])}
        if time.monotonic() > deadline:
            return f"rank {next(iter(waiting))} did not get to a training forward pass within {PATIENCE:g} s"
        time.sleep(_POLL)
    if waiting:
        return _YES  # not used: the outcome is known
    said = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    for rank, words in said.items():
        if words["reason"] is not None:
            return f"rank {rank}: {words['reason']}"
    first, last = min(said), max(said, key=lambda rank: said[rank]["what"] != said[min(said)]["what"])
    if said[first]["what"] != said[last]["what"]:
        return f"rank {first} trains {said[first]['what']}, rank {last} {said[last]['what']}"
    return _YES
