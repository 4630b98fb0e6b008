"""Process groups of K-FAC's own, so that its collectives cannot interleave with DDP's."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dkfac.plan.plan import Ranks


def world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 where torch.distributed is not in use."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


_KEPT: WeakKeyDictionary[Any, dict[Ranks, Any]] = WeakKeyDictionary()
"""Groups below a user's own group."""


def of_model(model: Any) -> Any:
    """Return the process group of a DDP, None if it is the whole world's or the model is no DDP."""
    if not isinstance(model, DistributedDataParallel):
        return None
    return None if model.process_group is dist.group.WORLD else model.process_group


def ddp_will_synchronise() -> bool:
    """Whether a DDP's forward runs now whose backward will average gradients: not under ``no_sync``."""
    ddp = DistributedDataParallel._active_ddp_module
    return ddp is not None and bool(ddp.require_backward_grad_sync)


def only(groups: Groups) -> Any:
    """Return a group of this rank alone. No other rank takes part: with thousands, a group for each would take long."""
    own = [groups.global_rank(groups.rank)]
    return dist.new_group(own, timeout=patience(groups.parent), use_local_synchronization=True)


def subgroup(ranks: Iterable[int]) -> Any:
    """Return a group of some ranks of the world; every rank of the world calls this."""
    return dist.new_group(list(ranks), timeout=patience())


def patience(parent: Any = None) -> datetime.timedelta | None:
    """Return how long a group (None: the world) waits for its ranks, which torch does not hand on to new groups."""
    parent = dist.group.WORLD if parent is None else parent
    for kind in ("cuda", "cpu"):
        with contextlib.suppress(Exception):  # no such device, or a backend that does not say
            return parent._get_backend(torch.device(kind)).options._timeout  # type: ignore[no-any-return]
    return None


def store() -> Any:
    """Return the key-value store of the world."""
    return dist.distributed_c10d._get_default_store()


class Groups:
    """The groups of one attachment: all its ranks, and the subsets that a program names."""

    def __init__(self, parent: Any = None) -> None:
        """Every rank of ``parent`` (None: of the world) makes them, in the same order."""
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
        # What a process still holds of a group when the interpreter is torn down aborts it.
        weakref.finalize(self, self._groups.clear)
        self._everyone = tuple(range(self.world_size))
        self._make(self._everyone)

    @property
    def everyone(self) -> Any:
        return self._groups[self._everyone]

    def make(self, wanted: Iterable[Ranks]) -> None:
        """Make the groups that are not there yet, in this order."""
        for ranks in wanted:
            if ranks not in self._groups:
                self._groups[ranks] = self._make(ranks)

    def _make(self, ranks: Ranks) -> Any:
        if ranks in self._groups:
            return self._groups[ranks]
        members = [self._global[rank] for rank in ranks]
        if self.parent is None:
            self._groups[ranks] = dist.new_group(members, timeout=patience())
            return self._groups[ranks]
        # Other replicas of the user's own group make theirs at the same time, unknown to us. Such a group is named by
        # its members, and its name cannot be used twice: it is kept for the next K-FAC.
        kept = _KEPT.setdefault(self.parent, {})
        if ranks not in kept:
            kept[ranks] = dist.new_group(members, timeout=patience(self.parent), use_local_synchronization=True)
        self._groups[ranks] = kept[ranks]
        return kept[ranks]

    def get(self, ranks: Ranks) -> Any:
        return self._groups[ranks]

    def global_rank(self, rank: int) -> int:
        return self._global[rank]

    def close(self) -> None:
        """Give the groups back, unless torch.distributed has ended already."""
        groups = list(self._groups.items())
        self._groups.clear()
        if not dist.is_initialized() or self.parent is not None:
            return
        for ranks, group in groups:
            if self.rank in ranks:
                with contextlib.suppress(ValueError, KeyError):  # it went with a world that has ended
                    dist.destroy_process_group(group)
