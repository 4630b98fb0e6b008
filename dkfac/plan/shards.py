"""Parameters that are split over ranks, and what moves between their shards and the owners of layers.

Input: a sharding, and who owns each parameter's layer. Output: sizes of what each rank sends and receives. Owns:
nothing; plain frozen data, equal on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from dkfac.plan.spec import Ranks

Cuts = tuple[tuple[int, int], ...]
"""For each dimension of the mesh of one replica, the dimension of the parameter along which it is split, and into how
many parts; -1: not at all, each rank has it. The last was split first: FSDP2 splits what tensor parallelism has."""


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    layer: str
    key: str
    """``"weight"`` or ``"bias"``."""
    shape: tuple[int, ...]
    cuts: Cuts

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sharding:
    mesh: tuple[Ranks, ...]
    """The ranks that together hold each replica of the model, in the order of the shards. FSDP has one replica."""
    parameters: tuple[ShardedParameter, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the mesh of one replica."""
        return tuple(number for _, number in self.parameters[0].cuts)

    @cached_property
    def by_name(self) -> dict[tuple[str, str], ShardedParameter]:
        return {(p.layer, p.key): p for p in self.parameters}

    def replica_of(self, rank: int) -> Ranks:
        return next(ranks for ranks in self.mesh if rank in ranks)

    def within(self, group: Ranks) -> tuple[Ranks, ...]:
        """Return the replicas that a group of ranks holds."""
        return tuple(ranks for ranks in self.mesh if set(ranks) <= set(group))


class Divided(Protocol):
    """A part of a transfer that is split over ranks."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def cuts(self) -> Cuts: ...


class OwnedPart(Divided, Protocol):
    @property
    def owner(self) -> int: ...


def shard_range(size: int, number: int, index: int) -> tuple[int, int]:
    """Return the range of a dimension that a shard holds, as ``torch.chunk`` splits: the last ones may be smaller, or
    empty."""
    width = -(-size // number)
    return min(size, index * width), min(size, (index + 1) * width)


def _places(cuts: Cuts, index: int) -> list[int]:
    """Return the place of a rank in each dimension of the mesh."""
    places = [0] * len(cuts)
    for i in reversed(range(len(cuts))):
        index, places[i] = divmod(index, cuts[i][1])
    return places


def region(part: Divided, index: int) -> tuple[slice, ...]:
    """Return the part of a parameter that a rank has."""
    found = [(0, size) for size in part.shape]
    for (dim, number), place in reversed(list(zip(part.cuts, _places(part.cuts, index), strict=True))):
        if dim >= 0:
            first, last = found[dim]
            begin, end = shard_range(last - first, number, place)
            found[dim] = first + begin, first + end
    return tuple(slice(begin, end) for begin, end in found)


def copies(cuts: Cuts) -> int:
    """Return how many ranks of a replica have the same part."""
    return math.prod(number for dim, number in cuts if dim < 0)


def shard_elements(part: Divided, index: int) -> int:
    """Return how many elements of a parameter a rank has."""
    return math.prod(each.stop - each.start for each in region(part, index))


def sent_elements(part: OwnedPart, ranks: Ranks, index: int) -> int:
    """Return how many elements one of the ranks of a replica sends to the owner, which may be itself. Of several with
    the same part, it is the one in the place of the owner."""
    if copies(part.cuts) > 1:
        places = zip(part.cuts, _places(part.cuts, index), _places(part.cuts, ranks.index(part.owner)), strict=True)
        if any(cut[0] < 0 and here != there for cut, here, there in places):
            return 0
    return shard_elements(part, index)


def splits(
    parts: Iterable[OwnedPart], group: Ranks, mesh: tuple[Ranks, ...], rank: int, *, to_owners: bool
) -> tuple[list[int], list[int]]:
    """Return how many elements a rank sends to each rank of a group, and receives from each.

    Owners collect the shards of their own replica; they send every replica its shards, which are the same.
    """
    mine = next(ranks for ranks in mesh if rank in ranks)
    index = mine.index(rank)
    gives, takes = dict.fromkeys(group, 0), dict.fromkeys(group, 0)
    elements = sent_elements if to_owners else _received
    for part in parts:
        if part.owner in mine or not to_owners:
            gives[part.owner] += elements(part, mine, index)
        if part.owner == rank:
            for replica in (mine,) if to_owners else mesh:
                for i, holder in enumerate(replica):
                    takes[holder] += elements(part, replica, i)
    pair = list(gives.values()), list(takes.values())
    return pair if to_owners else (pair[1], pair[0])


def _received(part: OwnedPart, ranks: Ranks, index: int) -> int:
    return shard_elements(part, index)


def overlap(a: int, b: int, c: int, d: int) -> int:
    """Return the length of the intersection of two ranges."""
    return max(0, min(b, d) - max(a, c))
