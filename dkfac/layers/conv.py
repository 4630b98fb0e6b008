"""Patches of a convolution, and the sum of their outer products.

Input: a convolution and its input ``[N, C, ...]``. Output: patches, or the sum over them. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkfac.ops import conv_fused, correlate, factors

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
TRANSPOSED: dict[type[nn.Module], Callable[..., Conv]] = {
    nn.ConvTranspose1d: nn.Conv1d,
    nn.ConvTranspose2d: nn.Conv2d,
    nn.ConvTranspose3d: nn.Conv3d,
}


def as_conv(module: Any) -> Conv | None:
    """Return the convolution whose patches are a layer's inputs: the module; for a transposed one, a convolution of its
    shape over its spread input (:func:`spread_input`); None for other layers."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module
    made = next((conv for base, conv in TRANSPOSED.items() if isinstance(module, base)), None)
    shape = () if made is None else (module.in_channels, module.out_channels, module.kernel_size)
    return None if made is None else made(*shape, dilation=module.dilation, bias=False, device="meta")


def spread_input(module: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and the output gradient of a plain convolution with a transposed one's weight and gradient.

    A transposed convolution is a convolution of its input with zeros between the pixels, by the mirrored kernel. Both
    tensors are mirrored instead, so that the taps keep their order.
    """
    geometry = list(zip(module.kernel_size, module.stride, module.padding, module.dilation, strict=True))
    if x.ndim == len(geometry) + 1:
        x, g = x.unsqueeze(0), g.unsqueeze(0)
    sizes = [(size - 1) * stride + 1 for size, (_, stride, _, _) in zip(x.shape[2:], geometry, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(None, None, stride) for _, stride, _, _ in geometry))] = x
    amounts: list[int] = []
    for size, output, (taps, _, padding, dilation) in zip(sizes, g.shape[2:], geometry, strict=True):
        before = dilation * (taps - 1) - padding
        amounts = [before, output + dilation * (taps - 1) - before - size, *amounts]
    dims = tuple(range(2, x.ndim))
    return F.pad(wide, amounts).flip(dims), g.flip(dims)


def strip_taps(module: Conv) -> int:
    """Return how many copies of the input are materialized to sum the products of its patches."""
    return math.prod(module.kernel_size[1:] if _correlates(module) else module.kernel_size)


def _correlates(module: Conv, groups: int | None = None) -> bool:
    groups = module.groups if groups is None else groups
    if groups > 1 or module.padding_mode != "zeros":
        return False
    above, below = conv_padding(module.padding, module.kernel_size, module.dilation)[-2:]
    return correlate.correlates(module.kernel_size[0], module.stride[0], module.dilation[0], above + below)


def _is_plain(module: Conv, groups: int) -> bool:
    """Return whether a convolution with a single tap reads each position exactly once, without padding."""
    return groups == 1 and set(module.stride) == {1} and not any(conv_padding(module.padding, module.kernel_size,
        module.dilation))  # fmt: skip


def channels_of(module: Conv, x: Tensor, first: int, number: int) -> Tensor:
    """Return ``number`` channels of each group of an input ``[N, C, ...]``, from ``first`` on."""
    if number == x.shape[1] // module.groups:
        return x
    return torch.unflatten(x, 1, (module.groups, -1))[:, :, first : first + number].flatten(1, 2)


def patches_gram(module: Conv, x: Tensor, *, ones: bool, dtype: torch.dtype, parts: int = 1, pieces: int = 1) -> Tensor:
    """Return the sum over patches of ``p p^T``, ``[parts * groups * pieces, D, D]``, features in the weight's order.

    ``parts``: number of equal parts of the images that are summed separately. ``pieces``: number of equal pieces of the
    channels of each group, whose products with each other are left out.
    """
    groups = module.groups
    if pieces > 1:  # each piece as further images: they are summed separately too
        apart = torch.unflatten(torch.unflatten(x, 1, (groups * pieces, -1)), 0, (parts, -1)).transpose(1, 2)
        x, parts, groups = apart.flatten(0, 2), parts * groups * pieces, 1
    taps = math.prod(module.kernel_size)
    channels = x.shape[1] // groups
    features = channels * taps
    if taps == 1 and _is_plain(module, groups):
        rows = x.movedim(1, -1).reshape(x.shape[0], -1, 1, channels)
        return factors.gram(rows, ones=ones, dtype=dtype, parts=parts)
    if not _correlates(module, groups):
        rows = patches(module, x, groups=groups, aligned=factors.adds_in_float32(x, dtype))
        total = factors.gram(rows, ones=ones, dtype=dtype, features=features, parts=parts)
        return factors.in_weight_order(total, taps)
    above, below = conv_padding(module.padding, module.kernel_size, module.dilation)[-2:]
    height, width = module.kernel_size[0], taps // module.kernel_size[0]
    if isinstance(module, nn.Conv2d) and height == 3 and min(above, below) > 0:
        return _rows_of_three(module, x, ones=ones, dtype=dtype, parts=parts)
    windows = _windows(module, x, groups, first=1)
    windows = windows.reshape(*windows.shape[:2], -1, width * channels) if windows.ndim > 6 else windows
    strips = correlate.with_room(windows, height)
    blocks = correlate.patch_gram(strips, height, above, below, dtype, parts)
    full = torch.empty(parts, features + ones, features + ones, dtype=dtype, device=x.device)
    inner = full[:, :features, :features].view(parts, channels, height, width, channels, height, width)
    blocks = blocks.view(parts, height, height, width, channels, width, channels)
    inner.copy_(blocks.permute(0, 4, 1, 3, 6, 2, 5))
    if ones:
        _fill_ones(full, strips, height, width, dtype)
    return full


def _rows_of_three(module: nn.Conv2d, x: Tensor, *, ones: bool, dtype: torch.dtype, parts: int) -> Tensor:
    """Return ``patches_gram`` for a kernel of three rows with zeros above and below, the usual case, in few
    launches."""
    left, right, above, below = conv_padding(module.padding, module.kernel_size, module.dilation)
    width = module.kernel_size[1]
    strips = conv_fused.strips(x, width, module.stride[1], module.dilation[1], (above, below, left, right), 2)
    totals = correlate.row_products(strips, 3, dtype, parts)
    borders: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if min(above, below) == 1:  # the last tap does not reach the first row, nor the first tap the last
        ends = [strips[:, row].reshape(parts, -1, strips.shape[-1]) for row in (above, -1 - below)]
        top, bottom = (factors.product(rows, rows, dtype) for rows in ends)
        borders = (top if above == 1 else torch.zeros_like(top), bottom if below == 1 else torch.zeros_like(bottom))
    full = conv_fused.assemble(totals, borders, x.shape[1], int(ones))
    if ones:
        _fill_ones(full, strips, 3, width, dtype)
    return full


def _fill_ones(full: Tensor, strips: Tensor, height: int, width: int, dtype: torch.dtype) -> None:
    """Fill the row and column of the constant feature 1, in place."""
    parts = len(full)
    total = correlate.patch_sum(strips, height, dtype, parts).view(parts, height, width, -1)
    total = total.permute(0, 3, 1, 2).reshape(parts, -1)
    full[:, :-1, -1] = total
    full[:, -1, :-1] = total
    full[:, -1, -1] = strips.shape[0] // parts * (strips.shape[1] - height + 1) * strips.shape[2]


def patches(module: Conv, x: Tensor, *, groups: int, aligned: bool = False) -> Tensor:
    """Return ``[N, S, groups, taps * channels / groups]``: the channels of one tap are adjacent, as in memory.

    Gathering them in the weight's order, channel by channel, takes several times as long. ``aligned``: pad the features
    with zeros to the multiple for which tensor cores are fast.
    """
    windows = _windows(module, x, groups)
    num_spatial = len(module.kernel_size)
    if groups > 1:
        windows = windows.movedim(-2, 1 + num_spatial)
        return windows.reshape(windows.shape[0], math.prod(windows.shape[1 : 1 + num_spatial]), groups, -1)
    features = math.prod(windows.shape[1 + num_spatial :])
    shape = windows.shape[: 1 + num_spatial]
    if not aligned or features % factors.COLUMN_ALIGNMENT == 0:
        return windows.reshape(shape[0], math.prod(shape[1:]), 1, features)
    wide = x.new_zeros(*shape, features + -features % factors.COLUMN_ALIGNMENT)
    wide[..., :features].view(windows.shape).copy_(windows)
    return wide.view(shape[0], math.prod(shape[1:]), 1, -1)


def _windows(module: Conv, x: Tensor, groups: int, *, first: int = 0) -> Tensor:
    """Return a view ``[N, *positions, *taps, groups, channels]`` of the padded input.

    ``first``: the first spatial dimension that is unfolded into taps; the ones before are left as they are.
    """
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    amounts = conv_padding(module.padding, module.kernel_size, module.dilation)
    if any(amounts):
        x = F.pad(x, amounts, mode=mode)
    x = x.movedim(1, -1).contiguous()
    spatial, channels = x.shape[1:-1], x.shape[-1]
    shape, steps = [x.shape[0], *spatial[:first]], list(x.stride()[: 1 + first])
    kernel = list(zip(module.kernel_size, module.stride, module.dilation, strict=True))[first:]
    for i, (size, stride, dilation) in enumerate(kernel, start=first):
        shape.append((spatial[i] - (size - 1) * dilation - 1) // stride + 1)
        steps.append(x.stride(1 + i) * stride)
    for i, (size, _, dilation) in enumerate(kernel, start=first):
        shape.append(size)
        steps.append(x.stride(1 + i) * dilation)
    shape += [groups, channels // groups]
    steps += [channels // groups, 1]
    return x.as_strided(shape, steps)


def conv_padding(padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the padding in the order of ``F.pad``: last dimension first, left then right."""
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
