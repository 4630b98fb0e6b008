"""Find the modules that K-FAC preconditions, and say why it leaves the others to the optimizer.

Input: a model and settings. Output: a :class:`Layer` or a :class:`Left` per module with parameters. Owns: nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from dkfac.config.optimizer_rules import Rule, share_state
from dkfac.config.settings import Settings
from dkfac.layers import sharded, tensor_parallel
from dkfac.layers.conv import TRANSPOSED
from dkfac.layers.kinds import KINDS, build_layer, channels_after, form_reason, kind_of
from dkfac.layers.layer import Layer, cut_factors
from dkfac.layers.uses import Use, own_class, uses_of

APART = "the optimizer has other betas, momentum or eps for it than for the weight"

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
    """Return the user's own module inside DDP, torch.compile, Fabric, and a DataParallel that only passes calls on."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None) or getattr(model, "_forward_module", None)
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise TypeError(
                "nn.DataParallel copies the model in every forward, so no statistics reach K-FAC; "
                "use torch.nn.parallel.DistributedDataParallel"
            )
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """Return a module's name without the components that wrappers add."""
    return _WRAPPERS.sub("", name).lstrip(".")


def is_frozen(module: nn.Module) -> bool:
    """Return whether K-FAC supports a module but its weight does not require a gradient."""
    weight = module._parameters.get("weight")
    return kind_of(module) is not None and weight is not None and not weight.requires_grad


def find_layers(
    model: nn.Module,
    settings: Settings,
    trained: Iterable[Tensor] | None,
    rules: Mapping[int, Rule] | None = None,
    *,
    meta: bool = False,
) -> tuple[list[Layer], list[Left]]:
    """Return the layers to precondition and everything left to the optimizer, in the model's order.

    ``trained``: the optimizer's parameters; None: all that require grad. ``rules``: the optimizer's, if K-FAC takes
    its steps. ``meta``: allow the meta device, to plan.
    """
    managed = sharded.managed_parameters(model)
    tensor_parallel.check_split(model, managed)
    _refuse_fsdp1(model)
    if not meta and any(p.is_meta for p in model.parameters()):
        raise RuntimeError("the model is on the meta device: materialise it before attaching K-FAC")
    allowed = None if trained is None else {id(p) for p in trained}
    users = _users(model)
    matched: set[str] = set()
    layers: list[Layer] = []
    left: list[Left] = []
    channels = 0
    for raw_name, module in model.named_modules():
        before, channels = channels, channels_after(module, channels)
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise RuntimeError(
                f"layer {raw_name!r} is lazy and has no shape yet: run one forward before attaching K-FAC"
            )
        rest = {key: p for key, p in module._parameters.items() if p is not None}
        module_name = clean_name(raw_name) or own_class(module).__name__
        for use in uses_of(module) if rest else ():
            name = module_name + use.suffix
            own = [rest.pop(key) for key in ((use.weight, use.bias) if use.suffix else tuple(rest)) if key in rest]
            patterns = [p for p in settings.skip if fnmatchcase(name, p) or fnmatchcase(module_name, p)]
            matched.update(patterns)
            bias = None if use.bias is None else module._parameters.get(use.bias)
            reason = f"skip={patterns[0]!r}" if patterns else _reason(module, use, allowed)
            layer, is_apart = None, False
            if reason is None:
                is_apart = _is_apart(module._parameters[use.weight], bias, rules or {})
                known = allowed - {id(bias)} if is_apart and allowed is not None else allowed
                layer = build_layer(name, module, use, settings, known, before)
                reason = form_reason(layer, settings)
            tied = [] if reason else _shared_with(module, own, users, settings)
            if tied:
                reason = f"shares its weight with {', '.join(repr(other) for other in tied)}"
            if reason is None and layer is not None:
                layers.append(cut_factors(layer, settings.block_dim))
                for key, p in module._parameters.items() if not use.suffix else ():
                    if p is not None and key not in (use.weight, use.bias):
                        left.append(_left(f"{name}.{key}", module, [p], "neither weight nor bias of the layer"))
                if bias is not None and not layer.has_bias:
                    why = "not in the optimizer" if bias.requires_grad else "frozen"
                    why = APART if is_apart else why
                    left.append(_left(f"{name}.bias", module, [bias], why))
            else:
                assert reason is not None
                left.append(_left(name, module, own, reason, warn=bool(tied)))
        for key, parameter in rest.items():
            left.append(_left(f"{module_name}.{key}", module, [parameter], "one parameter of several layers"))
    maps = list(settings.experimental.flattened or ())
    strangers = [n for n in maps if all(n != layer.name or layer.spec.factors[0].key != "A_C" for layer in layers)]
    if strangers:
        raise ValueError(
            f"flattened={strangers!r}: the model has no Linear layer of that name that K-FAC preconditions"
        )
    missing = [p for p in settings.skip if p not in matched]
    if missing:
        names = ", ".join(layer.name for layer in layers[:8])
        raise ValueError(f"skip={missing!r} matches no layer with parameters; the model has {names}, ...")
    is_any = any(sharded.is_sharded(layer.weight) for layer in layers)
    return sharded.hold_shards(layers, by_fsdp=bool(managed)) if is_any else layers, left


def _reason(module: nn.Module, use: Use, allowed: set[int] | None) -> str | None:
    """Return why a layer is left to the optimizer; None if it is not."""
    kind = kind_of(module)
    if kind is None:
        base = next((b.__name__ for b in KINDS if isinstance(module, b)), None)
        what = own_class(module).__name__
        return f"{what} overrides {base}.forward" if base else f"no K-FAC rule for {what}"
    if parametrize.is_parametrized(module) or not isinstance(module._parameters.get(use.weight), nn.Parameter):
        if not module._parameters:
            return "has no parameters"
        return "its weight is computed (parametrization or weight norm), not a parameter"
    weight = module._parameters[use.weight]
    assert weight is not None
    if isinstance(module, nn.SyncBatchNorm):
        return "it normalises with the statistics of all ranks"
    if not weight.requires_grad:
        return "frozen"
    if not weight.is_floating_point():
        return f"{weight.dtype} weight"
    if weight.numel() == 0:
        return "empty weight"
    if allowed is not None and id(weight) not in allowed:
        return "not in the optimizer"
    if isinstance(module, tuple(TRANSPOSED)) and cast(Any, module).groups > 1:
        return "transposed convolution with groups"
    if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq):
        return "sparse gradient" if module.sparse else "scale_grad_by_freq changes its gradient"
    return None


def _is_apart(weight: Tensor | None, bias: Tensor | None, rules: Mapping[int, Rule]) -> bool:
    """Whether the optimizer treats a bias in a way that does not allow one state for it and its weight."""
    one, other = rules.get(id(weight)), rules.get(id(bias))
    return one is not None and other is not None and not share_state(one, other)


def _users(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return, for every parameter, the modules that own it."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((clean_name(name), module))
    return users


def _shared_with(
    module: nn.Module, own: list[Tensor], users: dict[int, list[tuple[str, nn.Module]]], settings: Settings
) -> list[str]:
    """Return the names of other modules that own one of this module's parameters and were not excluded by the user."""
    others: list[str] = []
    for parameter in own:
        for other, owner in users[id(parameter)]:
            excluded = any(fnmatchcase(other, pattern) for pattern in settings.skip)
            if owner is not module and other not in others and not excluded:
                others.append(other)
    return others


def _left(name: str, module: nn.Module, own: list[Tensor], reason: str, warn: bool = False) -> Left:
    return Left(name, own_class(module).__name__, sum(p.numel() for p in own), reason, warn)


def _refuse_fsdp1(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise RuntimeError(
                f"module {name!r} is wrapped by FSDP, which flattens its parameters: K-FAC cannot find layers "
                f"in them; use fully_shard (FSDP2) or DistributedDataParallel"
            )
