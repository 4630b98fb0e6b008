"""A layer: a module that K-FAC preconditions, with its gradient in canonical form.

Input: a module and its spec. Output: its parameters, and canonical gradients in their shapes. Owns: nothing.

Shapes: B = blocks (groups of a convolution, channels of a norm), O = out features, I = in features, plus one where the
bias is folded in. The canonical gradient is ``[B, O, I]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dkfac.layers.conv import Conv, as_conv
from dkfac.layers.uses import PLAIN, Use
from dkfac.plan.spec import LayerSpec, cut_layer


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    module: nn.Module
    spec: LayerSpec
    has_bias: bool
    use: Use = PLAIN
    block: Layer | None = None
    """One of its blocks as a layer of its own, if each block has an input of its own."""
    name: str = field(init=False)
    kind: str = field(init=False)
    is_norm: bool = field(init=False)
    conv: Conv | None = field(init=False)
    """The convolution whose patches are the inputs; None for other layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.spec.name)
        object.__setattr__(self, "kind", self.spec.kind)
        object.__setattr__(self, "conv", as_conv(self.module))
        object.__setattr__(self, "is_norm", self.spec.kind in ("norm-unit", "norm-joint"))

    @property
    def weight(self) -> Tensor:
        weight = self.module._parameters.get(self.use.weight)
        if weight is not None:
            return weight
        made: object = self.module.weight  # parametrized: recomputed on each access
        assert isinstance(made, Tensor)
        return made

    @property
    def bias(self) -> Tensor | None:
        bias = getattr(self.module, self.use.bias) if self.has_bias and self.use.bias else None
        assert bias is None or isinstance(bias, Tensor)
        return bias

    @property
    def bias_is_live(self) -> bool:
        """Whether a bias is folded in and still requires a gradient; it may have been frozen after attach."""
        bias = self.bias
        return bias is not None and bias.requires_grad

    @property
    def leaves_bias(self) -> bool:
        """Whether A is cut, so that the bias is a piece of its own."""
        return self.has_bias and self.spec.factors[0].key == "A" and self.spec.factors[0].whole_dim > 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of factors and of all arithmetic: the parameter's, but at least float32."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def parameters(self) -> Iterator[Tensor]:
        yield self.weight
        if (bias := self.bias) is not None:
            yield bias


def cut_factors(layer: Layer, block_dim: int | None) -> Layer:
    """Return a layer of whole factors with factors in pieces of at most ``block_dim``; None: whole."""
    spec, block = layer.spec, None
    if layer.use.blocks:
        factors = tuple(replace(factor, num_blocks=1) for factor in spec.factors)
        one = replace(spec, kind="linear", factors=factors, grad_elements=spec.grad_elements // len(layer.use.blocks))
        block = Layer(layer.module, cut_layer(one, block_dim), layer.has_bias, layer.use)
    return Layer(layer.module, cut_layer(spec, block_dim), layer.has_bias, layer.use, block)


def split_grad(layer: Layer, grad: Tensor) -> list[Tensor]:
    """Return a canonical gradient split into the parameters' shapes, in the order of ``parameters()``."""
    bias = layer.bias
    if layer.is_norm:
        unit = layer.kind == "norm-unit"
        both = grad.squeeze(-1).mT if unit else grad.reshape(2 if bias is not None else 1, -1)
        weight_part, bias_part = both[0], both[-1]
    else:
        weight_part = grad if bias is None else grad[..., :-1]
        bias_part = grad[..., -1]
        if layer.kind in ("conv1d-transposed", "embedding"):
            weight_part = weight_part[0].mT
        elif layer.kind == "conv-transposed":
            weight_part = torch.unflatten(weight_part[0], -1, (-1, *layer.weight.shape[2:])).transpose(0, 1)
    parts = [weight_part.reshape(layer.weight.shape)]
    return parts if bias is None else [*parts, bias_part.reshape(bias.shape)]
