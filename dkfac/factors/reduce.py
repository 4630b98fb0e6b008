"""Turn what the ranks measured into batch factors: sum over ranks, then divide by the counts.

Input: this rank's :class:`BatchStatistics`. Output: :class:`ReducedStatistics`, the batch factors that this rank holds
and the counts of all ranks. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.capture.statistics import BatchStatistics
from dkfac.comm.transport import Named, Transport
from dkfac.factors import batch_factors
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.decompose import mean_eigenvalue
from dkfac.plan.plan import Placement, Plan
from dkfac.plan.program import HEADER_FIXED, Part
from dkfac.plan.spec import LayerSpec, is_input

Factors = dict[str, dict[str, Tensor]]
"""Batch factors, and moments, by layer and key."""


def scale_alone(measured: BatchStatistics, mean_terms: Tensor | float | None = None) -> Tensor | float:
    """Return the multiplier of this rank's sums of products of gradients."""
    if not measured.layers:
        return 1.0
    scale = measured.grad_correction / measured.terms
    if measured.by_terms:
        terms = measured.terms if mean_terms is None else mean_terms
        scale = scale * terms * terms
    return scale


def finish_alone(measured: BatchStatistics, names: Iterable[str], mean_terms: Tensor | float) -> Factors:
    """Return batch factors of layers that only this rank measures. ``mean_terms``: mean over the ranks."""
    scale = scale_alone(measured, mean_terms)
    batch: Factors = {}
    for name in names:
        sums = measured.layers[name]
        totals = sums.factors | ({} if sums.moments is None else {"moments": sums.moments})
        batch[name] = {key: batch_factors.batch_factor(key, s, sums.rows, scale) for key, s in totals.items()}
    return batch


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step shows of each factor: the batch factors held here, their noise, and the rows of all layers."""

    factors: Factors
    noise: dict[tuple[str, str], Tensor]
    """Expected squared distance of a batch factor from that of an infinite batch; NaN where the factor was not finite
    after its transfer."""
    rows: dict[str, float]


def observe_alone(measured: BatchStatistics, layers: dict[str, Layer]) -> Observation:
    """Return the observation from this rank's own sums."""
    scale = scale_alone(measured)
    factors = finish_alone(measured, measured.layers, measured.terms)
    noise = {
        (name, key): batch_factors.batch_factor(key, spread, sums.rows, scale).double().square().sum()
        for name, sums in measured.layers.items()
        for key, spread in sums.spreads.items()
    }
    rows = dict.fromkeys(layers, 0.0)
    for name, sums in measured.layers.items():
        rows[name] = float(measured.terms if layers[name].is_norm else sums.rows)
    return Observation(factors, noise, rows)


def local_sums(measured: BatchStatistics, ranks: RankPlan) -> Named:
    """Return this rank's sums over terms, of the layers that several ranks measure."""
    sums: Named = {}
    for name, layer_sums in measured.layers.items():
        if ranks.measures_alone(name):
            continue
        for key, total in layer_sums.factors.items():
            sums[name, key] = over_terms(key, total, measured.grad_correction)
        if layer_sums.moments is not None:
            sums[name, "moments"] = over_terms("moments", layer_sums.moments, measured.grad_correction)
    return sums


FEW_ELEMENTS = 1024
"""If a factor's rows have at most this many elements, starting a transfer takes longer than sending them."""


def worth_as_rows(layer: LayerSpec, placement: Placement, number: int) -> list[tuple[str, str, int]]:
    """Return a layer's factors that have a single holder and fewer elements as rows, or so few that saving a transfer
    is worth more."""
    if len(placement.statistics) < 2 or number < 1:
        return []
    return [
        (layer.name, factor.key, number)
        for factor, held in zip(layer.factors, placement.factors, strict=True)
        if len(held) == 1
        and factor.form == "dense"
        and factor.num_blocks == 1
        and (2 * number < factor.dim or number * factor.dim <= FEW_ELEMENTS)
    ]


def local_rows(measured: BatchStatistics, plan: Plan) -> Named:
    """Return this rank's rows, scaled like the sums; NaN where they exceed the capacity in the plan."""
    rows: Named = {}
    for name, key, room in plan.rows:
        sums = measured.layers.get(name)
        pieces = None if sums is None else sums.pieces.get(key)
        if not pieces:
            continue
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        root = measured.grad_correction**0.5
        rows[name, key] = over_terms(key, joined, root)[:room]
        if len(joined) > room:  # tells the owner that it cannot use them
            rows[name, key] = torch.full_like(rows[name, key], torch.nan)
    return rows


def over_terms(key: str, total: Tensor, correction: Tensor | float) -> Tensor:
    """Return a sum of products of gradients as a sum over terms of the loss; a sum over inputs unchanged."""
    if is_input(key) or (isinstance(correction, float) and correction == 1.0):
        return total
    return total * (correction.to(total.device, total.dtype) if isinstance(correction, Tensor) else correction)


@dataclass(frozen=True, slots=True)
class ReducedStatistics:
    """What all ranks measured together, restricted to what this rank holds."""

    batch: Factors
    absorb: dict[str, Tensor]
    """Whether a layer was measured at all, and its sums are finite after the transfer."""
    good: Tensor
    """Whether no rank found a value that is not finite, and none failed."""
    counts: Counts


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts summed over ranks; vectors are in the order of the layers."""

    terms: Tensor
    num_bad: Tensor
    num_failed: Tensor
    num_passes: Tensor
    rows: Tensor
    calls: Tensor
    again: Tensor
    """Number of ranks that called a layer several times per example."""
    spreads: Tensor
    """If each factor has its own interval: the variances of the factors' sums."""

    def scale(self, world_size: int, *, by_terms: bool) -> Tensor:
        """Return the multiplier of sums over terms."""
        scale: Tensor = self.terms / world_size**2 if by_terms else 1 / self.terms
        return scale

    def scale_of(self, key: str, place: int, scale: Tensor) -> Tensor:
        """Return the multiplier of a factor's sum. ``place``: index of its layer."""
        return 1 / self.rows[place].clamp(min=1) if is_input(key) else scale


def reduce(
    ranks: RankPlan, transport: Transport, measured: BatchStatistics, good: Tensor, error: BaseException | None
) -> ReducedStatistics:
    """Sum over ranks. ``good``: whether this rank's gradients are finite; ``error``: raised by its capture."""
    sums, rows, device = local_sums(measured, ranks), local_rows(measured, ranks.plan), good.device
    good = good & batch_factors.all_finite(sums, device)
    header = _header(ranks, measured, good, error, sums)
    scales: Named = {}
    if transport.program.header_first:  # float16 has little range: agree on divisors first
        told = transport.sum("header", header)
        names = _scaled_names(ranks)
        scales = {name: _power_of_two(told[i - len(names)]) for i, name in enumerate(names)}
        launched, sent = transport.launch_rest(sums, scales), transport.launch_rows(rows)
    else:
        launched, sent = transport.launch_rest(sums, scales), transport.launch_rows(rows)
        told = transport.sum("header", header)
    totals = transport.finish_factors(launched, scales)
    counts = _counts(told, len(ranks.layers))
    scale = counts.scale(transport.world_size, by_terms=measured.by_terms)

    def scale_of(part: Part) -> Tensor:
        return counts.scale_of(part.key, ranks.index[part.layer], scale)

    own = [name for name in ranks.by_name if ranks.measures_alone(name) and name in measured.layers]
    batch = finish_alone(measured, own, counts.terms / transport.world_size)
    absorb: dict[str, Tensor] = {}
    _divide(ranks, totals, counts, scale, batch, absorb)
    for (name, key), factor in transport.finish_rows(sent, scale_of).items():
        batch.setdefault(name, {})[key] = factor
        absorb[name] = counts.calls[ranks.index[name]] > 0
    is_good = ((counts.num_bad == 0) & (counts.num_failed == 0)).to(device)
    for name, factors in batch.items():
        named = {(name, key): factor for key, factor in factors.items()}
        absorb[name] = absorb.get(name, is_good).to(device) & batch_factors.all_finite(named, device)
    return ReducedStatistics(batch, absorb, is_good, counts)


def _counts(told: Tensor, num_layers: int) -> Counts:
    rows, calls, again = (told[HEADER_FIXED + i * num_layers :][:num_layers] for i in range(3))
    terms, num_bad, num_failed, num_passes = told[:HEADER_FIXED]
    spreads = told[HEADER_FIXED + 3 * num_layers :]
    return Counts(terms, num_bad, num_failed, num_passes, rows, calls, again, spreads)


def _divide(
    ranks: RankPlan, totals: Named, counts: Counts, scale: Tensor, batch: Factors, absorb: dict[str, Tensor]
) -> None:
    """Convert the sums that this rank holds to batch factors, in ``batch`` and ``absorb``."""
    for (name, key), total in totals.items():
        holding, i = ranks.holds(name), ranks.index[name]
        if key not in holding.running and not (key == "moments" and holding.moments):
            continue
        factor = batch_factors.batch_factor(key, total, counts.rows[i].clamp(min=1), scale)
        batch.setdefault(name, {})[key] = factor
        has_inputs = is_input(ranks.by_name[name].spec.factors[0].key)
        absorb[name] = (counts.calls[i] > 0) & (counts.rows[i] > 0) if has_inputs else counts.calls[i] > 0


def observe(reduced: ReducedStatistics, ranks: RankPlan, world_size: int, *, by_terms: bool) -> Observation:
    """Return the observation from the sums of all ranks. Synchronizes with the device."""
    counts, noise = reduced.counts, dict[tuple[str, str], Tensor]()
    scale = counts.scale(world_size, by_terms=by_terms)
    for i, (name, key) in enumerate(_names(ranks)):
        by = counts.scale_of(key, ranks.index[name], scale)
        noise[name, key] = counts.spreads[i] * by**2
        if name in reduced.absorb:
            noise[name, key] = noise[name, key].where(reduced.absorb[name].to(by.device), torch.nan)
    told, calls, terms = counts.rows.tolist(), counts.calls.tolist(), float(counts.terms)
    rows = {la.name: terms * (calls[i] > 0) if la.is_norm else told[i] for i, la in enumerate(ranks.layers)}
    return Observation(reduced.batch, noise, rows)


def _header(
    ranks: RankPlan, measured: BatchStatistics, good: Tensor, error: BaseException | None, sums: Named
) -> list[Tensor | float]:
    """Return terms, flags, passes; per layer rows, calls, repeated calls; variances if adaptive; for float16,
    traces."""
    found = [measured.layers.get(layer.name) for layer in ranks.layers]
    values: list[Tensor | float] = [measured.terms, (~good).to(torch.float64), float(error is not None)]
    values.append(float(measured.num_passes))
    values += [0.0 if s is None else s.rows for s in found]
    called = [float(layer.name in measured.called) for layer in ranks.layers]
    values += [here if s is None else float(s.calls) for here, s in zip(called, found, strict=True)]
    values += [0.0 if s is None else float(s.called_again) for s in found]
    if ranks.plan.adaptive:
        values += [_spread_square(measured, name, key) for name, key in _names(ranks)]
    if ranks.plan.wire_dtype == "float16":
        values += [_trace(name[1], sums[name]) if name in sums else 0.0 for name in _scaled_names(ranks)]
    return values


def _scaled_names(ranks: RankPlan) -> list[tuple[str, str]]:
    return _names(ranks) + ([(layer.name, "moments") for layer in ranks.layers] if ranks.plan.moments else [])


def _names(ranks: RankPlan) -> list[tuple[str, str]]:
    return [(layer.name, factor.key) for layer in ranks.layers for factor in layer.spec.factors]


def _spread_square(measured: BatchStatistics, name: str, key: str) -> Tensor | float:
    """Return the variance of this rank's sum over terms: variances of ranks add up."""
    sums = measured.layers.get(name)
    spread = None if sums is None else sums.spreads.get(key)
    return 0.0 if spread is None else over_terms(key, spread, measured.grad_correction).double().square().sum()


def _trace(key: str, total: Tensor) -> Tensor:
    return total.sum() if key == "moments" else mean_eigenvalue(total).sum() * total.shape[-1]


def _power_of_two(total: Tensor) -> Tensor:
    """Return the divisor that brings a sum of this trace to about 16; 1 where it is zero or not finite."""
    exponent = torch.floor(torch.log2(total)) - 4
    return torch.where(torch.isfinite(exponent), torch.exp2(exponent), 1.0)
