"""The kinds of layers: which modules are of which kind, and the factors of each.

Input: a module and settings. Output: a :class:`Layer`. Owns: nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.layers.uses import Use, applies_its_weight, is_own_linear, own_class
from dkfac.plan.spec import FactorSpec, LayerSpec

KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
    nn.ConvTranspose1d: "conv-transposed",
    nn.ConvTranspose2d: "conv-transposed",
    nn.ConvTranspose3d: "conv-transposed",
    nn.Embedding: "embedding",
    nn.MultiheadAttention: "attention",
    nn.BatchNorm1d: "norm",
    nn.BatchNorm2d: "norm",
    nn.BatchNorm3d: "norm",
    nn.SyncBatchNorm: "norm",
    nn.LayerNorm: "norm",
    nn.GroupNorm: "norm",
    nn.RMSNorm: "norm",
}
FOREIGN_KINDS = {"transformers.pytorch_utils.Conv1D": "conv1d-transposed"}
"""Classes of packages that are not imported here, by qualified name."""


def kind_of(module: nn.Module) -> str | None:
    """Return the layer kind of a module; None if it is unknown, or a subclass whose ``forward`` is not understood."""
    cls = own_class(module)
    foreign = FOREIGN_KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
    if foreign is not None:
        return foreign
    for base, kind in KINDS.items():
        is_known = cls.forward is base.forward or applies_its_weight(module)
        if isinstance(module, base) and "forward" not in vars(module) and is_known:
            return kind
    return "linear" if "forward" not in vars(module) and is_own_linear(module) else None


def build_layer(
    name: str, module: nn.Module, use: Use, settings: Settings, allowed: set[int] | None, channels: int
) -> Layer:
    """Return a module's layer, with whole factors. ``allowed``: the ids of the optimizer's parameters; None: all.
    ``channels``: of the map that the module may see flattened; 0: none."""
    weight, bias = module._parameters[use.weight], None if use.bias is None else module._parameters.get(use.bias)
    assert weight is not None
    has_bias = bias is not None and bias.requires_grad and (allowed is None or id(bias) in allowed)
    kind, factors = _factors(module, weight, use, has_bias, settings)
    if kind == "linear":
        channels = _map_channels(name, factors[0].dim, weight, settings, channels)
        if channels:
            positions = (factors[0].dim - has_bias) // channels
            kind, factors = "linear-map", (FactorSpec("A_C", channels), FactorSpec("A_S", positions), factors[1])
    elements = weight.numel() + (bias.numel() if has_bias and bias is not None else 0)
    dtype = str(torch.promote_types(weight.dtype, torch.float32)).removeprefix("torch.")
    spec = LayerSpec(name, kind, factors, elements, dtype)
    return Layer(module, spec, has_bias, use)


def channels_after(module: nn.Module, channels: int) -> int:
    """Return the number of channels of a module's output, as far as its type tells; 0 if it is not a feature map."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.num_features
    no_map = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.RNNBase)
    return 0 if isinstance(module, no_map) else channels


def _map_channels(name: str, dim: int, weight: Tensor, settings: Settings, channels: int) -> int:
    """Return the channels of the map that is a Linear layer's flattened input; 0 if A is not factored by them."""
    in_features = weight.shape[1]
    wanted = settings.experimental.flattened
    if settings.uses_inverses or wanted is None:
        if settings.flattened != "auto" or dim <= settings.max_dim or settings.uses_inverses or channels < 2:
            return 0
        return channels if in_features % channels == 0 and in_features > channels else 0
    found = wanted.get(name, 0)
    if found and in_features % found:
        what = f"the layer's {in_features} inputs are not a map of {found} channels"
        raise ValueError(f"flattened={{{name!r}: {found}}}: {what}")
    return found


def _factors(
    module: nn.Module, weight: Tensor, use: Use, has_bias: bool, settings: Settings
) -> tuple[str, tuple[FactorSpec, ...]]:
    kind = "linear" if use.suffix and not use.blocks else kind_of(module)
    assert kind is not None
    shape = tuple(weight.shape)
    if kind == "norm":
        channels, each = math.prod(shape), 2 if has_bias else 1
        match settings.experimental.norm_form:
            case "full":
                return "norm-joint", (FactorSpec("F", channels * each),)
            case "diagonal":
                return "norm-joint", (FactorSpec("F", channels * each, form="diagonal"),)
            case _:
                return "norm-unit", (FactorSpec("F", each, num_blocks=channels),)
    if kind == "embedding":
        return kind, (FactorSpec("A", shape[0], form="diagonal"), FactorSpec("G", shape[1]))
    if kind == "conv1d-transposed":
        return kind, (FactorSpec("A", shape[0] + has_bias, folds_bias=has_bias), FactorSpec("G", shape[1]))
    if kind == "conv-transposed":
        taps, dim = math.prod(shape[2:]), shape[0] * math.prod(shape[2:]) + has_bias
        return kind, (FactorSpec("A", dim, unit=taps, folds_bias=has_bias), FactorSpec("G", shape[1]))
    groups = module.groups if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else max(1, len(use.blocks))
    return kind, (
        FactorSpec("A", math.prod(shape[1:]) + has_bias, groups, unit=math.prod(shape[2:]), folds_bias=has_bias),
        FactorSpec("G", shape[0] // groups, groups),
    )


def form_reason(layer: Layer, settings: Settings) -> str | None:
    """Return why a layer is left to the optimizer although its kind is known; None if it is not."""
    if layer.is_norm and settings.norm_form == "off" and settings.experimental.norm_form is None:
        return 'norm layer (norm_form="off")'
    for factor in layer.spec.factors:
        if factor.form == "dense" and factor.dim > settings.max_dim:
            return f"{factor.key} of dim {factor.dim} > max_dim={settings.max_dim}"
    return None
