"""A program: the transfers of a step, in order, that follow from a plan. The same tuple on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dkfac.plan.plan import Plan, Ranks, num_bytes
from dkfac.plan.spec import FactorSpec, LayerSpec

Stage = Literal["header", "factors", "means", "status", "decompositions", "norms", "gradients", "weights"]
How = Literal["all-reduce", "reduce-scatter", "exchange", "broadcast", "all-gather"]

MAX_PADDING = 0.1
"""Of an all-gather; beyond it, each owner broadcasts."""

HEADER_FIXED = 3
"""The header begins with the number of terms, the bad flag and the error flag."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a flat buffer."""

    layer: str
    key: str
    elements: int
    owner: int = -1
    """Who receives it (reductions) or sends it (shares); -1: everyone."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective on a flat buffer. ``elements`` of it are handed over by each member, padding included."""

    stage: Stage
    how: How
    group: Ranks
    dtype: str
    parts: tuple[Part, ...]
    elements: int
    root: int = -1
    bucket: int = 0

    @property
    def num_bytes(self) -> int:
        """Payload that a member hands to the collective."""
        return self.elements * num_bytes(self.dtype)

    @property
    def padding_bytes(self) -> int:
        """Of the whole transfer: what was handed over for nothing."""
        used = sum(part.elements for part in self.parts)
        held = self.elements * (len(self.group) if self.how in ("all-gather", "exchange") else 1)
        return (held - used) * num_bytes(self.dtype)

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Of an exchange: how many elements a member sends to, and receives from, each member."""
        chunk, ranges = self.elements, self._ranges()
        begin, end = ranges[rank]
        send = [_overlap(*ranges[r], rank * chunk, (rank + 1) * chunk) for r in range(len(self.group))]
        receive = [_overlap(begin, end, r * chunk, (r + 1) * chunk) for r in range(len(self.group))]
        return send, receive

    def _ranges(self) -> list[tuple[int, int]]:
        totals = [0] * len(self.group)
        for part in self.parts:
            totals[part.owner] += part.elements
        ends, position = [], 0
        for total in totals:
            ends.append((position, position + total))
            position += total
        return ends


@dataclass(frozen=True, slots=True)
class Program:
    transfers: tuple[Transfer, ...]

    def stage(self, *stages: Stage) -> tuple[Transfer, ...]:
        return tuple(t for t in self.transfers if t.stage in stages)

    def of(self, rank: int, *, measures: bool, decomposes: bool) -> list[Transfer]:
        """Return what a rank takes part in, in a step of this kind."""
        skipped: set[str] = set()
        if not measures:
            skipped |= {"header", "factors"}
        if not decomposes:
            skipped |= {"means", "status", "decompositions"}
        return [t for t in self.transfers if rank in t.group and t.stage not in skipped]


def expand(plan: Plan) -> Program:
    """Return the program of a plan; empty on one rank."""
    if plan.world_size == 1:
        return Program(())
    everyone = tuple(range(plan.world_size))
    num_factors = sum(len(layer.factors) for layer in plan.layers)
    blocks = sum(factor.num_blocks for layer in plan.layers for factor in layer.factors)
    traces = num_factors if plan.wire_dtype == "float16" else 0
    transfers = [_small("header", everyone, HEADER_FIXED + 3 * len(plan.layers) + traces)]
    transfers += _reductions(plan, everyone)
    transfers.append(_small("means", everyone, num_factors + blocks))
    transfers.append(_small("status", everyone, 1 + 2 * num_factors))
    transfers += _shares("decompositions", _decompositions(plan))
    gradients = list(_gradients(plan))
    if plan.share == "weights":
        transfers.append(_small("norms", everyone, 3 * len(plan.layers)))
        transfers += _shares("weights", gradients)
    else:
        transfers += _shares("gradients", gradients)
    return Program(tuple(transfers))


def decomposition_elements(factor: FactorSpec, solver: str) -> int:
    """Return the size of a decomposition on the wire: a triangle of an inverse, or vectors and values."""
    return factor.packed_elements if solver == "cholesky" else factor.eigen_elements


def _small(stage: Stage, everyone: Ranks, elements: int) -> Transfer:
    return Transfer(stage, "all-reduce", everyone, "float64", (Part("", stage, elements),), elements)


def _reductions(plan: Plan, everyone: Ranks) -> Iterator[Transfer]:
    """Sums of the factors, bucket by bucket; EKFAC's moments, full size, in a bucket of their own."""
    by_name = {layer.name: (layer, placement) for layer, placement in zip(plan.layers, plan.placements, strict=True)}
    buckets: list[list[tuple[LayerSpec, Part]]] = []
    for bucket in plan.buckets:
        items: list[tuple[LayerSpec, Part]] = []
        for name, key in bucket:
            layer, placement = by_name[name]
            index = [factor.key for factor in layer.factors].index(key)
            if len(placement.statistics) > 1:
                held = placement.factors[index]
                owner = held[0] if len(held) == 1 else -1
                items.append((layer, Part(name, key, layer.factors[index].packed_elements, owner)))
        buckets.append(items)
    if plan.moments:
        measured = [
            (layer, Part(layer.name, "moments", layer.grad_elements, _single(placement.preconditioned_by)))
            for layer, placement in zip(plan.layers, plan.placements, strict=True)
            if has_moments(layer) and len(placement.statistics) > 1
        ]
        buckets.append(measured)
    for number, items in enumerate(buckets):
        for dtype in sorted({plan.wire_dtype or layer.dtype for layer, _ in items}):
            parts = [part for layer, part in items if (plan.wire_dtype or layer.dtype) == dtype]
            shared = tuple(part for part in parts if part.owner < 0)
            if shared:
                total = sum(part.elements for part in shared)
                yield Transfer("factors", "all-reduce", everyone, dtype, shared, total, bucket=number)
            owned = tuple(sorted((part for part in parts if part.owner >= 0), key=lambda part: part.owner))
            if owned:
                chunk = -(-sum(part.elements for part in owned) // len(everyone))
                whole = chunk * len(everyone)
                yield Transfer("factors", "reduce-scatter", everyone, dtype, owned, whole, bucket=number)
                yield Transfer("factors", "exchange", everyone, dtype, owned, chunk, bucket=number)


def has_moments(layer: LayerSpec) -> bool:
    """Whether EKFAC measures second moments of a layer."""
    return layer.kind in ("linear", "conv", "conv1d-transposed")


Share = tuple[Ranks, str, Part]
"""A group, a dtype and what its owner sends to the others."""


def _decompositions(plan: Plan) -> Iterator[Share]:
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        receivers = set(placement.preconditioned_by)
        if plan.moments and has_moments(layer):
            receivers |= set(placement.statistics)
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
            if len(by) == 1 and receivers - set(by):
                group = tuple(sorted(receivers | set(by)))
                elements = decomposition_elements(factor, plan.solver)
                yield group, layer.dtype, Part(layer.name, factor.key, elements, by[0])


def _gradients(plan: Plan) -> Iterator[Share]:
    """Worker i serves the i-th stretch of consecutive ranks, which it is one of."""
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        workers = placement.preconditioned_by
        served = plan.world_size // len(workers)
        dtype = layer.dtype if plan.wire_dtype is None or plan.share == "weights" else gradient_dtype(plan.wire_dtype)
        for i, worker in enumerate(workers):
            group = tuple(range(i * served, (i + 1) * served))
            assert worker in group, f"layer {layer.name!r}: worker {worker} is not among the ranks it serves"
            if served > 1:
                yield group, dtype, Part(layer.name, "gradient", layer.grad_elements, worker)


def gradient_dtype(wire_dtype: str) -> str:
    """Return how gradients travel: they have no agreed scale, so float16's range would not do."""
    return "bfloat16" if wire_dtype == "float16" else wire_dtype


def _shares(stage: Stage, shares: Iterable[Share]) -> Iterator[Transfer]:
    """One transfer per group if its members send about equally much, else one per sender."""
    grouped: dict[tuple[Ranks, str], dict[int, list[Part]]] = {}
    for group, dtype, part in shares:
        grouped.setdefault((group, dtype), {}).setdefault(part.owner, []).append(part)
    for (group, dtype), by_owner in grouped.items():
        totals = {owner: sum(part.elements for part in parts) for owner, parts in by_owner.items()}
        largest = max(totals.values())
        if largest * len(group) <= (1 + MAX_PADDING) * sum(totals.values()):
            parts = tuple(part for owner in group for part in by_owner.get(owner, []))
            yield Transfer(stage, "all-gather", group, dtype, parts, largest)
            continue
        for owner in sorted(by_owner):
            yield Transfer(stage, "broadcast", group, dtype, tuple(by_owner[owner]), totals[owner], root=owner)


def _single(ranks: Ranks) -> int:
    return ranks[0] if len(ranks) == 1 else -1


def _overlap(a: int, b: int, c: int, d: int) -> int:
    return max(0, min(b, d) - max(a, c))
