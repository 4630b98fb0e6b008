"""Adaptive refresh intervals (``staleness``): refresh each factor as often as it changes.

Input: the batch factors of each measured step. Output: which factors are due. Owns: the intervals and the tensors that
changes are measured against. A "statistic" is one factor with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from dkfac.comm.transport import Transport
from dkfac.config.settings import Settings
from dkfac.config.step_context import FactorName
from dkfac.decompose import layer_factors
from dkfac.decompose.refresh_sync import Found
from dkfac.experimental.factor_change import Seen, Statistic, change, next_interval, off_diagonal
from dkfac.factors.layer_state import LayerState
from dkfac.factors.observation import Observation
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.decompose import Eigen


class FactorIntervals:
    """The intervals of all statistics, identical on every rank; the tensors to judge each by are on one rank."""

    def __init__(self, settings: Settings, layers: list[Layer]) -> None:
        self._settings = settings
        self._names = [(layer.name, factor.key) for layer in layers for factor in layer.spec.factors]
        self.statistics = {name: Statistic() for name in self._names}
        self.history: list[tuple[int, str, str, int]] = []
        """``(step, layer, factor, new interval)`` for each change of an interval."""
        self.num_refreshes = 0
        """Number of refreshed statistics so far."""

    def due(self, step: int) -> frozenset[FactorName]:
        most = self._settings.experimental.max_interval
        return frozenset(name for name, statistic in self.statistics.items() if statistic.is_due(step, most))

    def gather(self, ranks: RankPlan, step: int, due: Iterable[FactorName], look: Observation) -> None:
        """Add a step's batch factors to the statistics that are due."""
        for name in due:
            statistic, rows = self.statistics[name], look.rows[name[0]]
            if rows == 0:
                continue
            statistic.rows += rows
            statistic.due = step + 1
            factor = look.factors.get(name[0], {}).get(name[1])
            if factor is None or not _judges(ranks, name):
                continue
            pool, noise = factor * rows, look.noise[name].to(factor.device, torch.float64) * rows**2
            statistic.pool = pool if statistic.pool is None else statistic.pool.add_(pool)
            statistic.noise = noise if statistic.noise is None else statistic.noise + noise

    def ready(self, states: dict[str, LayerState]) -> frozenset[FactorName]:
        """Return the statistics with enough rows to refresh; any number is enough for a first decomposition."""
        least = self._settings.experimental.staleness_min_rows
        found = {name: s.rows for name, s in self.statistics.items() if s.rows > 0}
        return frozenset(
            name for name, rows in found.items() if rows >= least or name[1] not in states[name[0]].decomposed
        )

    def changes(
        self, ranks: RankPlan, states: dict[str, LayerState], ready: frozenset[FactorName]
    ) -> list[Tensor | float]:
        """Return how each statistic differs from the last and from the second to last refresh; 0 if another rank judges
        it, infinite if there is nothing to compare with, NaN if it was corrupted in transfer."""
        found: list[Tensor | float] = []
        for name in self._names:
            statistic = self.statistics[name]
            if name not in ready or not _judges(ranks, name):
                found += [0.0, 0.0]
                continue
            seen, noise = statistic.seen, statistic.noise
            lost = 0.0 if noise is None else torch.where(noise.isnan(), torch.nan, 0.0)
            found += [
                lost + (self._change(ranks, states, name, seen[i]) if i < len(seen) else math.inf) for i in (0, 1)
            ]
        return found

    def without_lost(self, ready: frozenset[FactorName], changes: list[float]) -> frozenset[FactorName]:
        """Return the statistics that can be judged. For those corrupted in transfer, which only their judge can see,
        every rank discards what was accumulated and starts again."""
        lost = {name for name, last in zip(self._names, changes[::2], strict=True) if math.isnan(last)}
        for name in lost:
            self.statistics[name].empty()
        return ready - lost

    def _change(self, ranks: RankPlan, states: dict[str, LayerState], name: FactorName, old: Seen) -> Tensor | float:
        layer, state = ranks.by_name[name[0]], states[name[0]]
        if self._is_basis(layer, name[1]):
            return off_diagonal(layer_factors.used(layer, state, name[1]), old.value)
        look = self.statistics[name].look()
        return math.inf if look is None else change(look, old)

    def _is_basis(self, layer: Layer, key: str) -> bool:
        return self._settings.experimental.staleness == "basis" and layer.spec.factor(key).form == "dense"

    def conclude(
        self, ranks: RankPlan, step: int, ready: frozenset[FactorName], changes: list[float], found: Found
    ) -> None:
        """Set the next intervals from values that all ranks have, and keep what this refresh saw."""
        limit, most = self._settings.experimental.staleness_threshold, self._settings.experimental.max_interval
        for i, name in enumerate(self._names):
            if name not in ready:
                continue
            statistic = self.statistics[name]
            last, before = changes[2 * i : 2 * i + 2]
            like_last = last <= limit
            interval = next_interval(
                statistic.interval, statistic.previous, like_last=like_last, like_both=like_last and before <= limit,
                most=most,
            )  # fmt: skip
            if interval != statistic.interval or not self.history:
                self.history.append((step, *name, interval))
            statistic.previous, statistic.interval = statistic.interval, interval
            statistic.due = step + interval
            self.num_refreshes += 1
            if _judges(ranks, name):
                self._keep(ranks.by_name[name[0]], name[1], statistic, found)
            statistic.empty()

    def _keep(self, layer: Layer, key: str, statistic: Statistic, found: Found) -> None:
        look = statistic.look()
        if self._is_basis(layer, key):
            decomposition = found.get(layer.name, {}).get(key, (None, None))[0]
            look = None
            if isinstance(decomposition, Eigen) and decomposition.vectors is not None:
                nothing = torch.zeros((), dtype=torch.float64, device=decomposition.vectors.device)
                look = Seen(decomposition.vectors, nothing)
        statistic.seen = [] if look is None else [look, *statistic.seen[:1]]

    def intervals(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (layer, key), statistic in self.statistics.items():
            found.setdefault(layer, {})[key] = statistic.interval
        return found

    def follow(self, layers: dict[str, Layer]) -> None:
        """Move to the devices of the layers' weights and the dtypes of their factors."""
        for (name, _), statistic in self.statistics.items():
            layer = layers[name]
            statistic.follow(layer.weight.device, layer.dtype)

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that changes are measured against."""
        tensors = [seen.value for s in self.statistics.values() for seen in s.seen]
        return sum(t.nbytes for t in [*tensors, *(s.pool for s in self.statistics.values() if s.pool is not None)])

    def saved(self, ranks: RankPlan) -> dict[str, Any]:
        """Return the checkpoint entries: the numbers of all statistics, and the tensors that this rank judges by."""
        layers: dict[str, Any] = {}
        for name, statistic in self.statistics.items():
            layer = ranks.by_name[name[0]]
            numbers = [statistic.interval, statistic.previous, statistic.due, statistic.rows]
            entry: dict[str, Any] = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
            if _judges(ranks, name):
                entry |= _save_tensors(statistic, layer, layer.spec.factor(name[1]).shape)
            layers.setdefault(name[0], {})[name[1]] = entry
        return {"mode": self._settings.experimental.staleness, "layers": layers, "num_refreshes": self.num_refreshes}

    def load(
        self,
        ranks: RankPlan,
        transport: Transport,
        states: dict[str, LayerState],
        step: int,
        saved: dict[str, Any] | None,
        anew: Container[str],
    ) -> None:
        """Restore what was saved, except for layers in ``anew``, which are measured again. Statistics without a saved
        state are due at once, with initial intervals. Collective."""
        self.statistics = {name: Statistic(due=step) for name in self._names}
        self.history.clear()
        self.num_refreshes = 0 if saved is None else int(saved["num_refreshes"])
        found = {} if saved is None else saved["layers"]
        entries = [{} if name in anew else found.get(name, {}).get(key, {}) for name, key in self._names]
        for name, entry, held in zip(self._names, entries, self._held(ranks, transport, entries), strict=True):
            if held == 0:
                continue
            statistic = self.statistics[name] = self._load_numbers(states, step, name, entry["numbers"])
            self.history.append((step, *name, statistic.interval))
            if held == 1:  # the accumulated tensors are missing
                statistic.rows = 0.0
            elif _judges(ranks, name):
                _load_tensors(statistic, entry, ranks.by_name[name[0]])
                if saved is not None and saved.get("mode") != self._settings.experimental.staleness:
                    statistic.seen = []  # saved eigenbases cannot be compared with batch factors, or the reverse

    def _held(self, ranks: RankPlan, transport: Transport, entries: list[dict[str, Any]]) -> list[float]:
        """Return what the ranks have of each statistic: 0 nothing, 1 its numbers, 2 also the tensors of its judge."""
        mine = [
            1.0 + (not _judges(ranks, name) or "pool" in entry) if entry else 0.0
            for name, entry in zip(self._names, entries, strict=True)
        ]
        return [min(numbers) for numbers in zip(*transport.gather_numbers(mine), strict=True)]

    def _load_numbers(self, states: dict[str, LayerState], step: int, name: FactorName, numbers: Tensor) -> Statistic:
        """Return a statistic with its interval limited to ``max_interval``, due now if it was never decomposed."""
        most = self._settings.experimental.max_interval
        interval, previous, due, rows = numbers.tolist()
        if interval > most:
            due = max(step, due - (interval - most))
        if name[1] not in states[name[0]].decomposed:
            due = min(due, step)
        return Statistic(min(most, int(interval)), min(most, int(previous)), int(due), rows)


def _judges(ranks: RankPlan, name: FactorName) -> bool:
    """Whether this rank judges how a statistic changed: the first of the ranks that decompose it."""
    layer = ranks.by_name[name[0]].spec
    index = [factor.key for factor in layer.factors].index(name[1])
    return ranks.placements[name[0]].decomposed_by[index][0] == ranks.rank


def _save_tensors(statistic: Statistic, layer: Layer, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return tensors whose structure does not depend on what has happened; a negative noise marks a missing one."""
    blank = torch.zeros(shape, device=layer.weight.device, dtype=layer.dtype)
    nothing = torch.full((), -1.0, dtype=torch.float64, device=layer.weight.device)
    pool, noise = (blank, nothing) if statistic.pool is None else (statistic.pool, statistic.noise)
    assert noise is not None
    seen = [*statistic.seen, *[Seen(blank, nothing)] * 2]
    found = {"pool": pool, "pool_noise": noise, "last": seen[0].value, "last_noise": seen[0].noise}
    found |= {"before": seen[1].value, "before_noise": seen[1].noise}
    return {key: tensor.clone() for key, tensor in found.items()}


def _load_tensors(statistic: Statistic, saved: dict[str, Tensor], layer: Layer) -> None:
    def pair(key: str) -> Seen | None:
        noise = saved[f"{key}_noise"].to(layer.weight.device, torch.float64, copy=True)
        return None if noise < 0 else Seen(saved[key].to(layer.weight.device, layer.dtype, copy=True), noise)

    pool = pair("pool")
    if pool is not None:
        statistic.pool, statistic.noise = pool.value, pool.noise
    statistic.seen = [seen for seen in (pair("last"), pair("before")) if seen is not None]
