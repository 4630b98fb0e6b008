"""What one call of a layer adds to its factors: sums over rows, not scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.layers.rows import Rows, regroup
from dkfac.ops import factors as ops
from dkfac.ops.decompose import Eigen
from dkfac.plan.spec import FactorSpec
from dkfac.settings import Settings


def input_sum(
    layer: Layer, rows: Rows, mask: Tensor | None, settings: Settings, *, as_rows: bool = False
) -> tuple[Tensor, Tensor | float]:
    """Return the sum that A is made of, or the rows ``[R, D]`` whose products it sums, and what to divide by."""
    assert rows.a is not None
    factor = layer.spec.factor("A")
    a, kept = rows.a, rows.valid
    if mask is not None and mask.numel() == a.shape[0] * a.shape[1]:
        if 0 < settings.batch_dim < mask.ndim and a.shape[0] == rows.examples:
            mask = mask.movedim(settings.batch_dim, 0)
        mask = mask.reshape(a.shape[:2]).to(a.device, layer.dtype)
        kept = mask if kept is None else kept * mask
    reduce = settings.weight_sharing == "reduce"
    if reduce:
        a = regroup(a, rows.examples, layer.name)
        kept = None if kept is None else regroup(kept, rows.examples, layer.name)
    count: Tensor | float = float(a.shape[0] * (1 if reduce else a.shape[1]))
    if not reduce and kept is not None:
        count = kept.sum()
    if factor.form == "diagonal":
        diagonal = ops.token_mean_squares if reduce else ops.token_counts
        return diagonal(a, kept, factor.dim, layer.dtype), count
    if reduce:
        a, kept = ops.mean_over_positions(a, kept, layer.dtype), None
    if as_rows:
        flat = a.reshape(-1, a.shape[-1]).to(layer.dtype)
        ones = flat.new_ones(len(flat), 1 if layer.has_bias else 0)
        flat = torch.cat([flat, ones], dim=1)
        return flat if kept is None else flat * kept.reshape(-1, 1), count
    total = ops.gram(a, ones=layer.has_bias, dtype=layer.dtype, weight=kept)
    return ops.in_weight_order(total, rows.taps), count


def gradient_sum(
    layer: Layer,
    factor: FactorSpec,
    rows: Rows,
    weight: Tensor | float,
    settings: Settings,
    *,
    as_rows: bool = False,
) -> Tensor:
    """Return the sum that G, or a norm layer's F, is made of, times a weight; or the rows whose products it sums."""
    g = rows.g
    if factor.form == "diagonal":
        return ops.square_sum(g, layer.dtype) * weight
    if factor.key == "G" and settings.weight_sharing == "reduce":
        g = regroup(g, rows.examples, layer.name).to(layer.dtype).sum(1, keepdim=True)
    if as_rows:
        return g.reshape(-1, g.shape[-1]).to(layer.dtype) * weight**0.5
    if isinstance(weight, Tensor):
        return ops.gram(g, ones=False, dtype=layer.dtype) * weight
    return ops.gram(g, ones=False, dtype=layer.dtype, scale=weight)


def moment_sum(layer: Layer, a: Tensor, rows: Rows, basis: dict[str, Eigen]) -> Tensor:
    """Sum over examples of the squared gradient in the eigenbasis, ``[B, O, I]``."""
    q_a, q_g = basis["A"].vectors, basis["G"].vectors
    assert q_a is not None
    assert q_g is not None
    a = regroup(a, rows.examples, layer.name).to(layer.dtype)
    g = regroup(rows.g, rows.examples, layer.name).to(layer.dtype)
    q_a, q_g = q_a.to(a), q_g.to(g)  # the model may have been converted since
    if rows.taps > 1:
        channels = a.shape[-1] // rows.taps
        order = torch.arange(a.shape[-1], device=a.device).view(channels, rows.taps).mT.reshape(-1)
        last = torch.arange(a.shape[-1], q_a.shape[1], device=a.device)
        q_a = q_a[:, torch.cat([order, last])]
    if layer.has_bias:
        a = torch.einsum("nsbi,bij->nsbj", a, q_a[:, :-1]) + q_a[:, -1]
    else:
        a = torch.einsum("nsbi,bij->nsbj", a, q_a)
    return ops.gradient_square_sum(a, torch.einsum("nsbo,bop->nsbp", g, q_g))
