"""Overwrite decompositions in place, where new ones are valid, and rotate moments to the new bases.

Input: new decompositions and flags on the device. Output: decompositions, momentum and moments, changed in place. Owns:
nothing. Does not synchronize with the device.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from dkfac.config.settings import Settings
from dkfac.factors.layer_state import LayerState, carried
from dkfac.layers.layer import Layer
from dkfac.ops import carry, constants
from dkfac.ops.batches import in_bytes
from dkfac.ops.decompose import Decomposition, Eigen, from_tensors
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import INPUT_KEYS, OUTPUT_KEYS, multiply, of_side
from dkfac.ops.torch_private import foreach_copy_
from dkfac.plan.spec import FactorSpec


def replace_decompositions(
    factors: list[tuple[Layer, FactorSpec]],
    states: dict[str, LayerState],
    settings: Settings,
    new: dict[str, dict[str, Decomposition]],
    valid: Tensor,
    moved: Container[str],
) -> None:
    """Overwrite the decompositions in use with new ones where these are ``valid``, ``[factors]``.

    ``moved``: the layers whose moments this rank holds.
    """
    groups: dict[object, list[tuple[Layer, str, Decomposition, Tensor]]] = {}
    for (layer, factor), good in zip(factors, valid.unbind(), strict=True):
        old, found = states[layer.name].decompositions.get(factor.key), new[layer.name].get(factor.key)
        if old is not None and type(old) is type(found):
            kind: object = (factor.dim, factor.form, layer.dtype, layer.weight.device)
            groups.setdefault(kind, []).append((layer, factor.key, old, good))
    rotations: dict[str, dict[str, Tensor]] = {}
    room, places = _room(groups) if settings.takes_steps else ({}, {})
    for kind, group in groups.items():
        counts = [_num_blocks(old) for *_, old, _ in group]
        olds, news = joined([old for *_, old, _ in group]), joined([new[layer.name][key] for layer, key, *_ in group])
        good = per_block(torch.stack([flag.to(group[0][0].weight.device) for *_, flag in group]), counts)
        for name, before in olds.tensors().items():
            after = news.tensors()[name].to(before.dtype)
            after = torch.where(good.view(-1, *[1] * (before.ndim - 1)), after, before)
            if name == "vectors" and kind in places:  # before the old ones are overwritten
                turned = places[kind]
                given = after.to(turned.dtype).mT, before.to(turned.dtype)
                with tf32(settings.tf32, turned.device):
                    _ = torch.bmm(*given, out=turned) if turned.is_cuda else turned.copy_(given[0] @ given[1])
                for (layer, key, *_), rotation in zip(group, torch.split(turned, counts), strict=True):
                    rotations.setdefault(layer.name, {})[key] = rotation
            foreach_copy_([old.tensors()[name] for *_, old, _ in group], list(torch.split(after, counts)))
    chosen = {layer.name: layer for layer, _ in factors if layer.name in moved and layer.name in rotations}
    # Moments of a layer that lacks one of its bases, after a fallback, are in the basis of the weights.
    layers = [layer for name, layer in chosen.items() if states[name].basis() is not None]
    _carry_moments(layers, states, settings, rotations, room)


Room = dict[tuple[torch.device, torch.dtype], Tensor]
"""Tensors, one-dimensional, of which all rotations are parts."""


def _room(groups: dict[object, list[tuple[Layer, str, Decomposition, Tensor]]]) -> tuple[Room, dict[object, Tensor]]:
    """Return memory for the rotations, and each group's part of it, ``[blocks, w, w]``."""
    shapes = dict[tuple[torch.device, torch.dtype], dict[object, tuple[int, int, int]]]()
    for kind, group in groups.items():
        layer, _, old, _ = group[0]
        if isinstance(old, Eigen) and old.vectors is not None:
            width = old.vectors.shape[-1]
            shape = sum(_num_blocks(each) for *_, each, _ in group), width, width
            shapes.setdefault((layer.weight.device, layer.dtype), {})[kind] = shape
    room, places = Room(), dict[object, Tensor]()
    for (device, dtype), parts in shapes.items():
        sizes = [math.prod(shape) for shape in parts.values()]
        room[device, dtype] = torch.empty(sum(sizes), device=device, dtype=dtype)
        for (kind, shape), part in zip(parts.items(), torch.split(room[device, dtype], sizes), strict=True):
            places[kind] = part.view(shape)
    return room, places


def _num_blocks(decomposition: Decomposition) -> int:
    return len(next(iter(decomposition.tensors().values())))


def joined(decompositions: Sequence[Decomposition]) -> Decomposition:
    """Return decompositions of one width as one, concatenated along their blocks."""
    parts = [d.tensors() for d in decompositions]
    return from_tensors({name: concatenated([part[name] for part in parts]) for name in parts[0]})


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors concatenated, without a copy where they are parts of one tensor, in order."""
    first, blocks, size = tensors[0], 0, tensors[0].element_size()
    if first.is_contiguous():
        begin, step, storage = first.data_ptr(), first.stride(0) * size, first.untyped_storage().data_ptr()
        for tensor in tensors:
            is_next = tensor.data_ptr() == begin + blocks * step and tensor.stride() == first.stride()
            if not is_next or tensor.untyped_storage().data_ptr() != storage:
                return torch.cat(list(tensors))
            blocks += len(tensor)
        return first.as_strided((blocks, *first.shape[1:]), first.stride())
    return first if len(tensors) == 1 else torch.cat(list(tensors))


def _carry_moments(
    layers: list[Layer],
    states: dict[str, LayerState],
    settings: Settings,
    rotations: dict[str, dict[str, Tensor]],
    room: Room,
) -> None:
    """Rotate momentum and second moments to the new bases: in few launches where kernels run, otherwise layers of one
    shape in one batch."""
    groups, launched = dict[object, list[Layer]](), dict[object, list[tuple[carry.Moments, int]]]()
    for layer in layers:
        state = states[layer.name]
        if state.moments is None:
            continue
        turns, where = rotations[layer.name], (layer.weight.device, layer.dtype)
        one = _for_kernels(state, turns)
        if one is not None and carry.can_carry(one, room[where]):
            kind = (where, state.momentum_is_rotated, carry.rows_are_aligned(one))
            launched.setdefault(kind, []).append((one, layer.spec.grad_elements * layer.dtype.itemsize))
            continue
        keys = tuple([(key, rotation.shape) for key, rotation in turns.items()])
        groups.setdefault((keys, layer.spec.grad_shape, where, state.momentum_is_rotated), []).append(layer)
    for some in launched.values():
        for batch in in_bytes(some, CARRY_BYTES):
            carry.carry_(batch, room[batch[0].momentum.device, batch[0].momentum.dtype], tf32=settings.tf32)
    for group in groups.values():
        sizes = [layer.spec.grad_elements * layer.dtype.itemsize for layer in group]
        for chosen in in_bytes(zip(group, sizes, strict=True)):
            turns = {key: torch.cat([rotations[la.name][key] for la in chosen]) for key in rotations[chosen[0].name]}
            _carry(chosen, [states[layer.name] for layer in chosen], turns, settings)


CARRY_BYTES = 32 * 2**20
"""Upper bound on the bytes of momentum that one pair of launches rotates; its buffer is three times as large."""


def _for_kernels(state: LayerState, rotations: dict[str, Tensor]) -> carry.Moments | None:
    """Return a layer's moments as kernels rotate them; None for layers on maps and norm layers."""
    if state.moments is None or state.momentum is None or "A_C" in rotations or "F" in rotations:
        return None
    bases, sides = None, (OUTPUT_KEYS, INPUT_KEYS)
    if not state.momentum_is_rotated:
        vectors = {
            k: d.vectors for k, d in state.decompositions.items() if isinstance(d, Eigen) and d.vectors is not None
        }
        if vectors.keys() != rotations.keys():
            return None
        bases = of_side(vectors, OUTPUT_KEYS), of_side(vectors, INPUT_KEYS)
    outputs, inputs = (of_side(rotations, keys) for keys in sides)
    averages = (state.momentum.value, state.momentum.weight, state.moments.value, state.moments.weight)
    return carry.Moments(*averages, outputs, inputs, bases)


def _carry(layers: list[Layer], states: list[LayerState], rotations: dict[str, Tensor], settings: Settings) -> None:
    counts = [layer.spec.grad_shape[0] for layer in layers]
    moments, momenta = [s.moments for s in states if s.moments], [s.momentum for s in states if s.momentum]
    values, momentum = (torch.cat([average.value for average in each]) for each in (moments, momenta))
    weight, weight_of_momentum = (
        per_block(torch.stack([average.weight for average in each]), counts)[:, None, None]
        for each in (moments, momenta)
    )
    if not states[0].momentum_is_rotated:
        bases = _joined_bases(states)
        momentum = multiply(momentum, bases, transposed=True)
    elif rotations:
        momentum = multiply(momentum, rotations)
        foreach_copy_([average.value for average in momenta], list(torch.split(momentum, counts)))
    mean = momentum / weight_of_momentum.clamp(min=torch.finfo(weight.dtype).tiny)
    with tf32(settings.tf32, layers[0].weight.device):
        turned = carried(values, mean.square_().mul_(weight), rotations)
    foreach_copy_([average.value for average in moments], list(torch.split(turned, counts)))


def _joined_bases(states: list[LayerState]) -> dict[str, Tensor]:
    """Return the bases of layers of one shape, as one layer's."""
    found: dict[str, Tensor] = {}
    for key, first in states[0].decompositions.items():
        if isinstance(first, Eigen) and first.vectors is not None:
            vectors = [d.vectors for d in (s.decompositions[key] for s in states) if isinstance(d, Eigen)]
            found[key] = torch.cat([v for v in vectors if v is not None]).to(first.values.dtype)
    return found


def per_block(values: Tensor, counts: list[int]) -> Tensor:
    """Return values ``[n]``, each repeated for its blocks."""
    if len(set(counts)) == 1:
        return values if counts[0] == 1 else values.repeat_interleave(counts[0])
    repeats = constants.constant(tuple(counts), values.device, torch.int64)
    return values.repeat_interleave(repeats, output_size=sum(counts))
