"""The sum of products of a convolution's patches, without forming the patches.

Shapes: N = images, H = rows, W = columns (all other spatial dimensions together), F = features of a strip. A patch is k
strips, one per row of the kernel; a strip is what the kernel's other dimensions cover of one row. Two strips of a patch
are ``dy`` rows apart, so what they contribute depends, but for the border, on ``dy`` alone: k products of strips, not
k * k, and the border rows, which not every tap reaches, taken off again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dkfac.ops.factors import product


def correlates(kernel: int, stride: int, dilation: int, padding: int) -> bool:
    """Whether the sum over patches can be formed this way, along the first spatial dimension.

    ``padding``: zeros above and below together. They keep the images, which lie one after the other, apart.
    """
    return kernel > 1 and stride == 1 and dilation == 1 and padding >= kernel - 1


def patch_gram(strips_NHWF: Tensor, kernel: int, above: int, below: int, dtype: torch.dtype, parts: int = 1) -> Tensor:
    """Return ``sum over patches of p p^T``, ``[parts, k, k, F, F]``: by the rows of the kernel that the strips are of.

    ``strips_NHWF``: of the padded images, of which the rows ``above`` and ``below`` are zeros, as ``with_room`` makes
    them. ``parts``: of the images, that are summed apart.
    """
    features = strips_NHWF.shape[-1]
    totals = row_products(strips_NHWF, kernel, dtype, parts)
    signed = torch.stack([*(t.mT for t in reversed(totals[1:])), *totals], dim=1)
    places = [second - first + kernel - 1 for first in range(kernel) for second in range(kernel)]
    blocks = torch.stack([signed[:, place] for place in places], dim=1).view(parts, kernel, kernel, features, features)
    for (row, distance), pairs in missed(kernel, strips_NHWF.shape[1], above, below).items():
        rows = strips_NHWF[:, row].reshape(parts, -1, features)
        others = rows if distance == 0 else strips_NHWF[:, row + distance].reshape(parts, -1, features)
        border = product(rows, others, dtype)
        for one, other in pairs:
            blocks[:, one, other] -= border
            if distance:
                blocks[:, other, one] -= border.mT
    return blocks


def row_products(strips_NHWF: Tensor, kernel: int, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """Return the products of strips 0, 1, ... rows apart, ``[parts, F, F]`` each, the border rows included."""
    width, features = strips_NHWF.shape[2:]
    length = strips_NHWF.shape[0] // parts * strips_NHWF.shape[1] * width
    shape, steps = (parts, length, features), (length * features, features, 1)
    here = strips_NHWF.as_strided(shape, steps)
    start = strips_NHWF.storage_offset()
    shifted = [strips_NHWF.as_strided(shape, steps, start + d * width * features) for d in range(1, kernel)]
    return [product(here, there, dtype) for there in (here, *shifted)]


Pairs = list[tuple[int, int]]


def missed(kernel: int, height: int, above: int, below: int) -> dict[tuple[int, int], Pairs]:
    """Return products of border rows, as (row, distance), each with the pairs of taps that do not reach it."""
    found: dict[tuple[int, int], Pairs] = {}
    num_out = height - kernel + 1
    for one in range(kernel):
        for other in range(one, kernel):
            distance = other - one
            for row in (*range(one), *range(one + num_out, height - distance)):
                if above <= row and row + distance < height - below:
                    found.setdefault((row, distance), []).append((one, other))
    return found


def with_room(windows: Tensor, kernel: int) -> Tensor:
    """Return strips ``[N, H, W, F]`` of windows ``[N, H, W, ...]``, with zeros behind the last for taps to reach."""
    shape = windows.shape[:3]
    features = math.prod(windows.shape[3:])
    size, room = math.prod(shape) * features, (kernel - 1) * shape[2] * features
    flat = torch.empty(size + room, dtype=windows.dtype, device=windows.device)
    flat[size:] = 0
    flat[:size].view(windows.shape).copy_(windows)
    return flat[:size].view(*shape, features)


def patch_sum(strips_NHWF: Tensor, kernel: int, dtype: torch.dtype, parts: int = 1) -> Tensor:
    """Return ``sum over patches of p``, ``[parts, k, F]``."""
    by_row = strips_NHWF.view(parts, -1, *strips_NHWF.shape[1:]).sum((1, 3), dtype=dtype)
    return by_row.unfold(1, by_row.shape[1] - kernel + 1, 1).sum(-1)
