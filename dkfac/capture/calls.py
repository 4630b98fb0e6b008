"""Sum the outer products of calls of plain layers: linear layers and convolutions.

Input: the input and output gradient of one call, or of several calls of one kind, concatenated. Output: their sums for
A and G. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from dkfac.capture.outer_products import gradient_sum, in_pieces, input_sum
from dkfac.capture.statistics import LayerSums
from dkfac.config.settings import Settings
from dkfac.layers.conv import strip_taps
from dkfac.layers.layer import Layer
from dkfac.layers.rows import rows_of
from dkfac.ops.factors import gram, gram_of_rows
from dkfac.ops.precision import tf32
from dkfac.plan.spec import FactorSpec


@dataclass(frozen=True, slots=True)
class Form:
    """Properties of a layer that decide how its calls are summed."""

    number: int | None
    """Equal for layers that differ only in their name and weights; None for kinds that are not plain."""
    copies: int
    """Number of copies of the input that are materialized to sum the products of its patches."""
    is_pointwise: bool
    """Whether the rows of A are the rows of the input, without patches."""
    num_elements: int
    """Number of elements of all its factors."""
    inputs: tuple[FactorSpec, ...]
    outputs: tuple[FactorSpec, ...]
    num_dims: int = 0
    """Number of dimensions of a convolution's input; 0 for other layers."""


def form_of(layer: Layer) -> Form:
    module: Any = layer.module
    traits: tuple[Any, ...] = (layer.kind, layer.spec.factors, layer.has_bias)
    num_elements = sum(factor.num_elements for factor in layer.spec.factors)
    inputs, outputs = (layer.spec.side(key) for key in ("A", "G"))
    if layer.kind != "conv":
        is_known = layer.kind in ("linear", "conv1d-transposed")
        return Form(hash(traits) if is_known else None, 1, is_known, num_elements, inputs, outputs)
    geometry = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    is_pointwise = set(module.kernel_size) == set(module.stride) == {1} and module.groups == 1
    is_pointwise &= not isinstance(module.padding, str) and set(module.padding) == {0}
    number, num_dims = hash((traits, geometry)), 2 + len(module.kernel_size)
    return Form(number, strip_taps(module), is_pointwise, num_elements, inputs, outputs, num_dims)


class Route(Enum):
    """How a call is processed."""

    REFUSED = auto()
    """Not deferrable: the collector sums it instead."""
    ALONE = auto()
    """Summed immediately, by itself."""
    WAITING = auto()
    """Deferred, and summed together with others."""


@dataclass(frozen=True, slots=True)
class CallKind:
    """Calls of one kind can be summed in one batch if their ``weight`` is equal too."""

    number: int
    layer: Layer
    """One of the layers that are called this way."""
    form: Form
    examples: int
    route: Route
    most: int
    """Maximum number of calls summed in one batch."""
    rows: float
    """Number of rows of a call: output positions of a convolution, input positions of other layers."""
    num_bytes: int
    """Size of input and output gradient."""
    factor_bytes: int
    source: tuple[Any, ...] | None
    """What A depends on besides the input, if layers with the same input may share its sum; otherwise None."""


@dataclass(slots=True)
class Call:
    kind: CallKind
    name: str
    sums: LayerSums
    x: Tensor
    g: Tensor
    weight: float
    """Multiplies the sum for G."""
    number: int = -1
    """Equal for calls with the same input tensor; -1: unknown."""
    x_version: int = -1
    """Version counters of input and gradient when the call was recorded."""
    g_version: int = -1

    @property
    def is_intact(self) -> bool:
        """Whether neither tensor was modified in place since the call was recorded."""
        return self.x_version == version(self.x) and self.g_version == version(self.g)

    @property
    def source(self) -> tuple[Any, ...] | None:
        """Key of the sum for A, equal for calls that have the same sum; None if unknown."""
        return None if self.number < 0 or self.kind.source is None else (self.number, self.kind.source)


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@contextmanager
def plainly(settings: Settings, device: torch.device) -> Iterator[None]:
    """Use K-FAC's own modes for products: no grad, no autocast, its TF32 setting, whatever the surrounding pass
    uses."""
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
    inputs: list[Tensor] | None = None,
    patch_bytes: int = 2**62,
) -> list[Tensor]:
    """Return the sum for each factor of ``parts`` calls of one kind, concatenated over the calls.

    ``x`` and ``g``: inputs and output gradients, concatenated over the calls. ``weight``: multiplies the sums for G.
    ``inputs``: the sums for A if they are already known; only used for pointwise layers. ``patch_bytes``: memory limit
    for the patches of a convolution, which are formed for as many examples at a time as fit; ignored for several calls.
    """
    layer, form, examples = call.kind.layer, call.kind.form, call.kind.examples
    patch_bytes = patch_bytes if parts == 1 else 2**62  # a piece would not hold an equal share of each call
    if parts == 1 and form.is_pointwise:
        if layer.kind == "conv":
            x, g = x.movedim(1, -1), g.movedim(1, -1)
        flat_x, flat_g = (t.reshape(-1, t.shape[-1]) for t in (x, g))
        if inputs is None:
            inputs = [_gram(layer, factor, flat_x, 1.0) for factor in form.inputs]
        return inputs + [_gram(layer, factor, flat_g, weight) for factor in form.outputs]
    found: list[Tensor] = []
    for rows in rows_of(
        layer, x, g, examples=examples * parts, batch_dim=0, batch_stats=False, patch_bytes=patch_bytes
    ):
        sums = [input_sum(layer, factor, rows, None, settings, parts=parts)[0] for factor in form.inputs]
        sums += [gradient_sum(layer, factor, rows, weight, settings, parts=parts) for factor in form.outputs]
        found = sums if not found else [total.add_(more) for total, more in zip(found, sums, strict=True)]
    return found


def _gram(layer: Layer, factor: FactorSpec, rows: Tensor, scale: float) -> Tensor:
    """Return the sum for a factor of a pointwise layer from all its features ``[R, D]``."""
    if factor.dim - factor.folds_bias == rows.shape[1]:
        return gram_of_rows(rows, ones=factor.folds_bias, dtype=layer.dtype, scale=scale)
    return gram(in_pieces(layer, factor, rows[:, None, None]), ones=False, dtype=layer.dtype, scale=scale)
