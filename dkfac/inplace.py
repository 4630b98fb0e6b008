"""Decompositions of some layers of stacks, improved or made anew in place, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from dkfac import stages
from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, mean_eigenvalue
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import TF32_TOLERANCE, factored_damping, tf32_error
from dkfac.ops.together import renewed
from dkfac.settings import Settings
from dkfac.stacks import Stack
from dkfac.state import LayerState, bias_is_silent, carried

if TYPE_CHECKING:
    from dkfac.run import Runner

Item = TypeVar("Item")
ROUNDING = "rounding"
"""In the place of a factor's key: whether a layer may be preconditioned in TF32."""
Part = tuple[Stack, int, int]
"""Some layers of a stack: from, to."""


def is_renewable(stack: Stack, states: dict[str, LayerState], settings: Settings) -> bool:
    """Whether a stack's decompositions can be improved in place: all are there and of the solver's own form."""
    if settings.solver == "eigen" or settings.curvature == "ekfac":
        return False
    if any(bias_is_silent(layer, "A") or not states[layer.name].running for layer in stack.layers):
        return False
    if stack.layers[0].kind == "linear-map":
        return False
    is_split = any(factor.pieces > 1 for factor in stack.layers[0].spec.factors)
    if is_split and any(states[layer.name].decomposed_at < settings.split_warmup for layer in stack.layers):
        return False  # what is there may be whole
    found = stack.decompositions(states)
    form = Inverse if settings.solver == "cholesky" else Eigen
    return found is not None and all(isinstance(d, form) for d in found.values())


TOGETHER_BYTES = 128 * 2**20
"""Of factors that are decomposed together; what is needed for it is about ten times as much."""


def in_bytes(items: Iterable[tuple[Item, int]]) -> Iterator[list[Item]]:
    """Yield items in lists that are decomposed together. Each comes with the bytes of its factors."""
    chosen, num_bytes = list[Item](), 0
    for item, size in items:
        if chosen and num_bytes + size > TOGETHER_BYTES:
            yield chosen
            chosen, num_bytes = [], 0
        chosen.append(item)
        num_bytes += size
    if chosen:
        yield chosen


def renew(parts: list[Part], runner: Runner) -> list[dict[str, Tensor]]:
    """Replace decompositions where the new ones are good; returns which are, ``[layers]``, by part and factor."""
    return [good for some in in_bytes((part, _num_bytes(part)) for part in parts) for good in _renew(some, runner)]


def _num_bytes(part: Part) -> int:
    stack, begin, end = part
    return stack.dtype.itemsize * (end - begin) * sum(f.num_elements for f in stack.layers[0].spec.factors)


def _renew(parts: list[Part], runner: Runner) -> list[dict[str, Tensor]]:
    begun = [_begun(part, runner) for part in parts]
    jobs = [
        (factor, this.olds[key], this.shifts[key], stages.pieces(stack.layers[0], key, runner.settings, runner.step))
        for (stack, _, _), this in zip(parts, begun, strict=True)
        for key, factor in this.factors.items()
    ]
    found = iter(renewed(jobs))
    return [_replaced(part, runner, this, found) for part, this in zip(parts, begun, strict=True)]


@dataclass(frozen=True, slots=True)
class Begun:
    """What is decomposed of some layers of a stack, by factor."""

    factors: dict[str, Tensor]
    olds: dict[str, Decomposition]
    """Views of what is in use."""
    means: dict[str, Tensor]
    shifts: dict[str, Tensor]
    damping: Tensor | float


def _begun(part: Part, runner: Runner) -> Begun:
    """Look at the running factors of some layers, and keep their means."""
    (stack, begin, end), states, blocks = part, runner.states, part[0].blocks
    here = slice(begin * blocks, end * blocks)
    joined = stack.decompositions(states)
    assert joined is not None
    factors: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for key in joined:
        values, weights = stack.running(states, key)
        tiny = torch.finfo(weights.dtype).tiny
        weight = weights[begin:end].clamp(min=tiny).repeat_interleave(blocks)
        factors[key] = values[here] / weight.view(-1, *[1] * (values.ndim - 1))
        means[key] = mean_eigenvalue(values[here]) / weight
    for i, layer in enumerate(stack.layers[begin:end]):
        state = states[layer.name]
        for key, mean in means.items():  # in place: a captured graph reads them
            state.means[key].copy_(mean[i * blocks : (i + 1) * blocks])
    damping = stages.stack_damping(stack, states, runner.settings, runner.step)
    if isinstance(damping, Tensor):
        damping = damping[here].flatten()
    olds = {key: _part(joined[key], here, factor.shape) for key, factor in factors.items()}
    return Begun(factors, olds, means, factored_damping(means, damping), damping)


def _replaced(
    part: Part, runner: Runner, begun: Begun, found: Iterator[tuple[Decomposition, Tensor]]
) -> dict[str, Tensor]:
    """Put the next of the new decompositions in the place of the old ones of some layers, and carry moments over."""
    (stack, begin, end), states, settings, blocks = part, runner.states, runner.settings, part[0].blocks
    good: dict[str, Tensor] = {}
    rotations: dict[str, Tensor] = {}
    carries = runner.is_adam and any(states[layer.name].moments is not None for layer in stack.layers)
    gathered = _mean_in_basis(stack, states, begin, end, begun.olds) if carries else None
    for key, factor in begun.factors.items():
        new, sound = next(found)
        for name, target in begun.olds[key].tensors().items():
            chosen = torch.where(sound.view(-1, *[1] * (target.ndim - 1)), new.tensors()[name].to(target.dtype), target)
            if name == "vectors" and runner.is_adam:
                with tf32(settings.tf32, stack.device):
                    rotations[key] = chosen.to(factor.dtype).mT @ target.to(factor.dtype)
            target.copy_(chosen)
        good[key] = sound.view(-1, blocks).all(1)
    if settings.tf32 and not runner.is_adam:
        good[ROUNDING] = tf32_error(begun.olds, begun.means, begun.damping) < TF32_TOLERANCE
        good[ROUNDING] = good[ROUNDING].view(-1, blocks).all(1)
    if gathered is not None:
        down, across = stack.sizes
        values, weights = stack.moments(states, "moments")
        here = slice(begin * blocks, end * blocks)
        bare, squares = values[here, :down, :across], {key: rotation.square() for key, rotation in rotations.items()}
        weight = weights[begin:end].repeat_interleave(blocks)[:, None, None]
        with tf32(settings.tf32, stack.device):
            mean = _turn(stack, gathered, rotations).square() * weight
            bare.copy_(carried(bare, mean, lambda values: _turn(stack, values, squares)))
    return good


def _mean_in_basis(
    stack: Stack, states: dict[str, LayerState], begin: int, end: int, bases: dict[str, Decomposition]
) -> Tensor:
    """Return Adam's momentum of some layers in their bases."""
    down, across = stack.sizes
    values, weights = stack.moments(states, "momentum")
    weight = weights[begin:end].clamp(min=torch.finfo(weights.dtype).tiny).repeat_interleave(stack.blocks)
    mean = values[begin * stack.blocks : end * stack.blocks, :down, :across] / weight[:, None, None]
    vectors = {
        key: d.vectors.to(mean.dtype).mT for key, d in bases.items() if isinstance(d, Eigen) and d.vectors is not None
    }
    return _turn(stack, mean, vectors)


def _turn(stack: Stack, matrices: Tensor, by: dict[str, Tensor]) -> Tensor:
    """Return matrices laid out like the stack's gradients, multiplied from the side that each factor acts on."""
    for key, matrix in by.items():
        from_the_right = (key == "A") != stack.transposed
        matrices = matrices @ matrix.mT if from_the_right else matrix @ matrices
    return matrices


def _part(joined: Decomposition, here: slice, shape: torch.Size) -> Decomposition:
    """Return some blocks of a padded decomposition, without the padding."""
    size = slice(shape[-1])
    parts = {name: t[(here, *[size] * (t.ndim - 1))] for name, t in joined.tensors().items()}
    return decompose.from_tensors(parts)
