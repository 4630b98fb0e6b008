"""Decompose some layers of stacks in place, in batches, without synchronizing with the device.

Input: running factors and decompositions in the stacks' shared tensors. Output: the same decompositions, overwritten
where the new ones are valid, and flags that say which are. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dkfac.config.settings import Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_damping
from dkfac.factors.layer_state import LayerState, carried, share_of_mean, whole_means
from dkfac.factors.stacks import Stack
from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, mean_eigenvalue
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import TF32_TOLERANCE, factored_damping, multiply, per_piece, swapped, tf32_error
from dkfac.ops.together import renewed

Item = TypeVar("Item")
TF32_KEY = "rounding"
"""Used in place of a factor's key: the flag says whether a layer may be preconditioned in TF32."""
StackSlice = tuple[Stack, int, int]
"""Layers ``[begin, end)`` of a stack, as ``(stack, begin, end)``."""


def is_renewable(stack: Stack, states: dict[str, LayerState], settings: Settings) -> bool:
    """Whether a stack's decompositions can be updated in place: all exist, in the form that the solver produces."""
    if not (settings.improves_bases or settings.uses_inverses) or settings.measures_moments:
        return False
    frozen_bias = any(layer.has_bias and not layer.bias_is_live for layer in stack.layers)
    if frozen_bias or any(not states[layer.name].running for layer in stack.layers):
        return False
    if stack.layers[0].kind == "linear-map":
        return False
    found = stack.decompositions(states)
    form = Inverse if settings.uses_inverses else Eigen
    return found is not None and all(isinstance(d, form) for d in found.values())


SOLVE_BYTES = 128 * 2**20
"""Upper bound on the bytes of factors that are decomposed in one batch; the workspace is about ten times as large."""


def in_bytes(items: Iterable[tuple[Item, int]]) -> Iterator[list[Item]]:
    """Group items, given with the bytes of their factors, into lists that are decomposed in one batch."""
    chosen, num_bytes = list[Item](), 0
    for item, size in items:
        if chosen and num_bytes + size > SOLVE_BYTES:
            yield chosen
            chosen, num_bytes = [], 0
        chosen.append(item)
        num_bytes += size
    if chosen:
        yield chosen


def solve_in_place(
    parts: list[StackSlice], states: dict[str, LayerState], context: StepContext
) -> list[dict[str, Tensor]]:
    """Overwrite the decompositions in use where the new ones are valid.

    Returns, for each part and factor, which layers have a valid new decomposition, ``[layers]``. Also updates the
    layers' means in place.
    """
    chosen = in_bytes((part, _num_bytes(part)) for part in parts)
    return [good for some in chosen for good in _solve(some, states, context)]


def _num_bytes(part: StackSlice) -> int:
    stack, begin, end = part
    return stack.dtype.itemsize * (end - begin) * sum(f.num_elements for f in stack.layers[0].spec.factors)


def _solve(parts: list[StackSlice], states: dict[str, LayerState], context: StepContext) -> list[dict[str, Tensor]]:
    problems = [_problem(part, states, context) for part in parts]
    jobs = [
        (factor, this.olds[key], per_piece(this.shifts[key], len(factor)))
        for this in problems
        for key, factor in this.factors.items()
    ]
    found = iter(renewed(jobs))
    return [_replaced(part, states, context.settings, this, found) for part, this in zip(parts, problems, strict=True)]


@dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of a batched solve for some layers of a stack, by factor key."""

    factors: dict[str, Tensor]
    olds: dict[str, Decomposition]
    """Views of the decompositions in use."""
    means: dict[str, Tensor]
    shifts: dict[str, Tensor]
    damping: Tensor | float


def _problem(part: StackSlice, states: dict[str, LayerState], context: StepContext) -> Problem:
    """Collect the running factors of some layers, and copy their mean eigenvalues into the layers' states."""
    (stack, begin, end), blocks, like = part, part[0].blocks, part[0].layers[0]
    joined = stack.decompositions(states)
    assert joined is not None
    factors: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    olds: dict[str, Decomposition] = {}
    for factor in like.spec.factors:
        key, each = factor.key, factor.num_blocks
        values, weights = stack.running(states, key)
        tiny = torch.finfo(weights.dtype).tiny
        weight = weights[begin:end].clamp(min=tiny).repeat_interleave(each)
        here = slice(begin * each, end * each)
        factors[key] = values[here] / weight.view(-1, *[1] * (values.ndim - 1))
        means[key] = share_of_mean(like, factor, mean_eigenvalue(values[here]) / weight)
        olds[key] = _part(joined[key], here, factors[key].shape)
    means = whole_means(means)
    for i, layer in enumerate(stack.layers[begin:end]):
        state = states[layer.name]
        for key, mean in means.items():  # in place, because a captured CUDA graph reads them
            state.means[key].copy_(mean[i * blocks : (i + 1) * blocks])
    damping = layer_damping.stack_damping(stack, states, context.settings, context.step)
    if isinstance(damping, Tensor):
        damping = damping[begin * blocks : end * blocks].flatten()
    return Problem(factors, olds, means, factored_damping(means, damping), damping)


def _replaced(
    part: StackSlice,
    states: dict[str, LayerState],
    settings: Settings,
    problem: Problem,
    found: Iterator[tuple[Decomposition, Tensor]],
) -> dict[str, Tensor]:
    """Overwrite the old decompositions of some layers with the next ones from ``found``, and rotate moments to the new
    eigenbasis. Returns which layers have a valid decomposition, ``[layers]``, by factor."""
    (stack, begin, end), blocks = part, part[0].blocks
    good: dict[str, Tensor] = {}
    rotations: dict[str, Tensor] = {}
    carries = settings.takes_steps and any(states[layer.name].moments is not None for layer in stack.layers)
    gathered = _mean_in_basis(stack, states, begin, end, problem.olds) if carries else None
    for key, factor in problem.factors.items():
        new, sound = next(found)
        for name, target in problem.olds[key].tensors().items():
            chosen = torch.where(sound.view(-1, *[1] * (target.ndim - 1)), new.tensors()[name].to(target.dtype), target)
            if name == "vectors" and settings.takes_steps:
                with tf32(settings.tf32, stack.device):
                    rotations[key] = chosen.to(factor.dtype).mT @ target.to(factor.dtype)
            target.copy_(chosen)
        good[key] = sound.view(end - begin, -1).all(1)
    if settings.tf32 and not settings.takes_steps:
        shape = (end - begin) * blocks, *stack.layers[0].spec.grad_shape[1:]
        error = tf32_error(problem.olds, problem.means, problem.damping, shape)
        good[TF32_KEY] = (error < TF32_TOLERANCE).view(-1, blocks).all(1)
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
    """Return Adam's first moment of some layers, rotated to their eigenbases."""
    down, across = stack.sizes
    values, weights = stack.moments(states, "momentum")
    weight = weights[begin:end].clamp(min=torch.finfo(weights.dtype).tiny).repeat_interleave(stack.blocks)
    mean = values[begin * stack.blocks : end * stack.blocks, :down, :across] / weight[:, None, None]
    vectors = {
        key: d.vectors.to(mean.dtype).mT for key, d in bases.items() if isinstance(d, Eigen) and d.vectors is not None
    }
    return _turn(stack, mean, vectors)


def _turn(stack: Stack, matrices: Tensor, by: dict[str, Tensor]) -> Tensor:
    """Return matrices, laid out like the stack's gradients, multiplied by each factor's matrix on its side."""
    return multiply(matrices, swapped(by) if stack.transposed else by)


def _part(joined: Decomposition, here: slice, shape: torch.Size) -> Decomposition:
    """Return views of some blocks of a padded decomposition, without the padding."""
    size = slice(shape[-1])
    parts = {name: t[(here, *[size] * (t.ndim - 1))] for name, t in joined.tensors().items()}
    return decompose.from_tensors(parts)
