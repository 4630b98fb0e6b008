"""The published ways to distribute K-FAC: one function per strategy, from layers to placements.

Input: layer specs, world size and costs. Output: one placement per layer. Owns: nothing.

Only the ranks that decompose a factor need its running value, so only they hold it; ``replicate_factors`` keeps a copy
on every rank, as the papers do. Placement minimizes costs; ties are broken by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dkfac.plan.costs import Costs
from dkfac.plan.plan import Placement
from dkfac.plan.spec import FactorSpec, LayerSpec, Ranks


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """The inputs of a strategy."""

    layers: tuple[LayerSpec, ...]
    world_size: int
    costs: Costs
    solver: str = "eigen"
    worker_fraction: float | None = None
    replicate_factors: bool = False

    @property
    def everyone(self) -> Ranks:
        return tuple(range(self.world_size))

    def decompose_seconds(self, factor: FactorSpec) -> float:
        return self.costs.decompose(factor, self.solver)

    def layer_seconds(self, layer: LayerSpec) -> float:
        return sum(self.decompose_seconds(factor) for factor in layer.factors)

    def place(self, by: Sequence[Ranks], workers: Ranks) -> Placement:
        """Return the placement of a layer that all ranks measure."""
        held = [self.everyone if self.replicate_factors else ranks for ranks in by]
        return Placement(self.everyone, tuple(held), tuple(by), workers)


def balance(costs: Sequence[tuple[float, str]], bins: int) -> list[int]:
    """Return the bin of each ``(cost, name)``: the most expensive first, each to the least loaded bin."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i][0], costs[i][1]))
    heap = [(0.0, b) for b in range(bins)]
    result = [0] * len(costs)
    for i in order:
        load, b = heapq.heappop(heap)
        result[i] = b
        heapq.heappush(heap, (load + costs[i][0], b))
    return result


def replicated(problem: PlacementProblem) -> list[Placement]:
    """Every rank does everything: only the factors' sums are communicated."""
    everyone = problem.everyone
    return [Placement(everyone, (everyone,) * len(la.factors), (everyone,) * len(la.factors), everyone)
            for la in problem.layers]  # fmt: skip


def layer_wise(problem: PlacementProblem) -> list[Placement]:
    """SC'20 K-FAC-lw: layers are assigned round-robin; the owner decomposes, preconditions and sends the gradient."""
    return [_owned(problem, layer, i % problem.world_size) for i, layer in enumerate(problem.layers)]


def factor_wise(problem: PlacementProblem) -> list[Placement]:
    """SC'20 K-FAC-opt: factors are assigned round-robin; all ranks receive the decompositions and precondition."""
    owners = iter(range(sum(len(layer.factors) for layer in problem.layers)))
    return [
        problem.place([(next(owners) % problem.world_size,) for _ in layer.factors], problem.everyone)
        for layer in problem.layers
    ]


def comm_opt(problem: PlacementProblem) -> list[Placement]:
    """KAISA with every rank a worker: factors balanced by cost, decompositions sent to all ranks."""
    return grid(problem, problem.world_size)


def mem_opt(problem: PlacementProblem) -> list[Placement]:
    """KAISA with one worker per layer: the least memory, but gradients are sent in each step."""
    return grid(problem, 1)


def hybrid_opt(problem: PlacementProblem) -> list[Placement]:
    """KAISA in between: ``worker_fraction`` of the ranks hold a layer's decompositions."""
    world = problem.world_size
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    if problem.worker_fraction is None:
        return grid(problem, max(d for d in divisors if d <= max(1, world / 2)))
    workers = problem.worker_fraction * world
    for d in divisors:
        if abs(workers - d) <= 1e-3 * d:  # e.g. 0.3333 of 3 ranks is one
            return grid(problem, d)
    allowed = ", ".join(f"{d / world:.4g}" for d in divisors)
    raise ValueError(
        f"worker_fraction={problem.worker_fraction:g} gives {workers:g} workers on {world} ranks; "
        f"use one of [{allowed}]"
    )


def grid(problem: PlacementProblem, rows: int) -> list[Placement]:
    """Place layers on the columns of a grid with ``rows`` rows; the ranks of a column are the workers of its layers.

    Rank = row * columns + column, so that the i-th worker serves the i-th range of consecutive ranks.
    """
    columns = problem.world_size // rows
    layers = problem.layers
    column_of = balance([(problem.layer_seconds(layer), layer.name) for layer in layers], columns)
    placements: dict[str, Placement] = {}
    for column in range(columns):
        ours = [layer for layer, c in zip(layers, column_of, strict=True) if c == column]
        factors = [(layer, factor) for layer in ours for factor in layer.factors]
        costs = [(problem.decompose_seconds(factor), f"{layer.name}:{factor.key}") for layer, factor in factors]
        row_of = iter(balance(costs, rows))
        workers = tuple(row * columns + column for row in range(rows))
        for layer in ours:
            by = [(next(row_of) * columns + column,) for _ in layer.factors]
            placements[layer.name] = problem.place(by, workers)
    return [placements[layer.name] for layer in layers]


def spd(problem: PlacementProblem) -> list[Placement]:
    """SPD-KFAC: all ranks decompose what is cheaper to repeat than to send; the rest goes to the least loaded rank."""
    everyone, world = problem.everyone, problem.world_size
    factors = [(layer, factor) for layer in problem.layers for factor in layer.factors]
    order = sorted(range(len(factors)), key=lambda i: (-factors[i][1].dim, factors[i][0].name, factors[i][1].key))
    load = [0.0] * world
    by: list[Ranks] = [everyone] * len(factors)
    for i in order:
        layer, factor = factors[i]
        elements = factor.wire_elements(problem.solver)
        share = problem.costs.transfer(elements * (8 if layer.dtype == "float64" else 4))
        seconds = problem.decompose_seconds(factor)
        if seconds < share:
            load = [value + seconds for value in load]
        else:
            owner = load.index(min(load))
            load[owner] += seconds
            by[i] = (owner,)
    chosen = iter(by)
    return [problem.place([next(chosen) for _ in layer.factors], everyone) for layer in problem.layers]


def sharded(problem: PlacementProblem) -> list[Placement]:
    """Osawa et al.: each layer has one owner for everything, balanced by memory; factors are reduced only to owners."""
    owners = balance([(layer.state_elements, layer.name) for layer in problem.layers], problem.world_size)
    return [_owned(problem, layer, owner) for layer, owner in zip(problem.layers, owners, strict=True)]


def local(problem: PlacementProblem) -> list[Placement]:
    """DP-KFAC: like ``sharded``, but an owner measures only on its own batches, so factors are never communicated."""
    owners = balance([(layer.state_elements, layer.name) for layer in problem.layers], problem.world_size)
    placements = []
    for layer, owner in zip(problem.layers, owners, strict=True):
        each = ((owner,),) * len(layer.factors)
        placements.append(Placement((owner,), each, each, (owner,)))
    return placements


STRATEGIES: dict[str, Callable[[PlacementProblem], list[Placement]]] = {
    "replicated": replicated,
    "layer-wise": layer_wise,
    "factor-wise": factor_wise,
    "comm-opt": comm_opt,
    "hybrid-opt": hybrid_opt,
    "mem-opt": mem_opt,
    "spd": spd,
    "sharded": sharded,
    "local": local,
}
FULL_STATISTICS = tuple(name for name in STRATEGIES if name != "local")
"""Strategies whose results do not depend on the number of ranks."""


def _owned(problem: PlacementProblem, layer: LayerSpec, owner: int) -> Placement:
    return problem.place([(owner,)] * len(layer.factors), (owner,))
