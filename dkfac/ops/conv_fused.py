"""Copies around the strip products of a 2-d convolution, each in one pass: Triton kernels with a torch fallback.

Input: images, or products of strips. Output: strips, or the sum over patches. Owns: nothing.

See ``correlate`` for what strips are. Shapes: N = images, C = channels, kw = width of the kernel, F = kw * C features
of a strip, ordered by tap, then channel, D = 3 * F features of a patch, in the order of the weight: channel, then tap.
Both implementations give bitwise equal results. Kernels are compiled for each new kind of shapes: call with all of them
before capturing a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dkfac.ops import kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

PATCH_TILE = 2048
MAX_FEATURES = 512
ROWS, COLUMNS, WARPS = 16, 256, 8
"""Tile of the result of ``assemble`` per program: 16 columns of a total that is read transposed, and 28 channels."""


def strips(x: Tensor, width: int, stride: int, dilation: int, pads: Sequence[int], room: int) -> Tensor:
    """Return the strips ``[N, H + above + below, Wo, kw * C]`` of images ``[N, C, H, W]``, followed by zeros in memory.

    ``pads``: zeros (above, below, left, right). ``width``, ``stride`` and ``dilation`` are along the width. ``room``:
    rows of zeros, ``room * Wo * kw * C`` elements, after the strips, for shifted views to read. ``x``: preferably
    channels_last.
    """
    above, below, left, right = pads
    images, channels, height, columns = x.shape
    tall, wide = height + above + below, (columns + left + right - (width - 1) * dilation - 1) // stride + 1
    assert min(above, below, left, right, room) >= 0
    assert wide > 0, f"{columns} columns, padded by {left} and {right}, are narrower than the kernel"
    features = width * channels
    size = images * tall * wide * features
    flat = torch.empty(size + room * wide * features, dtype=x.dtype, device=x.device)
    found = flat[:size].view(images, tall, wide, features)
    if not kernels.usable((torch.float32, torch.bfloat16, torch.float16), x):
        padded = F.pad(x, (left, right, above, below)).movedim(1, -1).contiguous()
        windows = padded.unfold(2, (width - 1) * dilation + 1, stride)[..., ::dilation].mT
        found.view(windows.shape).copy_(windows)
        flat[size:] = 0
        return found
    across_tile, down_tile = _strip_tile(features, tall * wide)
    across, pieces = -(-features // across_tile), -(-tall * wide // down_tile)
    room_pieces = -(-room * wide // down_tile)
    kernels.launch_kernel(
        _strips_kernel, (images * pieces + room_pieces) * across,
        flat, x.contiguous(memory_format=torch.channels_last),
        images, height, columns * channels, channels, features, tall * wide, wide, room * wide,
        above, left, stride, (dilation - 1) * channels, pieces, across,
        POSITIONS=down_tile, FEATURES=across_tile, DILATED=int(dilation > 1 and width > 1),
    )  # fmt: skip
    return found


def assemble(
    totals: Sequence[Tensor], borders: tuple[Tensor, Tensor] | tuple[None, None], channels: int, ones: int
) -> Tensor:
    """Return the sum over patches of ``p p^T`` for a kernel of 3 rows, ``[parts, D + ones, D + ones]``.

    ``totals``: the products of strips 0, 1 and 2 rows apart, each ``[parts, F, F]``. ``borders``: the products of the
    first and of the last image row with themselves, which the last and the first tap do not reach; None where the
    padding lets every tap reach every row. If ``ones``, the caller has to fill the last row and column.
    """
    parts, features = totals[0].shape[:2]
    width = features // channels
    assert len(totals) == 3
    assert features == width * channels
    top, bottom = borders
    assert (top is None) == (bottom is None)
    given = [*totals, *(t for t in borders if t is not None)]
    assert all(t.shape == (parts, features, features) for t in given)
    side = 3 * features + int(ones)
    full = torch.empty(parts, side, side, dtype=totals[0].dtype, device=totals[0].device)
    if not kernels.usable((torch.float32,), *given):
        same, one, two = totals
        first = same if bottom is None else same - bottom
        last = same if top is None else same - top
        rows = ((first, one, two), (one.mT, same, one), (two.mT, one.mT, last))
        inner = full[:, : 3 * features, : 3 * features].view(parts, channels, 3, width, channels, 3, width)
        for i, row in enumerate(rows):
            for j, block in enumerate(row):
                block = block.reshape(parts, width, channels, width, channels)
                inner[:, :, i, :, :, j].copy_(block.permute(0, 2, 1, 4, 3))
        return full
    given = [t.contiguous() for t in given]
    tile = min(ROWS, 1 << (channels - 1).bit_length())
    down, across = -(-channels // tile), -(-3 * features // COLUMNS)
    kernels.launch_kernel(
        _assemble_kernel, parts * 3 * width * down * across,
        full, *given[:3], given[-2], given[-1], channels, features, side, down, across,
        WIDTH=width, BORDERS=int(top is not None), ROWS=tile, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return full


def _strip_tile(features: int, positions: int) -> tuple[int, int]:
    """Return powers of two: how many features, of how many positions, a program writes.

    Few threads should idle beyond the last feature, and runs should be long: each run costs as much as 16 features.
    """
    widths = [1 << i for i in range(4, MAX_FEATURES.bit_length())]
    width = min(widths, key=lambda w: (-(-features // w) * (w + 16), -w))
    return width, min(PATCH_TILE // width, 1 << (positions - 1).bit_length())


# Kernels. Offsets of images and rows are 64-bit.


def _strips_kernel(  # type: ignore[no-untyped-def]
    flat, x, images, height, length, channels, features, positions, wide, room, above, left, stride, spread, pieces,
    across, POSITIONS: tl.constexpr, FEATURES: tl.constexpr, DILATED: tl.constexpr,
):  # fmt: skip
    # The taps of a position are contiguous in the image row, which has ``length`` elements, unless dilated: then
    # ``spread`` elements are skipped before each. The room is image number ``images``, entirely out of bounds.
    piece = tl.program_id(0) // across
    feature = tl.program_id(0) % across * FEATURES + tl.arange(0, FEATURES)
    image = tl.minimum(piece // pieces, images)
    position = (piece - image * pieces) * POSITIONS + tl.arange(0, POSITIONS)
    row = position // wide - above
    place = ((position % wide * stride - left) * channels)[:, None] + feature[None, :]
    if DILATED:
        place += (feature // channels * spread)[None, :]
    image = image.to(tl.int64)
    has_row = (row >= 0) & (row < height) & (image < images)
    is_feature = (feature < features)[None, :]
    inside = has_row[:, None] & is_feature & (place >= 0) & (place < length)
    source = ((image * height + row) * length)[:, None] + place
    target = ((image * positions + position) * features)[:, None] + feature[None, :]
    limit = tl.where(image < images, positions, room)
    found = tl.load(x + source, mask=inside, other=0.0)
    tl.store(flat + target, found, mask=(position < limit)[:, None] & is_feature)


def _assemble_kernel(  # type: ignore[no-untyped-def]
    full, same, one, two, top, bottom, channels, features, side, down, across,
    WIDTH: tl.constexpr, BORDERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A tile covers the rows of one tap and ROWS channels, and any columns.
    tile = tl.program_id(0) % (down * across)
    block = tl.program_id(0) // (down * across)
    part = (block // (3 * WIDTH)).to(tl.int64)
    tap = block % (3 * WIDTH)
    y, x = tap // WIDTH, tap % WIDTH
    channel = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    other_y, other_x = column // WIDTH % 3, column % WIDTH
    feature = (x * channels + channel).to(tl.int64)[:, None]
    other = (other_x * channels + column // (3 * WIDTH)).to(tl.int64)[None, :]
    inside = (channel < channels)[:, None] & (column < 3 * features)[None, :]
    start = part * features * features
    ahead = feature * features + other
    later = tl.where(other_y == y + 1, one + start, two + start)
    total = tl.where(other_y == y, same + start, later)[None, :]
    found = tl.load(total + ahead, mask=inside & (other_y >= y)[None, :], other=0.0)
    if y > 0:  # a separate load: it is contiguous along the tile's other dimension
        earlier = tl.where(other_y == y - 1, one + start, two + start)[None, :]
        is_earlier = (other_y < y)[None, :]
        swapped = tl.load(earlier + (other * features + feature), mask=inside & is_earlier, other=0.0)
        found = tl.where(is_earlier, swapped, found)
    if BORDERS:
        border = tl.where(y == 0, bottom, top) + start
        found -= tl.load(border + ahead, mask=inside & ((other_y == y) & (y != 1))[None, :], other=0.0)
    target = (part * side + (channel.to(tl.int64) * (3 * WIDTH) + tap))[:, None] * side + column[None, :]
    tl.store(full + target, found, mask=inside)
