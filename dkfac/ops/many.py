"""Process many tensors at any addresses in one launch: the addresses are data in a tensor, which a CUDA graph can read.

Input: *outer* tensors (gradients, sums of a step), whose addresses change, and *inner* ones, parts of one tensor with a
fixed address. Output: copies, and updates in place. Owns: tables of addresses. Triton only: check ``usable`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

MOVE_BLOCK = 1024
MOST_PROGRAMS = 512
"""Limit per tensor; beyond it, each program processes several blocks."""
DIMS = 4
FIELDS = 16


@dataclass(frozen=True, slots=True)
class Items:
    """Maps elements of outer tensors to elements of an inner one."""

    meta: Tensor
    """``[n, FIELDS]``: elements, slot, index, offset; sizes but the first; strides of inner; strides of outer; number
    of programs."""
    tiles: Tensor
    """``[programs, 2]``: the item, and the number of the program among those of the item."""
    dims: int


def are_usable(*tensors: Tensor) -> bool:
    return kernels.usable((torch.float32, torch.bool), *tensors)


def describe(
    outer: Sequence[Tensor], inner: Sequence[Tensor], slots: Sequence[int], index: Sequence[int], begin: int = 0
) -> Items | None:
    """Return what ``gather`` and ``scatter`` need for pairs of tensors of equal shape; None beyond the kernels' limits.

    ``inner``: parts of one tensor, which begins at this element of its memory. ``slots``: where the outer ones'
    addresses will be. ``index``: of each one's flags.
    """
    rows, tiles, most = list[list[int]](), list[list[int]](), 1
    for one, other, slot, flag in zip(outer, inner, slots, index, strict=True):
        sizes, mine, yours = _merged(other.shape, other.stride(), one.stride())
        if len(sizes) > DIMS or one.numel() >= 2**31 or _reach(one) >= 2**31 or _reach(other) >= 2**31:
            return None
        lack = DIMS - len(sizes)
        sizes, mine, yours = [1] * lack + sizes, [0] * lack + mine, [0] * lack + yours
        programs = min(MOST_PROGRAMS, -(-one.numel() // MOVE_BLOCK))
        tiles += [[len(rows), i] for i in range(programs)]
        begins = int(other.storage_offset()) - begin
        rows.append([one.numel(), slot, flag, begins, *sizes[1:], *mine, *yours, programs])
        most = max(most, DIMS - lack)
    device = inner[0].device if inner else torch.device("cpu")
    return Items(on_device(rows, device).view(-1, FIELDS), on_device(tiles, device, torch.int32), most)


def _reach(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _merged(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], ...]:
    """Return sizes and strides with adjacent dimensions merged where all strides allow it, and without sizes of 1."""
    kept = [i for i, size in enumerate(shape) if size != 1]
    sizes, lines = [shape[i] for i in kept], [[line[i] for i in kept] for line in strides]
    for i in range(len(sizes) - 2, -1, -1):
        if all(line[i] == line[i + 1] * sizes[i + 1] for line in lines):
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
            for line in lines:
                del line[i]
    return sizes, *lines


def on_its_way(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor, pinned for CUDA, that can be copied to a device without synchronizing."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(rows: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers on a device, one row after the other, without synchronizing with it."""
    return on_its_way([n for row in rows for n in row], device, dtype).to(device, non_blocking=True)


def gather_tensors(pointers: Tensor, items: Items, inner: Tensor) -> None:
    """Copy the outer tensors to their parts of an inner one."""
    _move(pointers, items, inner, inner, inner, inner, inner, inner, inner, mode=GATHER)


def scatter(
    pointers: Tensor, items: Items, raw: Tensor, update: Tensor, scale: Tensor, sane: Tensor, good: Tensor
) -> None:
    """Set the outer tensors to ``scale[i] update`` where ``sane[i]``, to ``raw`` elsewhere, to zeros if not ``good``.

    ``raw`` and ``update`` are inner tensors of equal shape and strides; i is an item's index.
    """
    assert raw.stride() == update.stride()
    _move(pointers, items, raw, update, scale, scale, scale, sane, good, mode=SCATTER)


GATHER, SCATTER, STEP, ADD = range(4)


def _move(
    pointers: Tensor, items: Items, raw: Tensor, update: Tensor, scale: Tensor, left: Tensor, factor: Tensor,
    sane: Tensor, good: Tensor, *, mode: int,
) -> None:  # fmt: skip
    kernels.launch_kernel(
        _move_kernel, len(items.tiles) // 2, raw, update, pointers, items.meta, items.tiles, scale, left, factor, sane,
        good, MODE=mode, DIMS=items.dims, FIELDS=FIELDS, BLOCK=MOVE_BLOCK,
    )  # fmt: skip


def step_tensors(
    pointers: Tensor, items: Items, update: Tensor, rate: Tensor, left: Tensor, factor: Tensor, sane: Tensor,
    good: Tensor,
) -> None:  # fmt: skip
    """Set each outer tensor to ``left[n]`` times itself, minus ``rate[n] factor[i] update`` where ``sane[i]``, if
    ``good``.

    ``update``: an inner tensor. n: the item; i: its index.
    """
    _move(pointers, items, update, update, rate, left, factor, sane, good, mode=STEP)


def add_tensors(pointers: Tensor, items: Items, inner: Tensor, scale: Tensor) -> None:
    """Add ``scale[n]`` times each outer tensor to its part of an inner one."""
    _move(pointers, items, inner, inner, scale, scale, scale, scale, scale, mode=ADD)


class Totals:
    """Values ``v`` with fixed addresses, and totals ``t`` to be added to them: ``v <- decay v + scale t``.

    All are contiguous. ``are_finite`` and ``absorb`` can be captured in a graph; call ``give`` before each replay.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values, device = values, values[0].device
        self._sizes = [value.numel() for value in values]
        self._programs = min(MOST_PROGRAMS, -(-max(self._sizes) // MOVE_BLOCK))
        table = [n for v, size in zip(values, self._sizes, strict=True) for n in (v.data_ptr(), size)]
        self._table = on_its_way(table, device).to(device, non_blocking=True)
        self._totals = torch.zeros(len(values), dtype=torch.int64, device=device)
        self._scale = torch.zeros(len(values), dtype=torch.float32, device=device)
        self._scales: list[float] = []

    def give(self, totals: Sequence[Tensor], scales: list[float]) -> None:
        """Set the totals and their scales. The totals must stay alive until the work is launched."""
        assert self._sizes == [total.numel() for total in totals]
        device = self._table.device
        self._totals.copy_(on_its_way([total.data_ptr() for total in totals], device), non_blocking=True)
        if scales != self._scales:
            self._scales = scales
            self._scale.copy_(on_its_way(scales, device, torch.float32), non_blocking=True)

    def are_finite(self) -> Tensor:
        """Return whether all totals are finite, as a flag on the device."""
        flag = torch.ones((), dtype=torch.int32, device=self._table.device)
        count, programs = len(self._values) * self._programs, self._programs
        kernels.launch_kernel(_finite_kernel, count, self._table, self._totals, flag, programs, BLOCK=MOVE_BLOCK)
        return flag > 0

    def absorb(self, decay: float, good: Tensor) -> None:
        """Add the totals in place if ``good``, a single flag on the device."""
        count, programs = len(self._values) * self._programs, self._programs
        given = (self._table, self._totals, self._scale, good, decay, programs)
        kernels.launch_kernel(_absorb_kernel, count, *given, BLOCK=MOVE_BLOCK)


# Kernels. Offsets within an item are 32-bit, addresses 64-bit.


def _move_kernel(  # type: ignore[no-untyped-def]
    raw, update, pointers, meta, tiles, scale, left, factor, sane, good,
    MODE: tl.constexpr, DIMS: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # MODE: 0 gather from the outer tensors, 1 scatter to them, 2 step them, 3 add them to the inner ones.
    item = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta += item * FIELDS
    programs = tl.load(meta + 15).to(tl.int32)
    size = tl.load(meta).to(tl.int32)
    outer = tl.load(pointers + tl.load(meta + 1)).to(tl.pointer_type(raw.dtype.element_ty))
    index = tl.load(meta + 2)
    raw += tl.load(meta + 3)
    update += tl.load(meta + 3)
    for begin in range(first * BLOCK, size, programs * BLOCK):
        rest = begin + tl.arange(0, BLOCK)
        inside = rest < size
        here = tl.zeros((BLOCK,), tl.int32)
        there = tl.zeros((BLOCK,), tl.int32)
        for dim in tl.static_range(3, 4 - DIMS, -1):
            length = tl.load(meta + 3 + dim).to(tl.int32)
            digit = rest % length
            rest = rest // length
            here += digit * tl.load(meta + 7 + dim).to(tl.int32)
            there += digit * tl.load(meta + 11 + dim).to(tl.int32)
        here += rest * tl.load(meta + 11 - DIMS).to(tl.int32)
        there += rest * tl.load(meta + 15 - DIMS).to(tl.int32)
        if MODE == 2:
            if tl.load(good):
                found = tl.load(outer + there, mask=inside, other=0.0) * tl.load(left + item)
                if tl.load(sane + index):
                    rate = tl.load(scale + item) * tl.load(factor + index)
                    found -= tl.load(update + here, mask=inside, other=0.0) * rate
                tl.store(outer + there, found, mask=inside)
        elif MODE == 1:
            found = tl.zeros((BLOCK,), tl.float32)
            if tl.load(good):
                if tl.load(sane + index):
                    found = tl.load(update + here, mask=inside, other=0.0) * tl.load(scale + index)
                else:
                    found = tl.load(raw + here, mask=inside, other=0.0)
            tl.store(outer + there, found, mask=inside)
        elif MODE == 3:
            found = tl.load(outer + there, mask=inside, other=0.0) * tl.load(scale + item)
            tl.store(raw + here, tl.load(raw + here, mask=inside, other=0.0) + found, mask=inside)
        else:
            tl.store(raw + here, tl.load(outer + there, mask=inside, other=0.0), mask=inside)


def _finite_kernel(table, totals, flag, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0) // programs
    total = tl.load(totals + item).to(tl.pointer_type(tl.float32))
    size = tl.load(table + 2 * item + 1)
    bad = tl.zeros((BLOCK,), tl.float32)
    for begin in range((tl.program_id(0) % programs).to(tl.int64) * BLOCK, size, programs * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        found = tl.load(total + place, mask=place < size, other=0.0)
        bad += tl.where(tl.abs(found) <= 3.4028234663852886e38, 0.0, 1.0)
    tl.store(flag, 0, mask=tl.sum(bad) > 0)


def _absorb_kernel(  # type: ignore[no-untyped-def]
    table, totals, scale, good, decay, programs, BLOCK: tl.constexpr
):
    item = tl.program_id(0) // programs
    if tl.load(good):
        value = tl.load(table + 2 * item).to(tl.pointer_type(tl.float32))
        total = tl.load(totals + item).to(tl.pointer_type(tl.float32))
        size = tl.load(table + 2 * item + 1)
        factor = tl.load(scale + item)
        for begin in range((tl.program_id(0) % programs).to(tl.int64) * BLOCK, size, programs * BLOCK):
            place = begin + tl.arange(0, BLOCK)
            inside = place < size
            old = tl.load(value + place, mask=inside, other=0.0)
            new = tl.load(total + place, mask=inside, other=0.0)
            tl.store(value + place, decay * old + factor * new, mask=inside)
