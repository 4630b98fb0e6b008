"""The length of Adam's own update for ``curvature="adaptive"``, of many layers in each launch: Triton kernels.

Input: tables with the addresses of the layers' tensors, in the basis of the weights. Output: Adam's momentum, and
second moments of rows and of columns, in place; sums of squares of its update. Owns: nothing. ``adam_update`` in
``precondition/adaptive.py`` has the formula.

Blocks of gradients are cut in tiles of ``DOWN x ACROSS``, each processed by one program. Sums are added up in a fixed
order.
"""

from __future__ import annotations

from typing import Any

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

PER_TILE = {"DOWN": 32, "ACROSS": 128}

# Fields of a block, 16 of 64 bits: 0-3 addresses of gradient, momentum and moments of rows and of columns; 4, 5 rows
# and columns; 6, 7 where its sums of rows and of columns begin; 8, 9 their number for each row and for each column;
# 10 layer; 11 offset of the copy of the momentum in working memory.


def sides_kernel(  # type: ignore[no-untyped-def]
    pieces, tiles, work, good, row_sums, column_sums, keep,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # Copy the momentum and update it, in the basis of the weights; sum squared gradients over rows and columns.
    tiles += tl.program_id(0) * 3
    meta = pieces + tl.load(tiles) * 16
    down = tl.load(tiles + 1)
    across = tl.load(tiles + 2)
    gradient = tl.load(meta).to(tl.pointer_type(tl.float32))
    mean = tl.load(meta + 1).to(tl.pointer_type(tl.float32))
    copy = (tl.load(meta + 11) + work.to(tl.int64)).to(tl.pointer_type(tl.float32))
    rows = tl.load(meta + 4).to(tl.int32)
    columns = tl.load(meta + 5).to(tl.int32)
    if ALIGNED:
        copy = tl.multiple_of(copy, 16)
        gradient = tl.multiple_of(gradient, 16)
        mean = tl.multiple_of(mean, 16)
        columns = tl.multiple_of(columns, 4)
    row = down * DOWN + tl.arange(0, DOWN)
    column = across * ACROSS + tl.arange(0, ACROSS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    is_good = tl.load(good)
    g = tl.load(gradient + place, mask=inside, other=0.0)
    g = tl.where(is_good, g, 0.0)
    m = tl.load(mean + place, mask=inside, other=0.0)
    tl.store(copy + place, m, mask=inside)
    tl.store(mean + place, m * tl.where(is_good, keep, 1.0) + g, mask=inside)
    g = g * g
    tl.store(row_sums + tl.load(meta + 6) + across * rows + row, tl.sum(g, 1), mask=row < rows)
    tl.store(column_sums + tl.load(meta + 7) + down * columns + column, tl.sum(g, 0), mask=column < columns)


def collect_kernel(  # type: ignore[no-untyped-def]
    pieces, good, row_sums, column_sums, totals, keep_square, BLOCK: tl.constexpr
):
    # Update the second moments of rows, or of columns, with the sums of the tiles; and sum those of rows.
    piece = tl.program_id(0) // 2
    side = tl.program_id(0) % 2
    meta = pieces + piece * 16
    rows = tl.load(meta + 4).to(tl.int32)
    columns = tl.load(meta + 5).to(tl.int32)
    size = tl.where(side == 0, rows, columns)
    parts = tl.load(meta + 8 + side).to(tl.int32)
    moments = tl.load(meta + 2 + side).to(tl.pointer_type(tl.float32))
    sums = tl.where(side == 0, row_sums.to(tl.int64), column_sums.to(tl.int64)).to(tl.pointer_type(tl.float32))
    sums += tl.load(meta + 6 + side)
    keep = tl.where(tl.load(good), keep_square, 1.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        found = tl.load(moments + place, mask=place < size, other=0.0) * keep
        for part in range(parts):
            found += tl.load(sums + part * size + place, mask=place < size, other=0.0)
        tl.store(moments + place, found, mask=place < size)
        total += found
    if side == 0:
        tl.store(totals + piece, tl.sum(total))


def length_kernel(  # type: ignore[no-untyped-def]
    pieces, tiles, layers, values, totals, lengths, eps,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # Sum the squares of Adam's update in the basis of the weights.
    tiles += tl.program_id(0) * 3
    piece = tl.load(tiles)
    meta = pieces + piece * 16
    layer = tl.load(meta + 10)
    tiny = 1.1754943508222875e-38
    mean = tl.load(meta + 1).to(tl.pointer_type(tl.float32))
    rows = tl.load(meta + 4).to(tl.int32)
    columns = tl.load(meta + 5).to(tl.int32)
    if ALIGNED:
        mean = tl.multiple_of(mean, 16)
        columns = tl.multiple_of(columns, 4)
    row = tl.load(tiles + 1) * DOWN + tl.arange(0, DOWN)
    column = tl.load(tiles + 2) * ACROSS + tl.arange(0, ACROSS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    m = tl.load(mean + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    of_rows = tl.load(meta + 2).to(tl.pointer_type(tl.float32))
    of_columns = tl.load(meta + 3).to(tl.pointer_type(tl.float32))
    mean_weight = tl.load(tl.load(layers + layer * 16 + 6).to(tl.pointer_type(tl.float32)))
    square_weight = tl.load(tl.load(layers + layer * 16 + 7).to(tl.pointer_type(tl.float32)))
    most = tl.load(values + layer * 8 + 4)
    total = tl.maximum(tl.load(totals + piece), tiny) * tl.maximum(square_weight, tiny)
    down = tl.sqrt_rn(tl.load(of_rows + row, mask=row < rows, other=0.0) / total)
    across = tl.sqrt_rn(tl.load(of_columns + column, mask=column < columns, other=0.0))
    second = down[:, None] * across[None, :] + eps
    u = m / (second * tl.maximum(mean_weight, tiny))
    u = tl.where(u > most, most, tl.where(u < -most, -most, u))
    tl.store(lengths + tl.program_id(0), tl.sum(tl.where(inside, u * u, 0.0)))
