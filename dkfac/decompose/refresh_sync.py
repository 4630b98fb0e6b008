"""What ranks exchange during a refresh: mean eigenvalues, the outcome of each decomposition, and decompositions.

Input: what this rank has. Output: the same values on all ranks. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.comm.buffers import vector
from dkfac.comm.packing import Name, alike, packed_shape
from dkfac.comm.transport import Transport
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_factors
from dkfac.decompose.fallback import OUTCOMES, Outcome
from dkfac.decompose.sent_decompositions import pack_all, unpack_all
from dkfac.factors.layer_state import LayerState, bias_is_silent, share_of_mean, whole_means
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants
from dkfac.ops.decompose import Decomposition, mean_eigenvalue
from dkfac.plan.spec import FactorSpec, whole_key

Found = dict[str, dict[str, tuple[Decomposition | None, Outcome]]]
"""By layer and factor key: a decomposition and the outcome that produced it."""
Means = dict[str, dict[str, Tensor]]
"""Mean eigenvalues by layer and factor key."""
LayerFactor = tuple[Layer, FactorSpec]
Outcomes = dict[str, dict[str, Outcome]]


@dataclass(frozen=True, slots=True)
class ToldMeans:
    """Sums over ranks, on the device."""

    schedules: Tensor
    """Of the scheduled settings, and of their squares; empty with one rank."""
    has: Tensor
    """By factor, above 0 if it has statistics."""
    means: Tensor
    """Contributions of the factors to the mean eigenvalues of whole factors, in float64."""

    def disagreed(self, world_size: int) -> Tensor:
        """Return which scheduled settings are not the same on all ranks."""
        totals, squares = self.schedules.view(2, len(self.schedules) // 2)
        difference = world_size * squares - totals.square()
        return torch.gt(difference, 1e-9 * totals.square())

    def by_layer(self, layers: list[Layer]) -> Means:
        """Return the mean eigenvalues of whole factors, by layer and factor."""
        position, result, home = 0, Means(), dict[tuple[torch.device, torch.dtype], Tensor]()
        for layer in layers:
            where = layer.weight.device, layer.dtype
            if where not in home:
                home[where] = self.means.to(*where)
            here, found = home[where], {}
            for factor in layer.spec.factors:
                blocks = factor.num_blocks // factor.pieces
                found[factor.key] = here[position : position + blocks]
                position += blocks
            result[layer.name] = whole_means(found)
        return result


def exchange_means(
    ranks: RankPlan, states: dict[str, LayerState], layers: list[Layer], transport: Transport, context: StepContext
) -> ToldMeans:
    """Sum the mean eigenvalues of some layers' factors over the ranks; those of other layers are zero. Collective."""
    has: list[Tensor | float] = []
    due, speaking = {layer.name for layer in layers}, list[LayerFactor]()
    for layer in ranks.layers:
        state, placement = states[layer.name], ranks.placements[layer.name]
        is_known = layer_factors.is_ready(layer, state)  # what was decomposed has statistics
        for factor, held in zip(layer.spec.factors, placement.factors, strict=True):
            speaks = ranks.rank == held[0] and layer.name in due and factor.key in state.running
            has.append(0.0 if not speaks else 1.0 if is_known else state.running[factor.key].weight > 0)
            if speaks:
                speaking.append((layer, factor))
    device = ranks.layers[0].weight.device
    joined = _in_order(ranks, _live_means(speaking, states), device)
    told = joined[:0]
    if all(isinstance(flag, float) for flag in has):  # not by way of the host, from which a CUDA graph cannot copy
        flags = constants.constant(tuple(has), device, torch.float64)
    else:
        flags = vector(has, device)
    for _ in transport.program.stage("means"):
        scheduled = [context.at(name) for name in SCHEDULES]
        told = vector([*scheduled, *(value * value for value in scheduled)], device)
        together = transport.sum_vector("means", torch.cat([told, flags, joined]))
        told, flags, joined = torch.split(together, [len(told), len(flags), len(joined)])
    return ToldMeans(told, flags, joined)


def _live_means(factors: list[LayerFactor], states: dict[str, LayerState]) -> dict[Name, Tensor]:
    """Return what running factors contribute to the mean eigenvalues of whole factors, those of one shape at once."""
    found: dict[Name, Tensor] = {}
    if all(layer_factors.traces_are_launched(states[layer.name]) for layer, _ in factors):
        lives = layer_factors.all_live_means({layer.name: layer for layer, _ in factors}.values(), states)
        return {(layer.name, factor.key): lives[layer.name][factor.key] for layer, factor in factors}

    def kind(item: LayerFactor) -> object:
        layer, factor = item
        if factor.key == "A_S" or bias_is_silent(layer, factor.key):
            return layer.name
        leaves_bias = whole_key(factor.key) == "A" and layer.has_bias and factor.whole_dim > 0
        sizes = packed_shape(factor), factor.pieces, factor.whole_dim, factor.key
        return sizes, leaves_bias and (layer.bias_is_live,), layer.weight.dtype, layer.weight.device

    for same in alike(factors, kind):
        layer, factor = same[0]
        if isinstance(kind(same[0]), str):
            live = layer_factors.live_means(layer, states[layer.name])
            found |= {(layer.name, f.key): live[f.key] for _, f in same}
            continue
        averages = [states[la.name].running[f.key] for la, f in same]
        if len(same) == 1:
            mean = mean_eigenvalue(averages[0].value) / averages[0].guarded_weight()
            found[layer.name, factor.key] = share_of_mean(layer, factor, mean)
            continue
        values = [a.value if factor.form == "diagonal" else a.value.diagonal(dim1=-2, dim2=-1) for a in averages]
        weights = torch.stack([average.weight for average in averages])
        means = torch.stack(values).mean(-1) / weights.clamp(min=torch.finfo(weights.dtype).tiny)[:, None]
        shares = share_of_mean(layer, factor, means.flatten()).view(len(same), -1)
        found |= zip([(la.name, f.key) for la, f in same], shares.unbind(), strict=True)
    return found


def _in_order(ranks: RankPlan, means: dict[Name, Tensor], device: torch.device) -> Tensor:
    """Return means of factors as one float64 vector in the order of all ranks, zeros where there are none."""
    sizes = [((layer.name, f.key), f.num_blocks // f.pieces) for layer in ranks.layers for f in layer.spec.factors]
    missing = [size for name, size in sizes if name not in means]
    blank = iter(torch.split(torch.zeros(sum(missing), device=device), missing) if missing else ())
    return torch.cat([means[n].to(device) if n in means else next(blank) for n, _ in sizes]).to(torch.float64)


def agree_on_means(ranks: RankPlan, states: dict[str, LayerState], transport: Transport, context: StepContext) -> Means:
    """Return the factors' mean eigenvalues, identical on all ranks, for the layers that have statistics. Collective,
    and synchronizes with the device."""
    told = exchange_means(ranks, states, ranks.layers, transport, context)
    check_schedules(told.disagreed(transport.world_size).tolist(), context.step)
    counts, means = iter(told.has.tolist()), told.by_layer(ranks.layers)
    complete = {la.name for la in ranks.layers if min([next(counts) for _ in la.spec.factors]) > 0}
    return {name: found for name, found in means.items() if name in complete}


def check_schedules(disagreed: list[bool], step: int) -> None:
    """Raise, on all ranks, if they do not all have the same damping, decay and clip."""
    for name, differs in zip(SCHEDULES, disagreed, strict=False):
        if differs:
            raise RuntimeError(
                f"{name} is not the same on all ranks at step {step}: a schedule must not depend on what one rank "
                f"alone knows; reduce the loss it follows first"
            )


def agree_on_outcomes(
    ranks: RankPlan,
    states: dict[str, LayerState],
    transport: Transport,
    due: Iterable[Layer],
    found: Found,
    error: BaseException | None,
    only: Container[tuple[str, str]] | None = None,
) -> Outcomes:
    """Return the outcome of each factor's decomposition, identical on all ranks; an error on one rank is raised on all.

    If ranks that decomposed the same factor report different outcomes, all of them keep the previous decomposition.
    ``only`` restricts the factors that were due, as ``(layer, key)`` pairs. Collective.
    """
    codes = []
    for layer in ranks.layers:
        mine = found.get(layer.name, {})
        codes += [float(1 + OUTCOMES.index(mine[f.key][1])) if f.key in mine else 0.0 for f in layer.spec.factors]
    values = [float(error is not None), *codes, *(code * code for code in codes)]
    told = transport.sum_numbers("status", values)
    if told[0] > 0:
        transport.raise_everywhere(error)
    names = {layer.name for layer in due}
    result: Outcomes = {}
    i = 1
    for layer in ranks.layers:
        for factor, by in zip(layer.spec.factors, ranks.placements[layer.name].decomposed_by, strict=True):
            total, squares = told[i], told[i + len(codes)]
            i += 1
            if layer.name not in names or not (only is None or (layer.name, factor.key) in only):
                continue
            agreed = len(by) * squares == total * total
            fallback: Outcome = "kept" if factor.key in states[layer.name].decomposed else "raw"
            outcome = OUTCOMES[round(total / len(by)) - 1] if agreed else fallback
            result.setdefault(layer.name, {})[factor.key] = outcome
    return result


def share_decompositions(
    settings: Settings,
    transport: Transport,
    due: Iterable[Layer],
    found: Found,
    outcomes: Outcomes,
    only: Container[tuple[str, str]] | None = None,
) -> dict[str, dict[str, Decomposition]]:
    """Return the new decompositions that this rank holds: its own and those received from other ranks. Collective."""
    own = {layer.name: {key: d for key, (d, _) in found.get(layer.name, {}).items() if d is not None} for layer in due}
    by_name = {layer.name: layer for layer in due}
    if only is not None:
        transport = transport.only("decompositions", only)

    def is_valid(name: Name) -> bool:
        return name[0] in own and outcomes[name[0]].get(name[1], "raw") not in ("kept", "raw")

    parts = {(p.layer, p.key) for t in transport.program.stage("decompositions") for p in t.parts}
    sent = {name: own[name[0]][name[1]] for name in parts if is_valid(name) and name[1] in own[name[0]]}
    packed = pack_all(sent, by_name, packs=settings.uses_inverses)
    received = transport.share("decompositions", lambda part: packed.get((part.layer, part.key)))
    given = {name: flat for name, flat in received.items() if is_valid(name)}
    inverses = {name for name in given if settings.uses_inverses or outcomes[name[0]][name[1]] == "cholesky"}
    for (name, key), decomposition in unpack_all(given, by_name, inverses, packs=settings.uses_inverses).items():
        own[name][key] = decomposition
    return own
