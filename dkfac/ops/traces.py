"""Traces of many running factors in one launch: Triton kernels only.

Input: sums of factors with their weights. Output: a number per block, on the device. Owns: nothing; addresses are
data in a tensor, cached as a constant, so that a captured call finds what an eager one on the same tensors has made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dkfac.ops import constants, kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

TRACE_BLOCK = 256
TRACE_FIELDS = 6


class Trace(NamedTuple):
    value: Tensor
    """``[B * P, w, w]``, or ``[B * P, w]`` of a diagonal factor."""
    weight: Tensor
    """What the value is divided by."""
    pieces: int
    scale: float
    shift: float


def can_trace(value: Tensor, weight: Tensor) -> bool:
    return kernels.usable((torch.float32,), value, weight) and value.numel() < 2**31


def traces(given: Sequence[Trace]) -> Tensor:
    """Return ``scale trace / weight + shift`` of each, summed over the pieces of a block, ``[B]`` each, one after the
    other, in float64."""
    device, table, numbers = given[0].value.device, list[int](), list[float]()
    for value, weight, pieces, scale, shift in given:
        width, step = value.shape[-1], sum(value.stride()[1:])
        for first in range(0, len(value), pieces):
            begin = value.data_ptr() + first * value.stride(0) * value.element_size()
            table += [begin, weight.data_ptr(), pieces * width, width, value.stride(0), step]
            numbers += [scale, shift]
    rows = constants.constant(tuple(table), device, torch.int64)
    coefficients = constants.constant(tuple(numbers), device, torch.float64)
    found = torch.empty(len(coefficients) // 2, dtype=torch.float64, device=device)
    kernels.launch_kernel(_trace_kernel, len(found), found, rows, coefficients, FIELDS=TRACE_FIELDS, BLOCK=TRACE_BLOCK)
    return found


def _trace_kernel(found, rows, coefficients, FIELDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = rows + tl.program_id(0) * FIELDS
    value = tl.load(row).to(tl.pointer_type(tl.float32))
    weight = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)))
    size = tl.load(row + 2).to(tl.int32)
    width = tl.load(row + 3).to(tl.int32)
    stride = tl.load(row + 4).to(tl.int32)
    step = tl.load(row + 5).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        total += tl.load(value + i // width * stride + i % width * step, mask=i < size, other=0.0)
    trace = (tl.sum(total) / tl.maximum(weight, 1.1754943508222875e-38)).to(tl.float64)
    scale = tl.load(coefficients + 2 * tl.program_id(0))
    tl.store(found + tl.program_id(0), trace * scale + tl.load(coefficients + 2 * tl.program_id(0) + 1))
