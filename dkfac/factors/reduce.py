"""Turn what the ranks measured into batch factors: sum over ranks, then divide by the counts.

Input: this rank's :class:`BatchStatistics`. Output: :class:`ReducedStatistics`, the batch factors that this rank holds
and the counts of all ranks. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dkfac.capture.statistics import BatchStatistics
from dkfac.comm import packing
from dkfac.comm.buffers import dtype_of
from dkfac.comm.collectives import Pending
from dkfac.comm.packing import Layout, Name, Named, PackedFactors, alike
from dkfac.comm.transport import Transport
from dkfac.factors import batch_factors
from dkfac.factors.batch_factors import Batch, finish_alone, over_terms
from dkfac.factors.sent_rows import finish_rows, launch_rows, local_rows
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants, triangles
from dkfac.ops.decompose import mean_eigenvalue
from dkfac.ops.torch_private import foreach_mul
from dkfac.plan.program import HEADER_FIXED
from dkfac.plan.spec import is_input
from dkfac.plan.transfer import Transfer


def local_sums(measured: BatchStatistics, ranks: RankPlan) -> Named:
    """Return this rank's sums, of the layers that several ranks measure."""
    sums: Named = {}
    for name, layer_sums in measured.layers.items():
        if ranks.measures_alone(name):
            continue
        for key, total in layer_sums.factors.items():
            sums[name, key] = total
        if layer_sums.moments is not None:
            sums[name, "moments"] = layer_sums.moments
    return sums


def _over_terms(sums: Named, correction: Tensor | float) -> Named:
    """Return sums of products of gradients as sums over terms of the loss; sums over inputs unchanged."""
    if isinstance(correction, float) and correction == 1.0:
        return sums
    gradients, found = [item for item in sums.items() if not is_input(item[0][1])], dict(sums)
    for given in alike(gradients, lambda item: (item[1].dtype, item[1].device)):
        like = given[0][1]
        by = correction.to(like.device, like.dtype) if isinstance(correction, Tensor) else correction
        found.update(zip([name for name, _ in given], foreach_mul([t for _, t in given], by), strict=True))
    return found


@dataclass(frozen=True, slots=True)
class ReducedStatistics:
    """What all ranks measured together, restricted to what this rank holds."""

    packed: list[tuple[Layout, Tensor]]
    """Sums, not divided yet, that kernels absorb as they are."""
    batches: list[Batch]
    moments: dict[str, Tensor]
    absorb: Tensor
    """By layer, whether it was measured at all, and its sums are finite after the transfer."""
    good: Tensor
    """Whether no rank found a value that is not finite, and none failed."""
    counts: Counts
    scale: Tensor
    """The multiplier of sums over terms."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts summed over ranks; vectors are in the order of the layers."""

    terms: Tensor
    num_bad: Tensor
    num_failed: Tensor
    num_passes: Tensor
    flags: Tensor
    """How many ranks failed; then what all said of their step and learning rates."""
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
    ranks: RankPlan, transport: Transport, measured: BatchStatistics, good: Tensor, flags: list[float]
) -> ReducedStatistics:
    """Sum over ranks. ``good``: whether this rank's gradients are finite; ``flags``: of its ``ErrorChannel``."""
    rows, scales = local_rows(measured, ranks.plan), None
    totals = local_sums(measured, ranks)
    at_once = transport.launch_sums(totals, measured.grad_correction)
    if at_once is not None:
        launched, fine = at_once
        sent = launch_rows(transport, rows)
        counted = transport.sum("header", _header(ranks, measured, good & fine.to(good.device), flags))
    else:
        groups, others = transport.pack(_over_terms(totals, measured.grad_correction))
        told = [group.means().sum(-1) for group in groups] + [value.sum()[None] for value in others.values()]
        header = _header(ranks, measured, good & _all_finite(told, good.device), flags)
        if ranks.plan.wire_dtype == "float16":
            header += _traces(ranks, groups, others)
        if transport.program.header_first:  # float16 has little range: agree on divisors first
            counted = transport.sum("header", header)
            names = _scaled_names(ranks)
            scales = Scales({name: i for i, name in enumerate(names)}, _power_of_two(counted[-len(names) :]))
            groups = [replace(g, flat=g.flat / scales.of(g.names, g.flat.dtype)) for g in groups]
            others = {name: value / scales.each[scales.index[name]] for name, value in others.items()}
        for group in groups:
            others |= group.parts()
        launched, sent = transport.launch_rest(others), launch_rows(transport, rows)
        if not transport.program.header_first:
            counted = transport.sum("header", header)
    received = transport.finish_factors(launched)
    return _divided(ranks, transport, measured, received, sent, scales, _counts(counted, len(ranks.layers)))


@dataclass(frozen=True, slots=True)
class Scales:
    """Divisors of the sums while they are sent."""

    index: dict[Name, int]
    each: Tensor

    def of(self, names: list[Name], dtype: torch.dtype) -> Tensor:
        """Return the divisors of some sums, ``[n, 1, 1]``."""
        places = constants.constant(tuple([self.index[name] for name in names]), self.each.device, torch.int64)
        return self.each[places].to(dtype).view(-1, 1, 1)


def _divided(
    ranks: RankPlan,
    transport: Transport,
    measured: BatchStatistics,
    received: list[tuple[Layout, Tensor]],
    sent: list[tuple[Transfer, Pending]],
    scales: Scales | None,
    counts: Counts,
) -> ReducedStatistics:
    """Turn the sums that this rank holds into batch factors."""
    scale = counts.scale(transport.world_size, by_terms=measured.by_terms)
    rows = counts.rows.clamp(min=1)
    batches, told, moments = list[Batch](), list[tuple[list[Name], Tensor]](), dict[str, Tensor]()

    def add(names: list[Name], values: Tensor, means: Tensor) -> None:
        batches.append(Batch(names, values))
        told.append((names, means.view(len(names), -1).sum(-1)))

    def kind(name: Name) -> object:
        return ranks.by_name[name[0]].spec.dtype, is_input(name[1])

    packed = list[tuple[Layout, Tensor]]()
    absorb = torch.ones(len(ranks.layers), dtype=torch.bool, device=counts.rows.device)
    for layout, buffer in received:
        if scales is None and _may_stay_packed(ranks, layout, buffer):
            packed.append((layout, buffer))
            absorb = absorb & layout.table(buffer.device).are_finite(buffer, len(ranks.layers))
            continue
        groups, others = packing.unpack(layout, buffer, transport.factors, kind)
        for group in groups:
            flat = group.flat.to(dtype_of(ranks.by_name[group.names[0][0]].spec.dtype))
            flat = flat if scales is None else flat * scales.of(group.names, flat.dtype)
            if is_input(group.names[0][1]):
                places = constants.constant(tuple([ranks.index[n] for n, _ in group.names]), rows.device, torch.int64)
                flat = flat / rows[places].to(flat).view(-1, 1, 1)
            else:
                flat = flat * scale.to(flat)
            group = replace(group, flat=flat)
            add(group.names, group.unpacked(), group.means())
        for item, value in others.items():
            spec = ranks.by_name[item[0]].spec
            value = value.to(dtype_of(spec.dtype)).view(spec.grad_shape)
            value = value if scales is None else value * scales.each[scales.index[item]]
            moments[item[0]] = batch_factors.batch_factor("moments", value, 1.0, scale)
    by_rows = finish_rows(transport, sent, lambda p: counts.scale_of(p.key, ranks.index[p.layer], scale))
    for name, factor in by_rows.items():
        add([name], factor, mean_eigenvalue(factor))
    own = [name for name in ranks.by_name if ranks.measures_alone(name) and name in measured.layers]
    alone, moments_alone = finish_alone(measured, own, counts.terms / transport.world_size)
    for batch in alone:
        add(batch.names, batch.values, mean_eigenvalue(batch.values))
    moments |= moments_alone
    told += [([(name, "moments")], value.sum()[None]) for name, value in moments.items()]
    good = ((counts.num_bad == 0) & (counts.num_failed == 0)).to(ranks.layers[0].weight.device)
    absorb = absorb & _is_measured(ranks, counts, own, by_rows)
    if told:
        absorb = absorb & _finite_layers(ranks, told, absorb.device)
    return ReducedStatistics(packed, batches, moments, absorb, good, counts, scale)


def _may_stay_packed(ranks: RankPlan, layout: Layout, buffer: Tensor) -> bool:
    """Whether kernels absorb a buffer without unpacking it: it has factors alone, and nobody asks for batch factors."""
    if ranks.plan.adaptive or not layout.only_factors or not triangles.can_pack(buffer):
        return False
    return all(ranks.by_name[name].spec.dtype == "float32" for name, _ in layout.held)


def _counts(told: Tensor, num_layers: int) -> Counts:
    rows, calls, again = (told[HEADER_FIXED + i * num_layers :][:num_layers] for i in range(3))
    terms, num_bad, num_passes, num_failed = told[:4]
    spreads = told[HEADER_FIXED + 3 * num_layers :]
    return Counts(terms, num_bad, num_failed, num_passes, told[3:HEADER_FIXED], rows, calls, again, spreads)


def _is_measured(ranks: RankPlan, counts: Counts, own: Container[str], by_rows: Iterable[Name]) -> Tensor:
    """Return, by layer, whether any rank measured it."""
    device, layers, as_rows = counts.rows.device, ranks.layers, {name for name, _ in by_rows}
    no_rows = [not is_input(layer.spec.factors[0].key) or layer.name in as_rows for layer in layers]
    mine = constants.constant(tuple([layer.name in own for layer in layers]), device, torch.bool)
    has_rows = (counts.rows > 0) | constants.constant(tuple(no_rows), device, torch.bool)
    return ((counts.calls > 0) & has_rows) | mine


def _finite_layers(ranks: RankPlan, told: list[tuple[list[Name], Tensor]], device: torch.device) -> Tensor:
    """Return, by layer, whether all sums are finite. ``told``: numbers of some factors that show it."""
    bad = torch.zeros(len(ranks.layers), dtype=torch.int32, device=device)
    indices = tuple([ranks.index[name] for names, _ in told for name, _ in names])
    places = constants.constant(indices, device, torch.int64)
    spoilt = torch.isfinite(torch.cat([numbers.to(device, torch.float64) for _, numbers in told])).logical_not()
    return bad.index_add_(0, places, spoilt.to(torch.int32)) == 0


def _all_finite(told: list[Tensor], device: torch.device) -> Tensor:
    """Return whether numbers are finite, as a flag on the device."""
    if not told:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.cat(told).to(device, torch.float64)).all()


def _header(ranks: RankPlan, measured: BatchStatistics, good: Tensor, flags: list[float]) -> list[Tensor | float]:
    """Return terms, passes and flags; per layer rows, calls, repeated calls; variances if adaptive."""
    found = [measured.layers.get(layer.name) for layer in ranks.layers]
    values: list[Tensor | float] = [measured.terms, ~good, float(measured.num_passes), *flags]
    values += [0.0 if s is None else s.rows for s in found]
    called = [float(layer.name in measured.called) for layer in ranks.layers]
    values += [here if s is None else float(s.calls) for here, s in zip(called, found, strict=True)]
    values += [0.0 if s is None else float(s.called_again) for s in found]
    if ranks.plan.adaptive:
        values += [_spread_square(measured, name, key) for name, key in names_of(ranks)]
    return values


def _traces(ranks: RankPlan, groups: list[PackedFactors], others: Named) -> list[Tensor | float]:
    """Return the traces of this rank's sums, from which float16's divisors follow."""
    traces: Named = {name: value.sum() for name, value in others.items()}
    for group in groups:
        traces |= zip(group.names, (group.means().sum(-1) * group.factor.dim).unbind(), strict=True)
    return [traces.get(name, 0.0) for name in _scaled_names(ranks)]


def _scaled_names(ranks: RankPlan) -> list[tuple[str, str]]:
    return names_of(ranks) + ([(layer.name, "moments") for layer in ranks.layers] if ranks.plan.moments else [])


def names_of(ranks: RankPlan) -> list[Name]:
    """Return all factors, in order."""
    return [(layer.name, factor.key) for layer in ranks.layers for factor in layer.spec.factors]


def _power_of_two(traces: Tensor) -> Tensor:
    """Return the divisors that bring sums of these traces to about 16; 1 where one is zero or not finite."""
    exponent = torch.floor(torch.log2(traces)) - 4
    return torch.where(torch.isfinite(exponent), torch.exp2(exponent), 1.0)


def _spread_square(measured: BatchStatistics, name: str, key: str) -> Tensor | float:
    """Return the variance of this rank's sum over terms: variances of ranks add up."""
    sums = measured.layers.get(name)
    spread = None if sums is None else sums.spreads.get(key)
    return 0.0 if spread is None else over_terms(key, spread, measured.grad_correction).double().square().sum()
