"""Calls of plain layers, and what they add to the layers' factors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
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


class Route(Enum):
    """What is done with a call."""

    REFUSED = auto()
    """It cannot wait, and is summed by others."""
    ALONE = auto()
    """Summed at once."""
    WAITING = auto()
    """Summed with others."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that can be summed together if their weights are the same too."""

    number: int
    layer: Layer
    """One that is called so."""
    form: Form
    examples: int
    route: Route
    most: int
    """So many of them at a time."""
    rows: float
    """In a call: positions of the output of a convolution, of the input of others."""
    num_bytes: int
    """Of input and gradient."""
    factor_bytes: int
    blocks: int
    """Of a factor."""
    source: tuple[Any, ...] | None
    """What A depends on besides the input, if its sum may be that of other layers too."""


@dataclass(slots=True)
class Call:
    kind: Kind
    name: str
    sums: Sums
    x: Tensor
    g: Tensor
    weight: float
    """Of G."""
    number: int = -1
    """The same for calls on the same input; -1: not known."""
    x_version: int = -1
    """How often the input, and the gradient, had been changed in place."""
    g_version: int = -1

    @property
    def is_intact(self) -> bool:
        return self.x_version == version(self.x) and self.g_version == version(self.g)

    @property
    def source(self) -> tuple[Any, ...] | None:
        """What A is a sum over; None if that is not known."""
        return None if self.number < 0 or self.kind.source is None else (self.number, self.kind.source)


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
    layer, examples = call.kind.layer, call.kind.examples
    patch_bytes = patch_bytes if parts == 1 else 2**62  # a piece would not be so much of each call
    if parts == 1 and call.kind.form.is_pointwise:
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
        both = [input_sum(layer, layer.spec.factors[0], rows, None, settings, parts=parts)[0], gradients]
        found = both if not found else [total.add_(more) for total, more in zip(found, both, strict=True)]
    return found[0], found[1]
