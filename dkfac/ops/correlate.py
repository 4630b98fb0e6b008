"""Sum the outer products of a convolution's patches without materializing the patches.

Input: strips of padded images. Output: the sum over patches. Owns: nothing.

Shapes: N = images, H = rows, W = columns (all other spatial dimensions together), F = features of a strip. A patch is k
strips, one per row of the kernel; a strip is what the kernel's other dimensions cover of one row. The contribution of
two strips of a patch depends, except at the border, only on their distance ``dy`` in rows. So k products of strips are
enough, instead of k * k; those of border rows that not every tap reaches are subtracted afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dkfac.ops.factors import product


def correlates(kernel: int, stride: int, dilation: int, padding: int) -> bool:
    """Return whether the sum over patches can be computed this way, along the first spatial dimension.

    ``padding``: zero rows above and below together. They separate the images, which are contiguous in memory.
    """
    return kernel > 1 and stride == 1 and dilation == 1 and padding >= kernel - 1


def patch_gram(strips_NHWF: Tensor, kernel: int, above: int, below: int, dtype: torch.dtype, parts: int = 1) -> Tensor:
    """Return ``sum over patches of p p^T``, ``[parts, k, k, F, F]``, indexed by the kernel rows of the two strips.

    ``strips_NHWF``: of the padded images, whose first ``above`` and last ``below`` rows are zero, made by
    ``with_room``. ``parts``: number of equal parts of the images that are summed separately.
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
    """Return the products of strips 0, 1, ... rows apart, ``[parts, F, F]`` each, including the border rows."""
    width, features = strips_NHWF.shape[2:]
    length = strips_NHWF.shape[0] // parts * strips_NHWF.shape[1] * width
    shape, steps = (parts, length, features), (length * features, features, 1)
    here = strips_NHWF.as_strided(shape, steps)
    start = strips_NHWF.storage_offset()
    shifted = [strips_NHWF.as_strided(shape, steps, start + d * width * features) for d in range(1, kernel)]
    return [product(here, there, dtype) for there in (here, *shifted)]


Pairs = list[tuple[int, int]]


def missed(kernel: int, height: int, above: int, below: int) -> dict[tuple[int, int], Pairs]:
    """Return the products of border rows, as (row, distance), each with the pairs of taps that do not reach it."""
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
    """Return strips ``[N, H, W, F]`` of windows ``[N, H, W, ...]``, followed by zeros that shifted views may read."""
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
