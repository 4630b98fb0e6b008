"""A program: the ordered transfers of a step that follow from a plan. Every rank has the same, or its own part of it.

Input: a plan. Output: its transfers, with their buffers and bytes. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

from dkfac.plan import shards
from dkfac.plan.plan import Plan, gradient_dtype, num_bytes
from dkfac.plan.spec import LayerSpec, Ranks
from dkfac.plan.transfer import How, Part, Stage, Transfer

NUM_SCHEDULES = 4
"""Damping, norm damping, decay and clip: compared at each refresh, as values and squares."""

HEADER_FIXED = 9
"""Terms, bad flag, backward passes, error flag; ranks with a batch, sums and squares of step and learning rates."""

REPLICAS_FIXED = 3
"""The comparison of replicas starts with the step and two hashes of learning rates."""


@dataclass(frozen=True, slots=True)
class Program:
    transfers: tuple[Transfer, ...]
    _stages: dict[str, tuple[Transfer, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[str, list[Transfer]] = {}
        for transfer in self.transfers:
            found.setdefault(transfer.stage, []).append(transfer)
        object.__setattr__(self, "_stages", {stage: tuple(some) for stage, some in found.items()})

    def stage(self, *stages: Stage) -> tuple[Transfer, ...]:
        found = [self._stages.get(stage, ()) for stage in stages]
        return found[0] if len(found) == 1 else tuple(t for some in found for t in some)

    @property
    def header_first(self) -> bool:
        """Whether ranks agree on the header before factors are sent: float16 sums are divided by its scales."""
        order = [stage for stage in self._stages if stage in ("header", "factors")]
        return order[:1] == ["header"] and "factors" in order

    def only(self, stage: Stage, kept: Container[tuple[str, str]]) -> Program:
        """Return the program with only these ``(layer, key)`` pairs in a stage; still the same on every rank."""
        found = []
        for transfer in self.transfers:
            if transfer.stage == stage:
                parts = tuple(part for part in transfer.parts if (part.layer, part.key) in kept)
                transfer = replace(transfer, parts=parts)
            if transfer.parts:
                found.append(transfer)
        return Program(tuple(found))

    def of(self, rank: int, *, measures: bool, decomposes: bool, compares: bool | None = None) -> list[Transfer]:
        """Return a rank's transfers in a step of this kind; replicas are compared also in the first steps."""
        skipped: set[str] = set() if (decomposes if compares is None else compares) else {"replicas"}
        if not measures:
            skipped |= {"header", "factors"}
        if not decomposes:
            skipped |= {"changes", "means", "status", "decompositions"}
        return [t for t in self.transfers if rank in t.group and t.stage not in skipped]


def expand(plan: Plan, rank: int | None = None, *, broadcasts: bool = False) -> Program:
    """Return the program of a plan, or one rank's part of it; empty for one rank. ``broadcasts``: share decompositions
    by broadcasts, as published, instead of ``deal`` and all-gather."""
    everyone = tuple(range(plan.world_size))
    num_factors = sum(len(layer.factors) for layer in plan.layers)
    blocks = sum(factor.grad_blocks for layer in plan.layers for factor in layer.factors)
    traces = num_factors + len(plan.layers) * plan.moments if plan.wire_dtype == "float16" else 0
    spreads = num_factors if plan.adaptive else 0
    header = _small("header", everyone, HEADER_FIXED + 3 * len(plan.layers) + spreads + traces)
    factors = [*_reductions(plan, everyone), *_rows(plan, everyone)]
    transfers = [header, *factors] if plan.wire_dtype == "float16" else [*factors, header]
    if plan.num_compared:  # largest values, and largest of their negatives
        size = 2 * (REPLICAS_FIXED + 2 * plan.num_compared)
        transfers.append(Transfer("replicas", "all-reduce", everyone, "int64", (Part("", "replicas", size),)))
    if plan.adaptive:
        transfers.append(_small("changes", everyone, 2 * num_factors))
    transfers.append(_small("means", everyone, 2 * NUM_SCHEDULES + num_factors + blocks))
    transfers.append(_small("status", everyone, 1 + 2 * num_factors))
    decompositions = list(_decompositions(plan))
    if broadcasts:
        transfers += [Transfer("decompositions", "broadcast", g, dtype, (part,)) for g, dtype, part in decompositions]
    else:
        transfers += _shares("decompositions", decompositions)
    gradients = list(_gradients(plan, rank))
    if plan.sharding is not None:
        transfers = [_small("squares", everyone, len(plan.layers) + 1), *transfers]
        transfers += _sharded(plan, plan.sharding, "to-owners", rank)
        transfers.append(_small("norms", everyone, 3 * len(plan.layers)))
        transfers += _sharded(plan, plan.sharding, "to-shards", rank)
    elif plan.share == "weights":
        transfers.append(_small("norms", everyone, 3 * len(plan.layers)))
        transfers += _shares("weights", gradients)
    else:
        transfers += _shares("gradients", gradients)
    if plan.loopback:  # but for gradients, which stay where they are preconditioned
        return Program(tuple(t for t in transfers if t.stage != "gradients"))
    return Program(tuple(t for t in transfers if len(t.group) > 1 and (rank is None or rank in t.group)))


def _small(stage: Stage, everyone: Ranks, elements: int) -> Transfer:
    return Transfer(stage, "all-reduce", everyone, "float64", (Part("", stage, elements),))


def _reductions(plan: Plan, everyone: Ranks) -> Iterator[Transfer]:
    """Yield the reductions of factors, bucket by bucket; EKFAC's moments, unpacked, in a separate bucket."""
    by_name = {layer.name: (layer, placement) for layer, placement in zip(plan.layers, plan.placements, strict=True)}
    buckets: list[list[tuple[LayerSpec, Part]]] = []
    as_rows = {(name, key) for name, key, _ in plan.rows}
    for bucket in plan.buckets:
        items: list[tuple[LayerSpec, Part]] = []
        for name, key in (item for item in bucket if item not in as_rows):
            layer, placement = by_name[name]
            index = [factor.key for factor in layer.factors].index(key)
            if plan.is_summed(placement):
                held = placement.factors[index]
                owner = held[0] if len(held) == 1 else -1
                items.append((layer, Part(name, key, layer.factors[index].packed_elements, owner)))
        buckets.append(items)
    if plan.moments:
        measured = [
            (layer, Part(layer.name, "moments", layer.grad_elements, _single(placement.preconditioned_by)))
            for layer, placement in zip(plan.layers, plan.placements, strict=True)
            if layer.has_moments and plan.is_summed(placement)
        ]
        buckets.append(measured)
    for number, items in enumerate(buckets):
        for dtype in sorted({plan.wire_dtype or layer.dtype for layer, _ in items}):
            parts = [part for layer, part in items if (plan.wire_dtype or layer.dtype) == dtype]
            shared = tuple(part for part in parts if part.owner < 0)
            if shared and num_bytes(dtype) >= 4:
                yield Transfer("factors", "all-reduce", everyone, dtype, shared, number)
            elif shared:  # an all-reduce would add up in half precision
                yield Transfer("factors", "reduce-scatter", everyone, dtype, shared, number)
                yield Transfer("factors", "all-gather", everyone, dtype, shared, number)
            owned = tuple(sorted((part for part in parts if part.owner >= 0), key=lambda part: part.owner))
            if owned:
                yield Transfer("factors", "reduce-scatter", everyone, dtype, owned, number)
                yield Transfer("factors", "collect", everyone, dtype, owned, number)


def _rows(plan: Plan, everyone: Ranks) -> Iterator[Transfer]:
    """Yield the transfers of factors that are sent as rows, from each rank to the owner."""
    layers = {layer.name: layer for layer in plan.layers}
    by_dtype: dict[str, list[Part]] = {}
    for name, key, number in plan.rows:
        layer, placement = layers[name], plan.placement(name)
        index = [factor.key for factor in layer.factors].index(key)
        dtype = layer.dtype if plan.wire_dtype is None else gradient_dtype(plan.wire_dtype)
        part = Part(name, key, number * layer.factors[index].dim, placement.factors[index][0])
        by_dtype.setdefault(dtype, []).append(part)
    for dtype, parts in by_dtype.items():
        yield Transfer("factors", "rows", everyone, dtype, tuple(sorted(parts, key=lambda part: part.owner)), -1)


def groups_of(plan: Plan) -> Iterable[Ranks]:
    """Return the groups in the programs of all ranks, each once."""
    found: dict[Ranks, None] = {tuple(range(plan.world_size)): None}
    for placement in {placement.preconditioned_by: placement for placement in plan.placements}.values():
        if len(placement.preconditioned_by) < plan.world_size or plan.loopback:
            found |= dict.fromkeys(group for _, group in plan.served(placement))
    return found | dict.fromkeys(group for group, _, _ in _decompositions(plan))


SharedPart = tuple[Ranks, str, Part]
"""A group, a dtype and the part that its owner sends to the others."""


def _decompositions(plan: Plan) -> Iterator[SharedPart]:
    groups: dict[tuple[Ranks, Ranks, int], Ranks] = {}
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        measures = placement.statistics if plan.moments and layer.has_moments else ()
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
            if len(by) > 1:
                continue
            key = placement.preconditioned_by, measures, by[0]
            group = groups[key] = groups.get(key) or tuple(sorted({*key[0], *key[1], *by}))
            if len(group) > 1 or plan.loopback:
                yield group, layer.dtype, Part(layer.name, factor.key, factor.wire_elements(plan.solver), by[0])


def _gradients(plan: Plan, rank: int | None) -> Iterator[SharedPart]:
    """Yield the shares of gradients, or one rank's. Worker i serves the i-th range of ranks, which contains it."""
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        if len(placement.preconditioned_by) == plan.world_size and not plan.loopback:  # each rank is its own worker
            continue
        dtype = layer.dtype if plan.wire_dtype is None or plan.share == "weights" else gradient_dtype(plan.wire_dtype)
        for worker, group in plan.served(placement, rank):
            yield group, dtype, Part(layer.name, "gradient", layer.grad_elements, worker)


def _sharded(plan: Plan, sharding: shards.Sharding, how: How, rank: int | None) -> Iterator[Transfer]:
    """Yield the transfers of gradients from the shards of parameters to the owners of layers, or of updates back."""
    dtypes, grouped = {layer.name: layer.dtype for layer in plan.layers}, dict[tuple[Ranks, str], list[Part]]()
    for p in sharding.parameters:
        dtype = dtypes[p.layer] if plan.wire_dtype is None else gradient_dtype(plan.wire_dtype)
        for worker, group in plan.served(plan.placement(p.layer), rank):
            grouped.setdefault((group, dtype), []).append(Part(p.layer, p.key, p.elements, worker, p.shape, p.cuts))
    for (group, dtype), parts in grouped.items():
        yield Transfer("gradients", how, group, dtype, tuple(parts), mesh=sharding.within(group))


def _shares(stage: Stage, shares: Iterable[SharedPart]) -> Iterator[Transfer]:
    """Yield two transfers per group: owners distribute equal chunks of what they send, then all gather the chunks.

    One broadcast per owner would load only the links of the largest owner; an all-gather of what each rank owns would
    be padded to the largest.
    """
    grouped: dict[tuple[Ranks, str], list[Part]] = {}
    for group, dtype, part in shares:
        grouped.setdefault((group, dtype), []).append(part)
    for (group, dtype), parts in grouped.items():
        ordered = tuple(sorted(parts, key=lambda part: part.owner))
        yield Transfer(stage, "deal", group, dtype, ordered)
        yield Transfer(stage, "all-gather", group, dtype, ordered)


def _single(ranks: Ranks) -> int:
    return ranks[0] if len(ranks) == 1 else -1
