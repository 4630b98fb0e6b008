"""Parameters that are split over ranks, and what moves between their shards and the owners of layers.

Input: a sharding, and who owns each parameter's layer. Output: sizes of what each rank sends and receives. Owns:
nothing; plain frozen data, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dkfac.plan.spec import Ranks


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    layer: str
    key: str
    """``"weight"`` or ``"bias"``."""
    elements: int
    size: int
    """Size of the dimension along which it is split; 0: each rank has all of it."""


@dataclass(frozen=True, slots=True)
class Sharding:
    mesh: tuple[Ranks, ...]
    """The ranks that together hold each replica of the model, in the order of the shards. FSDP has one replica."""
    parameters: tuple[ShardedParameter, ...]

    def replica_of(self, rank: int) -> Ranks:
        return next(ranks for ranks in self.mesh if rank in ranks)

    def within(self, group: Ranks) -> tuple[Ranks, ...]:
        """Return the replicas that a group of ranks holds."""
        return tuple(ranks for ranks in self.mesh if set(ranks) <= set(group))


class Divided(Protocol):
    """A part of a transfer that is split over ranks."""

    @property
    def elements(self) -> int: ...
    @property
    def owner(self) -> int: ...
    @property
    def size(self) -> int: ...


def shard_range(size: int, number: int, index: int) -> tuple[int, int]:
    """Return the range of a dimension that a shard holds, as ``torch.chunk`` splits: the last ones may be smaller, or
    empty."""
    width = -(-size // number)
    return min(size, index * width), min(size, (index + 1) * width)


def shard_elements(part: Divided, number: int, index: int) -> int:
    """Return how many elements of a parameter a shard has."""
    if not part.size:
        return part.elements
    begin, end = shard_range(part.size, number, index)
    return (end - begin) * (part.elements // part.size)


def sent_elements(part: Divided, ranks: Ranks, index: int) -> int:
    """Return how many elements one of the ranks of a replica sends to the owner, which may be itself. It has all of a
    parameter that is not split."""
    if not part.size:
        return part.elements if ranks[index] == part.owner else 0
    return shard_elements(part, len(ranks), index)


def splits(
    parts: Iterable[Divided], group: Ranks, mesh: tuple[Ranks, ...], rank: int, *, to_owners: bool
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


def _received(part: Divided, ranks: Ranks, index: int) -> int:
    return shard_elements(part, len(ranks), index)


def overlap(a: int, b: int, c: int, d: int) -> int:
    """Return the length of the intersection of two ranges."""
    return max(0, min(b, d) - max(a, c))
