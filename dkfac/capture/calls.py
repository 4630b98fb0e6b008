"""Sum the outer products of calls of plain layers: linear layers and convolutions.

Input: the input and output gradient of one call, or of several calls of one kind, concatenated. Output: their sums for
A and G. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    inputs: tuple[FactorSpec, ...]
    outputs: tuple[FactorSpec, ...]
    num_dims: int = 0
    """Number of dimensions of a convolution's input; 0 for other layers."""
    is_depthwise: bool = False
    """Whether each channel has patches of its own. Kernels read them faster where pixels are adjacent, not channels."""


def form_of(layer: Layer) -> Form:
    module: Any = layer.module
    traits: tuple[Any, ...] = (layer.kind, layer.spec.factors, layer.has_bias)
    inputs, outputs = (layer.spec.side(key) for key in ("A", "G"))
    if layer.kind != "conv":
        is_known = layer.kind in ("linear", "conv1d-transposed") or layer.block is not None
        return Form(hash(traits) if is_known else None, 1, is_known and layer.block is None, inputs, outputs)
    geometry = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    is_pointwise = set(module.kernel_size) == set(module.stride) == {1} and module.groups == 1
    is_pointwise &= not isinstance(module.padding, str) and set(module.padding) == {0}
    number, num_dims = hash((traits, geometry)), 2 + len(module.kernel_size)
    is_depthwise = module.groups == module.in_channels and math.prod(module.kernel_size) > 1
    return Form(number, strip_taps(module), is_pointwise, inputs, outputs, num_dims, is_depthwise)


Blocks = tuple[tuple[Tensor, Tensor], ...]
"""Input and output gradient of blocks of a layer."""


class Route(Enum):
    """How a call is processed."""

    REFUSED = auto()
    """Not deferrable: the collector sums it instead."""
    ALONE = auto()
    """Summed immediately, by itself."""
    WAITING = auto()
    """Deferred, and summed together with others."""
    GROUPED = auto()
    """Deferred, and summed by kernels together with calls of any kind."""


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
    more: Blocks = ()
    """Input and gradient of each further block of the layer."""
    weights: Sequence[float] = ()
    """``weight`` of each block."""
    versions: tuple[int, ...] = field(init=False)
    """Version counters of the tensors when the call was recorded."""

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def pairs(self) -> Blocks:
        """Return input and gradient of each block."""
        return ((self.x, self.g), *self.more)

    def _versions(self) -> tuple[int, ...]:
        if not self.more:
            return version(self.x), version(self.g)
        return tuple([version(t) for pair in self.pairs() for t in pair])

    @property
    def is_intact(self) -> bool:
        """Whether no tensor was modified in place since the call was recorded."""
        return self.versions == self._versions()

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
) -> list[Tensor]:
    """Return the sum for each factor of ``parts`` calls of one kind, concatenated over the calls.

    ``x`` and ``g``: inputs and output gradients, concatenated over the calls. ``weight``: multiplies the sums for G.
    ``inputs``: the sums for A if they are already known; only used for pointwise layers.
    """
    layer, form, examples = call.kind.layer, call.kind.form, call.kind.examples
    if parts == 1 and form.is_pointwise:
        if layer.kind == "conv":
            x, g = x.movedim(1, -1), g.movedim(1, -1)
        flat_x, flat_g = (t.reshape(-1, t.shape[-1]) for t in (x, g))
        if inputs is None:
            inputs = [_gram(layer, factor, flat_x, 1.0) for factor in form.inputs]
        return inputs + [_gram(layer, factor, flat_g, weight) for factor in form.outputs]
    options: dict[str, Any] = {"examples": examples * parts, "batch_dim": 0, "batch_stats": False}
    (rows,) = rows_of(layer, x, g, **options, patch_bytes=2**62)  # a piece would not hold an equal share of each call
    found = [input_sum(layer, factor, rows, None, settings, parts=parts)[0] for factor in form.inputs]
    return found + [gradient_sum(layer, factor, rows, weight, settings, parts=parts) for factor in form.outputs]


def _gram(layer: Layer, factor: FactorSpec, rows: Tensor, scale: float) -> Tensor:
    """Return the sum for a factor of a pointwise layer from all its features ``[R, D]``."""
    if factor.dim - factor.folds_bias == rows.shape[1]:
        return gram_of_rows(rows, ones=factor.folds_bias, dtype=layer.dtype, scale=scale)
    return gram(in_pieces(layer, factor, rows[:, None, None]), ones=False, dtype=layer.dtype, scale=scale)
