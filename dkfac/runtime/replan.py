"""Change the plan according to what all ranks counted together.

Input: counts that all ranks have. Output: a new plan, if one is needed, which the transport carries out from then on.
Owns: what was counted since the last refresh.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dkfac.capture.collector import Collector
from dkfac.capture.statistics import BatchStatistics
from dkfac.comm.transport import Transport
from dkfac.experimental.overlap import Overlap
from dkfac.factors import reduce, sent_rows
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.host_copy import HostCopy
from dkfac.plan.plan import Plan
from dkfac.runtime.notices import Notices


class Replanner:
    def __init__(self, transport: Transport, collector: Collector, notices: Notices, overlap: Overlap | None) -> None:
        self._transport, self._collector, self._notices, self._overlap = transport, collector, notices, overlap
        self._counts: reduce.Counts | None = None
        self._noted: HostCopy | None = None
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
        """Act on how often all ranks together called each layer. Synchronizes with the device."""
        self.note_calls()
        self.judge_earlier_calls(ranks)

    def note_calls(self) -> None:
        """Start copying the counts to the host, to be judged at a later step without waiting for the device."""
        counts, self._counts = self._counts, None
        if counts is not None:
            numbers = torch.stack([counts.num_bad, counts.num_passes])
            self._noted = HostCopy(torch.cat([numbers, counts.calls, counts.again]))

    def judge_earlier_calls(self, ranks: RankPlan) -> None:
        """Act on the counts that were noted last: warn, give up moments, choose layers to overlap."""
        if self._noted is None:
            return
        (num_bad, num_passes, *counts), self._noted = self._noted.read(), None
        calls, again = counts[: len(ranks.layers)], counts[len(ranks.layers) :]
        if num_bad > 0 or sum(calls) == 0:
            return
        alone = {n for n, p in ranks.placements.items() if len(p.statistics) == 1}  # calls elsewhere are not counted
        self._notices.capture({name for name, i in ranks.index.items() if calls[i] > 0} | alone, 0)
        twice = {name for name, i in ranks.index.items() if again[i] > 0}
        self._collector.give_up_moments(twice, warn=ranks.rank == 0)
        if self._overlap is not None and not self._overlap.layers:
            once = {name for name, i in ranks.index.items() if calls[i] == num_passes and again[i] == 0}
            self._overlap.choose(frozenset(once))

    def choose_rows(self, ranks: RankPlan) -> RankPlan:
        """Send rows instead of sums where every rank had few of them. Collective."""
        told = self._transport.gather_numbers([self.rows_seen.get(layer.name, 0.0) for layer in ranks.layers])
        self.rows_seen.clear()
        wanted = []
        for layer, numbers in zip(ranks.layers, zip(*told, strict=True), strict=True):
            if min(numbers) >= 0 and layer.kind in ("linear", "conv1d-transposed"):
                wanted += sent_rows.worth_as_rows(layer.spec, ranks.placements[layer.name], int(max(numbers)))
        if tuple(wanted) == ranks.plan.rows:
            return ranks
        self._collector.keep_rows({(name, key) for name, key, _ in wanted})
        return self._follow(ranks, replace(ranks.plan, rows=tuple(wanted)))

    def _follow(self, ranks: RankPlan, plan: Plan) -> RankPlan:
        self._transport.follow(plan)
        if self._overlap is not None:
            self._overlap.follow()
        return ranks.follow(plan)
