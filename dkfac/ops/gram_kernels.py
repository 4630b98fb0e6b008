"""The Triton kernels of ``grouped_grams.py``: partial sums of tiles, and their sums.

Input: tensors by their addresses, and tables. Output: sums. Owns: nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from dkfac.ops import kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""
read_tile: Any = None
"""``_read_tile``, compiled."""


@functools.cache
def compile_helpers() -> None:
    """Compile the functions that the kernels call."""
    globals()["read_tile"] = kernels.compiled(_read_tile)


# Kernels. Offsets within an image are 32-bit. The fields of a product are numbered as in ``_fields``.


def _read_tile(  # type: ignore[no-untyped-def]
    image, here, start, y, x, offset, tap_y, tap_x, is_inside, is_one, height, length,
    IS_CONV: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    # [ROWS, TILE]: features of positions of one image, zero outside.
    inside = here[:, None] & is_inside[None, :]
    if IS_CONV:
        inside = inside & ((y[:, None] + tap_y[None, :]).to(tl.uint32) < height)
        inside = inside & ((x[:, None] + tap_x[None, :]).to(tl.uint32) < length)
    found = tl.load(image + (start[:, None] + offset[None, :]), mask=inside, other=0.0)
    if ONES:
        found = tl.where(here[:, None] & is_one[None, :], 1.0, found.to(tl.float32)).to(image.dtype.element_ty)
    return found


def partial_kernel(  # type: ignore[no-untyped-def]
    like, pointers, products, programs, partial,
    IS_CONV: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr, ONES: tl.constexpr,
    SINGLE: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    programs += tl.program_id(0) * 6
    product = products + tl.load(programs) * FIELDS
    block = tl.load(programs + 1).to(tl.int32)
    channels = tl.load(product + 1).to(tl.int32)
    first = tl.load(product + 3).to(tl.int32)
    pieces = tl.load(product + 4).to(tl.int32)
    apart = tl.load(product + 8)
    along = tl.load(product + 9).to(tl.int32)
    across = tl.load(product + 10).to(tl.int32)
    positions = tl.load(product + 11).to(tl.int32)
    height = tl.load(product + 19).to(tl.uint32)
    length = tl.load(product + 20).to(tl.uint32)
    down = tl.load(product + 21).to(tl.int32)
    beside = tl.load(product + 22).to(tl.int32)
    taps = tl.load(product + 24).to(tl.int32)
    group_channels = tl.load(product + 5).to(tl.int32)
    tensor = tl.load(pointers + tl.load(product)).to(tl.pointer_type(like.dtype.element_ty))
    if INNER == 0:
        across = 1
    if INNER == 1:
        along = 1
        beside = 1
    if CHANNELS > 0:
        channels = CHANNELS
    if ALIGNED:  # to 16 bytes
        unit: tl.constexpr = 128 // like.dtype.element_ty.primitive_bitwidth
        channels = tl.multiple_of(channels, unit)
        apart = tl.multiple_of(apart, unit)
        along = tl.multiple_of(along, unit)
        down = tl.multiple_of(down, unit)
        beside = tl.multiple_of(beside, unit)
        tensor = tl.multiple_of(tensor, 16)
    channel = first + (block // pieces) * group_channels + (block % pieces) * channels
    if ALIGNED:
        channel = tl.multiple_of(channel, unit)
    rows = tl.arange(0, ROWS)
    feature = tl.load(programs + 2).to(tl.int32) * TILE + tl.arange(0, TILE)
    other_feature = tl.load(programs + 3).to(tl.int32) * TILE + tl.arange(0, TILE)
    tap_y, tap_x, other_y, other_x = feature, feature, other_feature, other_feature
    if IS_CONV:  # features are ordered by tap, then channel
        width = tl.load(product + 12).to(tl.int32)
        kernel = tl.load(product + 23).to(tl.int32)
        dilation_y = tl.load(product + 17).to(tl.int32)
        dilation_x = tl.load(product + 18).to(tl.int32)
        turn = tl.load(pointers)
        every_y = tl.load(product + 25).to(tl.int32)
        every_x = tl.load(product + 26).to(tl.int32)
        stride_y = tl.load(product + 13).to(tl.int32)
        stride_x = tl.load(product + 14).to(tl.int32)
        first_y = ((turn % every_y) * stride_y - tl.load(product + 15)).to(tl.int32)
        first_x = (((turn // every_y) % every_x) * stride_x - tl.load(product + 16)).to(tl.int32)
        stride_y *= every_y
        stride_x *= every_x
        if CHANNELS == -1:
            tap_y = feature * 0
            tap_x = tap_y
            other_y = tap_y
            other_x = tap_y
            offset = (channel + feature) * across
            other_offset = (channel + other_feature) * across
        else:
            tap_y = (feature // channels // kernel) * dilation_y
            tap_x = (feature // channels % kernel) * dilation_x
            offset = tap_y * down + tap_x * beside + (channel + feature % channels) * across
            other_y = (other_feature // channels // kernel) * dilation_y
            other_x = (other_feature // channels % kernel) * dilation_x
            other_offset = other_y * down + other_x * beside + (channel + other_feature % channels) * across
    else:
        offset = (channel + feature) * across
        other_offset = (channel + other_feature) * across
    inside = feature < channels * taps
    other_inside = other_feature < channels * taps
    per_image = tl.cdiv(positions, ROWS)
    total = tl.zeros((TILE, TILE), tl.float32)
    for step in range(tl.load(programs + 4).to(tl.int32), tl.load(programs + 5).to(tl.int32)):
        image = tensor + (step // per_image) * apart
        position = (step % per_image) * ROWS + rows
        here = position < positions
        y, x = position, position
        if IS_CONV:
            y = (position // width) * stride_y + first_y
            x = (position % width) * stride_x + first_x
            start = y * down + x * beside
        else:
            start = position * along
        one = read_tile(
            image, here, start, y, x, offset, tap_y, tap_x, inside, feature == channels * taps, height, length,
            IS_CONV, ONES,
        )  # fmt: skip
        if SINGLE:
            other = one
        else:
            other = read_tile(
                image, here, start, y, x, other_offset, other_y, other_x, other_inside,
                other_feature == channels * taps, height, length, IS_CONV, ONES,
            )  # fmt: skip
        if ROUNDS:
            total = tl.dot(tl.trans(one), other, total)
        else:
            total = tl.dot(tl.trans(one), other, total, input_precision="ieee")
    place = tl.arange(0, TILE)
    partial += tl.program_id(0).to(tl.int64) * TILE * TILE
    tl.store(partial + place[:, None] * TILE + place[None, :], total)


def finish_kernel(  # type: ignore[no-untyped-def]
    partial, products, tiles, scales, result, TILE: tl.constexpr, FIELDS: tl.constexpr
):
    tiles += tl.program_id(0) * 7
    product = products + tl.load(tiles) * FIELDS
    block = tl.load(tiles + 1)
    row = tl.load(tiles + 2).to(tl.int32) * TILE + tl.arange(0, TILE)
    column = tl.load(tiles + 3).to(tl.int32) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, TILE)
    partial += tl.load(tiles + 4) * TILE * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(tl.load(tiles + 5).to(tl.int32)):
        total += tl.load(partial + place[:, None] * TILE + place[None, :])
        partial += TILE * TILE
    total *= tl.load(scales + tl.load(product + 6))
    result += tl.load(tiles + 6)
    channels = tl.load(product + 1).to(tl.int32)
    dim = tl.load(product + 2).to(tl.int32)
    taps = tl.load(product + 24).to(tl.int32)
    packs = tl.load(product + 7) > 0  # several blocks in a tile
    row_block = tl.where(packs, row // dim, 0)
    column_block = tl.where(packs, column // dim, 0)
    last = tl.where(packs, channels, dim)
    inside = (row_block[:, None] == column_block[None, :]) & (row[:, None] >= column[None, :])
    inside = inside & (row < last)[:, None] & (column < last)[None, :]
    down = tl.where(row < channels * taps, (row % channels) * taps + row // channels, row)
    across = tl.where(column < channels * taps, (column % channels) * taps + column // channels, column)
    down = tl.where(packs, row % dim, down)
    across = tl.where(packs, column % dim, across)
    begin = result + ((block + row_block) * dim * dim)[:, None]
    tl.store(begin + down[:, None] * dim + across[None, :], total, mask=inside)
    tl.store(begin + across[None, :] * dim + down[:, None], total, mask=inside)
