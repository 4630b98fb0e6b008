"""Sums of outer products: what the factors A, G and F are made of.

Shapes: N = examples, S = shared positions, B = blocks, D = features.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

EXAMPLE_ELEMENTS = 2**25
"""Per-example gradients are formed for so many examples at a time that they have at most this many elements."""


def gram(
    rows_NSBD: Tensor, *, ones: bool, dtype: torch.dtype, weight: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Return ``scale * sum over rows of r r^T`` as ``[B, D, D]``, with a feature that is always 1 appended if ``ones``.

    ``weight`` in {0, 1}, shaped ``[N, S]``, leaves rows out, their 1 included. The 1 is never materialised:
    its row is the sum of the others.
    """
    blocks, features = rows_NSBD.shape[2:]
    if weight is not None:
        rows_NSBD = rows_NSBD * weight[:, :, None, None].to(rows_NSBD.dtype)
    rows = rows_NSBD.permute(2, 0, 1, 3).reshape(blocks, -1, features)
    size = features + 1 if ones else features
    full = torch.empty(blocks, size, size, dtype=dtype, device=rows.device)
    inner = full[:, :features, :features]
    if rows.is_cuda and rows.dtype.itemsize == 2 and dtype == torch.float32 and _HAS_OUT_DTYPE:
        # Products of half-precision numbers are exact in float32, in which tensor cores add them up.
        torch.mul(torch.bmm(rows.mT, rows, out_dtype=dtype), scale, out=inner)
    elif blocks == 1:
        rows = rows.to(dtype)
        _symmetric_product(rows[0], inner[0], scale)
    else:
        rows = rows.to(dtype)
        inner.baddbmm_(rows.mT, rows, beta=0, alpha=scale)
    if ones:
        total = rows.sum(1, dtype=dtype) * scale
        full[:, :-1, -1] = total
        full[:, -1, :-1] = total
        full[:, -1, -1] = scale * (rows.shape[1] if weight is None else weight.sum())
    return full


STRIPS = 4
"""Of the upper triangle of a product on the CPU: three eighths of the work are saved by not computing the lower."""


def _symmetric_product(rows: Tensor, out: Tensor, scale: float) -> None:
    """Write ``scale * rows^T rows``."""
    num_rows, dim = rows.shape
    strips = STRIPS if rows.device.type == "cpu" and dim >= 256 and num_rows >= dim else 1
    cuts = [dim * i // strips for i in range(strips + 1)]
    for begin, end in pairwise(cuts):
        out[begin:end, begin:].addmm_(rows[:, begin:end].mT, rows[:, begin:], beta=0, alpha=scale)
        out[end:, begin:end] = out[begin:end, end:].mT


def in_weight_order(factor: Tensor, taps: int) -> Tensor:
    """Return ``[B, D, D]``, ordered by tap and channel, ordered by channel and tap; a last feature of 1 stays last."""
    if taps == 1:
        return factor
    blocks, size = factor.shape[:2]
    features = size - size % taps
    channels = features // taps
    result = torch.empty_like(factor)
    inner = factor[:, :features, :features].reshape(blocks, taps, channels, taps, channels)
    result[:, :features, :features] = inner.permute(0, 2, 1, 4, 3).reshape(blocks, features, features)
    if features < size:
        row = factor[:, -1, :features].reshape(blocks, taps, channels).mT.reshape(blocks, features)
        result[:, :-1, -1] = row
        result[:, -1, :-1] = row
        result[:, -1, -1] = factor[:, -1, -1]
    return result


def mean_over_positions(rows_NSBD: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``[N, 1, B, D]``: each example's mean over its (kept) positions."""
    rows_NSBD = rows_NSBD.to(dtype)
    if weight is None:
        return rows_NSBD.mean(1, keepdim=True)
    weight = weight.to(dtype)
    kept = weight.sum(1).clamp(min=1)
    return torch.einsum("nsbd,ns->nbd", rows_NSBD, weight).div_(kept[:, None, None]).unsqueeze(1)


def square_sum(rows_NSBD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the diagonal of ``gram``: ``[B, D]``."""
    return rows_NSBD.to(dtype).square().sum((0, 1))


def token_counts(index_NS: Tensor, valid_NS: Tensor | None, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return how often each token occurs, ``[1, num_tokens]``: the diagonal A of an embedding."""
    counts = torch.zeros(num_tokens, dtype=dtype, device=index_NS.device)
    ones = torch.ones_like(index_NS, dtype=dtype) if valid_NS is None else valid_NS.to(dtype)
    return counts.index_add_(0, index_NS.reshape(-1), ones.reshape(-1)).unsqueeze(0)


def token_mean_squares(index_NS: Tensor, valid_NS: Tensor | None, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return ``sum over examples of (share of the example's positions with this token)^2``, ``[1, num_tokens]``."""
    ones = torch.ones_like(index_NS, dtype=dtype) if valid_NS is None else valid_NS.to(dtype)
    shares = ones / ones.sum(1, keepdim=True).clamp(min=1)
    total = torch.zeros(num_tokens, dtype=dtype, device=index_NS.device)
    step = max(1, EXAMPLE_ELEMENTS // num_tokens)
    for start in range(0, index_NS.shape[0], step):
        index = index_NS[start : start + step]
        per_example = total.new_zeros(index.shape[0], num_tokens)
        per_example.scatter_add_(1, index, shares[start : start + step])
        total += per_example.square().sum(0)
    return total.unsqueeze(0)


def gradient_square_sum(a_NSBI: Tensor, g_NSBO: Tensor) -> Tensor:
    """Return ``sum over examples of (sum over positions of g a^T)^2``, ``[B, O, I]``: EKFAC's moments."""
    examples, positions, blocks, inputs = a_NSBI.shape
    outputs = g_NSBO.shape[-1]
    if positions == 1:
        a, g = a_NSBI[:, 0].square(), g_NSBO[:, 0].square()
        return torch.einsum("nbo,nbi->boi", g, a)
    total = a_NSBI.new_zeros(blocks, outputs, inputs)
    step = max(1, EXAMPLE_ELEMENTS // max(1, blocks * outputs * inputs))
    for start in range(0, examples, step):
        a, g = a_NSBI[start : start + step], g_NSBO[start : start + step]
        total += torch.einsum("nsbo,nsbi->nboi", g, a).square_().sum(0)
    return total
