"""Add the sums of a single process to its running factors, in few launches.

Input: :class:`BatchStatistics` of this rank only. Output: running factors, updated in place. Owns: the plan of the
launch that does it, and its CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.capture.statistics import BatchStatistics
from dkfac.factors import batch_factors
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.ops import constants, many
from dkfac.ops.fused import absorb_
from dkfac.ops.graph_cache import GraphedFunction, GraphPool
from dkfac.ops.torch_private import foreach_norm
from dkfac.plan.spec import is_input


@dataclass(eq=False, slots=True)
class LaunchPlan:
    """What one launch absorbs, valid as long as the same factors are measured."""

    stacks: list[Stack]
    entries: list[tuple[str, str, Tensor]]
    """Layer, factor and its running value."""
    rest: list[Tensor]
    """Further totals, which are always the same."""
    totals: many.Totals
    fine: Tensor
    """Whether the last totals were absorbed."""


class RunningAverage:
    """Adds sums to running factors each step. With CUDA graphs a step like the last one costs little host time."""

    def __init__(self, pool: GraphPool) -> None:
        self._plan: LaunchPlan | None = None
        self._graph = GraphedFunction(pool)

    def absorb(
        self,
        measured: BatchStatistics,
        stacks: list[Stack],
        states: dict[str, LayerState],
        good: Tensor,
        decay: float,
        *,
        use_graphs: bool,
    ) -> Tensor:
        """Absorb this rank's sums into the running factors, those of equal shape in one batch, unless any of them is
        not finite; return whether it did, as a flag on the device that is valid until the next call."""
        scale = batch_factors.scale_alone(measured)
        plan, totals, scales = self._plan, list[Tensor](), list[float]()
        if not use_graphs or plan is None or not _is_same(plan, stacks, states, measured, scale, totals, scales):
            good, self._plan = _absorb(stacks, states, measured, good, decay, scale)
            return good
        plan.totals.give(totals + plan.rest, scales + [1.0] * len(plan.rest))

        def work() -> None:
            plan.fine.copy_(good & plan.totals.are_finite())
            plan.totals.absorb(decay, plan.fine)

        self._graph.run([plan, good, decay], work, good.device)
        return plan.fine


def _is_same(
    plan: LaunchPlan,
    stacks: list[Stack],
    states: dict[str, LayerState],
    measured: BatchStatistics,
    scale: Tensor | float,
    totals: list[Tensor],
    scales: list[float],
) -> bool:
    """Return whether a plan fits what was measured; fills in the entries' totals and scales."""
    if plan.stacks is not stacks or isinstance(scale, Tensor):
        return False
    if sum([len(sums.factors) for sums in measured.layers.values()]) != len(plan.entries):
        return False
    for name, key, value in plan.entries:
        sums, average = measured.layers.get(name), states[name].running.get(key)
        total = None if sums is None else sums.factors.get(key)
        if sums is None or total is None or average is None or average.value is not value:
            return False
        if sums.moments is not None or isinstance(sums.rows, Tensor) or not sums.rows:
            return False
        if total.dtype is not value.dtype or not total.is_contiguous():
            return False
        totals.append(total)
        scales.append(1 / sums.rows if is_input(key) else scale)
    return True


def _absorb(
    stacks: list[Stack],
    states: dict[str, LayerState],
    measured: BatchStatistics,
    good: Tensor,
    decay: float,
    scale: Tensor | float,
) -> tuple[Tensor, LaunchPlan | None]:
    """Do the same for any sums; also return a plan if one launch absorbed them all."""
    found = []
    for stack in stacks:
        sums = [measured.layers.get(layer.name) for layer in stack.layers]
        for factor in stack.layers[0].spec.factors:
            key = factor.key
            totals = [None if s is None else s.factors.pop(key, None) for s in sums]
            if all(total is None for total in totals):
                continue
            scales: list[Tensor | float] = [scale] * stack.num_layers
            if is_input(key):
                scales = [1.0 if s is None or _is_zero(s.rows) else 1 / s.rows for s in sums]
            found.append((stack, key, totals, scales))
    moments = {name: s.moments for name, s in measured.layers.items() if s.moments is not None}
    plan, _kept, apart = _by_kernel(stacks, states, found, good)  # _kept may be copies, which must outlive the launch
    if plan is not None:
        good = good & plan.totals.are_finite()
    everything = [t for _, _, totals, _ in apart for t in totals if t is not None]
    everything += moments.values()
    if everything:
        good = good & _all_finite(everything, good.device)
    loose = [s for _, _, _, scales in found for s in scales if isinstance(s, Tensor)]
    if loose:  # from a division by zero rows or terms
        good = good & torch.isfinite(torch.stack([s.reshape(()).to(good.device, torch.float64) for s in loose])).all()
    if plan is not None:
        plan.totals.absorb(decay, good)
    for stack, key, totals, scales in apart:
        (values, weights), flat = stack.running(states, key), (stack.num_layers, -1)
        here = good.to(stack.device) & constants.constant(_ran(totals), stack.device, torch.bool)
        absorb_(values.view(flat), _joined(totals, values).view(flat), decay, _vector(scales, values), here)
        weights.copy_(torch.where(here, weights * decay + 1, weights))
    layers = {layer.name: layer for stack in stacks for layer in stack.layers}
    for name, moment in moments.items():
        layer, state = layers[name], states[name]
        batch = {"moments": batch_factors.batch_factor("moments", moment, 1.0, scale)}
        batch_factors.average(layer, state, batch, decay=decay, good=good)
    return good, None if apart or moments else plan


Total = tuple[Stack, str, list[Tensor | None], list[Tensor | float]]
"""A stack, a factor, each layer's sum (None if it has none), and the multipliers of the sums."""


def _by_kernel(
    stacks: list[Stack], states: dict[str, LayerState], found: list[Total], good: Tensor
) -> tuple[LaunchPlan | None, list[Tensor], list[Total]]:
    """Return a plan for the sums that one launch can absorb, these sums as the launch needs them, and the others.

    All have running factors from now on.
    """
    entries, totals, scales, apart = list[tuple[str, str, Tensor]](), list[Tensor](), list[float](), list[Total]()
    counts, ones = list[Tensor](), list[Tensor]()
    for stack, key, sums, factors in found:
        ran = _ran(sums)
        names = {layer.name for layer, has in zip(stack.layers, ran, strict=True) if has}
        common, weights = stack.running(states, key, names)
        if any(isinstance(factor, Tensor) for factor in factors) or not many.are_usable(common, good):
            apart.append((stack, key, sums, factors))
            continue
        one = constants.constant((1.0,) * stack.num_layers, stack.device, weights.dtype)
        counts += [weights] if all(ran) else [weights[i] for i, has in enumerate(ran) if has]
        ones += [one] if all(ran) else [one[i] for i, has in enumerate(ran) if has]
        for layer, total, factor in zip(stack.layers, sums, factors, strict=True):
            if total is not None:
                entries.append((layer.name, key, states[layer.name].running[key].value))
                totals.append(total.to(common.device, common.dtype).contiguous())
                scales.append(float(factor))
    if not entries:
        return None, totals, apart
    given = many.Totals([value for _, _, value in entries] + counts)
    given.give(totals + ones, scales + [1.0] * len(ones))
    return LaunchPlan(stacks, entries, ones, given, torch.ones_like(good)), totals, apart


def _ran(totals: list[Tensor | None]) -> tuple[bool, ...]:
    return tuple(total is not None for total in totals)


def _is_zero(rows: Tensor | float) -> bool:
    return not isinstance(rows, Tensor) and rows == 0


def _all_finite(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return whether sums are finite, as a flag on the device. On a GPU one launch checks them; elsewhere the diagonals
    are checked: a bad entry comes from a bad row, and shows there."""
    if device.type == "cuda":
        told = [n.to(device, torch.float32) for n in foreach_norm(tensors, torch.inf)]
    else:
        square = [t.ndim == 3 and t.shape[-1] == t.shape[-2] for t in tensors]
        told = [(t.diagonal(dim1=-2, dim2=-1) if s else t).sum().double() for t, s in zip(tensors, square, strict=True)]
    return torch.isfinite(torch.stack(told)).all()


def _joined(totals: list[Tensor | None], like: Tensor) -> Tensor:
    """Return tensors concatenated, without a copy where they already are in memory; zeros for missing ones."""
    first = totals[0]
    if first is not None and first.is_contiguous():
        size = first.numel() * first.element_size()
        if all(t is not None and t.data_ptr() == first.data_ptr() + i * size for i, t in enumerate(totals)):
            inside = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
            if inside >= len(totals) * size:
                return first.as_strided((len(totals) * first.shape[0], *first.shape[1:]), first.stride())
    blank = like[: len(like) // len(totals)]
    return torch.cat([torch.zeros_like(blank) if t is None else t for t in totals])


def _vector(values: list[Tensor | float], like: Tensor) -> Tensor:
    """Return numbers, some of which may be on the device, as one tensor there."""
    if not any(isinstance(value, Tensor) for value in values):
        return constants.constant(tuple(values), like.device, like.dtype)
    if all(value is values[0] for value in values):
        return torch.as_tensor(values[0]).to(like.device, like.dtype).expand(len(values)).contiguous()
    parts = [v if isinstance(v, Tensor) else torch.full((), v, device=like.device) for v in values]
    return torch.stack([part.to(like.device, like.dtype) for part in parts])
