"""The cost of a cluster's links and linear algebra, as data: measured (``dkfac measure``), published or guessed.

Input: measurements or a JSON file. Output: seconds of collectives and of work. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dkfac.plan.costs import Costs
from dkfac.plan.curves import Curve

CLUSTER_VERSION = 1

STEPS = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0, "all-to-all": 1.0, "broadcast": 1.0}
"""How often a ring collective passes on all of its data: each of p ranks sends ``(p - 1) * STEPS`` pieces of 1/p each.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a collective for one group size: ``latency + byte_seconds * bytes`` of the whole buffer.

    Real links are not linear: switches and traffic shapers let short bursts pass faster. If ``knots`` were measured,
    values between them are interpolated, and values beyond them are extrapolated from the last two.
    """

    latency: float
    byte_seconds: float
    error: float = 0.0
    """Root mean square of the relative errors of the linear model."""
    knots: tuple[tuple[float, float], ...] = ()
    """Pairs of bytes and seconds, in increasing order."""

    def __call__(self, num_bytes: float) -> float:
        if len(self.knots) < 2:
            return self.latency + self.byte_seconds * num_bytes
        if num_bytes <= self.knots[0][0]:
            return self.knots[0][1]
        place = min(bisect.bisect(self.knots, (num_bytes,)), len(self.knots) - 1)
        (a, first), (b, second) = self.knots[place - 1], self.knots[place]
        return first + (num_bytes - a) * (second - first) / (b - a)

    def scaled(self, steps: float, volume: float) -> Line:
        """Return the line of a collective with ``steps`` times the start-ups and ``volume`` times the data."""

        def moved(seconds: float) -> float:
            start = min(self.latency, seconds)
            return start * steps + (seconds - start) * volume

        knots = tuple((num_bytes, moved(seconds)) for num_bytes, seconds in self.knots)
        return Line(self.latency * steps, self.byte_seconds * volume, self.error, knots)


Lines = Mapping[str, Mapping[int, Line]]
"""Lines by collective and group size."""


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    costs: Costs = field(default_factory=Costs)
    within: Lines = field(default_factory=dict)
    """Links between ranks on one host."""
    between: Lines = field(default_factory=dict)
    """Links between ranks on several hosts."""
    ranks_per_host: int = 1
    slots: float | None = None
    """How many ranks of a machine compute at full speed at the same time; None: all."""
    slot_ranks: int | None = None
    """How many ranks share the slots; None: those of a host."""
    hidden: tuple[float, float] = (1.0, 1.0)
    """Speed of transfers during a forward and during a backward pass, relative to their speed alone."""
    memory_bytes: int | None = None
    """Memory of a rank."""
    environment: Mapping[str, Any] = field(default_factory=dict)

    def seconds(self, how: str, size: int, num_bytes: float, *, one_host: bool) -> float:
        """Return the seconds of a collective with ``size`` ranks when nothing else is running.

        ``num_bytes`` is the size of the whole buffer, even if each rank gives or gets only a part of it.
        """
        return self.line(how, size, one_host=one_host)(num_bytes)

    def line(self, how: str, size: int, *, one_host: bool) -> Line:
        """Return the measured line, or one derived from the nearest measured size by the steps and volume of a ring."""
        lines = (self.within or self.between) if one_host else (self.between or self.within)
        known = lines.get(how) or _derived(lines, how)
        if not known:
            volume = STEPS[how] * (size - 1) / size
            return Line(self.costs.latency_seconds * STEPS[how] * (size - 1), self.costs.byte_seconds * volume)
        if size in known:
            return known[size]
        near = min(known, key=lambda other: (abs(other - size), other))
        steps = max(1, size - 1) / max(1, near - 1)
        volume = ((size - 1) / size) / ((near - 1) / near)
        return known[near].scaled(steps, volume)

    def with_hosts_of(self, ranks_per_host: int) -> Cluster:
        """Return a copy with another number of ranks per host."""
        if ranks_per_host < 1:
            raise ValueError(f"{ranks_per_host} ranks on a host: there are 1 or more")
        return replace(self, ranks_per_host=ranks_per_host)

    def is_measured(self, how: str, size: int, *, one_host: bool) -> bool:
        lines = self.within if one_host else self.between
        return size in lines.get(how, {})

    def to_json(self) -> str:
        body = asdict(self) | {"version": CLUSTER_VERSION}
        return json.dumps(body, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str = "the cluster file") -> Cluster:
        """Return the cluster that ``to_json`` wrote."""
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error}); write one with `dkfac measure -o FILE`") from None
        if not isinstance(body, dict) or body.get("version") != CLUSTER_VERSION:
            version = body.get("version") if isinstance(body, dict) else None
            raise ValueError(f"{where} has version {version!r}, this dkfac reads {CLUSTER_VERSION}: measure again")
        body.pop("version")
        own = costs_of(body.pop("costs"))
        within, between = _lines(body.pop("within")), _lines(body.pop("between"))
        forward, backward = body.pop("hidden")
        return cls(costs=own, hidden=(forward, backward), within=within, between=between, **body)


def costs_of(body: dict[str, Any]) -> Costs:
    """Return the costs from the dict that ``asdict`` made of them."""
    curves = {name: _curve(value) for name, value in body["curves"].items()}
    return Costs(**{**body, "curves": curves})


def _lines(body: dict[str, Any]) -> Lines:
    return {how: {int(size): _line(line) for size, line in sizes.items()} for how, sizes in body.items()}


def _line(body: dict[str, Any]) -> Line:
    knots = tuple((num_bytes, seconds) for num_bytes, seconds in body.get("knots", ()))
    return Line(**{**body, "knots": knots})


def _curve(body: dict[str, Any]) -> Curve:
    knots = tuple((size, seconds) for size, seconds in body.get("knots", ()))
    return Curve(body["form"], tuple(body["coefficients"]), body["error"], knots)


def _derived(lines: Lines, how: str) -> Mapping[int, Line]:
    """Return lines for a collective that was not measured, from one that was: by the data that a ring passes on."""
    for other in STEPS:
        if other in lines:
            ratio = STEPS[how] / STEPS[other]
            return {size: line.scaled(ratio, ratio) for size, line in lines[other].items()}
    return {}
