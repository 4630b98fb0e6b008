"""A step as spans of time, simulated or recorded: what each rank did when, on which stream.

Input: spans. Output: seconds by stage, and traces. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Stream = Literal["compute", "network"]


@dataclass(frozen=True, slots=True)
class Span:
    rank: int
    stream: Stream
    stage: str
    """forward, backward, gradients, measure, factors, decompose, decompositions, precondition, ..."""
    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of some ranks, in seconds from the beginning of the step."""

    spans: tuple[Span, ...]
    seconds: float
    """Until the last rank was done, even if its spans are not kept."""

    def of(self, rank: int, stream: Stream | None = None) -> list[Span]:
        return [s for s in self.spans if s.rank == rank and (stream is None or s.stream == stream)]

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    def busy(self, rank: int) -> dict[str, float]:
        """Return a rank's seconds of work by stage."""
        found: dict[str, float] = defaultdict(float)
        for span in self.of(rank, "compute"):
            found[span.stage] += span.end - span.begin
        return dict(found)

    def network(self, rank: int) -> dict[str, tuple[float, float]]:
        """Return a rank's seconds of transfers by stage, as ``(hidden behind its work, exposed)``."""
        work = _union((s.begin, s.end) for s in self.of(rank, "compute"))
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        counted: list[tuple[float, float]] = []
        for span in sorted(self.of(rank, "network"), key=lambda s: (s.begin, s.end)):
            own = _less([(span.begin, span.end)], counted)  # of concurrent transfers only the first counts
            exposed = sum(end - begin for begin, end in _less(own, work))
            found[span.stage][0] += sum(end - begin for begin, end in own) - exposed
            found[span.stage][1] += exposed
            counted = _union([*counted, (span.begin, span.end)])
        return {stage: (hidden, exposed) for stage, (hidden, exposed) in found.items()}

    def to_chrome(self) -> str:
        """Return the spans as JSON for Perfetto and chrome://tracing; a rank is a process, a stream a thread."""
        return chrome([("", self)])


def chrome(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return titled timelines, such as predicted and measured ones, as one trace, below each other."""
    events: list[dict[str, Any]] = []
    first = 0
    for title, timeline in timelines:
        for rank in timeline.ranks:
            name = f"{title} rank {rank}".strip()
            events.append({"ph": "M", "name": "process_name", "pid": first + rank, "args": {"name": name}})
        for span in timeline.spans:
            place = {"pid": first + span.rank, "tid": span.stream, "cat": span.stage}
            times = {"ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin)}
            events.append({"ph": "X", "name": f"{span.stage} {span.name}".strip(), **place, **times})
        first += 1 + max(timeline.ranks, default=0)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals that overlap or touch."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def _less(intervals: Iterable[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of some intervals outside of the others, which must be sorted and disjoint."""
    result: list[tuple[float, float]] = []
    for begin, end in intervals:
        for b, e in others:
            if e <= begin:
                continue
            if b >= end:
                break
            if b > begin:
                result.append((begin, b))
            begin = max(begin, e)
        if begin < end:
            result.append((begin, end))
    return result
