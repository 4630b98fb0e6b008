"""The norms of many tensors in two launches, and whether all are finite: Triton only.

Input: contiguous tensors at fixed addresses. Output: their norms, on the device. Owns: a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import kernels
from dkfac.ops.many import on_device

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

SUMMED = {"CHUNK": 4096, "BLOCK": 1024}
"""Elements that a program sums, and how many of them at once."""


class LayerNorms:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device, rows, chunks = tensors[0].device, [], list[list[int]]()
        for i, tensor in enumerate(tensors):
            number = -(-tensor.numel() // SUMMED["CHUNK"])
            rows.append([tensor.data_ptr(), tensor.numel(), len(chunks), number])
            chunks += [[i, n] for n in range(number)]
        self._is_aligned = not any(row[0] % 16 or row[1] % 4 for row in rows)
        self._rows, self._chunks = on_device(rows, device), on_device(chunks, device, torch.int32)
        self._count, self._programs = len(rows), len(chunks)

    def write(self, norms: Tensor, good: Tensor) -> None:
        """Write the norms, and whether all of them are finite."""
        partial = torch.empty(self._programs, dtype=torch.float32, device=norms.device)
        kernels.launch_kernel(
            _squares_kernel, self._programs, self._rows, self._chunks, partial,
            **SUMMED, ALIGNED=int(self._is_aligned),
        )  # fmt: skip
        kernels.launch_kernel(_norms_kernel, self._count, self._rows, partial, norms, BLOCK=256)
        kernels.launch_kernel(_good_kernel, 1, norms, good, self._count, BLOCK=256)


def write_totals(before: Tensor, after: Tensor, totals: Tensor) -> None:
    """Write the norms of all gradients and of all updates, of which these are the layers' norms."""
    kernels.launch_kernel(_totals_kernel, 2, before, after, totals, len(before), BLOCK=256)


# Kernels.


def _totals_kernel(before, after, totals, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        if tl.program_id(0) == 0:
            found = tl.load(before + place, mask=place < count, other=0.0)
        else:
            found = tl.load(after + place, mask=place < count, other=0.0)
        total += found * found
    tl.store(totals + tl.program_id(0), tl.sqrt_rn(tl.sum(total)))


def _squares_kernel(  # type: ignore[no-untyped-def]
    rows, chunks, partial, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    rows += tl.load(chunks + 2 * tl.program_id(0)) * 4
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    values = tl.load(rows).to(tl.pointer_type(tl.float32))
    size = tl.load(rows + 1)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        size = tl.multiple_of(size, 4)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHUNK // BLOCK):
        place = begin + i * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(values + place, mask=place < size, other=0.0)
        total += found * found
    tl.store(partial + tl.program_id(0), tl.sum(total))


def _norms_kernel(rows, partial, norms, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(rows + tl.program_id(0) * 4 + 2)
    count = tl.load(rows + tl.program_id(0) * 4 + 3)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        total += tl.load(partial + first + place, mask=place < count, other=0.0)
    tl.store(norms + tl.program_id(0), tl.sqrt_rn(tl.sum(total)))


def _good_kernel(norms, good, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    bad = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        found = tl.load(norms + place, mask=place < count, other=0.0)
        bad += tl.where(tl.abs(found) < float("inf"), 0, 1)
    tl.store(good, tl.sum(bad) == 0)
