"""One process's sums into its running factors, with few launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dkfac import reduce, stages
from dkfac.ops import many
from dkfac.ops.fused import absorb_
from dkfac.stacks import Stack
from dkfac.window import Measured

if TYPE_CHECKING:
    from dkfac.run import Runner


def absorb(runner: Runner, measured: Measured, good: Tensor, decay: float) -> Tensor:
    """Absorb this rank's own sums into the running factors, those of one shape together, unless anything in them is not
    finite; returns whether it was good."""
    scale = reduce.scale_alone(runner, measured)
    found = []
    for stack in runner.stacks:
        sums = [measured.layers.get(layer.name) for layer in stack.layers]
        for factor in stack.layers[0].spec.factors:
            key = factor.key
            totals = [None if s is None else s.factors.pop(key, None) for s in sums]
            if all(total is None for total in totals):
                continue
            scales: list[Tensor | float] = [scale] * len(stack)
            if key == "A":
                scales = [1.0 if s is None or _is_zero(s.rows) else 1 / s.rows for s in sums]
            found.append((stack, key, totals, scales))
    moments = {name: s.moments for name, s in measured.layers.items() if s.moments is not None}
    together, apart = _by_kernel(runner, found, good)
    if together is not None:
        good = good & together.are_finite()
    everything = [t for _, _, totals, _ in apart for t in totals if t is not None]
    everything += moments.values()
    if everything:
        good = good & _all_finite(everything, good.device)
    loose = [s for _, _, _, scales in found for s in scales if isinstance(s, Tensor)]
    if loose:  # a division by no rows or no terms
        good = good & torch.isfinite(torch.stack([s.reshape(()).to(good.device, torch.float64) for s in loose])).all()
    if together is not None:
        together.absorb(decay, good)
    for stack, key, totals, scales in apart:
        (values, weights), flat = stack.running(runner.states, key), (len(stack), -1)
        here = good.to(stack.device) & stages.constant(_ran(totals), stack.device, torch.bool)
        absorb_(values.view(flat), _joined(totals, values).view(flat), decay, _vector(scales, values), here)
        weights.copy_(torch.where(here, weights * decay + 1, weights))
    for name, moment in moments.items():
        layer, state = runner.by_name[name], runner.states[name]
        batch = {"moments": stages.batch_factor("moments", moment, 1.0, scale)}
        stages.average(layer, state, batch, decay=decay, good=good)
    return good


Total = tuple[Stack, str, list[Tensor | None], list[Tensor | float]]
"""Of a stack's factor: each layer's sum, if it has one, and what that is multiplied by."""


def _by_kernel(runner: Runner, found: list[Total], good: Tensor) -> tuple[many.Totals | None, list[Total]]:
    """Return the sums that one launch absorbs, and the others. All have running factors from now on."""
    values, totals, scales, apart = list[Tensor](), list[Tensor](), list[float](), list[Total]()
    for stack, key, sums, factors in found:
        ran = _ran(sums)
        names = {layer.name for layer, has in zip(stack.layers, ran, strict=True) if has}
        common, weights = stack.running(runner.states, key, names)
        if any(isinstance(factor, Tensor) for factor in factors) or not many.usable(common, good):
            apart.append((stack, key, sums, factors))
            continue
        one = stages.constant((1.0,) * len(stack), stack.device, weights.dtype)
        counted = [(weights, one)] if all(ran) else [(weights[i], one[i]) for i, has in enumerate(ran) if has]
        values += [weight for weight, _ in counted]
        totals += [one for _, one in counted]
        scales += [1.0] * len(counted)
        for layer, total, factor in zip(stack.layers, sums, factors, strict=True):
            if total is not None:
                values.append(runner.states[layer.name].running[key].value)
                totals.append(total.to(common.device, common.dtype).contiguous())
                scales.append(float(factor))
    return many.Totals(values, totals, scales) if values else None, apart


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
