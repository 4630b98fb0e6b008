"""When each statistic is refreshed again: intervals that follow how fast it changes (``staleness``)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import stages
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Eigen
from dkfac.reduce import Look
from dkfac.settings import Settings
from dkfac.shares import Found

if TYPE_CHECKING:
    from dkfac.run import Runner

Name = tuple[str, str]
"""A statistic: layer and factor."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A statistic as a refresh found it: a batch factor, or the basis that was decomposed from the running one."""

    value: Tensor
    noise: Tensor
    """How far, squared, a batch factor is expected to be from that of endless batches."""


@dataclass(slots=True)
class Statistic:
    interval: int = 1
    previous: int = 1
    due: int = 0
    """From this step on it is looked for."""
    rows: float = 0.0
    """Measured since the last refresh; there may be too few for the next."""
    pool: Tensor | None = None
    """The sum of batch factors times their rows, since then; on the rank that judges."""
    noise: Tensor | None = None
    """The sum of their noise times the squares of their rows; NaN if one of them did not survive the wire."""
    seen: list[Seen] = field(default_factory=list)
    """What the last two refreshes found, the last one first; on the rank that judges."""

    def look(self) -> Seen | None:
        """Return the batch factor of all rows since the last refresh."""
        if self.pool is None or self.noise is None:
            return None
        return Seen(self.pool / self.rows, self.noise / self.rows**2)

    def is_due(self, step: int, most: int) -> bool:
        """Whether it is looked for at a step: at each, but where its layer has not been called for long, only after an
        eighth of that time again, or about ``most`` steps: to look makes ranks wait for each other."""
        missing = step - self.due
        every = 1 << max(0, min(missing.bit_length() - 4, most.bit_length() - 1))
        return missing >= 0 and missing % every == 0

    def empty(self) -> None:
        """Forget what was gathered."""
        self.rows, self.pool, self.noise = 0.0, None, None

    def follow(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to where the model was moved, as the layer's state does."""
        if self.pool is not None and self.noise is not None:
            self.pool, self.noise = self.pool.to(device, dtype), self.noise.to(device)
        self.seen = [Seen(seen.value.to(device, dtype), seen.noise.to(device)) for seen in self.seen]


def next_interval(interval: int, previous: int, *, like_last: bool, like_both: bool, most: int) -> int:
    """Return the steps until a statistic's next refresh, from whether it is what it was at the last two."""
    if not like_last:
        return max(1, min(most, interval // 2))
    return min(most, interval + previous if like_both else interval)


def change(new: Seen, old: Seen) -> Tensor:
    """Return how far a batch factor is from an earlier one, relative to that, without what few rows account for."""
    square = _square(new.value - old.value) - new.noise - old.noise
    return (square.clamp(min=0) / _square(old.value).clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def off_diagonal(factor: Tensor, vectors: Tensor) -> Tensor:
    """Return the share of a factor that is not on its diagonal in a basis, as a ratio of norms."""
    vectors = vectors.to(factor.dtype)
    turned = vectors.mT @ factor @ vectors
    rest = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return (_square(rest) / _square(turned).clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _square(value: Tensor) -> Tensor:
    return value.to(torch.float64).square().sum()


class Staleness:
    """The intervals of all statistics. Every rank has the same; what they are judged by lives with one each."""

    def __init__(self, settings: Settings, layers: list[Layer]) -> None:
        self._settings = settings
        self._names = [(layer.name, factor.key) for layer in layers for factor in layer.spec.factors]
        self.statistics = {name: Statistic() for name in self._names}
        self.history: list[tuple[int, str, str, int]] = []
        """Step, layer, factor and the interval from then on, where it changed."""
        self.num_refreshes = 0
        """Of statistics."""

    def due(self, step: int) -> frozenset[Name]:
        most = self._settings.max_interval
        return frozenset(name for name, statistic in self.statistics.items() if statistic.is_due(step, most))

    def gather(self, runner: Runner, due: Iterable[Name], look: Look) -> None:
        """Add a step's batch factors to what has been seen of the statistics that are due."""
        for name in due:
            statistic, rows = self.statistics[name], look.rows[name[0]]
            if rows == 0:
                continue
            statistic.rows += rows
            statistic.due = runner.step + 1
            factor = look.factors.get(name[0], {}).get(name[1])
            if factor is None or not _judges(runner, name):
                continue
            pool, noise = factor * rows, look.noise[name].to(factor.device, torch.float64) * rows**2
            statistic.pool = pool if statistic.pool is None else statistic.pool.add_(pool)
            statistic.noise = noise if statistic.noise is None else statistic.noise + noise

    def ready(self, runner: Runner) -> frozenset[Name]:
        """Return the statistics of which there are rows enough; of those never decomposed any will do."""
        least = self._settings.staleness_min_rows
        found = {name: s.rows for name, s in self.statistics.items() if s.rows > 0}
        return frozenset(
            name for name, rows in found.items() if rows >= least or name[1] not in runner.states[name[0]].decomposed
        )

    def changes(self, runner: Runner, ready: frozenset[Name]) -> list[Tensor | float]:
        """Return how each statistic differs from the last refresh and from the one before; 0 where another rank
        judges, infinite where there is nothing to compare with, NaN where something was lost on the wire."""
        found: list[Tensor | float] = []
        for name in self._names:
            statistic = self.statistics[name]
            if name not in ready or not _judges(runner, name):
                found += [0.0, 0.0]
                continue
            seen, noise = statistic.seen, statistic.noise
            lost = 0.0 if noise is None else torch.where(noise.isnan(), torch.nan, 0.0)
            found += [lost + (self._change(runner, name, seen[i]) if i < len(seen) else math.inf) for i in (0, 1)]
        return found

    def without_lost(self, ready: frozenset[Name], changes: list[float]) -> frozenset[Name]:
        """Return the statistics that can be judged. Of one that lost something on the wire, which its judge alone has
        seen, every rank forgets what was gathered, and it is gathered anew."""
        lost = {name for name, last in zip(self._names, changes[::2], strict=True) if math.isnan(last)}
        for name in lost:
            self.statistics[name].empty()
        return ready - lost

    def _change(self, runner: Runner, name: Name, old: Seen) -> Tensor | float:
        layer, state = runner.by_name[name[0]], runner.states[name[0]]
        if self._is_basis(layer, name[1]):
            return off_diagonal(stages.used(layer, state, name[1]), old.value)
        look = self.statistics[name].look()
        return math.inf if look is None else change(look, old)

    def _is_basis(self, layer: Layer, key: str) -> bool:
        return self._settings.staleness == "basis" and layer.spec.factor(key).form == "dense"

    def conclude(self, runner: Runner, ready: frozenset[Name], changes: list[float], found: Found) -> None:
        """Set the next intervals from what all ranks know, and keep what this refresh saw."""
        limit, most = self._settings.staleness_threshold, self._settings.max_interval
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
                self.history.append((runner.step, *name, interval))
            statistic.previous, statistic.interval = statistic.interval, interval
            statistic.due = runner.step + interval
            self.num_refreshes += 1
            if _judges(runner, name):
                self._keep(runner.by_name[name[0]], name[1], statistic, found)
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

    def follow(self, runner: Runner) -> None:
        """Move to where the layers' weights are, and to the dtypes of their factors."""
        for (name, _), statistic in self.statistics.items():
            layer = runner.by_name[name]
            statistic.follow(layer.weight.device, layer.dtype)

    def num_bytes(self) -> int:
        """Return what is kept to compare with."""
        tensors = [seen.value for s in self.statistics.values() for seen in s.seen]
        return sum(t.nbytes for t in [*tensors, *(s.pool for s in self.statistics.values() if s.pool is not None)])

    def saved(self, runner: Runner) -> dict[str, Any]:
        """Return what a checkpoint holds of it: numbers of all, and what this rank judges by."""
        layers: dict[str, Any] = {}
        for name, statistic in self.statistics.items():
            layer = runner.by_name[name[0]]
            numbers = [statistic.interval, statistic.previous, statistic.due, statistic.rows]
            entry: dict[str, Any] = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
            if _judges(runner, name):
                entry |= _save_tensors(statistic, layer, layer.spec.factor(name[1]).shape)
            layers.setdefault(name[0], {})[name[1]] = entry
        return {"mode": self._settings.staleness, "layers": layers, "num_refreshes": self.num_refreshes}

    def load(self, runner: Runner, saved: dict[str, Any] | None, anew: Container[str]) -> None:
        """Take up what was saved, but for layers that are measured ``anew``: there, and without it, all statistics are
        due and their intervals begin anew. A collective call."""
        self.statistics = {name: Statistic(due=runner.step) for name in self._names}
        self.history.clear()
        self.num_refreshes = 0 if saved is None else int(saved["num_refreshes"])
        found = {} if saved is None else saved["layers"]
        entries = [{} if name in anew else found.get(name, {}).get(key, {}) for name, key in self._names]
        for name, entry, held in zip(self._names, entries, self._held(runner, entries), strict=True):
            if held == 0:
                continue
            statistic = self.statistics[name] = self._load_numbers(runner, name, entry["numbers"])
            self.history.append((runner.step, *name, statistic.interval))
            if held == 1:  # what was gathered is not there
                statistic.rows = 0.0
            elif _judges(runner, name):
                _load_tensors(statistic, entry, runner.by_name[name[0]])
                if saved is not None and saved.get("mode") != self._settings.staleness:
                    statistic.seen = []  # bases where batch factors are compared, or the other way round

    def _held(self, runner: Runner, entries: list[dict[str, Any]]) -> list[float]:
        """Return what the ranks have of each statistic: nothing, its numbers, or also what its judge goes by."""
        mine = [
            1.0 + (not _judges(runner, name) or "pool" in entry) if entry else 0.0
            for name, entry in zip(self._names, entries, strict=True)
        ]
        told = [mine] if runner.exchange is None else runner.exchange.gather_numbers(mine)
        return [min(numbers) for numbers in zip(*told, strict=True)]

    def _load_numbers(self, runner: Runner, name: Name, numbers: Tensor) -> Statistic:
        """Return a statistic that waits no longer than it may now, and not at all for a first decomposition."""
        most = self._settings.max_interval
        interval, previous, due, rows = numbers.tolist()
        if interval > most:
            due = max(runner.step, due - (interval - most))
        if name[1] not in runner.states[name[0]].decomposed:
            due = min(due, runner.step)
        return Statistic(min(most, int(interval)), min(most, int(previous)), int(due), rows)


def _judges(runner: Runner, name: Name) -> bool:
    """Whether this rank compares a statistic with what it was: the first of those who decompose it."""
    layer = runner.by_name[name[0]].spec
    index = [factor.key for factor in layer.factors].index(name[1])
    return runner.placements[name[0]].decomposed_by[index][0] == runner.rank


def _save_tensors(statistic: Statistic, layer: Layer, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return tensors of a form that does not depend on what has happened; a noise below 0 marks what is not there."""
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
