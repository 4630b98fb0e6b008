"""Check arguments and find the layers when K-FAC is attached, before ranks agree on a plan and any hook is registered.

Input: what was given to ``KFAC``. Output: layers and settings, or an error. Owns: which modules K-FAC is attached to.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from dkfac.comm import groups, join
from dkfac.config import optimizer_rules, restrictions
from dkfac.config.resolve import choose_settings
from dkfac.config.settings import Settings
from dkfac.layers.find import Left, find_layers, unwrap
from dkfac.layers.layer import Layer
from dkfac.layers.sharded import fsdp_modules, grid_of, is_sharded, replicas_of
from dkfac.plan.plan import Plan
from dkfac.precondition import adam_eigen
from dkfac.runtime.levenberg_marquardt import LevenbergMarquardt

ATTACHED: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""The ``KFAC`` instance that each module is attached to."""


def detach(model: nn.Module) -> None:
    """Close every :class:`KFAC` that is attached to a layer of ``model``, even if no reference to it is at hand."""
    for module in unwrap(model).modules():
        attached = ATTACHED.get(module)
        kfac = None if attached is None else attached()
        if kfac is not None:
            kfac.close()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What ``KFAC`` would be attached to: the model and the optimizer without wrappers, settings and layers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    process_group: Any
    settings: Settings
    layers: list[Layer]
    left: list[Left]


def prepare_attachment(
    model: nn.Module, optimizer: Any, scaler: Any, process_group: Any, roles: Any, settings: Settings | None,
    options: dict[str, Any],
) -> Prepared:  # fmt: skip
    """Check the arguments of ``KFAC`` and find the layers. Changes nothing, and sends nothing to other ranks."""
    optimizer = unwrap_optimizer(optimizer)
    check_arguments(model, optimizer, scaler)
    group = choose_group(model, process_group, roles)
    chosen = choose_settings(settings, options, model, optimizer, scaler, roles)
    trained = None if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
    inner = unwrap(model)
    rules = optimizer_rules.rules_of_steps(chosen, optimizer)
    layers, left = find_layers(inner, chosen, trained, rules)
    if any(item.reason == "not in the optimizer" for item in left):
        check_parameters(inner, trained)
    check_layers(layers, left, ATTACHED)
    optimizer_rules.check_zero(optimizer, chosen.share)
    if replicas_of(layers):
        check_shards(chosen, roles)
        check_tensor_parallel(layers, chosen, by_fsdp=bool(fsdp_modules(inner)))
    elif any(map(is_sharded, inner.parameters())) and not fsdp_modules(inner):
        raise RuntimeError(
            "K-FAC would step none of the layers that parallelize_module splits: let it step one (skip=), or attach it "
            "to a model without parallelize_module"
        )
    adam_eigen.check_optimizer(optimizer, chosen.curvature, is_sharded=bool(replicas_of(layers)))
    return Prepared(inner, optimizer, group, chosen, layers, left)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside wrappers that call its ``step``, like those of Accelerate, Lightning and
    Fabric."""
    while not _runs_hooks(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is optimizer or not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def _runs_hooks(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False)


def check_arguments(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    if not isinstance(model, nn.Module):
        swapped = ": are model and optimizer swapped?" if isinstance(model, torch.optim.Optimizer) else ""
        raise TypeError(f"KFAC(model, ...) needs a torch.nn.Module, not {type(model).__name__}{swapped}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"KFAC(model, optimizer) needs a torch.optim.Optimizer, not {type(optimizer).__name__}; "
            f"without one, use KFAC(model) and kfac.step(lr=...)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss several times per step and is second order itself; use SGD or AdamW")
    if optimizer is not None and not _runs_hooks(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} does not run the hooks of torch.optim.Optimizer (a wrapper around another "
            f"optimizer?); attach K-FAC to the inner optimizer"
        )
    if scaler is not None and not hasattr(scaler, "_get_scale_async"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def check_parameters(model: nn.Module, trained: Iterable[Tensor] | None) -> None:
    """Raise if the optimizer of a sharded model has other parameters instead of the model's."""
    known = {id(p): p for p in model.parameters()}
    if any(map(is_sharded, known.values())) and any(id(p) not in known for p in trained or ()):
        raise RuntimeError(
            "the optimizer has parameters that are not the model's, and lacks some that are: was it made before "
            "fully_shard(model) or parallelize_module(model, ...), or after a forward without a backward, which leaves "
            "whole parameters in the model (see model.reshard)? First split the model, then make the optimizer, then "
            "KFAC(model, optimizer)"
        )


def check_shards(settings: Settings, roles: Any) -> None:
    """Raise if sharded parameters do not go together with other arguments."""
    restrictions.check_combinations(settings, "with shards")
    if isinstance(settings.damping, LevenbergMarquardt):
        raise ValueError(
            "damping=LevenbergMarquardt(...) with parameters that are split over ranks: lm_step needs whole gradients; "
            "give a number or a schedule"
        )
    if roles is not None:
        raise ValueError("roles with parameters that are split over ranks: helpers do not know shards; omit roles")


def check_tensor_parallel(layers: list[Layer], settings: Settings, *, by_fsdp: bool) -> None:
    """Raise if tensor parallelism, if there is any, does not go together with other arguments, or with DDP."""
    if by_fsdp and len(grid_of(layers)) == 1:
        return
    number, world_size = len(replicas_of(layers)[0]), groups.world_size()
    if number != world_size:
        raise RuntimeError(
            f"tensor parallelism splits parameters over {number} of {world_size} ranks: dkfac does not support "
            f"other data parallelism beside it than fully_shard; make the mesh of all ranks"
        )
    if settings.strategy == "local":
        raise ValueError(
            'strategy="local" with tensor parallelism: an owner cannot measure alone a layer that is split; omit it'
        )


def check_layers(layers: list[Layer], left: list[Left], attached: Container[nn.Module]) -> None:
    if not layers:
        reasons = "; ".join(f"{item.name or item.what}: {item.reason}" for item in left[:5]) or "no parameters"
        raise ValueError(f"the model has no layer that K-FAC can precondition ({reasons})")
    twice = [layer.name for layer in layers if layer.module in attached]
    if twice:
        raise RuntimeError(
            f"layer {twice[0]!r} is already attached to another KFAC, which would precondition it twice; close() the "
            f"other one first, or call dkfac.detach(model)"
        )


def choose_group(model: nn.Module, process_group: Any, roles: Any) -> Any:
    """Return the process group that trains replicas of the model: that of its DDP wrapper if none was given."""
    process_group = process_group if roles is None else roles.group
    wrapped = getattr(model, "_forward_module", model)  # Fabric's wrapper holds DDP's
    return groups.of_model(wrapped) if process_group is None else process_group


def check_uneven_inputs(plan: Plan) -> None:
    """Raise if a rank that runs out of batches would be missed by the others."""
    if plan.sharding is not None:
        raise ValueError("Join with parameters that are split over ranks: FSDP2 itself needs a batch on every rank")
    if not plan.shares_no_updates:
        raise ValueError(
            f"strategy={plan.strategy!r} has layers preconditioned by ranks that may run out of batches, and then "
            f'have no gradient; uneven inputs need strategy="comm-opt" or "replicated"'
        )


def check_join(config: Any) -> None:
    """Raise if DDP joins uneven inputs without K-FAC. ``config``: K-FAC's own Join configuration."""
    if not config.enable and join.ddp_joins():
        raise RuntimeError(
            "uneven inputs: K-FAC's ranks would wait for one that has run out of batches; use "
            "torch.distributed.algorithms.Join([model, kfac]) instead of model.join()"
        )
