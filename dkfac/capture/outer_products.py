"""Outer products that one call of a layer adds to its factors: sums over rows, not scaled.

Input: the rows of a call. Output: sums or rows for A, G and F, and EKFAC's moments. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import cast

import torch
from torch import Tensor

from dkfac.capture.statistics import LayerSums
from dkfac.config.settings import Settings
from dkfac.layers.conv import Conv, channels_of, patches, patches_gram
from dkfac.layers.layer import Layer
from dkfac.layers.rows import Picked, Rows, first_rows, regroup
from dkfac.ops import factors as ops
from dkfac.ops.decompose import Eigen
from dkfac.plan.spec import FactorSpec, is_input, whole_key


def input_sum(
    layer: Layer,
    factor: FactorSpec,
    rows: Rows,
    mask: Tensor | None,
    settings: Settings,
    *,
    as_rows: bool = False,
    parts: int = 1,
) -> tuple[Tensor, Tensor | float]:
    """Return the sum for A, or the rows ``[R, D]`` whose outer products it sums, and its divisor.

    ``parts``: number of calls in the examples, which are summed separately: ``[parts * B, D, D]``.
    """
    reduce = settings.weight_sharing == "reduce"
    if rows.image is not None and mask is None and not reduce and not as_rows and has_whole_channels(factor):
        module, image = cast(Conv, layer.conv), _channels(layer, factor, rows.image)
        total = patches_gram(
            module, image, ones=factor.folds_bias, dtype=layer.dtype, parts=parts, pieces=factor.pieces
        )
        return total, float(rows.g.shape[0] * rows.g.shape[1] // parts)
    a, kept = input_rows(layer, factor, rows), _kept(layer, rows, mask, settings)
    count = _count(rows, kept, settings, parts)
    if reduce:
        a = regroup(a, rows.examples, layer.name)
        kept = None if kept is None else regroup(kept, rows.examples, layer.name)
    if factor.form == "diagonal":
        diagonal = ops.token_mean_squares if reduce else ops.token_counts
        return diagonal(a, kept, factor.dim, layer.dtype), count
    if reduce:
        a, kept = ops.mean_over_positions(a, kept, layer.dtype), None
    if as_rows:
        flat = a.reshape(-1, a.shape[-1]).to(layer.dtype)
        ones = flat.new_ones(len(flat), 1 if factor.folds_bias else 0)
        flat = torch.cat([flat, ones], dim=1)
        return flat if kept is None else flat * kept.reshape(-1, 1), count
    total = ops.gram(a, ones=factor.folds_bias, dtype=layer.dtype, weight=kept, parts=parts)
    return ops.in_weight_order(total, _taps(layer, rows) if has_whole_channels(factor) else 1), count


def _kept(layer: Layer, rows: Rows, mask: Tensor | None, settings: Settings) -> Tensor | None:
    """Return ``[N, S]``: which rows count; None: all."""
    n, s = rows.g.shape[:2]
    picked = rows.picked or Picked((n, s), rows.examples, (slice(None), slice(None)))
    if mask is None or mask.numel() != math.prod(picked.shape):
        return rows.valid
    if 0 < settings.batch_dim < mask.ndim and picked.shape[0] == picked.examples:
        mask = mask.movedim(settings.batch_dim, 0)
    mask = mask.reshape(picked.shape)[picked.here].to(rows.g.device, layer.dtype)
    return mask if rows.valid is None else rows.valid * mask


def _count(rows: Rows, kept: Tensor | None, settings: Settings, parts: int = 1) -> Tensor | float:
    """Return the divisor of a sum over inputs."""
    if settings.weight_sharing == "reduce":
        return float(rows.examples // parts)
    return float(rows.g.shape[0] // parts * rows.g.shape[1]) if kept is None else kept.sum()


def map_sum(
    layer: Layer, factor: FactorSpec, rows: Rows, mask: Tensor | None, settings: Settings, *, as_rows: bool = False
) -> tuple[Tensor, Tensor | float]:
    """Return the sum over examples of ``X X^T`` (channels) or ``X^T X`` (positions), where inputs are flattened maps X,
    and its divisor."""
    assert not as_rows, "maps do not travel as rows"
    flat, count = input_sum(layer, factor, rows, mask, settings, as_rows=True)
    channels, positions = (layer.spec.factor(key).dim for key in ("A_C", "A_S"))
    maps = flat[:, : channels * positions].view(-1, channels, positions)
    if factor.key == "A_C":
        maps = maps.mT
    sides = maps.reshape(-1, maps.shape[-1])
    return (sides.mT @ sides).unsqueeze(0), count


def input_rows(layer: Layer, factor: FactorSpec, rows: Rows) -> Tensor:
    """Return the rows of an input factor, ``[N, S, blocks, features]``: inputs, or a convolution's patches, whose
    features are ordered by tap and channel if the factor has whole channels."""
    if rows.image is None:
        assert rows.a is not None
        is_dense = whole_key(factor.key) == "A" and factor.form == "dense"
        return in_pieces(layer, factor, rows.a) if is_dense else rows.a
    module = cast(Conv, layer.conv)
    if has_whole_channels(factor):
        return patches(module, _channels(layer, factor, rows.image), groups=factor.num_blocks)
    taps = _taps(layer, rows)
    by_tap = patches(module, rows.image, groups=module.groups)
    return in_pieces(layer, factor, torch.unflatten(by_tap, -1, (taps, -1)).mT.flatten(-2))


def in_pieces(layer: Layer, factor: FactorSpec, rows: Tensor) -> Tensor:
    """Return the features ``[N, S, B, D]`` of a layer that belong to a factor, ``[N, S, B * P, w]``."""
    number = factor.pieces * factor.dim - factor.folds_bias
    if number == rows.shape[-1] and factor.pieces == 1:
        return rows
    first = layer.spec.first_feature(factor.key)
    return torch.unflatten(rows[..., first : first + number], -1, (factor.pieces, -1)).flatten(2, 3)


def has_whole_channels(factor: FactorSpec) -> bool:
    """Whether the features of a convolution's input factor are whole channels, with all taps of the kernel."""
    return (factor.dim - factor.folds_bias) % factor.unit == 0


def _channels(layer: Layer, factor: FactorSpec, image: Tensor) -> Tensor:
    """Return the channels of an input that belong to a factor."""
    number = (factor.pieces * factor.dim - factor.folds_bias) // factor.unit
    return channels_of(cast(Conv, layer.conv), image, layer.spec.first_feature(factor.key) // factor.unit, number)


def _taps(layer: Layer, rows: Rows) -> int:
    return 1 if rows.image is None else math.prod(cast(Conv, layer.conv).kernel_size)


def gradient_sum(
    layer: Layer,
    factor: FactorSpec,
    rows: Rows,
    weight: Tensor | float,
    settings: Settings,
    *,
    as_rows: bool = False,
    parts: int = 1,
) -> Tensor:
    """Return the sum for G, or a norm layer's F, times ``weight``; or the rows whose outer products it sums."""
    g = rows.g
    if factor.form == "diagonal":
        return ops.square_sum(g, layer.dtype) * weight
    if factor.key != "F" and settings.weight_sharing == "reduce":
        g = regroup(g, rows.examples, layer.name).to(layer.dtype).sum(1, keepdim=True)
    g = in_pieces(layer, factor, g)
    if as_rows:
        return g.reshape(-1, g.shape[-1]).to(layer.dtype) * weight**0.5
    if isinstance(weight, Tensor):
        return ops.gram(g, ones=False, dtype=layer.dtype, parts=parts) * weight
    return ops.gram(g, ones=False, dtype=layer.dtype, scale=weight, parts=parts)


def add_products(
    sums: LayerSums,
    layer: Layer,
    rows: Rows,
    weight: Tensor | float,
    mask: Tensor | None,
    settings: Settings,
    *,
    due: Container[tuple[str, str]] | None,
    keep: Container[str],
    inputs: bool,
) -> None:
    """Add the products of a call's rows to a layer's sums.

    ``weight``: multiplies sums over gradients. ``due``: factors to measure, as (layer, key), with their noise; None:
    all, without. ``keep``: factors whose rows are kept instead. ``inputs``: whether to measure the input's factors.
    """
    for factor in layer.spec.factors:
        key, is_own, is_first = factor.key, is_input(factor.key), factor is layer.spec.factors[0]
        if is_own and not inputs:
            continue
        if due is not None and (layer.name, key) not in due:
            if is_own and is_first:  # the row count serves the other factors too
                sums.rows = sums.rows + _count(rows, _kept(layer, rows, mask, settings), settings)
            continue
        if is_own:
            total = map_sum if layer.kind == "linear-map" else input_sum
            value, count = total(layer, factor, rows, mask, settings, as_rows=key in keep)
            sums.rows = sums.rows + (count if is_first else 0.0)
        else:
            value = gradient_sum(layer, factor, rows, weight, settings, as_rows=key in keep)
        sums.add(key, value, as_rows=key in keep)
        if due is not None:
            sums.add_spread(key, spread(layer, factor, rows, value, weight, mask, settings))


def spread(
    layer: Layer,
    factor: FactorSpec,
    rows: Rows,
    total: Tensor,
    weight: Tensor | float,
    mask: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Return the difference of the means over two halves of the examples, scaled to have the variance of ``total``.

    Zero for a single example, whose variance is unknown.
    """
    per_example = rows.g.shape[0] // rows.examples if rows.examples > 0 and not rows.g.shape[0] % rows.examples else 1
    n, first = rows.g.shape[0] // per_example, rows.g.shape[0] // per_example // 2
    if first == 0:
        return torch.zeros_like(total)
    half = first_rows(rows, first * per_example, first if rows.examples == n else rows.examples)
    if is_input(factor.key):
        sum_of = map_sum if layer.kind == "linear-map" else input_sum
        part = sum_of(layer, factor, half, mask, settings)[0]
    else:
        part = gradient_sum(layer, factor, half, weight, settings)
    second = n - first
    return (part / first - (total - part) / second) * math.sqrt(first * second)


def moment_sum(layer: Layer, rows: Rows, basis: dict[str, Eigen]) -> Tensor:
    """Return the sum over examples of the squared gradient in the eigenbasis, ``[B, O, I]``."""
    blocks, a, g = layer.spec.grad_shape[0], list[Tensor](), list[Tensor]()
    for factor in layer.spec.factors:
        is_own = is_input(factor.key)
        side = input_rows(layer, factor, rows) if is_own else in_pieces(layer, factor, rows.g)
        side = regroup(side, rows.examples, layer.name).to(layer.dtype)
        vectors = basis[factor.key].vectors
        assert vectors is not None
        taps = _taps(layer, rows) if is_own and has_whole_channels(factor) else 1
        turned = _turned(side, vectors.to(side), taps, folds_bias=factor.folds_bias)  # the model may have been moved
        (a if is_own else g).append(torch.unflatten(turned, 2, (blocks, -1)).flatten(3))
    if layer.has_bias and not layer.spec.factors[0].folds_bias:
        a.append(torch.ones_like(a[0][..., :1]))
    return ops.gradient_square_sum(torch.cat(a, -1), torch.cat(g, -1))


def _turned(rows: Tensor, vectors: Tensor, taps: int, *, folds_bias: bool) -> Tensor:
    """Return rows ``[N, S, B, D]`` in an eigenbasis; ``taps``: of a convolution whose features are ordered by tap."""
    if taps > 1:
        order = torch.arange(rows.shape[-1], device=rows.device).view(-1, taps).mT.reshape(-1)
        last = torch.arange(rows.shape[-1], vectors.shape[1], device=rows.device)
        vectors = vectors[:, torch.cat([order, last])]
    if folds_bias:
        return torch.einsum("nsbi,bij->nsbj", rows, vectors[:, :-1]) + vectors[:, -1]
    return torch.einsum("nsbi,bij->nsbj", rows, vectors)
