"""Pack many symmetric matrices into a flat buffer in one launch, and add a buffer to as many matrices in another.

Input: matrices at any addresses, and a flat buffer of their triangles. Output: the buffer, or the matrices, changed in
place. Owns: tables of places. The layout is that of ``pack.py``, which is the reference. The buffer may have another
dtype; the matrices are float32. Triton only: check ``can_pack`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dkfac.ops import kernels
from dkfac.ops.many import on_its_way

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

SIDE = 32
CHUNK = SIDE * SIDE
ITEM_FIELDS = 4


class Entry(NamedTuple):
    """A factor in a flat buffer."""

    begin: int
    blocks: int
    dim: int
    is_dense: bool
    flag: int
    """Index of its flag in ``are_finite``."""

    @property
    def packed(self) -> int:
        return self.blocks * (self.dim * (self.dim + 1) // 2 if self.is_dense else self.dim)

    @property
    def tiles(self) -> int:
        """Number of tiles of the factor itself."""
        return self.blocks * (-(-self.dim // SIDE)) ** 2 if self.is_dense else -(-self.packed // CHUNK)


def can_pack(flat: Tensor, *matrices: Tensor) -> bool:
    """Return whether the kernels support a buffer and matrices."""
    wire = (torch.float32, torch.bfloat16, torch.float16)
    return kernels.usable(wire, flat) and all(m.dtype is torch.float32 and m.device == flat.device for m in matrices)


class Triangles:
    """Places of factors in a flat buffer, and the work on all of them."""

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
        assert all(entry.blocks * entry.dim**2 < 2**31 for entry in entries if entry.is_dense)
        rows = [(e.begin, e.dim if e.is_dense else 0, e.packed, e.flag) for e in entries]
        self.number, self._device = len(entries), device
        self._items = self._upload([n for row in rows for n in row])
        self._chunks = self._pieces([-(-entry.packed // CHUNK) for entry in entries])
        self._tiles = self._pieces([entry.tiles for entry in entries])

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        return on_its_way(numbers, self._device).to(self._device, non_blocking=True)

    def _pieces(self, counts: list[int]) -> Tensor:
        """Return, for each program, its factor and its number among those of the factor, ``[programs, 2]``."""
        each = torch.tensor(counts, device="cpu")
        owner = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), each)
        begin = torch.cumsum(each, 0) - each
        found = torch.stack([owner, torch.arange(len(owner), device="cpu") - begin[owner]], 1).to(torch.int32)
        return (found.pin_memory() if self._device.type == "cuda" else found).to(self._device, non_blocking=True)

    def pack(self, sources: Sequence[Tensor | None], scales: Tensor, flat: Tensor) -> Tensor:
        """Write ``scales[i]`` times the triangles of ``sources[i]`` to the buffer, zeros where there is none; return
        whether all sources are finite, as a flag on the device. The sources are contiguous."""
        fine = torch.ones((), dtype=torch.int32, device=flat.device)
        pointers = self.addresses(sources)
        given = (flat, pointers, self._items, self._chunks, scales, fine)
        kernels.launch_kernel(_pack_kernel, len(self._chunks), *given, ITEM_FIELDS=ITEM_FIELDS, CHUNK=CHUNK)
        return fine > 0

    def addresses(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the addresses of tensors, which must stay alive until the work is launched."""
        return self._upload([0 if t is None else t.data_ptr() for t in tensors])

    def are_finite(self, flat: Tensor, number: int) -> Tensor:
        """Return ``number`` flags, which are False where a factor in the buffer with this flag is not finite."""
        flags = torch.ones(number, dtype=torch.int32, device=flat.device)
        given = (flat, self._items, self._chunks, flags)
        kernels.launch_kernel(_finite_kernel, len(self._chunks), *given, ITEM_FIELDS=ITEM_FIELDS, CHUNK=CHUNK)
        return flags > 0

    def absorb(self, flat: Tensor, addresses: Tensor, factor: Tensor, here: Tensor, decay: float) -> None:
        """Set each value ``v`` at its address to ``decay v + factor[i] t`` where ``here[i]``; t is in the buffer."""
        given = (flat, addresses, self._items, self._tiles, factor, here, decay)
        kernels.launch_kernel(_absorb_kernel, len(self._tiles), *given, ITEM_FIELDS=ITEM_FIELDS, SIDE=SIDE)


# Kernels. Offsets within a factor are 32-bit, addresses and places in the buffer 64-bit. A matrix of dimension ``dim``
# is split after its first ``m`` rows; 0 stands for a diagonal.


def _pack_kernel(  # type: ignore[no-untyped-def]
    flat, pointers, items, pieces, scales, fine, ITEM_FIELDS: tl.constexpr, CHUNK: tl.constexpr
):
    item = tl.load(pieces + 2 * tl.program_id(0))
    chunk = tl.load(pieces + 2 * tl.program_id(0) + 1)
    items += item * ITEM_FIELDS
    begin = tl.load(items)
    dim = tl.load(items + 1).to(tl.int32)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(items + 2).to(tl.int32)
    there = place
    if dim > 0:
        size = (dim * (dim + 1)) // 2
        m = (dim + 1) // 2
        even = 1 - dim % 2
        columns = m + even
        within = place % size
        row = within // columns
        column = within % columns
        is_first = column >= row + even
        rest = within - m * columns
        width = tl.maximum(dim - m, 1)
        is_across = rest >= 0
        i = tl.where(is_across, rest // width, tl.where(is_first, row, m + row - 1 + even))
        j = tl.where(is_across, m + rest % width, tl.where(is_first, column - even, m + column))
        there = ((place // size) * dim + i) * dim + j
    address = tl.load(pointers + item)
    found = tl.load(address.to(tl.pointer_type(tl.float32)) + there, mask=inside & (address != 0), other=0.0)
    bad = tl.where(tl.abs(found) <= 3.4028234663852886e38, 0.0, 1.0)
    tl.store(fine, 0, mask=tl.sum(bad) > 0)
    found = found * tl.load(scales + item)
    tl.store(flat + begin + place, found.to(flat.dtype.element_ty), mask=inside)


def _finite_kernel(  # type: ignore[no-untyped-def]
    flat, items, pieces, flags, ITEM_FIELDS: tl.constexpr, CHUNK: tl.constexpr
):
    items += tl.load(pieces + 2 * tl.program_id(0)) * ITEM_FIELDS
    place = tl.load(pieces + 2 * tl.program_id(0) + 1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(items + 2).to(tl.int32)
    found = tl.load(flat + tl.load(items) + place, mask=inside, other=0.0).to(tl.float32)
    bad = tl.where(tl.abs(found) <= 3.4028234663852886e38, 0.0, 1.0)
    tl.store(flags + tl.load(items + 3), 0, mask=tl.sum(bad) > 0)


def _absorb_kernel(  # type: ignore[no-untyped-def]
    flat, pointers, items, pieces, factor, here, decay, ITEM_FIELDS: tl.constexpr, SIDE: tl.constexpr
):
    item = tl.load(pieces + 2 * tl.program_id(0))
    if tl.load(here + item):
        tile = tl.load(pieces + 2 * tl.program_id(0) + 1)
        items += item * ITEM_FIELDS
        dim = tl.load(items + 1).to(tl.int32)
        value = tl.load(pointers + item).to(tl.pointer_type(tl.float32))
        within = tl.arange(0, SIDE * SIDE)
        place = tile * (SIDE * SIDE) + within
        inside = place < tl.load(items + 2).to(tl.int32)
        there = place
        if dim > 0:
            m = (dim + 1) // 2
            even = 1 - dim % 2
            columns = m + even
            across = (dim + SIDE - 1) // SIDE
            block = tile // (across * across)
            number = tile % (across * across)
            i = (number // across) * SIDE + within // SIDE
            j = (number % across) * SIDE + within % SIDE
            inside = (i < dim) & (j < dim)
            place = (block * dim + i) * dim + j
            low = tl.minimum(i, j)
            high = tl.maximum(i, j)
            first = low * columns + high + even
            second = (high - m + 1 - even) * columns + low - m
            off = m * columns + low * (dim - m) + high - m
            there = block * ((dim * (dim + 1)) // 2) + tl.where(high < m, first, tl.where(low >= m, second, off))
        new = tl.load(flat + tl.load(items) + there, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(value + place, mask=inside, other=0.0)
        tl.store(value + place, decay * old + tl.load(factor + item) * new, mask=inside)
