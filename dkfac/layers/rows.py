"""From what a module saw to canonical rows ``[N, S, B, features]``.

N = examples, S = shared positions (pixels, tokens), B = blocks. One file, because the
kinds differ in a few lines each and the regrouping by example is common to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkfac.layers.layer import Layer
from dkfac.layers.norm import normalised

PATCH_BYTES = 256 * 2**20
"""Convolution patches are formed for so many examples at a time that they fit in this."""


@dataclass(frozen=True, slots=True)
class Rows:
    a: Tensor | None
    """``[N, S, B, I]``; token numbers ``[N, S]`` for embeddings; None for norm layers. No bias column."""
    g: Tensor
    """``[N, S, B, O]``, as autograd gave it: not scaled."""
    examples: int
    """How many of the model's examples these rows stem from; they may differ from N until regrouped."""
    valid: Tensor | None = None
    """``[N, S]`` in {0, 1}: rows that exist for the parameters (an embedding's padding row does not)."""
    taps: int = 1
    """Of a convolution: the features of ``a`` are ordered by tap, then channel; the weight's the other way round."""


def rows_of(layer: Layer, x: Tensor, g: Tensor, *, examples: int, batch_dim: int, batch_stats: bool) -> Iterator[Rows]:
    """Yield the rows of one call of a layer, a piece of the batch at a time."""
    match layer.kind:
        case "linear" | "conv1d-transposed":
            a, g = (_sequence(t, examples, batch_dim).unsqueeze(2) for t in (x, g))
            yield Rows(a, g, examples)
        case "conv":
            yield from _conv_rows(layer.module, x, g, examples)
        case "embedding":
            index = _sequence(x.unsqueeze(-1), examples, batch_dim).squeeze(-1)
            rows = _sequence(g, examples, batch_dim)
            padding: Any = layer.module.padding_idx
            valid = None if padding is None else (index != padding).to(rows.dtype)
            if valid is not None:
                rows = rows * valid.unsqueeze(-1)
            yield Rows(index, rows.unsqueeze(2), examples, valid)
        case "norm-unit" | "norm-joint":
            yield _norm_rows(layer, x, g, examples, batch_dim, batch_stats)
        case kind:
            raise AssertionError(kind)


def regroup(rows: Tensor, examples: int, name: str) -> Tensor:
    """Return ``[n, s, ...]`` rows as ``[examples, n * s / examples, ...]``: a layer may see examples folded
    into a leading dimension of its own (windows, frames, tokens)."""
    n, s = rows.shape[:2]
    if n == examples:
        return rows
    if examples <= 0 or (n * s) % examples:
        raise RuntimeError(
            f"layer {name!r} saw {n * s} rows for {examples} examples: they cannot be told apart by example, "
            f'which weight_sharing="reduce", curvature="ekfac" and norm layers need. '
            f"Leave it out with skip=[{name!r}], or check batch_dim."
        )
    return rows.reshape(examples, (n * s) // examples, *rows.shape[2:])


def _sequence(x: Tensor, examples: int, batch_dim: int) -> Tensor:
    """``[..., features] -> [n, s, features]`` with the examples in front."""
    if x.ndim == 1:
        return x.reshape(1, 1, -1)
    if 0 < batch_dim < x.ndim - 1 and x.shape[batch_dim] == examples:
        x = x.movedim(batch_dim, 0)
    elif x.ndim > 2 and x.shape[1] == examples and x.shape[0] % max(examples, 1):
        x = x.movedim(1, 0)  # a layer fed sequence-first inside a batch-first model
    elif batch_dim == 1 and examples > 0 and x.shape[0] != examples and x.shape[0] % examples == 0:
        x = x.reshape(-1, examples, *x.shape[1:]).movedim(1, 0)  # flattened with the examples inside
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _conv_rows(module: nn.Module, x: Tensor, g: Tensor, examples: int) -> Iterator[Rows]:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    num_spatial = len(module.kernel_size)
    if x.ndim == num_spatial + 1:
        x, g = x.unsqueeze(0), g.unsqueeze(0)
    taps = math.prod(module.kernel_size)
    positions = g[0, 0].numel()
    bytes_per_example = max(1, positions * module.in_channels * taps * x.element_size())
    # A layer may see several images per example (frames); a piece never ends inside an example.
    images = x.shape[0] // examples if examples > 0 and x.shape[0] % examples == 0 else x.shape[0]
    step = max(1, PATCH_BYTES // (bytes_per_example * images)) * images
    for start in range(0, x.shape[0], step):
        piece = g[start : start + step]
        grad = piece.reshape(piece.shape[0], module.groups, -1, positions).permute(0, 3, 1, 2)
        count = examples if images == x.shape[0] else piece.shape[0] // images
        yield Rows(_patches(module, x[start : start + step]), grad, count, taps=taps)


def _patches(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """Return ``[N, S, groups, taps * in_channels / groups]``: the channels of one tap side by side, as memory has them.

    Gathering them in the weight's order, channel by channel, takes several times as long.
    """
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    amounts = conv_padding(module.padding, module.kernel_size, module.dilation)
    if any(amounts):
        x = F.pad(x, amounts, mode=mode)
    x = x.movedim(1, -1).contiguous()
    spatial, channels = x.shape[1:-1], x.shape[-1]
    shape, steps = [x.shape[0]], [x.stride(0)]
    for i, (size, stride, dilation) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        shape.append((spatial[i] - (size - 1) * dilation - 1) // stride + 1)
        steps.append(x.stride(1 + i) * stride)
    positions, num_spatial = math.prod(shape[1:]), len(module.kernel_size)
    for i, (size, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
        shape.append(size)
        steps.append(x.stride(1 + i) * dilation)
    groups = module.groups
    shape += [groups, channels // groups]
    steps += [channels // groups, 1]
    windows = x.as_strided(shape, steps)
    if groups > 1:
        windows = windows.movedim(-2, 1 + num_spatial)
    return windows.reshape(shape[0], positions, groups, -1)


def conv_padding(padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the amounts in the order of ``F.pad``: last dimension first, left then right."""
    amounts: list[int] = []
    for i in reversed(range(len(kernel))):
        if padding == "valid":
            left = right = 0
        elif padding == "same":
            total = dilation[i] * (kernel[i] - 1)
            left, right = total // 2, total - total // 2
        else:
            left = right = int(padding[i])
        amounts += [left, right]
    return amounts


def _norm_rows(layer: Layer, x: Tensor, g: Tensor, examples: int, batch_dim: int, batch_stats: bool) -> Rows:
    """Rows of a norm layer are its per-example gradients: ``[N, 1, B, p]``, already summed over positions."""
    x_hat = normalised(layer.module, x, layer.dtype, batch_stats=batch_stats)
    g = g.to(layer.dtype)
    products = (g * x_hat, g) if layer.has_bias else (g * x_hat,)
    if isinstance(layer.module, (nn.LayerNorm, nn.RMSNorm)):
        per_position = [_sequence(t.flatten(-layer.weight.ndim), examples, batch_dim) for t in products]
    else:
        per_position = [t.reshape(t.shape[0], t.shape[1], -1).mT for t in products]
    gradients = torch.stack([regroup(t, examples, layer.name).sum(1) for t in per_position], dim=-1)  # [N, C, p]
    if layer.kind == "norm-joint":
        gradients = gradients.mT.reshape(gradients.shape[0], 1, -1)
    return Rows(None, gradients.unsqueeze(1), gradients.shape[0])
