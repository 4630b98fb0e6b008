"""Sums of outer products, of which the factors A, G and F are made.

Input: rows ``[N, S, B, D]``. Output: sums ``[B, D, D]``, or diagonals ``[B, D]``. Owns: nothing.

Shapes: N = examples, S = shared positions, B = blocks, D = features.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

EXAMPLE_ELEMENTS = 2**25
"""Per-example gradients are formed for as many examples at a time as have at most this many elements."""


def gram(
    rows_NSBD: Tensor,
    *,
    ones: bool,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    scale: float = 1.0,
    features: int | None = None,
    parts: int = 1,
) -> Tensor:
    """Return ``scale * sum over rows of r r^T`` as ``[B, D, D]``, with a constant feature 1 appended if ``ones``.

    ``weight`` in {0, 1}, ``[N, S]``, masks rows, including their 1. The 1 is never materialized: its row is the sum of
    the rows. ``features``: number of columns that count; the others are padding. ``parts``: number of equal parts of
    the examples that are summed separately; ``[parts * B, D, D]`` is returned.
    """
    blocks, width = rows_NSBD.shape[2:]
    features = width if features is None else features
    if parts == blocks == 1 and weight is None and features == width:
        return gram_of_rows(rows_NSBD.reshape(-1, width), ones=ones, dtype=dtype, scale=scale)
    if weight is not None:
        rows_NSBD = rows_NSBD * weight[:, :, None, None].to(rows_NSBD.dtype)
    apart = rows_NSBD.reshape(parts, -1, *rows_NSBD.shape[1:])
    rows = apart.permute(0, 3, 1, 2, 4).reshape(parts * blocks, -1, width)
    inner = product(rows, rows, dtype)[:, :features, :features]
    if scale != 1.0:
        inner = inner.mul_(scale)
    if not ones:
        return inner.contiguous()
    full = torch.empty(len(inner), features + 1, features + 1, dtype=dtype, device=rows.device)
    full[:, :-1, :-1] = inner
    total = _column_sums(rows, dtype)[:, :features] * scale
    full[:, :-1, -1] = total
    full[:, -1, :-1] = total
    full[:, -1, -1] = scale * (rows.shape[1] if weight is None else weight.sum())
    return full


def gram_of_rows(rows_RD: Tensor, *, ones: bool, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return ``gram`` of rows ``[R, D]`` as ``[1, D, D]``, with as little host work as possible."""
    width = rows_RD.shape[1]
    if not adds_in_float32(rows_RD, dtype):
        rows_RD = rows_RD.to(dtype)
    if width % COLUMN_ALIGNMENT and rows_RD.dtype != dtype:
        inner = product(rows_RD[None], rows_RD[None], dtype)[0].contiguous()
    else:
        inner = _one_product(rows_RD, rows_RD, dtype, same=True)
    if scale != 1.0:
        inner.mul_(scale)
    if not ones:
        return inner.unsqueeze(0)
    full = inner.new_empty(1, width + 1, width + 1)
    full[0, :-1, :-1] = inner
    total = _column_sums(rows_RD.unsqueeze(0), dtype)[0] * scale
    full[0, :-1, -1] = total
    full[0, -1, :-1] = total
    full[0, -1, -1].fill_(scale * len(rows_RD))  # an assignment would synchronize with the device
    return full


def _column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows of batches of matrices; on tensor cores as products with ones."""
    if not adds_in_float32(rows, dtype) or len(rows) > 1 or rows.shape[-1] % COLUMN_ALIGNMENT:
        return rows.sum(1, dtype=dtype)
    ones = rows.new_ones(COLUMN_ALIGNMENT, rows.shape[1])
    return torch.mm(ones, rows[0], out_dtype=dtype)[:1]


STRIPS = 4
"""Strips of the upper triangle of a product: not computing the lower one saves three eighths of the work."""

COLUMN_ALIGNMENT = 8
"""Half-precision products on a GPU are several times as fast if the row length is a multiple of this."""

PIECES = 128
"""Batched products on a GPU are split along the rows into at least this many: the library does not split them."""


def adds_in_float32(rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether half-precision rows need no cast: products are exact in float32, as tensor cores accumulate."""
    return rows.is_cuda and rows.dtype.itemsize == 2 and dtype == torch.float32 and _HAS_OUT_DTYPE


def product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``first^T second`` of batches of matrices, accumulated in ``dtype``. ``second`` may be ``first``."""
    is_half = adds_in_float32(first, dtype)
    same = second is first
    width = first.shape[-1]
    if is_half and width % COLUMN_ALIGNMENT:
        first = pad(first, (0, -width % COLUMN_ALIGNMENT))
        second = first if same else pad(second, (0, -width % COLUMN_ALIGNMENT))
        return product(first, second, dtype)[:, :width, :width]
    if not is_half:
        first = first.to(dtype)
        second = first if same else second.to(dtype)
    batch, num_rows = first.shape[:2]
    if batch == 1:
        return _one_product(first[0], second[0], dtype, same=same).unsqueeze(0)
    pieces = 1
    while first.is_cuda and batch * pieces < PIECES and num_rows % (2 * pieces) == 0 and num_rows >= 2048 * pieces:
        pieces *= 2
    first, second = (t.reshape(batch * pieces, num_rows // pieces, width) for t in (first, second))
    found = torch.bmm(first.mT, second, out_dtype=dtype) if is_half else first.mT @ second
    return found if pieces == 1 else found.view(batch, pieces, width, width).sum(1)


def _one_product(first: Tensor, second: Tensor, dtype: torch.dtype, *, same: bool) -> Tensor:
    """Return ``first^T second``; of a wide matrix with itself only the upper triangle is computed, and mirrored."""
    width = first.shape[-1]

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.mT, b, out_dtype=dtype) if adds_in_float32(a, dtype) else a.mT @ b

    least = 256 if first.device.type == "cpu" else 2048
    if not same or width < least or len(first) < width:
        return multiply(first, second)
    out = torch.empty(width, width, dtype=dtype, device=first.device)
    cuts = [width * i // STRIPS // COLUMN_ALIGNMENT * COLUMN_ALIGNMENT for i in range(STRIPS)] + [width]
    for begin, end in pairwise(cuts):
        out[begin:end, begin:] = multiply(first[:, begin:end], first[:, begin:])
        out[end:, begin:end] = out[begin:end, end:].mT
    return out


def in_weight_order(factor: Tensor, taps: int) -> Tensor:
    """Return ``[B, D, D]``, reordered from (tap, channel) to (channel, tap); a constant feature 1 stays last."""
    if taps == 1:
        return factor
    blocks, size = factor.shape[:2]
    features = size - size % taps
    channels = features // taps
    result = torch.empty_like(factor)
    inner = factor[:, :features, :features].view(blocks, taps, channels, taps, channels)
    place = result[:, :features, :features].view(blocks, channels, taps, channels, taps)
    place.copy_(inner.permute(0, 2, 1, 4, 3))
    if features < size:
        row = factor[:, -1, :features].reshape(blocks, taps, channels).mT.reshape(blocks, features)
        result[:, :-1, -1] = row
        result[:, -1, :-1] = row
        result[:, -1, -1] = factor[:, -1, -1]
    return result


def mean_over_positions(rows_NSBD: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``[N, 1, B, D]``: each example's mean over its unmasked positions."""
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
