"""Convert the input and output gradient of a module to canonical rows ``[N, S, B, features]``.

Input: the tensors of one call. Output: :class:`Rows`. Owns: nothing.

N = examples, S = shared positions (pixels, tokens), B = blocks. All kinds are in one file, because they differ in a few
lines each and share the regrouping by example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dkfac.layers.conv import spread_input, strip_taps
from dkfac.layers.layer import Layer
from dkfac.layers.norm import normalised

ROWS_PER_FEATURE, ENOUGH_EXAMPLES, MOST_EVERY = 32, 16, 8
"""``statistics_fraction=None``: a call keeps at least so many rows for each feature of the widest factor and, if whole
examples are kept, so many examples; and at least one in so many of either."""

PATCH_BYTES = 256 * 2**20
"""Memory limit for convolution patches: they are formed for as many examples at a time as fit."""


@dataclass(frozen=True, slots=True)
class Rows:
    a: Tensor | None
    """``[N, S, B, I]``, no bias column; token indices ``[N, S]`` of embeddings; None for norm layers, convolutions."""
    g: Tensor
    """``[N, S, B, O]``, as computed by autograd: not scaled."""
    examples: int
    """Number of the model's examples that these rows come from; may differ from N until regrouped."""
    valid: Tensor | None = None
    """``[N, S]`` in {0, 1}: rows that contribute to the parameters (an embedding's padding row does not)."""
    image: Tensor | None = None
    """Input ``[N, C, ...]`` of a convolution."""
    picked: Picked | None = None
    """Which part of a layer's rows these are, if not all."""
    ratio: float = 1.0
    """Number of rows of the layer per measured row."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A subset (``here``) of the rows ``[N, S]`` (``shape``) of a call with ``examples`` examples."""

    shape: tuple[int, int]
    examples: int
    here: tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class Sample:
    """Which rows a step measures: one in ``every``, a different one at each ``turn``."""

    every: int = 1
    turn: int = 0
    by_example: bool = False
    """Whether all positions of an example must stay together."""
    adapts: bool = False
    """Whether ``every`` depends on the number of rows of a call."""

    def of_call(self, layer: Layer, rows: int, examples: int) -> Sample:
        """Return the sample of a call: one in 2, 4 or 8, as long as enough rows remain and, where whole examples are
        kept, enough examples: rows of one example are alike."""
        if not self.adapts:
            return self
        every, enough = 1, ROWS_PER_FEATURE * layer.spec.widest
        limited = self.by_example or layer.conv is not None
        while every < MOST_EVERY and rows >= 2 * every * enough:
            if limited and examples < 2 * every * ENOUGH_EXAMPLES:
                break
            every *= 2
        return replace(self, every=every, adapts=False)

    @property
    def offset(self) -> int:
        """Return which of ``every`` rows is sampled."""
        return hashed(self.turn) % self.every


def hashed(turn: int) -> int:
    """Return ``turn`` hashed: the interval of measured steps may have a common divisor with that of sampled rows."""
    return turn * 2654435761 >> 8


ALL = Sample()


def rows_of(
    layer: Layer,
    x: Tensor,
    g: Tensor,
    *,
    examples: int,
    batch_dim: int,
    batch_stats: bool,
    sample: Sample = ALL,
    patch_bytes: int = PATCH_BYTES,
) -> Iterator[Rows]:
    """Yield the rows of one call of a layer; for a convolution, one piece of the batch at a time: see
    ``PATCH_BYTES``."""
    match layer.kind:
        case "linear" | "linear-map" | "conv1d-transposed":
            a, g = (_sequence(t, examples, batch_dim).unsqueeze(2) for t in (x, g))
            yield _sampled(layer, Rows(a, g, examples), sample)
        case "conv":
            yield from _conv_rows(layer, x, g, examples, sample, patch_bytes)
        case "conv-transposed":
            yield from _conv_rows(layer, *spread_input(layer.module, x, g), examples, sample, patch_bytes)
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


def _sampled(layer: Layer, rows: Rows, sample: Sample) -> Rows:
    """Return one in ``every`` positions, or examples. A layer that sees each example once keeps them all."""
    assert rows.a is not None
    n, s = rows.a.shape[:2]
    sample = sample.of_call(layer, n * s, rows.examples)
    every, examples = sample.every, rows.examples
    if every == 1 or n * s <= max(examples, 1):
        return rows
    if sample.by_example:
        if examples <= 0 or n % examples:
            return rows
        first, last = block_of(examples, sample)
        here, there = slice(first * (n // examples), last * (n // examples)), slice(None)
        examples = last - first
    elif s > 1:
        here, there = slice(None), slice(sample.offset % s, None, every)
    else:
        here, there = slice(sample.offset % n, None, every), slice(None)
    a, g = rows.a[here, there], rows.g[here, there]
    picked = Picked((n, s), rows.examples, (here, there))
    return Rows(a, g, examples, picked=picked, ratio=n * s / (a.shape[0] * a.shape[1]))


def first_rows(rows: Rows, number: int, examples: int) -> Rows:
    """Return the first ``number`` rows along N, which come from ``examples`` examples."""
    shape = (rows.g.shape[0], rows.g.shape[1])
    picked = rows.picked or Picked(shape, rows.examples, (slice(None), slice(None)))
    here = range(picked.shape[0])[picked.here[0]][:number]
    a, valid, image = (None if t is None else t[:number] for t in (rows.a, rows.valid, rows.image))
    picked = replace(picked, here=(slice(here.start, here.stop, here.step), picked.here[1]))
    return Rows(a, rows.g[:number], examples, valid, image, picked, rows.ratio)


def block_of(examples: int, sample: Sample) -> tuple[int, int]:
    """Return begin and end of the sampled examples, which are contiguous."""
    size = -(-examples // sample.every)
    gaps = sample.every - 1
    begin = (2 * sample.offset * (examples - size) + gaps) // (2 * gaps) if gaps else 0  # evenly spaced over the batch
    return begin, begin + size


def regroup(rows: Tensor, examples: int, name: str) -> Tensor:
    """Return rows ``[n, s, ...]`` as ``[examples, n * s / examples, ...]``: a layer may see examples folded into a
    leading dimension of its own (windows, frames, tokens)."""
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
    """Reshape ``[..., features]`` to ``[n, s, features]`` with the examples first."""
    if x.ndim == 1:
        return x.reshape(1, 1, -1)
    if 0 < batch_dim < x.ndim - 1 and x.shape[batch_dim] == examples:
        x = x.movedim(batch_dim, 0)
    elif x.ndim > 2 and x.shape[1] == examples and x.shape[0] % max(examples, 1):
        x = x.movedim(1, 0)  # a sequence-first layer inside a batch-first model
    elif batch_dim == 1 and examples > 0 and x.shape[0] != examples and x.shape[0] % examples == 0:
        x = x.reshape(-1, examples, *x.shape[1:]).movedim(1, 0)  # flattened with the examples as the inner dimension
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _conv_rows(layer: Layer, x: Tensor, g: Tensor, examples: int, sample: Sample, room: int) -> Iterator[Rows]:
    module = layer.conv
    assert module is not None
    num_spatial = len(module.kernel_size)
    if x.ndim == num_spatial + 1:
        x, g = x.unsqueeze(0), g.unsqueeze(0)
    positions = math.prod(g.shape[2:])
    # A layer may see several images per example (frames); a piece never ends inside an example.
    images = x.shape[0] // examples if examples > 0 and x.shape[0] % examples == 0 else x.shape[0]
    num_images, num_examples, begin, end = x.shape[0], examples, 0, x.shape[0]
    sample = sample.of_call(layer, positions * x.shape[0], examples)
    if sample.every > 1 and images < x.shape[0] and positions * images > 1:
        begin, end = (edge * images for edge in block_of(examples, sample))
        x, g, examples = x[begin:end], g[begin:end], (end - begin) // images
    bytes_per_image = max(1, positions * module.in_channels * strip_taps(module) * x.element_size())
    step = max(1, room // (bytes_per_image * images)) * images
    for start in range(0, x.shape[0], step):
        piece = g[start : start + step]
        grad = piece.reshape(piece.shape[0], module.groups, -1, positions).permute(0, 3, 1, 2)
        count = examples if images == x.shape[0] else piece.shape[0] // images
        there = slice(begin + start, begin + start + piece.shape[0])
        picked = Picked((num_images, positions), num_examples, (there, slice(None)))
        yield Rows(None, grad, count, image=x[start : start + step], picked=picked, ratio=num_images / (end - begin))


def _norm_rows(layer: Layer, x: Tensor, g: Tensor, examples: int, batch_dim: int, batch_stats: bool) -> Rows:
    """Return a norm layer's rows: its per-example gradients ``[N, 1, B, p]``, already summed over positions."""
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
