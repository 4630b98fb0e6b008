"""Rotate momentum and second moments of many layers to new bases, in two launches: Triton kernels only.

Input: moments in an old basis, and the rotations to the new one. Output: the same moments, changed in place. Owns:
nothing. The formula is that of :func:`dkfac.factors.layer_state.carried`, which takes some thirty passes over memory.

The first launch multiplies rows (the left side) and writes to a buffer, the second multiplies columns and combines.
Each program computes one tile of a piece. Addresses are data in a tensor, cached as a constant: a call that is captured
in a CUDA graph finds what an eager call on the same tensors has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dkfac.ops import constants, kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

DOWN, ACROSS, DEPTH = 32, 64, 16
"""Rows and columns that a program computes, and how many products it adds up at a time. See ``tile_products`` for why
there are few rows."""
SEGMENT_FIELDS = 15
MOST_SEGMENTS = 4096
"""Limit on the pieces of a layer: many tiny blocks are better multiplied in one batch."""


class Moments(NamedTuple):
    """Moments ``[B, O, I]`` of one layer, with their weights, and what rotates them."""

    momentum: Tensor
    momentum_weight: Tensor
    square: Tensor
    square_weight: Tensor
    outputs: list[Tensor]
    """Rotations of the pieces of G, ``[B * P, w, w]``, as views of one tensor."""
    inputs: list[Tensor]
    """The same of A. Rows and columns after the last piece are not rotated."""
    bases: tuple[list[Tensor], list[Tensor]] | None
    """The new bases of outputs and inputs, for momentum in the basis of the weights, where it stays. None: momentum is
    in the old basis, and is rotated."""


def can_carry(layer: Moments, rotations: Tensor) -> bool:
    """Whether ``carry_`` can rotate a layer's moments."""
    tensors = [*layer[:4], rotations, *(basis for side in layer.bases or () for basis in side)]
    if not kernels.usable((torch.float32,), *tensors) or not (layer.outputs or layer.inputs):
        return False
    one, other = layer.momentum, layer.square
    if one.stride() != other.stride() or 1 not in one.stride()[1:] or min(one.stride()) < 1:
        return False
    if one[0].numel() >= 2**30 or any(basis.stride(-1) != 1 for side in layer.bases or () for basis in side):
        return False
    blocks = sum(len(piece) for piece in (*layer.outputs, *layer.inputs))
    return blocks <= MOST_SEGMENTS and min(piece.shape[-1] for piece in (*layer.outputs, *layer.inputs)) >= 8


def rows_are_aligned(layer: Moments) -> bool:
    """Whether the kernels can load four neighbours at once; they may then read, not write, up to the end of a row."""
    layer = _row_major(layer)
    x, pieces = layer.momentum, (*layer.outputs, *layer.inputs)
    bases = [basis for side in layer.bases or () for basis in side]
    numbers = [*x.stride()[:2], *(number for piece in pieces for number in (piece.shape[-1], piece.storage_offset()))]
    numbers += [stride for basis in bases for stride in basis.stride()[:2]]
    if any(number % 4 for number in numbers) or any(t.data_ptr() % 16 for t in (x, layer.square, *bases)):
        return False
    blocks, rows, columns = x.shape
    ends = [t.storage_offset() + (blocks - 1) * t.stride(0) + rows * t.stride(1) for t in (x, layer.square)]
    rooms = [t.untyped_storage().nbytes() // t.element_size() for t in (x, layer.square)]
    return _up(columns) <= x.stride(1) and all(end <= room for end, room in zip(ends, rooms, strict=True))


def _up(columns: int) -> int:
    """Return the length of rows in the buffer, a multiple of four."""
    return -(-columns // 4) * 4


def carry_(layers: Sequence[Moments], rotations: Tensor, *, tf32: bool) -> None:
    """Rotate the moments of layers that all keep their momentum in the same basis, and are all aligned or all not.
    Multiplies in TF32, or nearly as in float32 by three products in TF32.

    ``rotations`` is the tensor, one-dimensional, of which the layers' rotations are views.
    """
    assert rotations.storage_offset() == 0
    device, turned, begin = rotations.device, [_row_major(layer) for layer in layers], 0
    left, right = list[list[int]](), list[list[int]]()
    for layer in turned:
        left += _segments(layer, begin, side=0)
        right += _segments(layer, begin, side=1)
        begin += layer.momentum[..., 0].numel() * _up(layer.momentum.shape[-1])
    buffer = torch.empty(3 * begin, dtype=torch.float32, device=device)
    for kernel, segments in ((_rows_kernel, left), (_columns_kernel, right)):
        tiles = [_tiles(segment) for segment in segments]
        total = 0
        for segment, number in zip(segments, tiles, strict=True):
            segment[14] = total
            total += number
        table = constants.constant(tuple([number for segment in segments for number in segment]), device, torch.int64)
        index = constants.constant(tuple(range(len(tiles))), device, torch.int32)
        counts = constants.constant(tuple(tiles), device, torch.int64)
        owners = index.repeat_interleave(counts, output_size=total)
        kernels.launch_kernel(
            kernel, total, rotations, buffer, table, owners, begin,
            FROM_WEIGHTS=layers[0].bases is not None, ALIGNED=rows_are_aligned(layers[0]), TF32=tf32,
            FIELDS=SEGMENT_FIELDS, DOWN=DOWN, ACROSS=ACROSS, DEPTH=DEPTH, num_warps=4, num_stages=3,
        )  # fmt: skip


def _row_major(layer: Moments) -> Moments:
    """Return the layer with contiguous rows: transposed, if its columns are."""
    if layer.momentum.stride(-1) == 1:
        return layer
    bases = None if layer.bases is None else (layer.bases[1], layer.bases[0])
    return Moments(
        layer.momentum.mT, layer.momentum_weight, layer.square.mT, layer.square_weight, layer.inputs, layer.outputs,
        bases,
    )  # fmt: skip


def _segments(layer: Moments, begin: int, *, side: int) -> Iterator[list[int]]:
    """Yield the kernels' table for the pieces of a layer's rows (side 0) or columns (side 1)."""
    x, y = layer.momentum, layer.square
    blocks, rows, columns = x.shape
    pieces = (layer.outputs, layer.inputs)[side]
    bases = pieces if layer.bases is None else layer.bases[side]
    weights = [layer.momentum_weight.data_ptr(), layer.square_weight.data_ptr()]
    for b in range(blocks):
        here = [x[b].data_ptr(), y[b].data_ptr(), int(x.stride(1)), rows, columns]
        first, buffer = 0, begin + b * rows * _up(columns)
        for piece, basis in zip(pieces, bases, strict=True):
            number, width = len(piece) // blocks, piece.shape[-1]
            for i in range(b * number, (b + 1) * number):
                offset = int(piece.storage_offset()) + i * width * width
                # Rotations are in temporary memory: found by their offset, not by an address.
                address = 0
                if layer.bases is not None:
                    address = basis.data_ptr() + i * basis.stride(0) * basis.element_size()
                yield [*here, first, width, offset, address, basis.stride(1), buffer, *weights, side, 0]
                first += width
        rest = (rows, columns)[side] - first
        if rest > 0:
            yield [*here, first, rest, -4, 0, 0, buffer, *weights, side, 0]


def _tiles(segment: list[int]) -> int:
    """Return the number of tiles of a segment."""
    rows, columns, width, side = segment[3], segment[4], segment[6], segment[13]
    down, across = (rows, width) if side else (width, columns)
    return -(-down // DOWN) * -(-across // ACROSS)


# Kernels. The table has a row of numbers per segment: addresses of momentum and square, stride of their rows,
# rows, columns; the segment's first row or column and its width; the offset of its rotation, or -4; address and stride
# of the rows of its basis; where its block begins in the buffer; addresses of both weights; side; its first tile.


def _rows_kernel(  # type: ignore[no-untyped-def]
    rotations, buffer, table, owners, size,
    FROM_WEIGHTS: tl.constexpr, ALIGNED: tl.constexpr, TF32: tl.constexpr, FIELDS: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # buffer[0] <- R momentum, or Q^T momentum; buffer[1] <- R^2 square; buffer[2] <- R^2 square^(1/4).
    segment = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * FIELDS
    size = tl.multiple_of(size, 4)
    first = tl.load(segment + 5).to(tl.int32)
    width = tl.load(segment + 6).to(tl.int32)
    stride = tl.load(segment + 2).to(tl.int32)
    columns = tl.load(segment + 4).to(tl.int32)
    length = (columns + 3) // 4 * 4
    offset = tl.load(segment + 7)
    momentum = tl.load(segment)
    square = tl.load(segment + 1)
    source = tl.load(segment + 8)
    along = tl.load(segment + 9).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(length, 4)
        length = tl.multiple_of(length, 4)
        first = tl.multiple_of(first, 4)
        stride = tl.multiple_of(stride, 4)
        offset = tl.multiple_of(offset, 4)
        along = tl.multiple_of(along, 4)
        momentum = tl.multiple_of(momentum, 16)
        square = tl.multiple_of(square, 16)
        source = tl.multiple_of(source, 16)
    momentum = momentum.to(tl.pointer_type(tl.float32)) + first * stride
    square = square.to(tl.pointer_type(tl.float32)) + first * stride
    basis = source.to(tl.pointer_type(tl.float32))
    tile = tl.program_id(0) - tl.load(segment + 14).to(tl.int32)
    down = (width + DOWN - 1) // DOWN
    i = (tile % down) * DOWN + tl.arange(0, DOWN)
    j = (tile // down) * ACROSS + tl.arange(0, ACROSS)
    inside = (i[:, None] < width) & (j[None, :] < columns)
    target = buffer + tl.multiple_of(tl.load(segment + 10), 4) + (first + i[:, None]) * length + j[None, :]
    if offset < 0:
        v = tl.load(square + i[:, None] * stride + j[None, :], mask=inside, other=0.0)
        tl.store(target, tl.load(momentum + i[:, None] * stride + j[None, :], mask=inside, other=0.0), mask=inside)
        tl.store(target + size, v, mask=inside)
        tl.store(target + 2 * size, tl.sqrt(tl.sqrt(v)), mask=inside)
    else:
        if ALIGNED:
            width = tl.multiple_of(width, 4)
        moved = tl.zeros((DOWN, ACROSS), tl.float32)
        plain = tl.zeros((DOWN, ACROSS), tl.float32)
        small = tl.zeros((DOWN, ACROSS), tl.float32)
        for begin in range(0, width, DEPTH):
            k = begin + tl.arange(0, DEPTH)
            here = (i[:, None] < width) & (k[None, :] < width)
            r = tl.load(rotations + offset + i[:, None] * width + k[None, :], mask=here, other=0.0)
            there = (k[:, None] < width) & (j[None, :] < columns)
            m = tl.load(momentum + k[:, None] * stride + j[None, :], mask=there, other=0.0)
            v = tl.load(square + k[:, None] * stride + j[None, :], mask=there, other=0.0)
            s = r * r
            if FROM_WEIGHTS:  # momentum by the basis instead
                r = tl.load(basis + k[None, :] * along + i[:, None], mask=here, other=0.0)
            moved = tl.dot(r, m, moved, input_precision="tf32" if TF32 else "tf32x3")
            plain = tl.dot(s, v, plain, input_precision="tf32" if TF32 else "tf32x3")
            small = tl.dot(s, tl.sqrt(tl.sqrt(v)), small, input_precision="tf32" if TF32 else "tf32x3")
        tl.store(target, moved, mask=inside)
        tl.store(target + size, plain, mask=inside)
        tl.store(target + 2 * size, small, mask=inside)


def _columns_kernel(  # type: ignore[no-untyped-def]
    rotations, buffer, table, owners, size,
    FROM_WEIGHTS: tl.constexpr, ALIGNED: tl.constexpr, TF32: tl.constexpr, FIELDS: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # From the buffer: x R^T of each part, or x Q of momentum; these combined to moments.
    segment = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * FIELDS
    size = tl.multiple_of(size, 4)
    stride = tl.load(segment + 2).to(tl.int32)
    rows = tl.load(segment + 3).to(tl.int32)
    length = tl.multiple_of((tl.load(segment + 4).to(tl.int32) + 3) // 4 * 4, 4)
    first = tl.load(segment + 5).to(tl.int32)
    width = tl.load(segment + 6).to(tl.int32)
    offset = tl.load(segment + 7)
    source = tl.load(segment + 8)
    along = tl.load(segment + 9).to(tl.int32)
    if ALIGNED:
        first = tl.multiple_of(first, 4)
        offset = tl.multiple_of(offset, 4)
        along = tl.multiple_of(along, 4)
        source = tl.multiple_of(source, 16)
    basis = source.to(tl.pointer_type(tl.float32))
    tile = tl.program_id(0) - tl.load(segment + 14).to(tl.int32)
    across = (width + ACROSS - 1) // ACROSS
    i = (tile // across) * DOWN + tl.arange(0, DOWN)
    j = (tile % across) * ACROSS + tl.arange(0, ACROSS)
    inside = (i[:, None] < rows) & (j[None, :] < width)
    here = buffer + tl.multiple_of(tl.load(segment + 10), 4) + first
    if offset < 0:
        x = here + i[:, None] * length + j[None, :]
        moved = tl.load(x, mask=inside, other=0.0)
        plain = tl.load(x + size, mask=inside, other=0.0)
        small = tl.load(x + 2 * size, mask=inside, other=0.0)
    else:
        if ALIGNED:
            width = tl.multiple_of(width, 4)
        moved = tl.zeros((DOWN, ACROSS), tl.float32)
        plain = tl.zeros((DOWN, ACROSS), tl.float32)
        small = tl.zeros((DOWN, ACROSS), tl.float32)
        for begin in range(0, width, DEPTH):
            k = begin + tl.arange(0, DEPTH)
            there = (i[:, None] < rows) & (k[None, :] < width)
            x = here + i[:, None] * length + k[None, :]
            m = tl.load(x, mask=there, other=0.0)
            v = tl.load(x + size, mask=there, other=0.0)
            w = tl.load(x + 2 * size, mask=there, other=0.0)
            both = (j[None, :] < width) & (k[:, None] < width)
            r = tl.load(rotations + offset + j[None, :] * width + k[:, None], mask=both, other=0.0)
            s = r * r
            if FROM_WEIGHTS:
                r = tl.load(basis + k[:, None] * along + j[None, :], mask=both, other=0.0)
            moved = tl.dot(m, r, moved, input_precision="tf32" if TF32 else "tf32x3")
            plain = tl.dot(v, s, plain, input_precision="tf32" if TF32 else "tf32x3")
            small = tl.dot(w, s, small, input_precision="tf32" if TF32 else "tf32x3")
    target = i[:, None] * stride + first + j[None, :]
    if not FROM_WEIGHTS:
        tl.store(tl.load(segment).to(tl.pointer_type(tl.float32)) + target, moved, mask=inside)
    weight = tl.load(tl.load(segment + 11).to(tl.pointer_type(tl.float32)))
    mean = moved / tl.maximum(weight, 1.1754943508222875e-38)
    mean = mean * mean * tl.load(tl.load(segment + 12).to(tl.pointer_type(tl.float32)))
    small *= small
    mean = tl.minimum(plain, mean, propagate_nan=tl.PropagateNan.ALL)
    found = tl.maximum(small * small, mean, propagate_nan=tl.PropagateNan.ALL)
    tl.store(tl.load(segment + 1).to(tl.pointer_type(tl.float32)) + target, found, mask=inside)
