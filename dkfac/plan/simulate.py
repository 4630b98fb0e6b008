"""The time of a step, from a plan's program and what a cluster's links and linear algebra cost.

It does what ``run.py`` and ``overlap.py`` do, in their order: forward and backward, in which gradients (and, with
``overlap``, factors) are reduced beside the work; then, one stage after the other, what is left of the factors, the
decompositions, their shares, the preconditioning and its shares. All ranks have the same batch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dkfac.plan.cluster import Cluster
from dkfac.plan.plan import Plan, num_bytes
from dkfac.plan.program import Program, Transfer, expand
from dkfac.plan.spec import LayerSpec
from dkfac.plan.timeline import Span, Stream, Timeline

BUCKET_BYTES = 25 * 2**20
"""Of gradients that are reduced together, as DistributedDataParallel does; the first bucket is smaller."""
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a rank's own work in a step, by layer, at full speed."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    factors: Mapping[tuple[str, str], float]
    """Of measuring each factor, as ``(layer, key)``."""
    optimizer: float = 0.0
    other_parameters: int = 0
    """Elements of gradients of no layer's, which are reduced too."""
    reduces_gradients: bool = True
    """Whether the gradients are averaged over the ranks in the backward pass."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of step."""

    measures: bool = True
    decomposes: bool = True
    overlap: bool = False


@dataclass(slots=True)
class Clock:
    """Where each rank is, and what was noted."""

    now: list[float]
    kept: frozenset[int]
    """Whose spans are noted."""
    spans: list[Span] = field(default_factory=list)

    def note(self, ranks: Iterable[int], stream: Stream, stage: str, name: str, begin: float, end: float) -> None:
        if end > begin:
            self.spans += [Span(rank, stream, stage, name, begin, end) for rank in ranks if rank in self.kept]


def simulate(plan: Plan, cluster: Cluster, work: Work, kind: Kind, *, program: Program | None = None,
             keep: int = 8) -> Timeline:  # fmt: skip
    """Return the timeline of one step of a kind, with the spans of the first ``keep`` ranks."""
    program = expand(plan) if program is None else program
    world = plan.world_size
    clock = Clock([0.0] * world, frozenset(range(min(keep, world))))
    waiting = _passes(plan, cluster, work, kind, program, clock)
    if kind.measures:
        _transfer_all(program.stage("header"), cluster, clock)
        _work([_packing(plan, cluster)] * world, "pack", cluster, clock)
        _transfer_all(waiting, cluster, clock)
        _work(_averaging(plan, cluster), "average", cluster, clock)
    if kind.decomposes:
        _transfer_all(program.stage("means"), cluster, clock)
        _work(_decompositions(plan, cluster), "decompose", cluster, clock)
        _transfer_all(program.stage("status"), cluster, clock)
        _transfer_all(program.stage("decompositions"), cluster, clock)
    _work(_preconditioning(plan, cluster), "precondition", cluster, clock)
    _transfer_all(program.stage("norms", "gradients", "weights"), cluster, clock)
    if work.optimizer:
        _work([work.optimizer] * world, "optimizer", cluster, clock)
    return Timeline(tuple(clock.spans), max(clock.now))


def average_seconds(plan: Plan, cluster: Cluster, work: Work, *, factor_interval: int, inverse_interval: int,
                    overlap: bool = False, keep: int = 0) -> float:  # fmt: skip
    """Return the mean time of a step over a whole interval."""
    program = expand(plan)

    def seconds(measures: bool, decomposes: bool) -> float:
        kind = Kind(measures, decomposes, overlap)
        return simulate(plan, cluster, work, kind, program=program, keep=keep).seconds

    measured = inverse_interval // factor_interval
    total = seconds(True, True)
    if measured > 1:
        total += (measured - 1) * seconds(True, False)
    if factor_interval > 1:
        total += (inverse_interval - measured) * seconds(False, False)
    return total / inverse_interval


def ready_times(layers: Sequence[LayerSpec], names: Sequence[tuple[str, str]], work: Work) -> list[float]:
    """Return when each factor, as ``(layer, key)``, is measured, if inputs are in the forward pass."""
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


# --- forward and backward, which are the same on all ranks ---------------------------------------------------


@dataclass(slots=True)
class Job:
    """A transfer beside the passes."""

    stage: str
    name: str
    ready: float
    seconds: float
    """Alone on the network."""
    queue: int
    """Jobs of one queue follow each other; queues share the network."""


def _passes(plan: Plan, cluster: Cluster, work: Work, kind: Kind, program: Program, clock: Clock) -> list[Transfer]:
    """Run forward and backward; returns the transfers of factors that begin after them."""
    world, everyone = plan.world_size, range(plan.world_size)
    slow = _crowding(cluster, world)
    early = kind.overlap and kind.measures
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
    jobs, filled, bucket = list[Job](), 0, FIRST_BUCKET_BYTES
    for layer in reversed(plan.layers):
        do("backward", layer.name, work.backward[layer.name])
        filled += layer.grad_elements * num_bytes(layer.dtype)
        if filled >= bucket and world > 1 and work.reduces_gradients:
            jobs.append(_gradients(cluster, world, filled, now))
            filled, bucket = 0, BUCKET_BYTES
        for factor in layer.factors if kind.measures else ():
            if (layer.name, factor.key) not in ready:
                do("measure", f"{layer.name} {factor.key}", work.factors[layer.name, factor.key])
                ready[layer.name, factor.key] = now
    filled += 4 * work.other_parameters
    if filled and world > 1 and work.reduces_gradients:
        jobs.append(_gradients(cluster, world, filled, now))
    waiting = [t for t in program.stage("factors") if kind.measures]
    if early:
        for transfer in waiting:
            when = max((ready.get((part.layer, part.key), now) for part in transfer.parts), default=now)
            seconds = _seconds(transfer, cluster)
            jobs.append(Job("factors", f"bucket {transfer.bucket} {transfer.how}", when, seconds, 1))
        waiting = []
    end = last = now
    for begin, done, job in _share_network(jobs, turn, end, cluster.hidden):
        begin = max(begin, done - job.seconds)  # beside work, or another transfer, it takes longer than it moves data
        clock.note(everyone, "network", job.stage, job.name, begin, done)
        last = max(last, done)
    clock.now = [last] * world
    return waiting


def _gradients(cluster: Cluster, world: int, num_bytes: float, now: float) -> Job:
    one_host = world <= cluster.ranks_per_host
    return Job("gradients", "bucket", now, cluster.seconds("all-reduce", world, num_bytes, one_host=one_host), 0)


def _share_network(
    jobs: list[Job], turn: float, end: float, hidden: tuple[float, float]
) -> list[tuple[float, float, Job]]:
    """Return when each job begins and is done: one of each queue at a time, which share the network.

    ``turn`` and ``end``: of forward and of backward, beside which transfers have the speed ``hidden``.
    """
    queues = [[job for job in jobs if job.queue == number] for number in sorted({job.queue for job in jobs})]
    left = [[job.seconds for job in queue] for queue in queues]
    place, begun = [0] * len(queues), [math.nan] * len(queues)
    found: list[tuple[float, float, Job]] = []
    now = 0.0
    while any(place[q] < len(queue) for q, queue in enumerate(queues)):
        heads = [q for q, queue in enumerate(queues) if place[q] < len(queue)]
        active = [q for q in heads if queues[q][place[q]].ready <= now]
        upcoming = [queues[q][place[q]].ready for q in heads if q not in active]
        upcoming += [moment for moment in (turn, end) if moment > now]
        speed = hidden[0] if now < turn else hidden[1] if now < end else 1.0
        rate = speed / len(active) if active else 0.0
        for q in active:
            begun[q] = now if math.isnan(begun[q]) else begun[q]
        until = {q: now + left[q][place[q]] / rate if rate > 0 else math.inf for q in active}
        later = min([*until.values(), *upcoming])
        for q in active:
            left[q][place[q]] -= rate * (later - now)
            if until[q] <= later:
                found.append((begun[q], later, queues[q][place[q]]))
                place[q], begun[q] = place[q] + 1, math.nan
        now = later
    return found


# --- the stages after them -------------------------------------------------------------------------------------


def _crowding(cluster: Cluster, world: int) -> float:
    """Return how much slower work is where all ranks of a host work at once."""
    busy = min(world, cluster.slot_ranks or cluster.ranks_per_host)
    return 1.0 if cluster.slots is None else max(1.0, busy / cluster.slots)


def _work(seconds: list[float], stage: str, cluster: Cluster, clock: Clock) -> None:
    """Let each rank work so long, at full speed; ranks of a host share its slots."""
    size = cluster.slot_ranks or cluster.ranks_per_host
    for first in range(0, len(seconds), size):
        ranks = range(first, min(first + size, len(seconds)))
        starts = [clock.now[rank] for rank in ranks]
        for rank, end in zip(ranks, _shared(starts, [seconds[rank] for rank in ranks], cluster.slots), strict=True):
            clock.note([rank], "compute", stage, "", clock.now[rank], end)
            clock.now[rank] = end


def _shared(starts: list[float], seconds: list[float], slots: float | None) -> list[float]:
    """Return when each is done, if ``slots`` of them have full speed together and more share it equally."""
    if slots is None or len(starts) <= slots:
        return [start + value for start, value in zip(starts, seconds, strict=True)]
    left, ends, now = list(seconds), list(starts), min(starts)
    while any(value > 0 for value in left):
        active = [i for i, value in enumerate(left) if value > 0 and starts[i] <= now]
        coming = [starts[i] for i, value in enumerate(left) if value > 0 and starts[i] > now]
        if not active:
            now = min(coming)
            continue
        rate = min(1.0, slots / len(active))
        until = {i: now + left[i] / rate for i in active}
        later = min([*until.values(), *coming])
        for i in active:
            left[i] -= rate * (later - now)
            if until[i] <= later:
                left[i], ends[i] = 0.0, later
        now = later
    return ends


def _decompositions(plan: Plan, cluster: Cluster) -> list[float]:
    """Return each rank's seconds of decomposing."""
    seconds, common = [0.0] * plan.world_size, 0.0
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
            cost = cluster.costs.decompose(factor, plan.solver)
            if len(by) == plan.world_size:
                common += cost
            else:
                for rank in by:
                    seconds[rank] += cost
    return [value + common for value in seconds]


def _packing(plan: Plan, cluster: Cluster) -> float:
    """Return the seconds of writing all factors' sums to buffers, and reading them, if that was measured."""
    if plan.world_size == 1 or "pack" not in cluster.costs.curves:
        return 0.0
    both = zip(plan.layers, plan.placements, strict=True)
    travels = [factor for layer, p in both if len(p.statistics) > 1 for factor in layer.factors]
    return sum(cluster.costs.work("pack", factor.packed_elements) for factor in travels)


def _averaging(plan: Plan, cluster: Cluster) -> list[float]:
    """Return each rank's seconds of absorbing factors into running ones, if that was measured."""
    seconds, common = [0.0] * plan.world_size, 0.0
    if "average" not in cluster.costs.curves:
        return seconds
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for factor, held in zip(layer.factors, placement.factors, strict=True):
            cost = cluster.costs.work("average", factor.num_elements)
            if len(held) == plan.world_size:
                common += cost
            else:
                for rank in held:
                    seconds[rank] += cost
    return [value + common for value in seconds]


def _preconditioning(plan: Plan, cluster: Cluster) -> list[float]:
    seconds, common = [0.0] * plan.world_size, 0.0
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        cost = cluster.costs.precondition(layer, plan.solver)
        if len(placement.preconditioned_by) == plan.world_size:
            common += cost
        else:
            for rank in placement.preconditioned_by:
                seconds[rank] += cost
    return [value + common for value in seconds]


def _transfer_all(transfers: Iterable[Transfer], cluster: Cluster, clock: Clock) -> None:
    for transfer in transfers:
        _transfer(transfer, cluster, clock)


def _transfer(transfer: Transfer, cluster: Cluster, clock: Clock) -> None:
    """Let a group's ranks wait for each other and for the data."""
    begin = max(clock.now[rank] for rank in transfer.group)
    end = begin + _seconds(transfer, cluster)
    for rank in transfer.group:
        clock.now[rank] = end
    clock.note(transfer.group, "network", transfer.stage, transfer.how, begin, end)


COLLECTIVES = {"collect": "all-to-all", "deal": "all-to-all", "rows": "all-to-all"}


def _seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Return a transfer's seconds, nothing else on the network."""
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
    """Return the ranks that may send or receive most: the owners of most, and any."""
    totals = dict.fromkeys(transfer.group, 0)
    for part in transfer.parts:
        totals[part.owner] += part.elements
    return [max(totals, key=lambda rank: totals[rank]), transfer.group[0]]
