"""Copies around the strip products of a 2-d convolution.

Input: images, or products of strips. Output: strips, or the sum over patches. Owns: nothing.

See ``correlate`` for what strips are. Shapes: N = images, C = channels, kw = width of the kernel, F = kw * C features
of a strip, ordered by tap, then channel, D = 3 * F features of a patch, in the order of the weight: channel, then tap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
    padded = F.pad(x, (left, right, above, below)).movedim(1, -1).contiguous()
    windows = padded.unfold(2, (width - 1) * dilation + 1, stride)[..., ::dilation].mT
    found.view(windows.shape).copy_(windows)
    flat[size:] = 0
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
