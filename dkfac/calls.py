"""Calls of plain layers, and what they add to the layers' factors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dkfac.layers.conv import strip_taps
from dkfac.layers.layer import Layer
from dkfac.layers.rows import rows_of
from dkfac.ops.factors import gram_of_rows
from dkfac.ops.precision import tf32
from dkfac.settings import Settings
from dkfac.sums import gradient_sum, input_sum
from dkfac.window import Sums


@dataclass(frozen=True, slots=True)
class Form:
    number: int | None
    """The same for layers that differ in nothing but their name and weights; None for kinds that are not plain."""
    copies: int
    """Of the input, that are made to sum the products of its patches."""
    is_pointwise: bool
    """Whether its rows are its input's as they are."""
    num_elements: int
    """Of its factors."""
    num_dims: int = 0
    """Of the input of a convolution."""


def form_of(layer: Layer) -> Form:
    module: Any = layer.module
    traits: tuple[Any, ...] = (layer.kind, layer.spec.factors, layer.has_bias)
    num_elements = sum(factor.num_elements for factor in layer.spec.factors)
    if layer.kind != "conv":
        is_known = layer.kind in ("linear", "conv1d-transposed")
        return Form(hash(traits) if is_known else None, 1, is_known, num_elements)
    geometry = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    is_pointwise = set(module.kernel_size) == set(module.stride) == {1} and module.groups == 1
    is_pointwise &= not isinstance(module.padding, str) and set(module.padding) == {0}
    number, num_dims = hash((traits, geometry)), 2 + len(module.kernel_size)
    return Form(number, strip_taps(module), is_pointwise, num_elements, num_dims)


@dataclass(slots=True)
class Call:
    layer: Layer
    form: Form
    sums: Sums
    x: Tensor
    g: Tensor
    alike: tuple[Any, ...]
    """What must be equal to sum calls together; examples and weight are the last."""
    number: int = -1
    """The same for calls on the same input; -1: not known."""
    versions: tuple[int, int] = (-1, -1)
    """How often input and gradient had been changed in place."""

    @property
    def weight(self) -> float:
        """Of G."""
        weight: float = self.alike[-1]
        return weight

    @property
    def is_intact(self) -> bool:
        return self.versions == (version(self.x), version(self.g))

    @property
    def source(self) -> tuple[Any, ...] | None:
        """What A is a sum over; None if that is not known."""
        if self.number < 0 or not self.form.is_pointwise:
            return None
        return (self.number, self.layer.kind, self.layer.has_bias, self.x.shape, self.x.dtype, self.layer.dtype)

    @property
    def rows(self) -> float:
        """How many there are: positions of the output of a convolution, of the input of others."""
        x, g = self.x, self.g
        return float(x.shape[0] * math.prod(g.shape[2:]) if self.form.num_dims else x.numel() // x.shape[-1])


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@contextmanager
def plainly(settings: Settings, device: torch.device) -> Iterator[None]:
    """Multiply as K-FAC does, whatever the pass around it has set."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), tf32(settings.tf32, device):
        yield


def products(
    call: Call,
    x: Tensor,
    g: Tensor,
    parts: int,
    settings: Settings,
    *,
    weight: float,
    inputs: Tensor | None = None,
    patch_bytes: int = 2**62,
) -> tuple[Tensor, Tensor]:
    """Return the sums for A and for G of ``parts`` calls that are alike, one call's after the other's.

    ``x`` and ``g``: theirs, one after the other. ``weight``: of G. ``inputs``: the sum for A, if it is known and the
    layer is pointwise. ``patch_bytes``: a convolution's patches are formed for so many examples of one call at a time
    that they fit in this.
    """
    layer, (*_, examples, _) = call.layer, call.alike
    patch_bytes = patch_bytes if parts == 1 else 2**62  # a piece would not be so much of each call
    if parts == 1 and call.form.is_pointwise:
        if layer.kind == "conv":
            x, g = x.movedim(1, -1), g.movedim(1, -1)
        gradients = gram_of_rows(g.reshape(-1, g.shape[-1]), ones=False, dtype=layer.dtype, scale=weight)
        if inputs is None:
            inputs = gram_of_rows(x.reshape(-1, x.shape[-1]), ones=layer.has_bias, dtype=layer.dtype)
        return inputs, gradients
    found: list[Tensor] = []
    for rows in rows_of(
        layer, x, g, examples=examples * parts, batch_dim=0, batch_stats=False, patch_bytes=patch_bytes
    ):
        gradients = gradient_sum(layer, layer.spec.factor("G"), rows, weight, settings, parts=parts)
        both = [input_sum(layer, rows, None, settings, parts=parts)[0], gradients]
        found = both if not found else [total.add_(more) for total, more in zip(found, both, strict=True)]
    return found[0], found[1]
