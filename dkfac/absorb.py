"""One process's sums into its running factors, with few launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dkfac import reduce, stages
from dkfac.ops import many
from dkfac.ops.fused import absorb_
from dkfac.plan.spec import is_input
from dkfac.replay import Captured, Pool
from dkfac.stacks import Stack
from dkfac.window import Measured

if TYPE_CHECKING:
    from dkfac.run import Runner


@dataclass(eq=False, slots=True)
class Plan:
    """What is absorbed by one launch, as long as the same is measured."""

    stacks: list[Stack]
    entries: list[tuple[str, str, Tensor]]
    """Layer, factor and its running value."""
    rest: list[Tensor]
    """Further totals, which are always the same."""
    totals: many.Totals
    fine: Tensor
    """Whether they were."""


class Absorber:
    """Absorbs sums step by step. With CUDA graphs a step like the last one costs the host little."""

    def __init__(self, pool: Pool) -> None:
        self._plan: Plan | None = None
        self._graph = Captured(pool)

    def absorb(self, runner: Runner, measured: Measured, good: Tensor, decay: float) -> Tensor:
        """Absorb this rank's own sums into the running factors, those of one shape together, unless anything in them is
        not finite; returns whether it was good, on the device, until the next call."""
        scale = reduce.scale_alone(runner, measured)
        plan, totals, scales = self._plan, list[Tensor](), list[float]()
        if not runner.uses_graphs or plan is None or not _is_same(plan, runner, measured, scale, totals, scales):
            good, self._plan = _absorb(runner, measured, good, decay, scale)
            return good
        plan.totals.give(totals + plan.rest, scales + [1.0] * len(plan.rest))

        def work() -> None:
            plan.fine.copy_(good & plan.totals.are_finite())
            plan.totals.absorb(decay, plan.fine)

        self._graph.run([plan, good, decay], work, good.device)
        return plan.fine


def _is_same(
    plan: Plan, runner: Runner, measured: Measured, scale: Tensor | float, totals: list[Tensor], scales: list[float]
) -> bool:
    """Whether a plan is of what was measured; fills in the entries' totals and scales."""
    if plan.stacks is not runner.stacks or isinstance(scale, Tensor):
        return False
    if sum([len(sums.factors) for sums in measured.layers.values()]) != len(plan.entries):
        return False
    for name, key, value in plan.entries:
        sums, average = measured.layers.get(name), runner.states[name].running.get(key)
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
    runner: Runner, measured: Measured, good: Tensor, decay: float, scale: Tensor | float
) -> tuple[Tensor, Plan | None]:
    """Do the same for any sums; returns a plan too if one launch absorbed them all."""
    found = []
    for stack in runner.stacks:
        sums = [measured.layers.get(layer.name) for layer in stack.layers]
        for factor in stack.layers[0].spec.factors:
            key = factor.key
            totals = [None if s is None else s.factors.pop(key, None) for s in sums]
            if all(total is None for total in totals):
                continue
            scales: list[Tensor | float] = [scale] * len(stack)
            if is_input(key):
                scales = [1.0 if s is None or _is_zero(s.rows) else 1 / s.rows for s in sums]
            found.append((stack, key, totals, scales))
    moments = {name: s.moments for name, s in measured.layers.items() if s.moments is not None}
    plan, _kept, apart = _by_kernel(runner, found, good)  # what is kept may be copies, which a launch needs
    if plan is not None:
        good = good & plan.totals.are_finite()
    everything = [t for _, _, totals, _ in apart for t in totals if t is not None]
    everything += moments.values()
    if everything:
        good = good & _all_finite(everything, good.device)
    loose = [s for _, _, _, scales in found for s in scales if isinstance(s, Tensor)]
    if loose:  # a division by no rows or no terms
        good = good & torch.isfinite(torch.stack([s.reshape(()).to(good.device, torch.float64) for s in loose])).all()
    if plan is not None:
        plan.totals.absorb(decay, good)
    for stack, key, totals, scales in apart:
        (values, weights), flat = stack.running(runner.states, key), (len(stack), -1)
        here = good.to(stack.device) & stages.constant(_ran(totals), stack.device, torch.bool)
        absorb_(values.view(flat), _joined(totals, values).view(flat), decay, _vector(scales, values), here)
        weights.copy_(torch.where(here, weights * decay + 1, weights))
    for name, moment in moments.items():
        layer, state = runner.by_name[name], runner.states[name]
        batch = {"moments": stages.batch_factor("moments", moment, 1.0, scale)}
        stages.average(layer, state, batch, decay=decay, good=good)
    return good, None if apart or moments else plan


Total = tuple[Stack, str, list[Tensor | None], list[Tensor | float]]
"""Of a stack's factor: each layer's sum, if it has one, and what that is multiplied by."""


def _by_kernel(runner: Runner, found: list[Total], good: Tensor) -> tuple[Plan | None, list[Tensor], list[Total]]:
    """Return a plan of the sums that one launch absorbs with these sums, and the other ones.

    All have running factors from now on.
    """
    entries, totals, scales, apart = list[tuple[str, str, Tensor]](), list[Tensor](), list[float](), list[Total]()
    counts, ones = list[Tensor](), list[Tensor]()
    for stack, key, sums, factors in found:
        ran = _ran(sums)
        names = {layer.name for layer, has in zip(stack.layers, ran, strict=True) if has}
        common, weights = stack.running(runner.states, key, names)
        if any(isinstance(factor, Tensor) for factor in factors) or not many.usable(common, good):
            apart.append((stack, key, sums, factors))
            continue
        one = stages.constant((1.0,) * len(stack), stack.device, weights.dtype)
        counts += [weights] if all(ran) else [weights[i] for i, has in enumerate(ran) if has]
        ones += [one] if all(ran) else [one[i] for i, has in enumerate(ran) if has]
        for layer, total, factor in zip(stack.layers, sums, factors, strict=True):
            if total is not None:
                entries.append((layer.name, key, runner.states[layer.name].running[key].value))
                totals.append(total.to(common.device, common.dtype).contiguous())
                scales.append(float(factor))
    if not entries:
        return None, totals, apart
    given = many.Totals([value for _, _, value in entries] + counts)
    given.give(totals + ones, scales + [1.0] * len(ones))
    return Plan(runner.stacks, entries, ones, given, torch.ones_like(good)), totals, apart


def _ran(totals: list[Tensor | None]) -> tuple[bool, ...]:
    return tuple(total is not None for total in totals)


def _is_zero(rows: Tensor | float) -> bool:
    return not isinstance(rows, Tensor) and rows == 0


def _all_finite(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Whether sums are finite, as a tensor. On a GPU one launch looks at all; elsewhere the diagonals do: a bad entry
    is a bad row."""
    if device.type == "cuda":
        told = [n.to(device, torch.float32) for n in torch._foreach_norm(tensors, torch.inf)]
    else:
        square = [t.ndim == 3 and t.shape[-1] == t.shape[-2] for t in tensors]
        told = [(t.diagonal(dim1=-2, dim2=-1) if s else t).sum().double() for t, s in zip(tensors, square, strict=True)]
    return torch.isfinite(torch.stack(told)).all()


def _joined(totals: list[Tensor | None], like: Tensor) -> Tensor:
    """Return tensors one after the other, without a copy where they lie so already; zeros for those that lack."""
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
        return stages.constant(tuple(values), like.device, like.dtype)
    if all(value is values[0] for value in values):
        return torch.as_tensor(values[0]).to(like.device, like.dtype).expand(len(values)).contiguous()
    parts = [v if isinstance(v, Tensor) else torch.full((), v, device=like.device) for v in values]
    return torch.stack([part.to(like.device, like.dtype) for part in parts])
