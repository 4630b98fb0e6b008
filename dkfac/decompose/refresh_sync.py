"""What ranks exchange during a refresh: mean eigenvalues, the outcome of each decomposition, and decompositions.

Input: what this rank has. Output: the same values on all ranks. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.comm.buffers import unpack_factor, vector
from dkfac.comm.transport import Transport
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_factors
from dkfac.decompose.fallback import OUTCOMES, Outcome
from dkfac.factors.layer_state import LayerState, whole_means
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants
from dkfac.ops.decompose import Decomposition, Eigen, Inverse
from dkfac.ops.pack import pack_triangle
from dkfac.plan.program import Part
from dkfac.plan.spec import FactorSpec

Found = dict[str, dict[str, tuple[Decomposition | None, Outcome]]]
"""By layer and factor key: a decomposition and the outcome that produced it."""
Means = dict[str, dict[str, Tensor]]
"""Mean eigenvalues by layer and factor key."""
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
    means: list[Tensor] = []
    lives = layer_factors.all_live_means(layers, states)
    for layer in ranks.layers:
        state, placement = states[layer.name], ranks.placements[layer.name]
        live = lives.get(layer.name, {})
        for factor, held in zip(layer.spec.factors, placement.factors, strict=True):
            speaks = ranks.rank == held[0] and factor.key in live
            is_known = layer_factors.is_ready(layer, state)  # what was decomposed has statistics
            has.append(0.0 if not speaks else 1.0 if is_known else state.running[factor.key].weight > 0)
            if speaks:
                means.append(live[factor.key])
            else:
                means.append(
                    torch.zeros(factor.num_blocks // factor.pieces, device=layer.weight.device, dtype=layer.dtype)
                )
    device = means[0].device
    joined = torch.cat([m.to(device, torch.float64) for m in means])
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
    solver = settings.solver
    if only is not None:
        transport = transport.only("decompositions", only)

    def value(part: Part) -> Tensor | None:
        decomposition = own.get(part.layer, {}).get(part.key)
        if decomposition is None or outcomes[part.layer][part.key] in ("kept", "raw"):
            return None
        return pack_decomposition(decomposition, solver)

    for (name, key), flat in transport.share("decompositions", value).items():
        if name not in by_name or outcomes[name][key] in ("kept", "raw"):
            continue
        layer = by_name[name]
        own[name][key] = unpack_decomposition(
            flat.to(layer.weight.device),
            layer.spec.factor(key),
            is_inverse=solver == "cholesky" or outcomes[name][key] == "cholesky",
            packed=solver == "cholesky",
        )
    return own


def pack_decomposition(decomposition: Decomposition, solver: str) -> Tensor:
    """Return a decomposition as one flat tensor: the triangle of an inverse, or eigenvectors and eigenvalues.

    With an eigen solver, an inverse (a fallback) is sent in place of the eigenvectors.
    """
    match decomposition:
        case Inverse(matrix):
            if matrix.ndim == 2:
                return matrix.reshape(-1)
            if solver == "cholesky":
                return pack_triangle(matrix).reshape(-1)
            return torch.cat([matrix.reshape(-1), matrix.new_zeros(matrix.shape[0] * matrix.shape[1])])
        case Eigen(vectors, values):
            return values.reshape(-1) if vectors is None else torch.cat([vectors.reshape(-1), values.reshape(-1)])


def unpack_decomposition(flat: Tensor, factor: FactorSpec, *, is_inverse: bool, packed: bool) -> Decomposition:
    if is_inverse and (packed or factor.form == "diagonal"):
        return Inverse(unpack_factor(flat, factor))
    if factor.form == "diagonal":
        return Eigen(None, flat.view(factor.shape))
    matrix = flat[: factor.num_elements].view(factor.shape).clone()
    if is_inverse:
        return Inverse(matrix)
    return Eigen(matrix, flat[factor.num_elements :].view(factor.row_shape).clone())
