"""From layers, a strategy's name and a world size to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dkfac.plan import fusion as rules
from dkfac.plan.costs import Costs
from dkfac.plan.plan import Plan, num_bytes
from dkfac.plan.program import expand
from dkfac.plan.spec import LayerSpec
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


def make_plan(layers: Sequence[LayerSpec], world_size: int, choices: Choices, costs: Costs | None = None) -> Plan:
    """Return the plan; deterministic in its arguments."""
    costs = costs or Costs()
    if choices.strategy != "auto":
        return _make(choices.strategy, tuple(layers), world_size, choices, costs)
    names = AUTO if choices.share == "gradients" else ("sharded",)
    plans = [_make(name, tuple(layers), world_size, choices, costs) for name in names]
    return min(plans, key=lambda plan: step_seconds(plan, choices, costs))  # of equals the first


def _make(strategy: str, layers: tuple[LayerSpec, ...], world_size: int, choices: Choices, costs: Costs) -> Plan:
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
        buckets=buckets(layers, world_size, choices, costs),
        wire_dtype=choices.wire_dtype,
        solver=choices.solver,
        moments=choices.moments,
        share=choices.share,
    )


def buckets(
    layers: tuple[LayerSpec, ...], world_size: int, choices: Choices, costs: Costs
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return which factors are reduced together: inputs in forward order, then the others in backward order."""
    inputs = [(layer, factor) for layer in layers for factor in layer.factors if factor.key == "A"]
    others = [(layer, factor) for layer in reversed(layers) for factor in layer.factors if factor.key != "A"]
    items = inputs + others
    names = [(layer.name, factor.key) for layer, factor in items]
    if choices.fusion == "one" or len(items) < 2:
        return (tuple(names),) if names else ()
    seconds = [
        costs.byte_seconds * factor.packed_elements * num_bytes(choices.wire_dtype or layer.dtype)
        for layer, factor in items
    ]
    ready = _ready_times(layers, [(layer.name, factor.key) for layer, factor in items], costs)
    rule = rules.spd if choices.fusion == "spd" else rules.optimal
    result, start = [], 0
    for size in rule(ready, seconds, costs.latency_seconds * max(1, world_size - 1)):
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
    return [forward[name] if key == "A" else backward[name] for name, key in names]


def step_seconds(plan: Plan, choices: Choices, costs: Costs) -> float:
    """Predict what K-FAC adds to an average step: the slowest rank's work, and its transfers one after another."""
    work = [0.0] * plan.world_size
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
            seconds = costs.decompose(factor, plan.solver) / choices.inverse_interval
            for rank in by:
                work[rank] += seconds
        seconds = costs.precondition(layer, plan.solver)
        for rank in placement.preconditioned_by:
            work[rank] += seconds
    links = [0.0] * plan.world_size
    for transfer in expand(plan).transfers:
        every = {"header": choices.factor_interval, "factors": choices.factor_interval}
        refreshes = dict.fromkeys(("means", "status", "decompositions"), choices.inverse_interval)
        interval = (every | refreshes).get(transfer.stage, 1)
        times = {"all-reduce": 2, "all-gather": len(transfer.group) - 1}.get(transfer.how, 1)
        for rank, elements in zip(transfer.group, transfer.sizes(), strict=True):
            links[rank] += costs.transfer(times * elements * num_bytes(transfer.dtype)) / interval
    return max(a + b for a, b in zip(work, links, strict=True))
