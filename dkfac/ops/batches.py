"""Group items into batches of limited size.

Input: items with their bytes. Output: lists of them. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SOLVE_BYTES = 128 * 2**20
"""Upper bound on the bytes of factors that are decomposed in one batch; the workspace is about ten times as large."""


def in_bytes(items: Iterable[tuple[Item, int]], most: int | None = None) -> Iterator[list[Item]]:
    """Group items, given with their bytes, into lists that are processed in one batch, of at most ``SOLVE_BYTES``
    unless ``most`` is given."""
    most = SOLVE_BYTES if most is None else most
    chosen, num_bytes = list[Item](), 0
    for item, size in items:
        if chosen and num_bytes + size > most:
            yield chosen
            chosen, num_bytes = [], 0
        chosen.append(item)
        num_bytes += size
    if chosen:
        yield chosen
