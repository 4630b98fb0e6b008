"""Recompute decompositions from previous ones, similar sizes in one batch, without synchronizing with the device.

Input: factors with their previous decompositions. Output: new decompositions, and which are valid. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dkfac.ops.decompose import (
    Decomposition,
    Eigen,
    Inverse,
    from_tensors,
    inverse_by_blocks,
    symmetric,
    warm_steps,
)

Job = tuple[Tensor, Decomposition, Tensor]
"""A factor, its previous decomposition, and its share of the damping, ``[B]``."""


def renewed(jobs: Sequence[Job], times: int = 1) -> list[tuple[Decomposition, Tensor]]:
    """Return new decompositions from previous ones, and which of their blocks are valid, ``[B]``; does not synchronize.

    Similar sizes are decomposed in one batch: on a GPU the number of small consecutive steps determines the time.
    ``times``: number of steps of subspace iteration for eigenbases.
    """
    found: dict[int, tuple[Decomposition, Tensor]] = {}
    groups = _alike(jobs)
    batches = [_joined([_padded(*jobs[i], size) for i in which]) for size, which in groups]
    made = _renewed(batches)
    for _ in range(times - 1):
        again = [
            (factor, _sorted_apart(new, [jobs[i][0].shape[-1] for i in which], [len(jobs[i][0]) for i in which]), shift)
            for (factor, _, shift), (new, _), (_, which) in zip(batches, made, groups, strict=True)
        ]
        made = _renewed(again)
    for (_, which), (new, good) in zip(groups, made, strict=True):
        counts = [len(jobs[i][0]) for i in which]
        parts = zip(*(torch.split(t, counts) for t in new.tensors().values()), strict=True)
        for i, tensors, flags in zip(which, parts, torch.split(good, counts), strict=True):
            own = slice(jobs[i][0].shape[-1])
            cut = {n: t[(slice(None), *[own] * (t.ndim - 1))] for n, t in zip(new.tensors(), tensors, strict=True)}
            found[i] = from_tensors(cut), flags
    return [found[i] for i in range(len(jobs))]


def _joined(jobs: list[Job]) -> Job:
    """Return jobs of one size as one."""
    if len(jobs) == 1:
        return jobs[0]
    factors, olds, shifts = zip(*jobs, strict=True)
    parts = [old.tensors() for old in olds]
    together = from_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return torch.cat(factors), together, torch.cat(shifts)


SIZE_ALIGNMENT = {0: 8, 512: 32}
"""On a GPU, matrices of at least this size are padded to this multiple: odd widths are multiplied much more slowly."""


def aligned(size: int, device: torch.device) -> int:
    if device.type != "cuda" or size <= SIZE_ALIGNMENT[0]:
        return size
    return size + -size % next(multiple for least, multiple in reversed(SIZE_ALIGNMENT.items()) if size >= least)


ABOUT = 1 / 16
"""Relative difference of sizes that are padded to the same size."""
ANOTHER_BATCH = {"cuda": 3e8}
"""By device type, the sum of cubes of sizes that padding may add: as much as takes the time of launching a batch."""


def _alike(jobs: Sequence[Job]) -> list[tuple[int, list[int]]]:
    """Return which jobs are decomposed in one batch, with the size that they are padded to."""
    found: dict[Any, list[int]] = {}
    blocks: dict[tuple[str, int], int] = {}
    for factor, old, _ in jobs:
        if factor.ndim == 3 and isinstance(old, Eigen):
            kind = factor.device.type, factor.shape[-1]
            blocks[kind] = blocks.get(kind, 0) + len(factor)
    padded: dict[tuple[str, int], int] = {}
    last: dict[str, int] = {}
    for device, size in sorted(blocks, reverse=True):
        larger = last.get(device, size)
        added = blocks[device, size] * (larger**3 - size**3)
        if size < larger * (1 - ABOUT) and added > ANOTHER_BATCH.get(device, 0.0):
            larger = size
        padded[device, size] = last[device] = larger
    for i, (factor, old, _) in enumerate(jobs):
        size = factor.shape[-1]
        if factor.ndim == 3 and isinstance(old, Eigen):
            size = aligned(padded[factor.device.type, size], factor.device)
        found.setdefault((size, factor.ndim, factor.dtype, factor.device, type(old)), []).append(i)
    return [(key[0], which) for key, which in found.items()]


def _padded(factor: Tensor, old: Decomposition, shift: Tensor, size: int) -> tuple[Tensor, Decomposition, Tensor]:
    """Return a factor padded to ``size``, the added directions decoupled from the others and ordered after them."""
    own = factor.shape[-1]
    if own == size:
        return factor, old, shift
    assert isinstance(old, Eigen)
    assert old.vectors is not None
    more = size - own
    vectors = F.pad(old.vectors, (0, more, 0, more))
    vectors.diagonal(dim1=-2, dim2=-1)[:, own:] = 1
    return F.pad(factor, (0, more, 0, more)), Eigen(vectors, F.pad(old.values, (0, more), value=-1.0)), shift


def _sorted_apart(found: Decomposition, own: list[int], counts: list[int]) -> Decomposition:
    """Return bases in which the added directions of padded factors are again ordered after the others."""
    if not isinstance(found, Eigen) or found.vectors is None:
        return found
    values = found.values.clone()
    for size, part in zip(own, torch.split(values, counts), strict=True):
        part[:, size:] = -1.0
    return Eigen(found.vectors, values)


def _renewed(batches: Sequence[Job]) -> list[tuple[Decomposition, Tensor]]:
    """Return each batch's new decomposition, and which of its blocks are valid."""
    found, dense = dict[int, tuple[Decomposition, Tensor]](), dict[object, dict[int, tuple[Tensor, Eigen]]]()
    for i, (factor, old, shift) in enumerate(batches):
        if isinstance(old, Inverse):
            found[i] = _inverted(factor, shift)
        elif factor.ndim == 2:
            values = factor.clamp(min=0)
            found[i] = Eigen(None, values), torch.isfinite(values).all(-1)
        else:
            dense.setdefault((factor.dtype, factor.device), {})[i] = factor, old
    for some in dense.values():
        made = warm_steps([factor for factor, _ in some.values()], [old for _, old in some.values()])
        for i, (new, is_orthonormal) in zip(some, made, strict=True):
            found[i] = new, torch.isfinite(new.values).all(-1) & is_orthonormal
    return [found[i] for i in range(len(batches))]


def _inverted(factor: Tensor, shift: Tensor) -> tuple[Inverse, Tensor]:
    if factor.ndim == 2:
        inverse = (factor + shift[:, None]).reciprocal()
        return Inverse(inverse), torch.isfinite(inverse).all(-1)
    damped = symmetric(factor)
    damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    matrix, sound = inverse_by_blocks(damped)
    return Inverse(matrix), sound
