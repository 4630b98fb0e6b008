"""Make a plan from layers, a strategy's name and a world size.

Input: layer specs, the user's choices and a cluster's costs. Output: a plan. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dkfac.plan import fusion as rules
from dkfac.plan.cluster import Cluster
from dkfac.plan.costs import Costs
from dkfac.plan.plan import Plan, num_bytes
from dkfac.plan.simulate import Work, average_seconds, ready_times
from dkfac.plan.spec import LayerSpec, is_input
from dkfac.plan.strategies import STRATEGIES, PlacementProblem

AUTO = ("replicated", "comm-opt", "sharded")
"""The strategies that ``auto`` chooses from. All use full statistics, so the choice does not change results."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user can choose about a plan."""

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
    block_dim: int | None = None
    """The width at which the layers were cut with ``spec.cut_layer``."""


def make_plan(
    layers: Sequence[LayerSpec],
    world_size: int,
    choices: Choices,
    cluster: Cluster | None = None,
    work: Work | None = None,
) -> Plan:
    """Return the plan, a deterministic function of the arguments. ``work`` is a rank's work in a step, if known."""
    cluster = cluster or Cluster("guessed")
    if choices.strategy != "auto":
        return _make(choices.strategy, tuple(layers), world_size, choices, cluster, work)
    names = AUTO if choices.share == "gradients" else ("sharded",)
    plans = [_make(name, tuple(layers), world_size, choices, cluster, work) for name in names]
    return min(plans, key=lambda plan: mean_seconds(plan, choices, cluster, work))  # on ties the first


def mean_seconds(plan: Plan, choices: Choices, cluster: Cluster, work: Work | None = None) -> float:
    """Predict the mean seconds of a step over an interval; without ``work`` only K-FAC's part."""
    return average_seconds(
        plan,
        cluster,
        work or nothing(plan.layers),
        factor_interval=choices.factor_interval,
        inverse_interval=choices.inverse_interval,
    )


def nothing(layers: Sequence[LayerSpec]) -> Work:
    """Return zero work, for ranks whose work is not known."""
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
    problem = PlacementProblem(
        layers, world_size, costs, choices.solver, choices.worker_fraction, choices.replicate_factors
    )
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
    """Return the buckets of factors: those of inputs in forward order, then the others in backward order."""
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
    rule = rules.spd_buckets if choices.fusion == "spd" else rules.optimal
    result, start = [], 0
    for size in rule(ready, seconds, latency):
        result.append(tuple(names[start : start + size]))
        start += size
    return tuple(result)


EXAMPLES = 32
"""Assumed examples per rank if the batch size is not known."""


def _ready_times(layers: tuple[LayerSpec, ...], names: list[tuple[str, str]], costs: Costs) -> list[float]:
    """Estimate when each factor is ready: two operations per weight and example in forward, four in backward."""
    forward, now = {}, 0.0
    for layer in layers:
        forward[layer.name] = now
        now += 2 * EXAMPLES * layer.grad_elements * costs.flop_seconds
    backward = {}
    for layer in reversed(layers):
        now += 4 * EXAMPLES * layer.grad_elements * costs.flop_seconds
        backward[layer.name] = now
    return [forward[name] if is_input(key) else backward[name] for name, key in names]
