"""From layers, a strategy's name and a world size to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dkfac.plan import fusion as rules
from dkfac.plan.cluster import Cluster
from dkfac.plan.costs import Costs
from dkfac.plan.plan import Plan, num_bytes
from dkfac.plan.simulate import Work, average_seconds, ready_times
from dkfac.plan.spec import LayerSpec, is_input
from dkfac.plan.strategies import STRATEGIES, Problem

AUTO = ("replicated", "comm-opt", "sharded")
"""What ``auto`` chooses from: all keep full statistics, so the choice does not change results."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user can choose of a plan."""

    strategy: str = "auto"
    worker_fraction: float | None = None
    replicate_factors: bool = False
    wire_dtype: str | None = None
    share: str = "gradients"
    fusion: str = "one"
    solver: str = "eigen"
    moments: bool = False
    factor_interval: int = 10
    inverse_interval: int = 100
    inverse_lag: int = 0
    split_dim: int | None = None
    """As the layers were split: ``spec.split``."""


def make_plan(
    layers: Sequence[LayerSpec],
    world_size: int,
    choices: Choices,
    cluster: Cluster | None = None,
    work: Work | None = None,
) -> Plan:
    """Return the plan; deterministic in its arguments. ``work``: of a rank in a step, if it is known."""
    cluster = cluster or Cluster("guessed")
    if choices.strategy != "auto":
        return _make(choices.strategy, tuple(layers), world_size, choices, cluster, work)
    names = AUTO if choices.share == "gradients" else ("sharded",)
    plans = [_make(name, tuple(layers), world_size, choices, cluster, work) for name in names]
    return min(plans, key=lambda plan: mean_seconds(plan, choices, cluster, work))  # of equals the first


def mean_seconds(plan: Plan, choices: Choices, cluster: Cluster, work: Work | None = None) -> float:
    """Predict a step over a whole interval; without ``work`` only K-FAC's part, the rest being the same for all."""
    return average_seconds(
        plan,
        cluster,
        work or nothing(plan.layers),
        factor_interval=choices.factor_interval,
        inverse_interval=choices.inverse_interval,
    )


def nothing(layers: Sequence[LayerSpec]) -> Work:
    """Return the work of a rank of which nothing is known."""
    idle = dict.fromkeys((layer.name for layer in layers), 0.0)
    free = dict.fromkeys(((layer.name, factor.key) for layer in layers for factor in layer.factors), 0.0)
    return Work(idle, idle, free, reduces_gradients=False)


def _make(
    strategy: str,
    layers: tuple[LayerSpec, ...],
    world_size: int,
    choices: Choices,
    cluster: Cluster,
    work: Work | None,
) -> Plan:
    costs = cluster.costs
    problem = Problem(layers, world_size, costs, choices.solver, choices.worker_fraction, choices.replicate_factors)
    placements = tuple(STRATEGIES[strategy](problem))
    if choices.share == "weights" and any(len(p.preconditioned_by) > 1 for p in placements):
        single = ", ".join(("layer-wise", "mem-opt", "sharded", "local"))
        raise ValueError(
            f'share="weights" needs one rank per layer that steps it; strategy={strategy!r} has several. '
            f'Use one of {single}, or share="gradients"'
        )
    return Plan(
        strategy=strategy,
        world_size=world_size,
        layers=layers,
        placements=placements,
        buckets=buckets(layers, world_size, choices, cluster, work),
        wire_dtype=choices.wire_dtype,
        solver=choices.solver,
        moments=choices.moments,
        share=choices.share,
    )


def buckets(
    layers: tuple[LayerSpec, ...], world_size: int, choices: Choices, cluster: Cluster, work: Work | None
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return which factors are reduced together: inputs in forward order, then the others in backward order."""
    inputs = [(layer, factor) for layer in layers for factor in layer.factors if is_input(factor.key)]
    others = [(layer, factor) for layer in reversed(layers) for factor in layer.factors if not is_input(factor.key)]
    items = inputs + others
    names = [(layer.name, factor.key) for layer, factor in items]
    if choices.fusion == "one" or len(items) < 2:
        return (tuple(names),) if names else ()
    latency, byte_seconds = cluster.costs.latency_seconds * max(1, world_size - 1), cluster.costs.byte_seconds
    if cluster.between or cluster.within:
        line = cluster.line("all-reduce", world_size, one_host=world_size <= cluster.ranks_per_host)
        latency, byte_seconds = line.latency, line.byte_seconds
    seconds = [
        byte_seconds * factor.packed_elements * num_bytes(choices.wire_dtype or layer.dtype) for layer, factor in items
    ]
    ready = _ready_times(layers, names, cluster.costs) if work is None else ready_times(layers, names, work)
    rule = rules.spd if choices.fusion == "spd" else rules.optimal
    result, start = [], 0
    for size in rule(ready, seconds, latency):
        result.append(tuple(names[start : start + size]))
        start += size
    return tuple(result)


EXAMPLES = 32
"""Per rank, where nothing is known of the batch."""


def _ready_times(layers: tuple[LayerSpec, ...], names: list[tuple[str, str]], costs: Costs) -> list[float]:
    """Guess when each factor is ready: a forward of two operations per weight and example, a backward of four."""
    forward, now = {}, 0.0
    for layer in layers:
        forward[layer.name] = now
        now += 2 * EXAMPLES * layer.grad_elements * costs.flop_seconds
    backward = {}
    for layer in reversed(layers):
        now += 4 * EXAMPLES * layer.grad_elements * costs.flop_seconds
        backward[layer.name] = now
    return [forward[name] if is_input(key) else backward[name] for name, key in names]
