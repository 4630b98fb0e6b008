"""Process groups for K-FAC alone, so that its collectives cannot interleave with DDP's.

Input: the user's process group, and the sets of ranks that a program names. Output: process groups. Owns: the groups
that it creates.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dkfac.ops.torch_private import default_store
from dkfac.plan.spec import Ranks


def is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 where torch.distributed is not in use."""
    return dist.get_world_size(group) if is_joined() else 1


def backends_of(group: Any = None) -> str:
    """Return the backends of a group (None: the default group) by device, like ``"cpu:gloo,cuda:nccl"``."""
    return str(dist.get_backend_config(group))


def sends_by_nccl(device: torch.device, group: Any = None) -> bool:
    """Whether a group sends a device's tensors by NCCL."""
    return device.type == "cuda" and "nccl" in backends_of(group)


def check_world(planned: int, process_group: Any) -> None:
    """Raise if the world size is not the one that K-FAC was attached with."""
    now = world_size(process_group)
    if now != planned:
        raise RuntimeError(
            f"K-FAC was attached when torch.distributed had {planned} rank{'s' if planned > 1 else ''}; now it has "
            f"{now}: attach K-FAC after init_process_group, and close() it before destroy_process_group"
        )


_KEPT: WeakKeyDictionary[Any, tuple[dict[Ranks, Any], Counter[int]]] = WeakKeyDictionary()
"""Subgroups of a user's own group, by their ranks, and how many each rank has made."""
atexit.register(_KEPT.clear)


def of_model(model: Any) -> Any:
    """Return the process group of a DDP model; None if it is the default group or the model is not DDP."""
    if not isinstance(model, DistributedDataParallel):
        return None
    return None if model.process_group is dist.group.WORLD else model.process_group


def ddp_will_synchronise() -> bool:
    """Return whether a DDP forward is running whose backward will average gradients: not under ``no_sync``."""
    ddp = DistributedDataParallel._active_ddp_module
    return ddp is not None and bool(ddp.require_backward_grad_sync)


def only(groups: Groups) -> Any:
    """Return a group of this rank alone. No other rank takes part: with thousands, a group for each would take long."""
    return _by_members([groups.global_rank(groups.rank)], patience(groups.parent))


def _by_members(members: list[int], timeout: datetime.timedelta | None, backend: str | None = None) -> Any:
    """Return a group that its members make without the other ranks.

    If the default group is bound to a device, torch would split the group off its communicator, in which all ranks
    have to take part: the members would wait for ever. So it is unbound while the group is made.
    """
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        return dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        default.bound_device_id = bound


def subgroup(ranks: Iterable[int]) -> Any:
    """Return a group of some ranks of the world. A collective: every rank of the world calls this."""
    return dist.new_group(list(ranks), timeout=patience())


def patience(parent: Any = None) -> datetime.timedelta | None:
    """Return the timeout of a group (None: the default group), which torch does not pass on to new groups."""
    parent = dist.group.WORLD if parent is None else parent
    for kind in ("cuda", "cpu"):
        with contextlib.suppress(Exception):  # no such device, or a backend that does not say
            return parent._get_backend(torch.device(kind)).options._timeout  # type: ignore[no-any-return]
    return None


def store() -> Any:
    """Return the key-value store of the default group."""
    return default_store()


class Groups:
    """The process groups of one attachment: all its ranks, and the subsets that a program names."""

    def __init__(self, parent: Any = None) -> None:
        """``parent``: the user's own group; None: the default group. Creates no group yet: ``make`` does, on all
        ranks."""
        self.parent = parent
        self.world_size = world_size(parent)
        self.rank = dist.get_rank(parent)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group that was given: attach K-FAC with the group that "
                f"it is in"
            )
        self._global = tuple(range(self.world_size)) if parent is None else tuple(dist.get_process_group_ranks(parent))
        self._groups: dict[Ranks, Any] = {}
        # A process that still refers to a group when the interpreter shuts down is aborted.
        weakref.finalize(self, self._groups.clear)
        self._everyone = tuple(range(self.world_size))

    @property
    def everyone(self) -> Any:
        return self._groups[self._everyone]

    def for_cpu(self) -> Any:
        """Return a group of all ranks that sends tensors of the CPU. A collective if everyone's sends only a GPU's."""
        key = (*self._everyone, self.world_size)  # no ranks of a program: those are below the world size
        if "nccl" not in (found := backends_of(self.everyone)) or "gloo" in found:
            return self.everyone
        if key not in self._groups:
            members, timeout = list(self._global), patience(self.parent)
            make = dist.new_group if self.parent is None else _by_members
            self._groups[key] = make(members, timeout=timeout, backend="gloo")
        return self._groups[key]

    def make(self, wanted: Iterable[Ranks]) -> None:
        """Create the groups that do not exist yet. ``wanted``: the groups of all ranks, the same on each of them."""
        for ranks in wanted:
            if ranks not in self._groups:
                self._groups[ranks] = self._make(ranks)

    def _make(self, ranks: Ranks) -> Any:
        members = [self._global[rank] for rank in ranks]
        if self.parent is None:
            return dist.new_group(members, timeout=patience())
        # Other replicas of the user's group create theirs at the same time, so only the members take part. torch names
        # such a group by its members and by the number of groups that a process has: members that have fewer make
        # groups of their own first. A name cannot be used twice, so the group is kept for the next K-FAC.
        kept, numbers = _KEPT.setdefault(self.parent, ({}, Counter()))
        if ranks not in kept:
            most, kept[ranks] = max(numbers[rank] for rank in ranks), None
            if self.rank in ranks:
                for _ in range(most - numbers[self.rank]):
                    only(self)
                kept[ranks] = _by_members(members, patience(self.parent))
            numbers |= dict.fromkeys(ranks, most + 1)
        return kept[ranks]

    def get(self, ranks: Ranks) -> Any:
        return self._groups[ranks]

    def global_rank(self, rank: int) -> int:
        return self._global[rank]

    def close(self) -> None:
        """Destroy the groups, unless torch.distributed was shut down or they are kept for a user's own group."""
        groups = list(self._groups.items())
        self._groups.clear()
        if not dist.is_initialized() or self.parent is not None:
            return
        for ranks, group in groups:
            if self.rank in ranks:
                with contextlib.suppress(ValueError, KeyError):  # already destroyed with its default group
                    dist.destroy_process_group(group)


def make_groups(parent: Any = None) -> Groups:
    """Return the groups of one attachment, with that of all its ranks. Every rank of ``parent`` calls this."""
    groups = Groups(parent)
    groups.make([tuple(range(groups.world_size))])
    return groups


class NoGroups(Groups):
    """The groups of a single rank: none."""

    def __init__(self) -> None:
        self.parent, self.rank, self.world_size = None, 0, 1
        self._global, self._groups, self._everyone = (0,), {}, (0,)

    def make(self, wanted: Iterable[Ranks]) -> None:
        """Do nothing: an empty program names no group."""

    def close(self) -> None:
        """Do nothing: there is no group to destroy."""
