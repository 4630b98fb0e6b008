"""Change the plan according to what all ranks counted together.

Input: counts that all ranks have. Output: a new plan, if one is needed, which the transport carries out from then on.
Owns: what was counted since the last refresh.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dkfac.capture.collector import Collector
from dkfac.capture.statistics import BatchStatistics
from dkfac.comm.transport import Transport
from dkfac.experimental.overlap import Overlap
from dkfac.factors import reduce
from dkfac.layers.rank_plan import RankPlan
from dkfac.plan.plan import Plan
from dkfac.runtime.notices import Notices


class Replanner:
    def __init__(self, transport: Transport, collector: Collector, notices: Notices, overlap: Overlap | None) -> None:
        self._transport, self._collector, self._notices, self._overlap = transport, collector, notices, overlap
        self._counts: reduce.Counts | None = None
        self.rows_seen: dict[str, float] = {}
        """Largest number of rows of a layer in one step since the last refresh; -1 if the host does not know it."""

    def see_rows(self, measured: BatchStatistics) -> None:
        """Record this rank's number of rows in a step."""
        for name, sums in measured.layers.items():
            rows = -1.0 if isinstance(sums.rows, Tensor) else sums.rows
            before = self.rows_seen.get(name, 0.0)
            self.rows_seen[name] = -1.0 if min(rows, before) < 0 else max(rows, before)

    def see_counts(self, counts: reduce.Counts) -> None:
        """Record what all ranks counted in a step."""
        self._counts = counts

    def judge_calls(self, ranks: RankPlan) -> None:
        """Act on how often all ranks together called each layer: warn, give up moments, choose layers to overlap.
        Synchronizes with the device."""
        counts = self._counts
        if counts is None or float(counts.num_bad) > 0 or float(counts.calls.sum()) == 0:
            return
        calls, again = counts.calls.tolist(), counts.again.tolist()
        alone = {n for n, p in ranks.placements.items() if len(p.statistics) == 1}  # calls elsewhere are not counted
        self._notices.capture({name for name, i in ranks.index.items() if calls[i] > 0} | alone, 0)
        twice = {name for name, i in ranks.index.items() if again[i] > 0}
        self._collector.give_up_moments(twice, warn=ranks.rank == 0)
        if self._overlap is not None and not self._overlap.layers:
            passes = float(counts.num_passes)
            once = {name for name, i in ranks.index.items() if calls[i] == passes and again[i] == 0}
            self._overlap.choose(frozenset(once))

    def choose_rows(self, ranks: RankPlan) -> RankPlan:
        """Send rows instead of sums where every rank had few of them. Collective."""
        told = self._transport.gather_numbers([self.rows_seen.get(layer.name, 0.0) for layer in ranks.layers])
        self.rows_seen.clear()
        wanted = []
        for layer, numbers in zip(ranks.layers, zip(*told, strict=True), strict=True):
            if min(numbers) >= 0 and layer.kind in ("linear", "conv1d-transposed"):
                wanted += reduce.worth_as_rows(layer.spec, ranks.placements[layer.name], int(max(numbers)))
        if tuple(wanted) == ranks.plan.rows:
            return ranks
        self._collector.keep_rows({(name, key) for name, key, _ in wanted})
        return self._follow(ranks, replace(ranks.plan, rows=tuple(wanted)))

    def _follow(self, ranks: RankPlan, plan: Plan) -> RankPlan:
        self._transport.follow(plan)
        if self._overlap is not None:
            self._overlap.follow()
        return ranks.follow(plan)
