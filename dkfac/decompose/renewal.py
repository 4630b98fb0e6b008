"""Update decompositions in place, on any number of ranks, without synchronizing with the device.

Input: running factors and the decompositions in use. Output: the same decompositions, overwritten where the new ones
are valid, and flags, identical on all ranks, that say which are. Owns: nothing.

Factors of one width are solved in one batch, whichever layers they belong to. A factor that several ranks decompose is
only batched with others that the same ranks decompose: its bits may depend on the batch, and must be equal on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dkfac.comm.buffers import vector
from dkfac.comm.transport import Transport
from dkfac.config.settings import Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_damping, layer_factors, refresh_sync
from dkfac.decompose.replace import joined, per_block, replace_decompositions
from dkfac.factors.layer_state import LayerState, bias_is_silent
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants
from dkfac.ops.batches import in_bytes
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, from_tensors
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import TF32_TOLERANCE, factored_damping, per_piece, tf32_error
from dkfac.ops.together import renewed
from dkfac.ops.torch_private import foreach_copy_
from dkfac.plan.spec import FactorSpec

Factor = tuple[Layer, FactorSpec]
Solved = dict[tuple[str, str], tuple[Decomposition, Tensor]]
"""By layer and key: a new decomposition, and whether it is valid, as a flag on the device."""


class Flags(NamedTuple):
    """What a renewal tells the host, as flags on the device."""

    failed: Tensor
    """Whether an error was raised on a rank, ``[1]``."""
    disagreed: Tensor
    """Which scheduled settings are not the same on all ranks."""
    valid: Tensor
    """Which factors, in the order of :func:`factors_of`, have a new decomposition."""
    tf32_safe: Tensor
    """Which layers may be preconditioned in TF32; empty if that is not asked."""

    def joined(self) -> Tensor:
        return torch.cat([part.to(self.valid.device) for part in self])


def factors_of(layers: Iterable[Layer]) -> list[Factor]:
    return [(layer, factor) for layer in layers for factor in layer.spec.factors]


def may_renew(settings: Settings) -> bool:
    """Whether decompositions that exist are updated in place."""
    return (settings.improves_bases or settings.uses_inverses) and not settings.measures_moments


def renew(
    layers: list[Layer], ranks: RankPlan, states: dict[str, LayerState], context: StepContext, transport: Transport
) -> tuple[Flags, BaseException | None]:
    """Update the decompositions of some layers. Collective. Returns flags, and the error that this rank will raise on
    all ranks, if any; with one rank it is raised here."""
    device = layers[0].weight.device
    with tf32(False, device), torch.autocast(device.type, enabled=False):  # the same on all ranks, in Join too
        return _renew(layers, ranks, states, context, transport)


def _renew(
    layers: list[Layer], ranks: RankPlan, states: dict[str, LayerState], context: StepContext, transport: Transport
) -> tuple[Flags, BaseException | None]:
    told = refresh_sync.exchange_means(ranks, states, layers, transport, context)
    _write_means(layers, ranks, states, told)
    solved, error = Solved(), None
    try:
        solved = _solve(layers, ranks, states, context)
    except Exception as caught:
        error = transport.defer(caught)
    failed, valid = _agree(layers, ranks, transport, solved, error)
    found: refresh_sync.Found = {layer.name: {} for layer in layers}
    for (name, key), (decomposition, _) in solved.items():
        found[name][key] = decomposition, "ok"
    factors = factors_of(layers)
    outcomes: refresh_sync.Outcomes = {layer.name: {f.key: "ok" for f in layer.spec.factors} for layer in layers}
    only = None if len(layers) == len(ranks.layers) else {(layer.name, factor.key) for layer, factor in factors}
    new = refresh_sync.share_decompositions(context.settings, transport, layers, found, outcomes, only)
    moved = {layer.name for layer in layers if ranks.holds(layer.name).adam}
    replace_decompositions(factors, states, context.settings, new, valid, moved)
    safe = torch.zeros(0, dtype=torch.bool, device=valid.device)
    if context.settings.tf32 and not context.settings.takes_steps:
        flags = [_is_tf32_safe(layer, states[layer.name], context) for layer in layers]
        safe = torch.stack([flag.to(valid.device) for flag in flags])
    return Flags(failed, told.disagreed(transport.world_size), valid, safe), error


def _write_means(
    layers: list[Layer], ranks: RankPlan, states: dict[str, LayerState], told: refresh_sync.ToldMeans
) -> None:
    """Copy the mean eigenvalues into the layers' states, in place, because a captured CUDA graph reads them."""
    means = told.by_layer(ranks.layers)
    pairs = [(states[la.name].means[key], mean) for la in layers for key, mean in means[la.name].items()]
    foreach_copy_([target for target, _ in pairs], [mean for _, mean in pairs])


# --- solving -----------------------------------------------------------------------------------------------------


def _solve(layers: list[Layer], ranks: RankPlan, states: dict[str, LayerState], context: StepContext) -> Solved:
    """Return new decompositions of the factors that this rank decomposes."""
    by_ranks: dict[tuple[int, ...], list[Factor]] = {}
    form = Inverse if context.settings.uses_inverses else Eigen
    for layer in layers:
        by = ranks.placements[layer.name].decomposed_by
        for factor, who in zip(layer.spec.factors, by, strict=True):
            is_regular = isinstance(states[layer.name].decompositions.get(factor.key), form)  # else: repaired later
            if ranks.rank in who and is_regular:
                by_ranks.setdefault(who if len(who) > 1 else (), []).append((layer, factor))
    found: Solved = {}
    for same in by_ranks.values():
        sizes = [factor.num_elements * layer.dtype.itemsize for layer, factor in same]
        for chosen in in_bytes(zip(same, sizes, strict=True)):
            found |= _solve_batch(chosen, states, context)
    return found


def _solve_batch(batch: list[Factor], states: dict[str, LayerState], context: StepContext) -> Solved:
    groups: dict[object, list[Factor]] = {}
    shifts = dict[str, dict[str, Tensor]]()
    for layer in {layer.name: layer for layer, _ in batch}.values() if context.settings.uses_inverses else ():
        damping = layer_damping.damping_of(layer, states[layer.name], context.settings, context.step)
        shifts[layer.name] = factored_damping(states[layer.name].means, damping)
    for layer, factor in batch:
        kind = (factor.dim, factor.form, layer.dtype, layer.weight.device)
        groups.setdefault(kind, []).append((layer, factor))
    jobs = [
        (_running(group, states), joined([states[la.name].decompositions[f.key] for la, f in group]),
         _shifts(group, shifts, context))
        for group in groups.values()
    ]  # fmt: skip
    found: Solved = {}
    for group, (new, sound) in zip(groups.values(), renewed(jobs), strict=True):
        counts = [factor.num_blocks for _, factor in group]
        parts = zip(*(torch.split(t, counts) for t in new.tensors().values()), strict=True)
        for (layer, factor), tensors, good in zip(group, parts, _all_of(sound, counts).unbind(), strict=True):
            own = from_tensors(dict(zip(new.tensors(), tensors, strict=True)))
            found[layer.name, factor.key] = own, good
    return found


def _all_of(flags: Tensor, counts: list[int]) -> Tensor:
    """Return for each factor, which has so many blocks, whether all their flags are set."""
    owners = constants.constant(
        tuple([i for i, count in enumerate(counts) for _ in range(count)]), flags.device, torch.int64
    )
    unset = torch.zeros(len(counts), dtype=torch.int32, device=flags.device)
    return unset.index_add_(0, owners, (~flags).to(torch.int32)) == 0


def _running(group: list[Factor], states: dict[str, LayerState]) -> Tensor:
    """Return running factors of one width as they are decomposed, ``[blocks, ...]``."""
    if any(f.key == "A_S" or bias_is_silent(la, f.key) for la, f in group):
        return torch.cat([layer_factors.used(la, states[la.name], f.key) for la, f in group])
    averages = [states[la.name].running[f.key] for la, f in group]
    values = torch.cat([average.value for average in averages])
    weights = torch.stack([average.weight for average in averages]).clamp_(min=torch.finfo(values.dtype).tiny)
    each = per_block(weights, [factor.num_blocks for _, factor in group])
    return values.div_(each.view(-1, *[1] * (values.ndim - 1)))


def _shifts(group: list[Factor], shifts: dict[str, dict[str, Tensor]], context: StepContext) -> Tensor:
    """Return each block's share of the damping; zeros where there is none to add."""
    if not context.settings.uses_inverses:
        blocks = sum(factor.num_blocks for _, factor in group)
        return torch.zeros(blocks, dtype=group[0][0].dtype, device=group[0][0].weight.device)
    return torch.cat([per_piece(shifts[layer.name][factor.key], factor.num_blocks) for layer, factor in group])


# --- agreeing and sharing ----------------------------------------------------------------------------------------


def _agree(
    layers: list[Layer], ranks: RankPlan, transport: Transport, solved: Solved, error: BaseException | None
) -> tuple[Tensor, Tensor]:
    """Return whether a rank failed, ``[1]``, and which factors of the layers are valid on all ranks that decomposed
    them. Collective."""
    device = layers[0].weight.device
    if not transport.program.stage("status"):  # not by way of the host, from which a CUDA graph cannot copy
        no = torch.zeros((), dtype=torch.bool, device=device)
        flags = [solved[la.name, f.key][1] if (la.name, f.key) in solved else no for la, f in factors_of(layers)]
        return no[None], torch.stack([flag.to(device) for flag in flags])
    due = {layer.name for layer in layers}
    known: list[Tensor | float] = [float(error is not None)]
    wanted, index = list[float](), list[int]()
    for i, (layer, factor) in enumerate(factors_of(ranks.layers)):
        mine = solved.get((layer.name, factor.key))
        known.append(0.0 if mine is None else mine[1])
        if layer.name in due:
            index.append(i)
    for layer in layers:
        wanted += [float(len(by)) for by in ranks.placements[layer.name].decomposed_by]
    codes = vector(known, device)
    told = transport.sum_vector("status", torch.cat([codes, codes[1:].square()]))
    totals = told[1 : len(codes)][constants.constant(tuple(index), told.device, torch.int64)]
    return told[:1] > 0, totals == constants.constant(tuple(wanted), told.device, told.dtype)


def _is_tf32_safe(layer: Layer, state: LayerState, context: StepContext) -> Tensor:
    if state.decompositions.keys() != state.means.keys():  # this rank does not precondition the layer
        return torch.ones((), dtype=torch.bool, device=layer.weight.device)
    damping = layer_damping.damping_of(layer, state, context.settings, context.step)
    error = tf32_error(state.decompositions, state.means, damping, layer.spec.grad_shape)
    return (error < TF32_TOLERANCE).all()
