"""The plan from the point of view of one rank.

Input: the layers of a model and the plan that all ranks agreed on. Output: this rank's part of it. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from dkfac.layers.layer import Layer
from dkfac.plan.plan import Holding, Placement, Plan


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    layers: list[Layer]
    plan: Plan
    rank: int
    takes_steps: bool
    """Whether K-FAC itself updates the weights of its layers; it then holds their moments."""
    by_name: dict[str, Layer] = field(init=False)
    index: dict[str, int] = field(init=False)
    """Indices of the layers, in the plan and in all vectors that ranks exchange."""
    placements: dict[str, Placement] = field(init=False)
    _preconditioned: frozenset[str] = field(init=False)
    _decomposed: dict[str, list[str]] = field(init=False)
    """This rank's part: looked up in each step, where a search in thousands of ranks would take long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {layer.name: layer for layer in self.layers})
        object.__setattr__(self, "index", {layer.name: i for i, layer in enumerate(self.layers)})
        object.__setattr__(self, "placements", {la.name: self.plan.placement(la.name) for la in self.layers})
        mine, decomposed = set[str](), dict[str, list[str]]()
        for layer in self.layers:
            placement = self.placements[layer.name]
            by = zip(layer.spec.factors, placement.decomposed_by, strict=True)
            decomposed[layer.name] = [factor.key for factor, ranks in by if self.rank in ranks]
            if self.rank in placement.preconditioned_by:
                mine.add(layer.name)
        object.__setattr__(self, "_preconditioned", frozenset(mine))
        object.__setattr__(self, "_decomposed", decomposed)

    def follow(self, plan: Plan) -> RankPlan:
        """Return this rank's view of another plan."""
        return replace(self, plan=plan)

    def holds(self, name: str) -> Holding:
        """Return which state of a layer this rank holds."""
        return replace(self.plan.holding(name, self.rank), adam=self.takes_steps and self.preconditions(name))

    def preconditions(self, name: str) -> bool:
        """Whether this rank holds a layer's decompositions and preconditions its gradient."""
        return name in self._preconditioned

    def speaks_for(self, name: str) -> bool:
        """Whether this rank is the first of those that precondition a layer."""
        return self.rank == self.placements[name].preconditioned_by[0]

    def steps(self, name: str) -> bool:
        """Whether this rank's optimizer steps a layer."""
        return self.plan.share == "gradients" or self.preconditions(name)

    def measures_alone(self, name: str) -> bool:
        return self.placements[name].statistics == (self.rank,) and not self.plan.loopback

    def decomposes(self, layer: Layer, only: Container[tuple[str, str]] | None = None) -> list[str]:
        """Return the layer's factors that this rank decomposes, by key; ``only``: among these, as (layer, key)."""
        return [key for key in self._decomposed[layer.name] if only is None or (layer.name, key) in only]

    def is_shared(self, layer: Layer, key: str) -> bool:
        """Whether several ranks decompose a factor; their results must be bitwise equal."""
        by = self.placements[layer.name].decomposed_by
        return any(f.key == key and len(ranks) > 1 for f, ranks in zip(layer.spec.factors, by, strict=True))
