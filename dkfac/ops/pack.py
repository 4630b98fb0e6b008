"""One triangle of symmetric matrices in a flat buffer, without index tables: the rectangular full packed format.

A matrix of even dimension ``2n`` is cut into ``[[T1, S], [S^T, T2]]`` with ``n x n`` blocks. S is written as it is;
the upper triangle of T1 and the lower one of T2 fill a rectangle ``n x (n + 1)``. For odd dimensions T1 is one larger
and the rectangle is square.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_triangle(matrices: Tensor) -> Tensor:
    """Return ``[B, D (D + 1) / 2]`` from symmetric ``[B, D, D]``."""
    dim = matrices.shape[-1]
    m = (dim + 1) // 2
    upper, lower = matrices[:, :m, :m].triu(), matrices[:, m:, m:].tril()
    if dim % 2 == 0:
        rectangle = torch.nn.functional.pad(upper, (1, 0))
        rectangle[:, :, :-1] += lower
    else:
        rectangle = upper
        rectangle[:, 1:, :-1] += lower
    return torch.cat([rectangle.flatten(1), matrices[:, :m, m:].flatten(1)], dim=1)


def unpack_triangle(packed: Tensor, dim: int) -> Tensor:
    """Return the symmetric ``[B, D, D]`` that was packed."""
    blocks = packed.shape[0]
    m = (dim + 1) // 2
    n = dim - m
    columns = m + 1 if dim % 2 == 0 else m
    rectangle = packed[:, : m * columns].reshape(blocks, m, columns)
    across = packed[:, m * columns :].reshape(blocks, m, n)
    if dim % 2 == 0:
        upper, lower = rectangle[:, :, 1:].triu(), rectangle[:, :, :-1].tril()
    else:
        upper, lower = rectangle.triu(), rectangle[:, 1:, :-1].tril()
    result = packed.new_empty(blocks, dim, dim)
    result[:, :m, :m] = upper + upper.triu(1).mT
    result[:, m:, m:] = lower + lower.tril(-1).mT
    result[:, :m, m:] = across
    result[:, m:, :m] = across.mT
    return result
