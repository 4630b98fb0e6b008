"""Agree with the other ranks on a plan when K-FAC is attached, and open the transport that executes it.

Input: layers, settings and the process group. Output: a transport with the plan that all ranks agree on, and the
comparison of ranks in training; or an error. Owns: nothing.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch

from dkfac.comm import agree, groups
from dkfac.comm.errors import ErrorChannel
from dkfac.comm.one_rank import OneRank
from dkfac.comm.replicas import Replicas, compared_parameters
from dkfac.comm.transport import Transport
from dkfac.config.restrictions import check_combinations
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.layers.layer import Layer
from dkfac.layers.sharded import Mesh, cuts_of, grid_of, replicas_of
from dkfac.plan.cluster import Cluster
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.plan import Plan
from dkfac.plan.preset import load_cluster
from dkfac.plan.search import choose
from dkfac.plan.shards import ShardedParameter, Sharding
from dkfac.plan.spec import LayerSpec
from dkfac.runtime.attach import Prepared

LOOPBACK = "DKFAC_LOOPBACK"
"""Environment variable: 1 makes a process group of one rank take the path of several (``benchmarks/one_line.py``)."""


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
        return _agree(specs, settings, choices, own, device, cluster, names, sharding)
    except Exception:
        own.close()
        raise


def without_idle_graphs(chosen: Settings, plan: Plan, given: Settings | None, options: dict[str, Any]) -> Settings:
    """Return the settings without CUDA graphs where they have no effect; warn if they were asked for."""
    if not chosen.cuda_graph or plan.shares_no_updates:
        return chosen
    if given is not None or "cuda_graph" in options:
        what = f"strategy={plan.strategy!r}" if plan.sharding is None else "parameters that are split over ranks"
        why = 'ranks send each other updates in every step, as they do not with strategy="comm-opt" or "replicated"'
        warnings.warn(f"cuda_graph has no effect with {what}: {why}", stacklevel=3)
    return replace(chosen, cuda_graph=False)


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
    grid = grid_of(layers)
    parameters = [
        ShardedParameter(layer.name, key, tuple(p.shape), cuts_of(p, grid))
        for layer in layers if mesh
        for key, p in zip(("weight", "bias"), layer.parameters(), strict=False)
    ]  # fmt: skip
    return Sharding(mesh, tuple(parameters)) if mesh else None
