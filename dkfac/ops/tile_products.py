"""Multiply strips of many tensors by square matrices, in place and in few launches: Triton only.

Input: strips of tensors at fixed addresses, and the matrices that their rows or columns are multiplied by. Output: the
products, in place. Owns: tables of addresses.

A strip has ``lines`` vectors of ``width`` elements, which is also the size of the matrix: the rows of a strip that is
multiplied from the right, the columns of one that is multiplied from the left. A program reads all of its vectors
before it writes any. On a GPU, operands are rounded to TF32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import kernels
from dkfac.ops.many import on_device

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

WIDTHS = {
    16: (16, 0), 32: (32, 0), 64: (64, 0), 96: (64, 32), 128: (128, 0), 160: (128, 32), 192: (128, 64), 256: (256, 0)
}  # fmt: skip
"""By the largest width of a strip: how its columns are divided, because sizes in a kernel are powers of two."""
MOST_WIDTH = max(WIDTHS)


@dataclass(frozen=True, slots=True)
class Strip:
    address: int
    """Of the strip; or, ``in_work``, its offset in bytes in the working memory that the launch is given."""
    matrix: int
    lines: int
    width: int
    stride: int
    """Between the rows of the tensor that the strip is a part of, in elements."""
    in_work: bool = False


@dataclass(frozen=True, slots=True)
class Products:
    """What one launch multiplies."""

    strips: Tensor
    tiles: Tensor
    """``[programs, 2]``: the strip, and which of its lines."""
    constants: dict[str, int]


def constants_of(size: int, is_aligned: bool) -> dict[str, int]:
    """Return the constants of the kernel.

    With 64 lines or more, Triton uses instructions of Hopper GPUs that need TF32 operands transposed in memory, and
    copies them element by element: on an H200, 105 TFLOP/s with 32 lines and 34 to 58 with more, cuBLAS 66 to 84.
    """
    width, extra = WIDTHS[size]
    found = {"ALIGNED": int(is_aligned), "LINES": 32, "WIDTH": width, "EXTRA": extra}
    return found | {"DEPTH": 16, "num_warps": 4, "num_stages": 4}


def describe_products(strips: Iterable[Strip], device: torch.device, *, left: bool) -> list[Products]:
    """Return the launches for strips, all of which are multiplied from the same side, by kinds of width."""
    kinds: dict[tuple[int, bool], list[Strip]] = {}
    for strip in strips:
        is_aligned = (
            strip.address % 16 == strip.matrix % 16 == strip.lines % 4 == strip.width % 4 == strip.stride % 4 == 0
        )
        kinds.setdefault((min(size for size in WIDTHS if strip.width <= size), is_aligned), []).append(strip)
    found = []
    for (size, is_aligned), mine in sorted(kinds.items()):
        constants = constants_of(size, is_aligned)
        lines = constants["LINES"]
        rows = [[j.address, j.matrix, j.lines, j.width, j.stride, int(j.in_work), 0, 0] for j in mine]
        tiles = [[i, tile] for i, strip in enumerate(mine) for tile in range(-(-strip.lines // lines))]
        found.append(
            Products(on_device(rows, device), on_device(tiles, device, torch.int32), constants | {"LEFT": int(left)})
        )
    return found


def multiply_tiles(products: Sequence[Products], work: Tensor, *, back: bool) -> None:
    """Replace each vector of a strip by ``vector @ matrix``, or with ``back`` by ``vector @ matrix.T``."""
    for each in products:
        kernels.launch_kernel(
            _product_kernel, len(each.tiles) // 2, each.strips, each.tiles, work, BACK=int(back), **each.constants
        )


def _product_kernel(  # type: ignore[no-untyped-def]
    strips, tiles, work,
    LEFT: tl.constexpr, BACK: tl.constexpr, ALIGNED: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
    EXTRA: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    strips += tl.load(tiles + 2 * tl.program_id(0)) * 8
    begin = tl.load(tiles + 2 * tl.program_id(0) + 1) * LINES
    strip = (tl.load(strips) + tl.load(strips + 5) * work.to(tl.int64)).to(tl.pointer_type(tl.float32))
    matrix = tl.load(strips + 1).to(tl.pointer_type(tl.float32))
    lines = tl.load(strips + 2).to(tl.int32)
    width = tl.load(strips + 3).to(tl.int32)
    stride = tl.load(strips + 4).to(tl.int32)
    if ALIGNED:
        strip = tl.multiple_of(strip, 16)
        matrix = tl.multiple_of(matrix, 16)
        lines = tl.multiple_of(lines, 4)
        width = tl.multiple_of(width, 4)
        stride = tl.multiple_of(stride, 4)
    line = begin + tl.arange(0, LINES)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((LINES, WIDTH), tl.float32)
    if EXTRA > 0:
        rest = WIDTH + tl.arange(0, EXTRA)
        more = tl.zeros((LINES, EXTRA), tl.float32)
    for first in range(0, width, DEPTH):
        k = first + tl.arange(0, DEPTH)
        place = k[None, :] * stride + line[:, None] if LEFT else line[:, None] * stride + k[None, :]
        x = tl.load(strip + place, mask=(line < lines)[:, None] & (k < width)[None, :], other=0.0)
        place = column[None, :] * width + k[:, None] if BACK else k[:, None] * width + column[None, :]
        y = tl.load(matrix + place, mask=(k < width)[:, None] & (column < width)[None, :], other=0.0)
        total = tl.dot(x, y, total, input_precision="tf32")
        if EXTRA > 0:
            place = rest[None, :] * width + k[:, None] if BACK else k[:, None] * width + rest[None, :]
            y = tl.load(matrix + place, mask=(k < width)[:, None] & (rest < width)[None, :], other=0.0)
            more = tl.dot(x, y, more, input_precision="tf32")
    tl.debug_barrier()
    place = column[None, :] * stride + line[:, None] if LEFT else line[:, None] * stride + column[None, :]
    tl.store(strip + place, total, mask=(line < lines)[:, None] & (column < width)[None, :])
    if EXTRA > 0:
        place = rest[None, :] * stride + line[:, None] if LEFT else line[:, None] * stride + rest[None, :]
        tl.store(strip + place, more, mask=(line < lines)[:, None] & (rest < width)[None, :])
