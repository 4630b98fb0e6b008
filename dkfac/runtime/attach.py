"""Validate arguments and agree on a plan when K-FAC is attached, before any hook is registered.

Input: model, optimizer, layers and settings. Output: a transport with the plan that all ranks agree on, or an error.
Owns: nothing.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from dkfac.comm import agree, groups, join
from dkfac.comm.errors import ErrorChannel
from dkfac.comm.one_rank import OneRank
from dkfac.comm.replicas import Replicas, compared_parameters
from dkfac.comm.transport import Transport
from dkfac.config import optimizer_rules, restrictions
from dkfac.config.resolve import choose_settings
from dkfac.config.restrictions import check_combinations
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.layers.find import Left, find_layers, unwrap
from dkfac.layers.layer import Layer
from dkfac.layers.sharded import Mesh, is_sharded, mesh_of, shard_dim
from dkfac.plan.cluster import Cluster
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.plan import Plan
from dkfac.plan.preset import load_cluster
from dkfac.plan.search import choose
from dkfac.plan.shards import ShardedParameter, Sharding
from dkfac.plan.spec import LayerSpec
from dkfac.precondition import adam_eigen
from dkfac.runtime.levenberg_marquardt import LevenbergMarquardt

LOOPBACK = "DKFAC_LOOPBACK"
"""Environment variable: 1 makes a process group of one rank take the path of several (``benchmarks/one_line.py``)."""
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
    chosen = choose_settings(settings, options, model, optimizer, scaler, groups.world_size(group), roles)
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
            "fully_shard(model), or after a forward without a backward, which leaves whole parameters in the model "
            "(see model.reshard)? First fully_shard(model), then make the optimizer, then KFAC(model, optimizer)"
        )


def check_shards(settings: Settings, roles: Any) -> None:
    """Raise if sharded parameters do not go together with other arguments."""
    restrictions.check_combinations(settings, "with shards")
    if isinstance(settings.damping, LevenbergMarquardt):
        raise ValueError(
            "damping=LevenbergMarquardt(...) with sharded parameters (fully_shard): lm_step needs whole gradients; "
            "give a number or a schedule"
        )
    if roles is not None:
        raise ValueError("roles with sharded parameters (fully_shard): helpers do not know shards; omit roles")


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


def connect(found: Prepared) -> tuple[Transport, ErrorChannel]:
    """Return the transport with the plan that all ranks agree on, and what compares them in training. Collective."""
    optimizer, names = found.optimizer, tuple[str, ...]()
    if not found.settings.experimental.replicas_may_differ:
        trained = None if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        names = compared_parameters(found.model, trained)
    transport = _transport(found.layers, found.settings, found.process_group, names)
    if not transport.program.transfers:
        return transport, ErrorChannel(transport)
    return transport, ErrorChannel(transport, Replicas(transport, found.model, names, optimizer))


def _transport(layers: list[Layer], settings: Settings, process_group: Any, names: tuple[str, ...]) -> Transport:
    world_size = groups.world_size(process_group)
    specs, replicas = [layer.spec for layer in layers], replicas_of(layers)
    choices = Choices(
        strategy=settings.strategy,
        worker_fraction=settings.worker_fraction,
        replicate_factors=settings.experimental.replicate_factors,
        wire_dtype=settings.wire_dtype,
        share="shards" if replicas else settings.share,
        fusion=settings.experimental.fusion or ("optimal" if settings.experimental.overlap else "one"),
        solver=settings.solver,
        moments=settings.measures_moments,
        factor_interval=settings.factor_interval,
        inverse_interval=settings.inverse_interval,
    )
    cluster = None if settings.cluster is None else load_cluster(settings.cluster)
    device = layers[0].weight.device
    if world_size == 1:
        plan = replace(make_plan(specs, 1, choices), sharding=sharding_of(layers, replicas and ((0,),)))
        if os.environ.get(LOOPBACK) == "1" and groups.is_joined():
            return Transport(
                replace(plan, loopback=True, num_compared=len(names)), groups.make_groups(process_group), device
            ).open()
        return OneRank(plan, device)
    check_several_ranks(settings, specs, by_nccl=groups.sends_by_nccl(device, process_group))
    own = groups.make_groups(process_group)
    try:
        sharding = sharding_of(layers, _places(replicas, own))
        transport = _agree(specs, settings, choices, own, device, cluster, names, sharding)
        if settings.cuda_graph and sharding is not None:
            warnings.warn("cuda_graph has no effect with sharded parameters (fully_shard)", stacklevel=3)
        elif settings.cuda_graph and not transport.plan.shares_no_updates:
            warnings.warn(
                f"cuda_graph has no effect with strategy={transport.plan.strategy!r}, under which ranks send each "
                f'other updates in every step: use strategy="comm-opt" or "replicated"',
                stacklevel=3,
            )
        return transport
    except Exception:
        own.close()
        raise


def check_several_ranks(settings: Settings, specs: list[LayerSpec], *, by_nccl: bool) -> None:
    """Raise for settings under which results would depend on the number of ranks, or ranks might hang."""
    check_combinations(settings, "on several ranks")
    if by_nccl:
        check_combinations(settings, "with NCCL")
    diagonal = [(spec.name, f.key) for spec in specs for f in spec.factors if f.form == "diagonal"]
    if settings.experimental.staleness == "basis" and diagonal:
        name, key = diagonal[0]
        raise ValueError(
            f'staleness="basis" on several ranks: factor {key} of layer {name!r} is diagonal, and whether it changed '
            f'is judged by noise that depends on the number of ranks; use skip=[{name!r}] or staleness="fixed"'
        )


def _agree(
    specs: list[LayerSpec],
    settings: Settings,
    choices: Choices,
    own: groups.Groups,
    device: torch.device,
    cluster: Cluster | None,
    names: tuple[str, ...],
    sharding: Sharding | None,
) -> Transport:
    schedules = {name: settings.at(name, 0) for name in SCHEDULES}
    said = {name: value for name, value in settings.describe().items() if name != "announce"}
    description = {"settings": said | schedules, "layers": [asdict(spec) for spec in specs], "parameters": names}
    agree.check_same(own, description, device)
    if cluster is None:
        plan = make_plan(specs, own.world_size, choices)
    else:
        plan = choose(specs, own.world_size, cluster, choices, overlap=settings.experimental.overlap)
    plan = replace(
        plan,
        adaptive=settings.experimental.staleness != "fixed",
        num_compared=len(names),
        sharding=sharding,
    )
    agree.check_same(own, {"plan": json.loads(plan.to_json())}, device)
    return Transport(plan, own, device).open()


def replicas_of(layers: list[Layer]) -> Mesh:
    """Return the global ranks that parameters are sharded over; none if they are not. Raises if layers differ."""
    found: dict[Mesh, str] = {}
    for layer in layers:
        for p in layer.parameters():
            if is_sharded(p):
                found.setdefault(mesh_of(layer.name, p), layer.name)
    if len(found) > 1:
        (one, name), (other, another) = list(found.items())[:2]
        raise RuntimeError(
            f"layers {name!r} and {another!r} are sharded over different ranks, {list(one)} and {list(other)}: "
            f"fully_shard both with one mesh, or attach one KFAC with skip= for each"
        )
    return next(iter(found), ())


def _places(replicas: Mesh, own: groups.Groups) -> Mesh:
    """Return the positions of ranks in K-FAC's group, which must be the ranks that parameters are sharded over."""
    members = [own.global_rank(rank) for rank in range(own.world_size)]
    if replicas and sorted(rank for ranks in replicas for rank in ranks) != sorted(members):
        raise RuntimeError(
            f"parameters are sharded over ranks {[rank for ranks in replicas for rank in ranks]}, but K-FAC is "
            f"attached on ranks {members}: pass the group of the mesh, KFAC(..., process_group=mesh.get_group())"
        )
    return tuple(tuple(members.index(rank) for rank in ranks) for ranks in replicas)


def sharding_of(layers: list[Layer], mesh: Mesh) -> Sharding | None:
    """Return how parameters are split over ranks of K-FAC's group; None if they are not."""
    parameters = [
        ShardedParameter(layer.name, key, p.numel(), p.shape[shard_dim(p)])
        for layer in layers if mesh
        for key, p in zip(("weight", "bias"), layer.parameters(), strict=False)
    ]  # fmt: skip
    return Sharding(mesh, tuple(parameters)) if mesh else None


def choose_group(model: nn.Module, process_group: Any, roles: Any) -> Any:
    """Return the process group that trains replicas of the model: that of its DDP wrapper if none was given."""
    process_group = process_group if roles is None else roles.group
    wrapped = getattr(model, "_forward_module", model)  # Fabric's wrapper holds DDP's
    return groups.of_model(wrapped) if process_group is None else process_group


def check_uneven_inputs(plan: Plan) -> None:
    """Raise if a rank that runs out of batches would be missed by the others."""
    if plan.sharding is not None:
        raise ValueError("Join with sharded parameters (fully_shard): FSDP2 itself needs a batch on every rank")
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
