"""Orthonormalize the columns of many matrices by Cholesky-QR, in one launch for all sizes: Triton kernel only.

Input: images with columns of length one. Output: columns that span the same subspaces in the same order, orthonormal.
Owns: nothing. cuSOLVER and cuBLAS decompose and solve such matrices in hundreds of small launches.

A program handles one matrix X with its Gram matrix G, in panels of columns: ``[G; X]`` becomes ``[L; X L^-T]`` with
``L L^T = G + shift I``. A panel is multiplied by the inverse of its diagonal block, which is found column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import constants, kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

MOST_WIDTH_OF_QR, ROWS, PANEL = 256, 64, 32
"""The largest matrix, the rows that are multiplied at a time, and the columns that are solved together."""
QR_WARPS = 4


def can_orthonormalize(images: Sequence[Tensor]) -> bool:
    return kernels.usable((torch.float32,), *images) and all(
        image.shape[-1] <= MOST_WIDTH_OF_QR and image.shape[-1] % 8 == 0 and image.is_contiguous() for image in images
    )


def orthonormalized(images: Sequence[Tensor], shifts: Sequence[float]) -> list[Tensor]:
    """Return the columns of matrices ``[n, w, w]`` after one Cholesky-QR for each shift, in units of w. Where the
    decomposition does not exist they are NaN."""
    if not images:
        return []
    device, sizes = images[0].device, [image.numel() for image in images]
    flat = torch.cat([image.view(-1) for image in images]) if len(images) > 1 else images[0].view(-1)
    grams = torch.empty_like(flat)
    table, begin = list[int](), 0
    for image in images:
        width = image.shape[-1]
        for _ in range(len(image)):
            table += [begin, width]
            begin += width * width
    rows = constants.constant(tuple(table), device, torch.int64)
    found = [part.view(image.shape) for part, image in zip(torch.split(flat, sizes), images, strict=True)]
    places = [part.view(image.shape) for part, image in zip(torch.split(grams, sizes), images, strict=True)]
    for shift in shifts:
        for columns, gram in zip(found, places, strict=True):
            torch.bmm(columns.mT, columns, out=gram)
        kernels.launch_kernel(
            _solve_kernel, len(rows) // 2, flat, grams, rows, shift, ROWS=ROWS, PANEL=PANEL, num_warps=QR_WARPS,
            num_stages=2,
        )  # fmt: skip
    return found


def _solve_kernel(x, gram, table, shift, ROWS: tl.constexpr, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.multiple_of(tl.load(table + 2 * tl.program_id(0)), 64)
    width = tl.multiple_of(tl.load(table + 2 * tl.program_id(0) + 1).to(tl.int32), 8)
    x += offset
    gram += offset
    rows = tl.arange(0, ROWS)
    t = tl.arange(0, PANEL)
    identity = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for first in range(0, width, PANEL):
        c = first + t
        across = c[None, :] < width
        # The diagonal block, and L^-T of it.
        exists = (c[:, None] < width) & across
        block = tl.load(gram + c[:, None] * width + c[None, :], mask=exists, other=0.0) + shift * width * identity
        for begin in range(0, first, PANEL):
            k = begin + t
            left = tl.load(gram + c[:, None] * width + k[None, :], mask=c[:, None] < width, other=0.0)
            right = tl.load(gram + c[None, :] * width + k[:, None], mask=across, other=0.0)
            block -= tl.dot(left, right, input_precision="tf32x3")
        block = tl.where(exists, block, identity)
        inverse = identity
        for j in range(PANEL):
            column = tl.sum(tl.where(t[None, :] == j, block, 0.0), 1)
            scale = 1.0 / tl.sqrt(tl.sum(tl.where(t == j, column, 0.0)))
            column = tl.where(t >= j, column * scale, 0.0)
            block -= column[:, None] * column[None, :]
            done = tl.sum(tl.where(t[None, :] == j, inverse, 0.0), 1) * scale
            inverse -= done[:, None] * tl.where(t > j, column, 0.0)[None, :]
            inverse = tl.where(t[None, :] == j, done[:, None], inverse)
        # Below it, then X.
        for top in range(first + PANEL, width, ROWS):
            r = top + rows
            inside = (r[:, None] < width) & across
            found = tl.load(gram + r[:, None] * width + c[None, :], mask=inside, other=0.0)
            for begin in range(0, first, PANEL):
                k = begin + t
                left = tl.load(gram + r[:, None] * width + k[None, :], mask=r[:, None] < width, other=0.0)
                right = tl.load(gram + c[None, :] * width + k[:, None], mask=across, other=0.0)
                found -= tl.dot(left, right, input_precision="tf32x3")
            found = tl.dot(found, inverse, input_precision="tf32x3")
            tl.store(gram + r[:, None] * width + c[None, :], found, mask=inside)
        for top in range(0, width, ROWS):
            r = top + rows
            inside = (r[:, None] < width) & across
            found = tl.load(x + r[:, None] * width + c[None, :], mask=inside, other=0.0)
            for begin in range(0, first, PANEL):
                k = begin + t
                left = tl.load(x + r[:, None] * width + k[None, :], mask=r[:, None] < width, other=0.0)
                right = tl.load(gram + c[None, :] * width + k[:, None], mask=across, other=0.0)
                found -= tl.dot(left, right, input_precision="tf32x3")
            found = tl.dot(found, inverse, input_precision="tf32x3")
            tl.store(x + r[:, None] * width + c[None, :], found, mask=inside)
        tl.debug_barrier()  # the next panel reads what other threads have stored
