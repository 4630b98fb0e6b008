"""One transfer of a program: a collective on a flat buffer, and what each rank sends and receives in it.

Input: parts and the ranks of a group. Output: sizes and bytes. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dkfac.plan import shards
from dkfac.plan.plan import num_bytes
from dkfac.plan.spec import Ranks

Stage = Literal[
    "squares", "header", "factors", "replicas", "changes", "means", "status", "decompositions", "norms", "gradients",
    "weights",
]  # fmt: skip
How = Literal["all-reduce", "reduce-scatter", "rows", "collect", "deal", "all-gather", "broadcast",
              "to-owners", "to-shards"]  # fmt: skip
"""``rows``: each rank sends its own rows to the owner of each part; they are not summed. ``collect``: from equal chunks
to owners, after a reduce-scatter. ``deal``: from owners to equal chunks, before an all-gather. These three are
all-to-alls; the last two only move what is not in place yet. ``broadcast``: only in the programs of other systems.
``to-owners``, ``to-shards``: all-to-alls between the shards of parameters and the owners of layers.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of a flat buffer."""

    layer: str
    key: str
    elements: int
    owner: int = -1
    """The rank that receives it (reductions) or sends it (shares); -1: all."""
    shape: tuple[int, ...] = ()
    cuts: shards.Cuts = ()
    """How a parameter is split over ranks."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective on a flat buffer of ``parts``, ordered by owner and split in equal chunks if it is split."""

    stage: Stage
    how: How
    group: Ranks
    dtype: str
    parts: tuple[Part, ...]
    bucket: int = 0
    mesh: tuple[Ranks, ...] = ()
    """Of parameters that are split over ranks: the ranks of each replica, in the order of the shards."""

    @property
    def used(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def chunk(self) -> int:
        """Elements of one member's chunk; the last chunk is padded."""
        return -(-self.used // len(self.group))

    def sizes(self) -> list[int]:
        """Return how many elements each member passes to the collective."""
        size = len(self.group)
        match self.how:
            case "all-reduce" | "rows" | "broadcast":
                return [self.used] * size
            case "reduce-scatter":
                return [self.chunk * size] * size
            case "all-gather":
                return [self.chunk] * size
            case "collect":
                used, chunk = self.used, self.chunk
                return [shards.overlap(0, used, i * chunk, (i + 1) * chunk) for i in range(size)]
            case "deal":
                return [end - begin for begin, end in self._owned()]
            case "to-owners" | "to-shards":
                return [sum(self.splits(rank)[0]) for rank in self.group]

    def elements(self, rank: int) -> int:
        """Return how many elements a member passes to the collective."""
        return self.sizes()[self.group.index(rank)]

    def num_bytes(self, rank: int) -> int:
        """Return the bytes that a member passes to the collective."""
        return self.elements(rank) * num_bytes(self.dtype)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the whole transfer."""
        padded = self.how in ("reduce-scatter", "all-gather")
        return (self.chunk * len(self.group) - self.used) * num_bytes(self.dtype) if padded else 0

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Return how many elements a member sends to each member, and receives from each."""
        if self.mesh:
            return shards.splits(self.parts, self.group, self.mesh, rank, to_owners=self.how == "to-owners")
        me, size, chunk = self.group.index(rank), len(self.group), self.chunk
        owned = self._owned()
        if self.how == "rows":
            return [end - begin for begin, end in owned], [owned[me][1] - owned[me][0]] * size
        chunks = [(i * chunk, (i + 1) * chunk) for i in range(size)]
        to_owner = [shards.overlap(*owned[i], *chunks[me]) for i in range(size)]
        from_chunk = [shards.overlap(*owned[me], *chunks[i]) for i in range(size)]
        return (to_owner, from_chunk) if self.how == "collect" else (from_chunk, to_owner)

    def _owned(self) -> list[tuple[int, int]]:
        """Return the range of each member's own parts in the buffer."""
        totals = dict.fromkeys(self.group, 0)
        for part in self.parts:
            totals[part.owner] += part.elements
        result, position = [], 0
        for total in totals.values():
            result.append((position, position + total))
            position += total
        return result
