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
    orthonormal,
    symmetric,
    warm_step,
)

Job = tuple[Tensor, Decomposition, Tensor]
"""A factor, its previous decomposition, and its share of the damping, ``[B]``."""


def renewed(jobs: Sequence[Job], times: int = 1) -> list[tuple[Decomposition, Tensor]]:
    """Return new decompositions from previous ones, and which of their blocks are valid, ``[B]``; does not synchronize.

    Similar sizes are decomposed in one batch: on a GPU the number of small consecutive steps determines the time.
    ``times``: number of steps of subspace iteration for eigenbases.
    """
    found: dict[int, tuple[Decomposition, Tensor]] = {}
    for size, which in _alike(jobs):
        given = [_padded(*jobs[i], size) for i in which]
        olds = [old.tensors() for _, old, _ in given]
        together = from_tensors({name: torch.cat([old[name] for old in olds]) for name in olds[0]})
        counts = [len(jobs[i][0]) for i in which]
        factors, shifts = torch.cat([f for f, _, _ in given]), torch.cat([s for _, _, s in given])
        new, good = _renewed(factors, together, shifts)
        for _ in range(times - 1):
            new, good = _renewed(factors, _sorted_apart(new, [jobs[i][0].shape[-1] for i in which], counts), shifts)
        parts = zip(*(torch.split(t, counts) for t in new.tensors().values()), strict=True)
        for i, tensors, flags in zip(which, parts, torch.split(good, counts), strict=True):
            own = slice(jobs[i][0].shape[-1])
            cut = {n: t[(slice(None), *[own] * (t.ndim - 1))] for n, t in zip(new.tensors(), tensors, strict=True)}
            found[i] = from_tensors(cut), flags
    return [found[i] for i in range(len(jobs))]


SIZE_ALIGNMENT = {0: 8, 512: 32}
"""On a GPU, matrices of at least this size are padded to this multiple: odd widths are multiplied much more slowly."""


def aligned(size: int, device: torch.device) -> int:
    if device.type != "cuda" or size <= SIZE_ALIGNMENT[0]:
        return size
    return size + -size % next(multiple for least, multiple in reversed(SIZE_ALIGNMENT.items()) if size >= least)


ABOUT = 1 / 16
"""Relative difference of sizes that are padded to the same size."""


def _alike(jobs: Sequence[Job]) -> list[tuple[int, list[int]]]:
    """Return which jobs are decomposed in one batch, with the size that they are padded to."""
    found: dict[Any, list[int]] = {}
    sizes = sorted({f.shape[-1] for f, old, _ in jobs if f.ndim == 3 and isinstance(old, Eigen)}, reverse=True)
    padded: dict[int, int] = {}
    for size in sizes:
        last = next(reversed(padded.values()), size)
        padded[size] = last if size >= last * (1 - ABOUT) else size
    for i, (factor, old, _) in enumerate(jobs):
        size = factor.shape[-1]
        size = aligned(padded[size], factor.device) if factor.ndim == 3 and isinstance(old, Eigen) else size
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


def _renewed(factor: Tensor, old: Decomposition, shift: Tensor) -> tuple[Decomposition, Tensor]:
    if isinstance(old, Inverse):
        if factor.ndim == 2:
            inverse = (factor + shift[:, None]).reciprocal()
            return Inverse(inverse), torch.isfinite(inverse).all(-1)
        damped = symmetric(factor)
        damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        matrix, sound = inverse_by_blocks(damped)
        return Inverse(matrix), sound
    found = warm_step(factor, old)
    sound = torch.isfinite(found.values).all(-1)
    return found, sound if found.vectors is None else sound & orthonormal(found.vectors)
