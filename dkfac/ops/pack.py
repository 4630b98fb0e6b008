"""Pack one triangle of symmetric matrices into a flat buffer, without index tables: rectangular full packed format.

Input: symmetric ``[B, D, D]``. Output: ``[B, D (D + 1) / 2]``, and back. Owns: nothing.

A matrix of even dimension ``2n`` is split into ``[[T1, S], [S^T, T2]]`` with ``n x n`` blocks. S is stored as it is;
the upper triangle of T1 and the lower one of T2 fill a rectangle ``n x (n + 1)``. For odd dimensions T1 is larger by
one and the rectangle is square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.ops import constants


def pack_triangle(matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``[B, D (D + 1) / 2]`` from symmetric ``[B, D, D]``; ``out`` may have another dtype."""
    blocks, dim = matrices.shape[:2]
    m, columns = _rectangle(dim)
    if out is None:
        out = matrices.new_empty(blocks, dim * (dim + 1) // 2)
    upper = torch.ones(m, columns, dtype=torch.bool, device=matrices.device).triu(columns - m)
    rectangle, across = _split(out, dim)
    if dim % 2 == 0:
        rectangle[:, :, 1:] = matrices[:, :m, :m]
        rectangle[:, :, :-1] = torch.where(upper[:, :-1], rectangle[:, :, :-1], matrices[:, m:, m:].to(out.dtype))
    else:
        rectangle.copy_(matrices[:, :m, :m])
        rectangle[:, 1:, :-1] = torch.where(upper[1:, :-1], rectangle[:, 1:, :-1], matrices[:, m:, m:].to(out.dtype))
    across.copy_(matrices[:, :m, m:])
    return out


def packed_diagonal(packed: Tensor, dim: int) -> Tensor:
    """Return the diagonals ``[..., D]`` of packed matrices ``[..., D (D + 1) / 2]``."""
    m, columns = _rectangle(dim)
    first = [i * columns + i + columns - m for i in range(m)]
    second = [(i + m + 1 - columns) * columns + i for i in range(dim - m)]
    return packed[..., constants.constant((*first, *second), packed.device, torch.int64)]


def _rectangle(dim: int) -> tuple[int, int]:
    """Return the number of rows and columns of the rectangle that holds both triangles."""
    m = (dim + 1) // 2
    return m, m + 1 if dim % 2 == 0 else m


def _split(packed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    m, columns = _rectangle(dim)
    blocks = packed.shape[0]
    return packed[:, : m * columns].view(blocks, m, columns), packed[:, m * columns :].view(blocks, m, dim - m)


def unpack_triangle(packed: Tensor, dim: int) -> Tensor:
    """Return the symmetric ``[B, D, D]`` that was packed."""
    blocks = packed.shape[0]
    m = _rectangle(dim)[0]
    rectangle, across = _split(packed, dim)
    result = packed.new_empty(blocks, dim, dim)
    if dim % 2 == 0:
        _mirror(rectangle[:, :, 1:].triu(), result[:, :m, :m])
        _mirror(rectangle[:, :, :-1].tril(), result[:, m:, m:])
    else:
        _mirror(rectangle.triu(), result[:, :m, :m])
        _mirror(rectangle[:, 1:, :-1].tril(), result[:, m:, m:])
    result[:, :m, m:] = across
    result[:, m:, :m] = across.mT
    return result


def _mirror(triangle: Tensor, out: Tensor) -> None:
    torch.add(triangle, triangle.mT, out=out)
    out.diagonal(dim1=-2, dim2=-1).copy_(triangle.diagonal(dim1=-2, dim2=-1))
