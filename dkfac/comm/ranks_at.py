"""Where ranks are in a step, in words: which have arrived, which have not.

Input: what each rank published. Output: messages. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OUTSIDE = 1
STAGES = ("load_state_dict", "outside", "K-FAC's step", "average", "decompose", "precondition")
"""Where a rank can be within a step, in order; ``OUTSIDE`` is everything that is not K-FAC's."""
WORDS = {"outside": "outside K-FAC (data, forward, backward or the optimizer)", "load_state_dict": "loading a state"}
SILENT = "does not answer: stopped, gone or cut off; last seen"


@dataclass(frozen=True, slots=True)
class Sighting:
    """Where a rank is."""

    beat: int
    """Counts how often it looked."""
    step: int
    stage: int
    """Index in ``STAGES``."""
    at: str
    """The line of the training script."""
    waits: bool
    """Whether it waits for other ranks in a transfer of K-FAC's."""

    def __str__(self) -> str:
        name = STAGES[self.stage]
        where = f", {self.at}" if self.at and self.stage == OUTSIDE else ""
        return f"step {self.step}, {WORDS.get(name, name)}{where}"


def position(stage: str, waits: bool) -> int:
    """Return the index of a stage; "" is outside of K-FAC, or between its stages."""
    if stage in STAGES:
        return STAGES.index(stage)
    return OUTSIDE + waits


def message(patience: float, seen: dict[int, Sighting], silent: set[int], world_size: int) -> str:
    """Return which ranks have not arrived, and where they and the others are."""
    here = {rank: (s.step, s.stage) for rank, s in seen.items() if rank not in silent}
    last = max(here.values(), default=(0, 0))
    late = [rank for rank in range(world_size) if rank not in here or here[rank] < last]
    there = [rank for rank in range(world_size) if rank not in late]
    if late:
        missing = _grouped(late, lambda rank: _state(rank, seen, silent))
        said = f"not arrived: {missing}; waiting: {_grouped(there, lambda rank: str(seen[rank]))}"
    else:
        said = f"all ranks are at {seen[there[0]]}, whose transfer does not complete: see the network"
    first = f"the output of rank {late[0]}" if late else "the output of all ranks"
    return (
        f"ranks waited {patience:g} s for others; {said}. See {first}; each rank takes every step and every "
        f"load_state_dict(). With TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) torch's "
        f"flight recorder has each rank's last transfers. The patience is the setting patience=SECONDS"
    )


def without_store(patience: float, rank: int, mine: Sighting, first: Sighting | None, held_by_rank_0: bool) -> str:
    """Return what a rank says that waits and cannot read where the others are."""
    where = "" if first is None else f" (last seen at {first})"
    who = f"rank 0{where}, whose process holds" if held_by_rank_0 else "the launcher, which holds"
    return (
        f"rank {rank} waited {patience:g} s for others at {mine}. The store does not answer: not arrived: {who} it, is "
        f"stopped, gone or cut off. The patience is the setting patience=SECONDS"
    )


def _state(rank: int, seen: dict[int, Sighting], silent: set[int]) -> str:
    if rank not in seen:
        return "was never seen"
    return f"{SILENT} at {seen[rank]}" if rank in silent else str(seen[rank])


def _grouped(ranks: Iterable[int], words: object) -> str:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(words(rank), []).append(rank)  # type: ignore[operator]
    return ", ".join(
        f"rank{'s' if some[1:] else ''} {', '.join(map(str, some[:8]))}"
        f"{f' and {len(some) - 8} more' if some[8:] else ''} ({text})"
        for text, some in found.items()
    )
