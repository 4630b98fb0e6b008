"""Find the modules that K-FAC preconditions, and say why it leaves the others to the optimizer.

Input: a model and settings. Output: a :class:`Layer` or a :class:`Left` per module with parameters. Owns: nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.plan.spec import FactorSpec, LayerSpec, cut_layer

KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
    nn.Embedding: "embedding",
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

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Left:
    """Parameters that are left to the optimizer."""

    name: str
    what: str
    num_parameters: int
    reason: str
    warn: bool = False


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP and torch.compile."""
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "nn.DataParallel copies the model in every forward, so no statistics reach K-FAC; "
            "use torch.nn.parallel.DistributedDataParallel"
        )
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            inner = model._orig_mod
            assert isinstance(inner, nn.Module)
            model = inner
        else:
            return model


def clean_name(name: str) -> str:
    """Return a module's name without the components that wrappers add."""
    return _WRAPPERS.sub("", name).lstrip(".")


def kind_of(module: nn.Module) -> str | None:
    """Return the layer kind of a module; None if it is unknown, or a subclass that overrides ``forward``."""
    cls = type(module)
    foreign = FOREIGN_KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
    if foreign is not None:
        return foreign
    for base, kind in KINDS.items():
        if isinstance(module, base) and cls.forward is base.forward and "forward" not in vars(module):
            return kind
    return None


def is_frozen(module: nn.Module) -> bool:
    """Return whether K-FAC supports a module but its weight does not require a gradient."""
    weight = module._parameters.get("weight")
    return kind_of(module) is not None and weight is not None and not weight.requires_grad


def find_layers(
    model: nn.Module, settings: Settings, trained: Iterable[Tensor] | None, *, meta: bool = False
) -> tuple[list[Layer], list[Left]]:
    """Return the layers to precondition and everything left to the optimizer, in the model's order.

    ``trained``: the optimizer's parameters; None: all that require grad. ``meta``: allow the meta device, to plan.
    """
    _refuse_sharded(model)
    if not meta and any(p.is_meta for p in model.parameters()):
        raise RuntimeError("the model is on the meta device: materialise it before attaching K-FAC")
    allowed = None if trained is None else {id(p) for p in trained}
    users = _users(model)
    matched: set[str] = set()
    layers: list[Layer] = []
    left: list[Left] = []
    channels = 0
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for raw_name, module in model.named_modules():
        before, channels = channels, _channels_after(module, channels)
        own = [p for p in module.parameters(recurse=False) if not isinstance(p, nn.UninitializedParameter)]
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise RuntimeError(
                f"layer {raw_name!r} is lazy and has no shape yet: run one forward before attaching K-FAC"
            )
        if not own:
            continue
        name = clean_name(raw_name) or type(module).__name__
        pattern = next((p for p in settings.skip if fnmatchcase(name, p)), None)
        matched.update(p for p in settings.skip if fnmatchcase(name, p))
        reason = f"skip={pattern!r}" if pattern is not None else _reason(module, parents.get(id(module)), allowed)
        layer: Layer | None = None
        if reason is None:
            layer = _build(name, module, settings, allowed, before)
            reason = _form_reason(layer, settings)
        tied = [] if reason else _shared_with(module, name, users, settings)
        if tied:
            reason = f"shares its weight with {', '.join(repr(other) for other in tied)}"
        if reason is None and layer is not None:
            layers.append(Layer(module, cut_layer(layer.spec, settings.block_dim), layer.has_bias))
            bias = module._parameters.get("bias")
            if bias is not None and not layer.has_bias:
                why = "not in the optimizer" if bias.requires_grad else "frozen"
                left.append(_left(name + ".bias", module, [bias], why))
        else:
            assert reason is not None
            left.append(_left(name, module, own, reason, warn=bool(tied)))
    maps = list(settings.experimental.flattened or ())
    strangers = [n for n in maps if all(n != layer.name or layer.kind != "linear-map" for layer in layers)]
    if strangers:
        raise ValueError(
            f"flattened={strangers!r}: the model has no Linear layer of that name that K-FAC preconditions"
        )
    missing = [p for p in settings.skip if p not in matched]
    if missing:
        names = ", ".join(layer.name for layer in layers[:8])
        raise ValueError(f"skip={missing!r} matches no layer with parameters; the model has {names}, ...")
    return layers, left


def _reason(module: nn.Module, parent: nn.Module | None, allowed: set[int] | None) -> str | None:
    """Return why a module cannot be preconditioned, regardless of its size; None if it can."""
    kind = kind_of(module)
    if kind is None:
        base = next((b.__name__ for b in KINDS if isinstance(module, b)), None)
        what = type(module).__name__
        return f"{what} overrides {base}.forward" if base else f"no K-FAC rule for {what}"
    if parametrize.is_parametrized(module) or not isinstance(module._parameters.get("weight"), nn.Parameter):
        if not module._parameters:
            return "has no parameters"
        return "its weight is computed (parametrization or weight norm), not a parameter"
    weight = module._parameters["weight"]
    assert weight is not None
    if isinstance(module, nn.SyncBatchNorm):
        return "it normalises with the statistics of all ranks"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention applies it without calling it"
    if not weight.requires_grad:
        return "frozen"
    if not weight.is_floating_point():
        return f"{weight.dtype} weight"
    if weight.numel() == 0:
        return "empty weight"
    if allowed is not None and id(weight) not in allowed:
        return "not in the optimizer"
    if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq):
        return "sparse gradient" if module.sparse else "scale_grad_by_freq changes its gradient"
    return None


def _build(name: str, module: nn.Module, settings: Settings, allowed: set[int] | None, channels: int) -> Layer:
    bias = module._parameters.get("bias")
    has_bias = bias is not None and bias.requires_grad and (allowed is None or id(bias) in allowed)
    kind, factors = _factors(module, has_bias, settings)
    if kind == "linear":
        channels = _map_channels(name, factors[0].dim, module, settings, channels)
        if channels:
            positions = (factors[0].dim - has_bias) // channels
            kind, factors = "linear-map", (FactorSpec("A_C", channels), FactorSpec("A_S", positions), factors[1])
    weight = module._parameters["weight"]
    assert weight is not None
    elements = weight.numel() + (bias.numel() if has_bias and bias is not None else 0)
    dtype = str(torch.promote_types(weight.dtype, torch.float32)).removeprefix("torch.")
    spec = LayerSpec(name, kind, factors, elements, dtype)
    return Layer(module, spec, has_bias)


def _channels_after(module: nn.Module, channels: int) -> int:
    """Return the number of channels of a module's output, as far as its type tells; 0 if it is not a feature map."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.num_features
    no_map = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.RNNBase)
    return 0 if isinstance(module, no_map) else channels


def _map_channels(name: str, dim: int, module: Any, settings: Settings, channels: int) -> int:
    """Return the channels of the map that is a Linear layer's flattened input; 0 if A is not factored by them."""
    wanted = settings.experimental.flattened
    if settings.uses_inverses or wanted is None:
        if settings.flattened != "auto" or dim <= settings.max_dim or settings.uses_inverses or channels < 2:
            return 0
        return channels if module.in_features % channels == 0 and module.in_features > channels else 0
    found = wanted.get(name, 0)
    if found and module.in_features % found:
        what = f"the layer's {module.in_features} inputs are not a map of {found} channels"
        raise ValueError(f"flattened={{{name!r}: {found}}}: {what}")
    return found


def _factors(module: nn.Module, has_bias: bool, settings: Settings) -> tuple[str, tuple[FactorSpec, ...]]:
    kind = kind_of(module)
    weight = module._parameters["weight"]
    assert weight is not None
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
    groups = module.groups if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else 1
    return kind, (
        FactorSpec("A", math.prod(shape[1:]) + has_bias, groups, unit=math.prod(shape[2:]), folds_bias=has_bias),
        FactorSpec("G", shape[0] // groups, groups),
    )


def _form_reason(layer: Layer, settings: Settings) -> str | None:
    if layer.is_norm and settings.norm_form == "off" and settings.experimental.norm_form is None:
        return 'norm layer (norm_form="off")'
    for factor in layer.spec.factors:
        if factor.form == "dense" and factor.dim > settings.max_dim:
            return f"{factor.key} of dim {factor.dim} > max_dim={settings.max_dim}"
    return None


def _users(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return, for every parameter, the modules that own it."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((clean_name(name), module))
    return users


def _shared_with(
    module: nn.Module, name: str, users: dict[int, list[tuple[str, nn.Module]]], settings: Settings
) -> list[str]:
    """Return the names of other modules that own one of this module's parameters and were not excluded by the user."""
    others: list[str] = []
    for parameter in module.parameters(recurse=False):
        for other, owner in users[id(parameter)]:
            excluded = any(fnmatchcase(other, pattern) for pattern in settings.skip)
            if owner is not module and other not in others and not excluded:
                others.append(other)
    return others


def _left(name: str, module: nn.Module, own: list[Tensor], reason: str, warn: bool = False) -> Left:
    return Left(name, type(module).__name__, sum(p.numel() for p in own), reason, warn)


def _refuse_sharded(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise RuntimeError(
                f"parameter {name!r} is a DTensor (FSDP2 or tensor parallelism): dkfac does not precondition "
                f"sharded parameters yet; use DistributedDataParallel, or attach K-FAC to an unsharded model"
            )
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise RuntimeError(
                f"module {name!r} is wrapped by FSDP, which flattens its parameters: K-FAC cannot find layers "
                f"in them; use DistributedDataParallel"
            )
