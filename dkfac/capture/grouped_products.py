"""Sum deferred calls on a GPU in a few launches, whatever their number and shapes (``ops/grouped_grams.py``).

Input: calls of plain layers, as hooks have left them. Output: their sums, added to the layers'. Owns: a plan for each
sequence of calls that has occurred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dkfac.capture.calls import Call
from dkfac.layers.conv import conv_padding
from dkfac.layers.layer import Layer
from dkfac.layers.rows import ROWS_PER_FEATURE, hashed
from dkfac.ops import grouped_grams
from dkfac.ops.grouped_grams import ConvWindow, Grams, Product, Reading
from dkfac.plan.spec import FactorSpec, is_input, whole_key

MOST_DIM = 1024
"""Factors that are wider are left to cuBLAS, which needs fewer bytes per operation."""
MOST_PLANS = 256
"""Limit on cached plans: with inputs of varying length their number is unbounded."""


class GroupedProducts:
    """Sums calls by kernels that read them where they are."""

    def __init__(self, *, tf32: bool, adapts: bool) -> None:
        """``adapts``: whether patches are read at some positions only, if these are enough."""
        self._tf32, self._adapts = tf32, adapts
        self._plans: dict[Any, tuple[Grams, list[int]]] = {}

    def sum_calls(self, calls: Sequence[Call], turn: int) -> None:
        """Add calls, for which ``rows_of_grouped`` is known, to the layers' sums. They are on one device.

        ``turn``: decides which positions are read, where not all are.
        """
        tensors, key = list[Tensor](), list[Any]()
        known: dict[Any, int] = {}
        for call in calls:
            same = []
            for t in (t for pair in call.pairs() for t in pair):
                address = t.data_ptr()
                layout = t.dtype, t.shape, t.stride(), address % 16
                same.append((known.setdefault((address, *layout), len(tensors)), layout))
                tensors.append(t)
            key.append((call.kind.number, *same))
        name = calls[0].x.device, *key
        if name not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            firsts = [first for _, *same in key for first, _ in same]
            self._plans[name] = _planned(calls, firsts, tf32=self._tf32, adapts=self._adapts)
        grams, sizes = self._plans[name]
        scales = [1.0, *[scale for call in calls for scale in (*call.weights, *_ratios(call)[1:])]]
        parts = iter(torch.split(grams.run(tensors, scales, hashed(turn)), sizes))
        for call in calls:
            for factor in call.kind.layer.spec.factors:
                call.sums.add(factor.key, next(parts).view(factor.shape))
            call.sums.rows = call.sums.rows + call.kind.rows


def _planned(calls: Sequence[Call], same: list[int], *, tf32: bool, adapts: bool) -> tuple[Grams, list[int]]:
    """Return the plan for calls like these, and the sizes of the results of each call's factors. ``same``: for each
    tensor, the first one that is the same. Inputs that are the same are multiplied once."""
    begins: dict[Product, list[int]] = {}
    sizes, end, tensor, scale = list[int](), 0, 0, 1
    for call in calls:
        pairs, ratios, layer = call.pairs(), _ratios(call), call.kind.layer
        for factor in layer.spec.factors:
            each = factor.num_elements // len(pairs)
            for j, (x, g) in enumerate(pairs):
                is_own = is_input(factor.key)
                product = product_of(layer.block or layer, factor.key, x if is_own else g, g, adapts=adapts)
                assert product is not None
                by = scale + j if not is_own else 0 if ratios[j] == 1 else scale + len(pairs) + j - 1
                product = replace(product, tensor=same[tensor + 2 * j + (not is_own)], scale=by)
                begins.setdefault(product, []).append(end + j * each)
            sizes.append(factor.num_elements)
            end += factor.num_elements
        tensor, scale = tensor + 2 * len(pairs), scale + 2 * len(pairs) - 1
    products = [replace(product, begins=tuple(places)) for product, places in begins.items()]
    return Grams(products, end, calls[0].x.device, tf32=tf32), sizes


def _ratios(call: Call) -> list[float]:
    """Return the factors of each block's sum over inputs: they are divided by the number of rows of the first."""
    if not call.more:
        return [1.0]
    rows = [x.numel() // x.shape[-1] for x, _ in call.pairs()]
    return [rows[0] / number for number in rows]


def rows_of_grouped(layer: Layer, x: Tensor, g: Tensor, *, adapts: bool) -> int | None:
    """Return the number of rows in a call's sum for A; None if kernels cannot sum calls of a layer with tensors like
    these."""
    if layer.dtype is not torch.float32 or not grouped_grams.can_read(x, g):
        return None
    one = layer.block or layer
    if one.spec.widest > MOST_DIM:
        return None
    found = [product_of(one, f.key, x if is_input(f.key) else g, g, adapts=adapts) for f in one.spec.factors]
    first = found[0]
    return None if first is None or None in found else first.reading.images * first.reading.positions


def product_of(layer: Layer, key: str, t: Tensor, g: Tensor, *, adapts: bool) -> Product | None:
    """Return the product for a factor of a call; ``t``: the input or the gradient, as the factor wants it. None if its
    layout is not supported."""
    factor = layer.spec.factor(key)
    reading = _read(layer, factor, t, g, adapts=adapts)
    if reading is None:
        return None
    module: Any = layer.module
    is_conv, is_own = layer.conv is layer.module, is_input(key)
    unit = reading.taps if is_own else 1
    inside, first = factor.dim - factor.folds_bias, layer.spec.first_feature(key)
    if inside % unit or first % unit:
        return None
    groups = module.groups if is_conv else 1
    channels = inside // unit
    total = t.shape[1 if is_conv else -1] // groups
    first //= unit
    return Product(
        0, 0, reading, t.dtype, factor.num_blocks, channels, bool(factor.folds_bias), (), first,
        factor.num_blocks // groups, total, grouped_grams.is_aligned(t, reading, channels, first, total),
    )  # fmt: skip


def _read(layer: Layer, factor: FactorSpec, t: Tensor, g: Tensor, *, adapts: bool) -> Reading | None:
    if layer.conv is not layer.module:
        return grouped_grams.read_rows(t)
    module: Any = layer.module
    if t.ndim == 3 and g.ndim == 3:  # one-dimensional: an image of one line
        t, g = t.unsqueeze(2), g.unsqueeze(2)
    if t.ndim != 4 or whole_key(factor.key) == "G":
        return None if t.ndim != 4 else grouped_grams.read_images(t)
    left, _, above, _ = (*conv_padding(module.padding, module.kernel_size, module.dilation), 0, 0)[:4]
    one = (1,) * (2 - len(module.kernel_size))
    kernel, stride, dilation = (
        (*one, *(int(n) for n in sizes)) for sizes in (module.kernel_size, module.stride, module.dilation)
    )
    padding = (above, left)
    if module.padding_mode != "zeros" and any(padding):
        return None
    if math.prod(kernel) == math.prod(stride) == 1 and not any(padding):
        return grouped_grams.read_images(t)
    outputs = (g.shape[2], g.shape[3])
    every = _every(t.shape[0], outputs, factor.dim) if adapts else (1, 1)
    window = ConvWindow(_two(kernel), _two(stride), _two(padding), _two(dilation), outputs, every)
    return grouped_grams.read_images(t, window)


def _every(images: int, outputs: tuple[int, int], features: int) -> tuple[int, int]:
    """Return a lattice of positions on which patches, which overlap, are read: every one, second or fourth row and
    column, as long as enough remain."""
    every = [1, 1]
    for side in (0, 1, 0, 1):
        rows = images * (outputs[0] // every[0]) * (outputs[1] // every[1])
        if rows >= 2 * ROWS_PER_FEATURE * features and outputs[side] >= 8 * every[side]:
            every[side] *= 2
    return every[0], every[1]


def _two(numbers: Sequence[int]) -> tuple[int, int]:
    first, second = numbers
    return first, second
