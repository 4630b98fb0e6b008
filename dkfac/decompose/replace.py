"""Overwrite decompositions in place, where new ones are valid, and rotate moments to the new bases.

Input: new decompositions and flags on the device. Output: decompositions, momentum and moments, changed in place. Owns:
nothing. Does not synchronize with the device.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from dkfac.config.settings import Settings
from dkfac.factors.layer_state import LayerState, carried
from dkfac.layers.layer import Layer
from dkfac.ops import constants
from dkfac.ops.batches import in_bytes
from dkfac.ops.decompose import Decomposition, Eigen, from_tensors
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import multiply
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
            kind = (factor.dim, factor.form, layer.dtype, layer.weight.device)
            groups.setdefault(kind, []).append((layer, factor.key, old, good))
    rotations: dict[str, dict[str, Tensor]] = {}
    for group in groups.values():
        counts = [_num_blocks(old) for *_, old, _ in group]
        olds, news = joined([old for *_, old, _ in group]), joined([new[layer.name][key] for layer, key, *_ in group])
        good = per_block(torch.stack([flag.to(group[0][0].weight.device) for *_, flag in group]), counts)
        for name, before in olds.tensors().items():
            after = news.tensors()[name].to(before.dtype)
            after = torch.where(good.view(-1, *[1] * (before.ndim - 1)), after, before)
            foreach_copy_([old.tensors()[name] for *_, old, _ in group], list(torch.split(after, counts)))
            if name == "vectors" and settings.takes_steps:
                dtype = group[0][0].dtype
                turned = torch.split(after.to(dtype).mT @ before.to(dtype), counts)
                for (layer, key, *_), rotation in zip(group, turned, strict=True):
                    rotations.setdefault(layer.name, {})[key] = rotation
    chosen = {layer.name: layer for layer, _ in factors if layer.name in moved and layer.name in rotations}
    # Moments of a layer that lacks one of its bases, after a fallback, are in the basis of the weights.
    layers = [layer for name, layer in chosen.items() if states[name].basis() is not None]
    _carry_moments(layers, states, settings, rotations)


def _num_blocks(decomposition: Decomposition) -> int:
    return len(next(iter(decomposition.tensors().values())))


def joined(decompositions: Sequence[Decomposition]) -> Decomposition:
    """Return decompositions of one width as one, concatenated along their blocks."""
    parts = [d.tensors() for d in decompositions]
    return from_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _carry_moments(
    layers: list[Layer], states: dict[str, LayerState], settings: Settings, rotations: dict[str, dict[str, Tensor]]
) -> None:
    """Rotate momentum and second moments to the new bases, layers of one shape in one batch."""
    groups: dict[object, list[Layer]] = {}
    for layer in layers:
        state = states[layer.name]
        if state.moments is not None:
            keys = tuple([(key, rotation.shape) for key, rotation in rotations[layer.name].items()])
            kind = (keys, layer.spec.grad_shape, layer.dtype, layer.weight.device, state.momentum_is_rotated)
            groups.setdefault(kind, []).append(layer)
    for group in groups.values():
        sizes = [layer.spec.grad_elements * layer.dtype.itemsize for layer in group]
        for chosen in in_bytes(zip(group, sizes, strict=True)):
            some = [states[layer.name] for layer in chosen]
            turns = {key: torch.cat([rotations[la.name][key] for la in chosen]) for key in rotations[chosen[0].name]}
            _carry(chosen, some, turns, settings)


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
