"""Simulate the time of a step, from a plan's program and a cluster's costs.

Input: a plan, a cluster and a rank's work. Output: a timeline. Owns: nothing.

Follows ``engine.py`` and ``overlap.py`` in their order: forward and backward, during which gradients (and, with
``overlap``, factors) are reduced; then, one stage after the other, the remaining factors, decompositions, their shares,
preconditioning and its shares. All ranks have the same batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dkfac.plan.cluster import Cluster
from dkfac.plan.plan import Plan, num_bytes
from dkfac.plan.program import Program, expand
from dkfac.plan.sharing import NetworkJob, per_rank, share_cores, share_network
from dkfac.plan.spec import LayerSpec, Ranks
from dkfac.plan.timeline import Span, Stream, Timeline
from dkfac.plan.transfer import Transfer

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket of gradients, as in ``DistributedDataParallel``; the first bucket is smaller."""
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a rank's own work in a step, by layer, at full speed."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    factors: Mapping[tuple[str, str], float]
    """Seconds to measure each factor, by ``(layer, key)``."""
    optimizer: float = 0.0
    reduces_gradients: bool = True
    """Whether gradients are averaged over the ranks in the backward pass."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of step."""

    measures: bool = True
    decomposes: bool = True
    overlap: bool = False
    beside: float = 0.0
    """Seconds of the steps during which decompositions run in the background (``inverse_lag``); the rest blocks."""


@dataclass(slots=True)
class Clock:
    """The current time of each rank, and the recorded spans."""

    now: list[float]
    kept: frozenset[int]
    """Ranks whose spans are recorded."""
    spans: list[Span] = field(default_factory=list)

    def note(self, ranks: Iterable[int], stream: Stream, stage: str, name: str, begin: float, end: float) -> None:
        if end > begin:
            self.spans += [Span(rank, stream, stage, name, begin, end) for rank in ranks if rank in self.kept]


def simulate(plan: Plan, cluster: Cluster, work: Work, kind: Kind, *, program: Program | None = None,
             keep: int = 8) -> Timeline:  # fmt: skip
    """Return the timeline of one step of this kind, with the spans of the first ``keep`` ranks."""
    program = expand(plan) if program is None else program
    world = plan.world_size
    clock = Clock([0.0] * world, frozenset(range(min(keep, world))))
    waiting = _passes(plan, cluster, work, kind, program, clock)
    if kind.measures:
        header = program.stage("header")
        _transfer_all(header if program.header_first else (), cluster, clock)
        _work([_packing(plan, cluster)] * world, "pack", cluster, clock)
        _transfer_all(waiting, cluster, clock)
        _transfer_all(() if program.header_first else header, cluster, clock)
        _work(per_rank(_averaging(plan, cluster), world), "average", cluster, clock)
    if kind.decomposes:
        _transfer_all(program.stage("means"), cluster, clock)
        left = [max(0.0, seconds - kind.beside) for seconds in per_rank(_decompositions(plan, cluster), world)]
        _work(left, "decompose", cluster, clock)
        _transfer_all(program.stage("status"), cluster, clock)
        _transfer_all(program.stage("decompositions"), cluster, clock)
    _work(per_rank(_preconditioning(plan, cluster), world), "precondition", cluster, clock)
    _transfer_all(program.stage("norms", "gradients", "weights"), cluster, clock)
    if work.optimizer:
        _work([work.optimizer] * world, "optimizer", cluster, clock)
    return Timeline(tuple(clock.spans), max(clock.now))


def kinds_of(factor_interval: int, inverse_interval: int, *, overlap: bool = False) -> list[tuple[str, int, Kind]]:
    """Return the kinds of steps in an interval, with their names and numbers."""
    measured = inverse_interval // factor_interval
    kinds = [
        ("refresh", 1, Kind(True, True, overlap)),
        ("measure", measured - 1, Kind(True, False, overlap)),
        ("ordinary", inverse_interval - measured, Kind(False, False, overlap)),
    ]
    return [(name, count, kind) for name, count, kind in kinds if count]


def average_seconds(plan: Plan, cluster: Cluster, work: Work, *, factor_interval: int, inverse_interval: int) -> float:
    """Return the mean time of a step over a whole interval."""
    program, total = expand(plan), 0.0
    for _, count, kind in kinds_of(factor_interval, inverse_interval):
        total += count * simulate(plan, cluster, work, kind, program=program, keep=0).seconds
    return total / inverse_interval


def ready_times(layers: Sequence[LayerSpec], names: Sequence[tuple[str, str]], work: Work) -> list[float]:
    """Return when each factor, as ``(layer, key)``, is measured, if A factors are measured in the forward pass."""
    now, ready = 0.0, dict[tuple[str, str], float]()
    for layer in layers:
        now += work.forward[layer.name] + work.factors.get((layer.name, "A"), 0.0)
        ready[layer.name, "A"] = now
    for layer in reversed(layers):
        now += work.backward[layer.name]
        for factor in layer.factors:
            if factor.key != "A":
                now += work.factors[layer.name, factor.key]
                ready[layer.name, factor.key] = now
    return [ready[name] for name in names]


# --- forward and backward, which are identical on all ranks --------------------------------------------------


def _passes(plan: Plan, cluster: Cluster, work: Work, kind: Kind, program: Program, clock: Clock) -> list[Transfer]:
    """Run forward and backward; returns the transfers of factors that start after them."""
    world, everyone = plan.world_size, range(plan.world_size)
    slow = _crowding(cluster, world)
    early, reduces = kind.overlap and kind.measures, work.reduces_gradients and world > 1
    now, ready = 0.0, dict[tuple[str, str], float]()

    def do(stage: str, name: str, seconds: float) -> None:
        nonlocal now
        clock.note(everyone, "compute", stage, name, now, now + slow * seconds)
        now += slow * seconds

    for layer in plan.layers:
        do("forward", layer.name, work.forward[layer.name])
        if early and (layer.name, "A") in work.factors:
            do("measure", f"{layer.name} A", work.factors[layer.name, "A"])
            ready[layer.name, "A"] = now
    turn = now
    jobs, filled, bucket = list[NetworkJob](), 0, FIRST_BUCKET_BYTES
    for layer in reversed(plan.layers):
        do("backward", layer.name, work.backward[layer.name])
        filled += layer.grad_elements * num_bytes(layer.dtype)
        if reduces and filled >= bucket:
            jobs.append(_gradients(cluster, world, filled, now))
            filled, bucket = 0, BUCKET_BYTES
        for factor in layer.factors if kind.measures else ():
            if (layer.name, factor.key) not in ready:
                do("measure", f"{layer.name} {factor.key}", work.factors[layer.name, factor.key])
                ready[layer.name, factor.key] = now
    if reduces and filled:
        jobs.append(_gradients(cluster, world, filled, now))
    waiting = [t for t in program.stage("factors") if kind.measures]
    if early:
        for transfer in waiting:
            when = max((ready.get((part.layer, part.key), now) for part in transfer.parts), default=now)
            seconds = _seconds(transfer, cluster)
            jobs.append(NetworkJob("factors", f"bucket {transfer.bucket} {transfer.how}", when, seconds, 1))
        waiting = []
    end = last = now
    for begin, done, job in share_network(jobs, turn, end, cluster.hidden):
        begin = max(begin, done - job.seconds)  # during work, or another transfer, it takes longer than it moves data
        clock.note(everyone, "network", job.stage, job.name, begin, done)
        last = max(last, done)
    clock.now = [last] * world
    return waiting


def _gradients(cluster: Cluster, world: int, num_bytes: float, now: float) -> NetworkJob:
    one_host = world <= cluster.ranks_per_host
    return NetworkJob("gradients", "bucket", now, cluster.seconds("all-reduce", world, num_bytes, one_host=one_host), 0)


# --- the stages after forward and backward ---------------------------------------------------------------------


def _crowding(cluster: Cluster, world: int) -> float:
    """Return the slowdown of work when all ranks of a host work at the same time."""
    busy = min(world, cluster.slot_ranks or cluster.ranks_per_host)
    return 1.0 if cluster.slots is None else max(1.0, busy / cluster.slots)


def _work(seconds: list[float], stage: str, cluster: Cluster, clock: Clock) -> None:
    """Advance each rank by this many seconds of work at full speed; ranks of a host share its slots."""
    size = cluster.slot_ranks or cluster.ranks_per_host
    for first in range(0, len(seconds), size):
        ranks = range(first, min(first + size, len(seconds)))
        starts = [clock.now[rank] for rank in ranks]
        for rank, end in zip(ranks, share_cores(starts, [seconds[rank] for rank in ranks], cluster.slots), strict=True):
            clock.note([rank], "compute", stage, "", clock.now[rank], end)
            clock.now[rank] = end


Shares = Iterator[tuple[Ranks, float]]
"""Sets of ranks, and the seconds that each rank of a set works."""


def _decompositions(plan: Plan, cluster: Cluster) -> Shares:
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
            yield by, cluster.costs.decompose(factor, plan.solver)


def _packing(plan: Plan, cluster: Cluster) -> float:
    """Return the seconds to pack and unpack the sums of all factors, if that was measured."""
    if "pack" not in cluster.costs.curves:
        return 0.0
    both = zip(plan.layers, plan.placements, strict=True)
    travels = [factor for layer, p in both if len(p.statistics) > 1 for factor in layer.factors]
    return sum((cluster.costs.work("pack", factor.packed_elements) for factor in travels), 0.0)


def _averaging(plan: Plan, cluster: Cluster) -> Shares:
    """Yield the work of updating the running factors, if that was measured."""
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for factor, held in zip(layer.factors, placement.factors, strict=True):
            if "average" in cluster.costs.curves:
                yield held, cluster.costs.work("average", factor.num_elements)


def _preconditioning(plan: Plan, cluster: Cluster) -> Shares:
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        yield placement.preconditioned_by, cluster.costs.precondition(layer, plan.solver)


def _transfer_all(transfers: Iterable[Transfer], cluster: Cluster, clock: Clock) -> None:
    for transfer in transfers:
        _transfer(transfer, cluster, clock)


def _transfer(transfer: Transfer, cluster: Cluster, clock: Clock) -> None:
    """Advance a group's ranks to the end of a transfer, which starts when all of them are ready."""
    begin = max(clock.now[rank] for rank in transfer.group)
    end = begin + _seconds(transfer, cluster)
    for rank in transfer.group:
        clock.now[rank] = end
    clock.note(transfer.group, "network", transfer.stage, transfer.how, begin, end)


COLLECTIVES = dict.fromkeys(("collect", "deal", "rows", "to-owners", "to-shards"), "all-to-all")


def _seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Return a transfer's seconds if nothing else uses the network."""
    size, how = len(transfer.group), COLLECTIVES.get(transfer.how, transfer.how)
    if size == 1:
        return 0.0
    hosts = {rank // cluster.ranks_per_host for rank in (transfer.group[0], transfer.group[-1])}
    elements: float = transfer.used if how in ("all-reduce", "broadcast") else transfer.chunk * size
    if how == "all-to-all":
        elements = max(max(map(sum, transfer.splits(rank))) for rank in _extremes(transfer)) * size / (size - 1)
        if elements == 0:
            return 0.0
    return cluster.seconds(how, size, elements * num_bytes(transfer.dtype), one_host=len(hosts) == 1)


def _extremes(transfer: Transfer) -> list[int]:
    """Return the ranks that may send or receive the most: the largest owner, and any other."""
    totals = dict.fromkeys(transfer.group, 0)
    for part in transfer.parts:
        totals[part.owner] += part.elements
    return [max(totals, key=lambda rank: totals[rank]), transfer.group[0]]
