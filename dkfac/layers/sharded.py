"""Layers whose parameters are split over ranks by FSDP2, HSDP or tensor parallelism.

Input: layers of a model that ``fully_shard`` or ``parallelize_module`` has changed. Output: the same layers with the
parameters as the optimizer has them, and how these are split. Owns: nothing.

During forward and backward, FSDP2 gives modules other parameters, which are whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dkfac.layers.layer import Layer
from dkfac.plan.shards import Cuts


@dataclass(frozen=True, slots=True, eq=False)
class ShardedLayer(Layer):
    shards: tuple[Tensor | None, Tensor | None] = (None, None)
    """The weight and the bias as the optimizer has them, whatever the module has at the moment."""

    @property
    def weight(self) -> Tensor:
        weight = self.shards[0]
        assert weight is not None
        return weight

    @property
    def bias(self) -> Tensor | None:
        return self.shards[1] if self.has_bias else None


Mesh = tuple[tuple[int, ...], ...]
"""The ranks that hold each replica of a parameter, in the order of its shards."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, known by its mesh: importing the class takes long."""
    return hasattr(tensor, "device_mesh")


def shard_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a view."""
    whole: Any = tensor
    shard: Tensor = whole.to_local() if is_sharded(tensor) else tensor
    return shard


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was called on."""
    classes = ("FSDPModule", "ReplicateModule")
    return [m for m in model.modules() if any(base.__name__ in classes for base in type(m).__mro__)]


def mesh_of(name: str, parameter: Tensor) -> Mesh:
    """Return the global ranks over which a parameter is split. Raises for what neither FSDP2 nor HSDP does."""
    sharded: Any = parameter
    placements, mesh = sharded.placements, sharded.device_mesh
    kinds = [type(placement).__name__.lstrip("_") for placement in placements]
    is_split = kinds in (["Shard", "Shard"], ["StridedShard", "Shard"], ["Shard", "Replicate"])
    if not is_split and kinds not in (["Shard"], ["Replicate"], ["Replicate", "Shard"]):
        raise RuntimeError(_refusal(name, placements))
    if shard_of(parameter).device.type != mesh.device_type:
        raise RuntimeError(
            f"parameter {name!r} is offloaded to the {shard_of(parameter).device.type}: dkfac does not support "
            f"CPUOffloadPolicy; leave it out"
        )
    rows = mesh.mesh.reshape(1 if is_split else -1, mesh.size() if is_split else mesh.mesh.shape[-1]).tolist()
    return tuple(tuple(row) for row in rows)


def grid_of(layers: Iterable[Layer]) -> tuple[int, ...]:
    """Return the shape of the mesh of one replica: FSDP2 and tensor parallelism together have two dimensions."""
    sizes: list[int] = []
    for p in (p for layer in layers for p in layer.parameters() if is_sharded(p)):
        split: Any = p
        if len(split.placements) == 2 and hasattr(split.placements[0], "dim"):
            return tuple(split.device_mesh.mesh.shape)
        sizes = [split.device_mesh.mesh.shape[-1]]
    return tuple(sizes)


def cuts_of(parameter: Tensor, grid: tuple[int, ...]) -> Cuts:
    """Return how a parameter is split over the mesh of one replica, which has this shape."""
    split: Any = parameter
    dims = [getattr(each, "dim", -1) for each in split.placements] if is_sharded(parameter) else []
    dims = [*dims[-len(grid) :], *(-1 for _ in grid)]
    return tuple(zip(dims, grid, strict=False))


def managed_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that FSDP2 manages. Raises if one is sharded in a way that is not supported."""
    managed: set[int] = set()
    for module in fsdp_modules(model):
        module.reshard()  # after a forward without a backward, the module has whole parameters
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        managed |= {id(each.sharded_param) for group in groups if group is not None for each in group.fsdp_params}
    for name, parameter in model.named_parameters():
        if id(parameter) in managed:
            mesh_of(name, parameter)
    return managed


def _refusal(name: str, placements: Any) -> str:
    return (
        f"parameter {name!r} is a DTensor with placements {placements}: dkfac supports FSDP2, HSDP, and FSDP2 of "
        f"layers that parallelize_module has split, but no other meshes, such as HSDP beside tensor parallelism"
    )


def hold_shards(layers: Iterable[Layer], *, by_fsdp: bool) -> list[Layer]:
    """Return the layers of a sharded model with their parameters as the optimizer has them. ``by_fsdp``: whether FSDP2
    has to manage all of them; beside tensor parallelism, each rank has all of some."""
    found: list[Layer] = []
    for layer in layers:
        given = (layer.weight, layer.bias)
        if by_fsdp and not all(is_sharded(p) for p in given if p is not None):
            raise RuntimeError(
                f"layer {layer.name!r} is not sharded, but others are, and nothing averages its gradient over ranks: "
                f"call fully_shard(model) on the whole model too, or skip=[{layer.name!r}]"
            )
        block = layer.block
        if block is not None:
            block = ShardedLayer(block.module, block.spec, block.has_bias, block.use, None, given)
        found.append(ShardedLayer(layer.module, layer.spec, layer.has_bias, layer.use, block, given))
    return found


def check_attached(layers: Iterable[Layer]) -> None:
    """Raise if parameters were sharded after K-FAC was attached, which made other parameters of them."""
    for layer in layers:
        now = layer.module._parameters.get(layer.use.weight)
        held = layer.weight if isinstance(layer, ShardedLayer) else None
        if now is not None and is_sharded(now) and now is not held:
            raise RuntimeError(
                f"layer {layer.name!r} was sharded after K-FAC was attached, which made another parameter of its "
                f"weight. First fully_shard(model) or parallelize_module(model, ...), then make the optimizer, then "
                f"attach: KFAC(model, optimizer)"
            )


def replicas_of(layers: list[Layer]) -> Mesh:
    """Return the global ranks that parameters are sharded over; none if they are not. Raises if layers differ."""
    found: dict[Mesh, str] = {}
    for layer in layers:
        for p in layer.parameters():
            if is_sharded(p):
                found.setdefault(mesh_of(layer.name, p), layer.name)
    found = {mesh: name for mesh, name in found.items() if not any(_is_column(mesh, other) for other in found)}
    if len(found) > 1:
        (one, name), (other, another) = list(found.items())[:2]
        raise RuntimeError(
            f"layers {name!r} and {another!r} are sharded over different ranks, {list(one)} and {list(other)}: "
            f"fully_shard both with one mesh, or attach one KFAC with skip= for each"
        )
    return next(iter(found), ())


def _is_column(mesh: Mesh, other: Mesh) -> bool:
    """Whether ranks are those of one column of a mesh: of a parameter that FSDP2 alone has split."""
    return len(mesh) == len(other) == 1 and set(mesh[0]) < set(other[0])
