"""What ranks tell each other at a refresh and for a step: means, rungs, decompositions, gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dkfac import stages
from dkfac.exchange import Exchange, unpack_factor, vector
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, join, piece, places
from dkfac.ops.pack import pack_triangle
from dkfac.plan.program import Part
from dkfac.plan.spec import FactorSpec
from dkfac.refresh import RUNGS, Rung
from dkfac.settings import SCHEDULES

if TYPE_CHECKING:
    from dkfac.run import Runner

Found = dict[str, dict[str, tuple[Decomposition | None, Rung]]]
"""By layer and key: a decomposition and the rung that produced it."""


def decomposed_here(runner: Runner, layer: Layer) -> list[str]:
    """Return which of a layer's factors this rank decomposes."""
    by = runner.placements[layer.name].decomposed_by
    mine = [f.key for f, ranks in zip(layer.spec.factors, by, strict=True) if runner.rank in ranks]
    return [key for key in mine if _is_refreshed(runner, layer.name, key)]


def _is_refreshed(runner: Runner, name: str, key: str) -> bool:
    return runner.refreshing is None or (name, key) in runner.refreshing


def agree_on_means(runner: Runner) -> dict[str, dict[str, Tensor]]:
    """Return the factors' mean eigenvalues, the same on all ranks, of the layers that have statistics. Waits for the
    device."""
    has: list[Tensor | float] = []
    means: list[Tensor] = []
    for layer in runner.layers:
        state, placement = runner.states[layer.name], runner.placements[layer.name]
        live = stages.live_means(layer, state)
        for factor, held in zip(layer.spec.factors, placement.factors, strict=True):
            speaks = runner.rank == held[0] and factor.key in state.running
            has.append((state.running[factor.key].weight > 0) if speaks else 0.0)
            zeros = torch.zeros(factor.num_blocks, device=layer.weight.device, dtype=layer.dtype)
            means.append(live[factor.key] if speaks else zeros)
    device = means[0].device
    joined = torch.cat([m.to(device, torch.float64) for m in means])
    flags = vector(has, device)
    if runner.exchange is not None:
        scheduled = [runner.settings.at(name, runner.step) for name in SCHEDULES]
        told = vector([*scheduled, *(value * value for value in scheduled)], device)
        together = runner.exchange.sum_vector("means", torch.cat([told, flags, joined]))
        _check_schedules(together[: len(told)].tolist(), runner.exchange.world_size, runner.step)
        together = together[len(told) :]
        flags, joined = together[: len(has)], together[len(has) :]
    counts, position = iter(flags.tolist()), 0
    means_of: dict[str, dict[str, Tensor]] = {}
    for layer in runner.layers:
        complete = min(next(counts) for _ in layer.spec.factors) > 0
        found = {}
        for factor in layer.spec.factors:
            found[factor.key] = joined[position : position + factor.num_blocks].to(layer.weight.device, layer.dtype)
            position += factor.num_blocks
        if complete:
            means_of[layer.name] = found
    return means_of


def _check_schedules(sums: list[float], world_size: int, step: int) -> None:
    """Raise on all ranks if they do not all have the same damping, decay and clip."""
    for i, name in enumerate(SCHEDULES):
        total, squares = sums[i], sums[i + len(SCHEDULES)]
        if world_size * squares - total * total > 1e-9 * total * total:
            raise RuntimeError(
                f"{name} is not the same on all ranks at step {step} (its mean is {total / world_size:g}): a schedule "
                f"must not depend on what one rank alone knows; reduce the loss it follows first"
            )


def agree_on_rungs(
    runner: Runner, due: Iterable[Layer], found: Found, error: BaseException | None
) -> dict[str, dict[str, Rung]]:
    """Return how each factor's decomposition went, the same on all ranks; one rank's error is raised on all.

    Ranks that decomposed the same factor and do not report the same all keep what they had.
    """
    exchange = runner.exchange
    if exchange is None:
        return {layer.name: {key: rung for key, (_, rung) in found[layer.name].items()} for layer in due}
    codes = []
    for layer in runner.layers:
        mine = found.get(layer.name, {})
        codes += [float(1 + RUNGS.index(mine[f.key][1])) if f.key in mine else 0.0 for f in layer.spec.factors]
    values = [float(error is not None), *codes, *(code * code for code in codes)]
    told = exchange.sum("status", values).tolist()
    if told[0] > 0:
        exchange.raise_everywhere(error)
    names = {layer.name for layer in due}
    result: dict[str, dict[str, Rung]] = {}
    i = 1
    for layer in runner.layers:
        for factor, by in zip(layer.spec.factors, runner.placements[layer.name].decomposed_by, strict=True):
            total, squares = told[i], told[i + len(codes)]
            i += 1
            if layer.name not in names or not _is_refreshed(runner, layer.name, factor.key):
                continue
            agreed = len(by) * squares == total * total
            state = runner.states[layer.name]
            fallback: Rung = "kept" if factor.key in state.decomposed else "raw"
            rung = RUNGS[round(total / len(by)) - 1] if agreed else fallback
            result.setdefault(layer.name, {})[factor.key] = rung
    return result


def share_decompositions(
    runner: Runner, due: Iterable[Layer], found: Found, rungs: dict[str, dict[str, Rung]], since: int
) -> dict[str, dict[str, Decomposition]]:
    """Return the new decompositions that this rank is to hold, its own and those of others. ``since``: the step of the
    factors."""
    own = {layer.name: {key: d for key, (d, _) in found.get(layer.name, {}).items() if d is not None} for layer in due}
    exchange = runner.exchange
    if exchange is None:
        return own
    if runner.refreshing is not None:
        exchange = exchange.only("decompositions", runner.refreshing)
    solver = runner.settings.solver

    def value(part: Part) -> Tensor | None:
        decomposition = own.get(part.layer, {}).get(part.key)
        if decomposition is None or rungs[part.layer][part.key] in ("kept", "raw"):
            return None
        pieces = stages.pieces(by_name[part.layer], part.key, runner.settings, since)
        return pack_decomposition(decomposition, solver, pieces)

    by_name = {layer.name: layer for layer in due}
    received = exchange.share("decompositions", value)
    for (name, key), flat in received.items():
        if name not in by_name or rungs[name][key] in ("kept", "raw"):
            continue
        layer = by_name[name]
        is_inverse = solver == "cholesky" or rungs[name][key] == "cholesky"
        factor = layer.spec.factor(key)
        own[name][key] = unpack_decomposition(
            flat.to(layer.weight.device),
            factor,
            stages.pieces(layer, key, runner.settings, since),
            is_inverse=is_inverse,
            packed=solver == "cholesky",
        )
    return own


def pack_decomposition(decomposition: Decomposition, solver: str, pieces: tuple[int, ...] = ()) -> Tensor:
    """Return it flat: the triangle of an inverse, or vectors and values. An inverse among eigenbases (a fallback) takes
    the place of the vectors. ``pieces``: sizes of diagonal blocks, which are all there is."""
    if len(pieces) > 1:
        cut = [piece(decomposition, here) for here in places(pieces)]
        return torch.cat([pack_decomposition(part, solver) for part in cut])
    match decomposition:
        case Inverse(matrix):
            if matrix.ndim == 2:
                return matrix.reshape(-1)
            if solver == "cholesky":
                return pack_triangle(matrix).reshape(-1)
            return torch.cat([matrix.reshape(-1), matrix.new_zeros(matrix.shape[0] * matrix.shape[1])])
        case Eigen(vectors, values):
            return values.reshape(-1) if vectors is None else torch.cat([vectors.reshape(-1), values.reshape(-1)])


def unpack_decomposition(
    flat: Tensor, factor: FactorSpec, pieces: tuple[int, ...] = (), *, is_inverse: bool, packed: bool
) -> Decomposition:
    if len(pieces) > 1:
        each = [replace(factor, dim=width, pieces=1) for width in pieces]
        flats = torch.split(flat, [one.wire_elements("cholesky" if packed else "eigen") for one in each])
        both = zip(flats, each, strict=True)
        return join([unpack_decomposition(part, one, is_inverse=is_inverse, packed=packed) for part, one in both])
    if is_inverse and (packed or factor.form == "diagonal"):
        return Inverse(unpack_factor(flat, factor))
    if factor.form == "diagonal":
        return Eigen(None, flat.view(factor.shape))
    matrix = flat[: factor.num_elements].view(factor.shape).clone()
    if is_inverse:
        return Inverse(matrix)
    return Eigen(matrix, flat[factor.num_elements :].view(factor.row_shape).clone())


def share_gradients(exchange: Exchange, updates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the preconditioned gradients of layers that not every rank preconditions; zeros where there is none."""
    shapes = {layer.name: layer.grad_shape for layer in exchange.plan.layers}
    received = exchange.share("gradients", lambda part: updates.get(part.layer))
    return {name: flat.view(shapes[name]) for (name, _), flat in received.items()}


def share_weights(exchange: Exchange, layers: dict[str, Layer]) -> None:
    """Send the weights of the layers that this rank stepped, and take those of the others."""

    def value(part: Part) -> Tensor:
        return torch.cat([p.reshape(-1) for p in layers[part.layer].parameters()])

    with torch.no_grad():
        for (name, _), flat in exchange.share("weights", value).items():
            position = 0
            for parameter in layers[name].parameters():
                parameter.copy_(flat[position : position + parameter.numel()].view_as(parameter))
                position += parameter.numel()
