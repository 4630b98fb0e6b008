"""Predict the step time of every strategy, and find the fastest one that fits into memory.

Input: layer specs, a cluster and a rank's work. Output: plans with their predicted cost. Owns: nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dkfac.plan.cluster import Cluster
from dkfac.plan.make import Choices, make_plan, nothing
from dkfac.plan.plan import Plan, num_bytes
from dkfac.plan.program import Program, expand
from dkfac.plan.sharing import per_rank
from dkfac.plan.simulate import Work, kinds_of, simulate
from dkfac.plan.spec import LayerSpec, cut_layer, whole_key
from dkfac.plan.strategies import FULL_STATISTICS
from dkfac.plan.timeline import Timeline

MOST_FRACTIONS = 6
"""Number of worker fractions that are tried: the divisors of the world size nearest to its square root."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its predicted cost."""

    plan: Plan
    choices: Choices
    overlap: bool
    seconds: float
    """Mean seconds of a step over an interval."""
    memory_bytes: int
    """Bytes of factors and decompositions on the rank that holds the most."""
    step_bytes: float
    """Bytes that a rank passes to collectives, averaged over ranks and steps."""
    steps: tuple[tuple[str, int, Timeline], ...]
    """Kinds of steps: the name, their number in an interval, and the timeline of one."""

    @property
    def name(self) -> str:
        workers = "" if self.choices.worker_fraction is None else f" {self.choices.worker_fraction:.3g}"
        wire = "" if self.choices.wire_dtype is None else f", {self.choices.wire_dtype} wire"
        pieces = "" if self.choices.block_dim is None else f", pieces of {self.choices.block_dim}"
        lag = f", lag {self.choices.inverse_lag}" if self.choices.inverse_lag else ""
        return f"{self.plan.strategy}{workers}{', overlap' if self.overlap else ''}{wire}{pieces}{lag}"

    def network(self, rank: int = 0) -> tuple[float, float]:
        """Return a rank's hidden and exposed seconds of transfers, as the mean of a step."""
        total, hidden, exposed = sum(count for _, count, _ in self.steps), 0.0, 0.0
        for _, count, timeline in self.steps:
            parts = timeline.network(rank).values()
            hidden += count * sum(a for a, _ in parts)
            exposed += count * sum(b for _, b in parts)
        return hidden / total, exposed / total


def predict(plan: Plan, choices: Choices, overlap: bool, cluster: Cluster, work: Work, *, keep: int = 1) -> Candidate:
    """Return the predicted cost of a plan."""
    program = expand(plan)
    kinds = kinds_of(choices.factor_interval, choices.inverse_interval, overlap=overlap)
    if choices.inverse_lag:  # computed during steps of the last kind, which are the most frequent
        each = simulate(plan, cluster, work, replace(kinds[-1][2], decomposes=False), program=program, keep=0).seconds
        beside = choices.inverse_lag * each
        kinds = [(name, count, replace(kind, beside=beside)) for name, count, kind in kinds]
    steps = tuple(
        (name, count, simulate(plan, cluster, work, kind, program=program, keep=keep)) for name, count, kind in kinds
    )
    seconds = sum(count * timeline.seconds for _, count, timeline in steps) / choices.inverse_interval
    return Candidate(plan, choices, overlap, seconds, most_memory(plan), step_bytes(program, choices, plan), steps)


def candidates(
    choices: Choices, world_size: int, *, wire_dtypes: Sequence[str | None]
) -> Iterator[tuple[Choices, bool]]:
    """Yield all choices that do not change results (except for rounding, if ``wire_dtypes`` offers lower precision)."""
    divisors = [d for d in range(2, world_size) if world_size % d == 0]
    divisors = sorted(sorted(divisors, key=lambda d: (abs(d * d - world_size), d))[:MOST_FRACTIONS])
    for wire in wire_dtypes:
        for overlap in (False, True):
            own = replace(choices, wire_dtype=wire, fusion="optimal" if overlap else "one")
            for name in FULL_STATISTICS:
                if name != "hybrid-opt":
                    yield replace(own, strategy=name, worker_fraction=None), overlap
                    continue
                for workers in divisors:
                    yield replace(own, strategy=name, worker_fraction=workers / world_size), overlap


def search(
    layers: Sequence[LayerSpec],
    world_size: int,
    cluster: Cluster,
    work: Work,
    choices: Choices,
    *,
    memory_bytes: int | None = None,
    wire_dtypes: Sequence[str | None] = (None,),
    block_dims: Sequence[int | None] = (None,),
    inverse_lags: Sequence[int] = (0,),
) -> list[Candidate]:
    """Return all candidates that fit into memory, fastest first; ties are ordered by memory, then by name.

    ``block_dims`` (``spec.cut_layer``) change results: they approximate. ``inverse_lags`` as in the settings use older
    decompositions, which are assumed to run on cores or GPU units that the steps leave idle.
    """
    found = []
    for block_dim, lag in itertools.product(block_dims, inverse_lags):
        chosen = replace(choices, block_dim=block_dim, inverse_lag=lag)
        pieces = [cut_layer(layer, block_dim) for layer in layers]
        own_work = work if block_dim is None else cut_work(work, layers, pieces)
        for own, overlap in candidates(chosen, world_size, wire_dtypes=wire_dtypes):
            if choices.share != "gradients" and own.strategy not in ("layer-wise", "mem-opt", "sharded"):
                continue
            plan = make_plan(pieces, world_size, own, cluster, own_work)
            found.append(predict(plan, own, overlap, cluster, own_work))
    found.sort(key=lambda f: (round(f.seconds, 9), f.memory_bytes, f.name))
    budget = cluster.memory_bytes if memory_bytes is None else memory_bytes
    if budget is None:
        return found
    fitting = [f for f in found if f.memory_bytes <= budget]
    if not fitting:
        least = min(found, key=lambda f: (f.memory_bytes, f.seconds))
        raise ValueError(
            f"no strategy fits into {budget / 1e9:.3g} GB for factors and decompositions on {world_size} ranks: the "
            f"least is {least.memory_bytes / 1e9:.3g} GB with {least.name}; more ranks, max_dim or skip= make it less"
        )
    return fitting


def cut_work(work: Work, layers: Sequence[LayerSpec], pieces: Sequence[LayerSpec]) -> Work:
    """Return work in which each factor is measured in pieces: it is proportional to the elements of the factor."""
    factors = {
        (layer.name, factor.key): work.factors[layer.name, whole_key(factor.key)]
        * factor.num_elements
        / layer.factor(whole_key(factor.key)).num_elements
        for layer, cut_layer in zip(layers, pieces, strict=True)
        for factor in cut_layer.factors
        if (layer.name, whole_key(factor.key)) in work.factors
    }
    return replace(work, factors=factors)


def choose(layers: Sequence[LayerSpec], world_size: int, cluster: Cluster, choices: Choices, *, overlap: bool) -> Plan:
    """Return the best plan if forward and backward were not timed: by K-FAC's own part."""
    found = search(layers, world_size, cluster, nothing(layers), choices)
    own = next(one for one in found if one.overlap == overlap)
    return make_plan(layers, world_size, replace(own.choices, fusion=choices.fusion), cluster)


def step_bytes(program: Program, choices: Choices, plan: Plan) -> float:
    """Return the bytes that a rank passes to collectives in a step, averaged over ranks and steps."""
    every = dict.fromkeys(("header", "factors"), choices.factor_interval)
    every |= dict.fromkeys(("means", "status", "decompositions"), choices.inverse_interval)
    total = 0.0
    for transfer in program.transfers:
        total += sum(transfer.sizes()) * num_bytes(transfer.dtype) / every.get(transfer.stage, 1)
    return total / plan.world_size


def most_memory(plan: Plan) -> int:
    """Return the bytes of factors and decompositions on the rank that holds the most."""
    both = zip(plan.layers, plan.placements, strict=True)
    parts = (part for layer, placement in both for part in plan.parts(layer, placement))
    return int(max(per_rank(parts, plan.world_size)))
