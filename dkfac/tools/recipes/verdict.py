"""Outcome of a comparison: a table, and whether and when K-FAC reaches the first-order optimizer's final result.

Input: run folders. Output: text. Owns: nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkfac.tools.recipes.folder import entries

_TITLES = {"first-order": "first order", "kfac": "K-FAC"}
DIVERGED = "diverged"
"""The ``reason`` of an ``end`` entry that ``dkfac compare`` appends to the metrics of a diverged run."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The test results of one run, and the metric they are compared by."""

    points: list[dict[str, Any]]
    measure: str

    @property
    def last(self) -> float:
        return float(self.points[-1][self.measure])

    def reaches(self, value: float) -> dict[str, Any] | None:
        """Return the first test that is at least as good as ``value``, or None."""
        sign = 1 if self.measure == "accuracy" else -1
        known = [point for point in self.points if point[self.measure] is not None]
        return next((point for point in known if sign * point[self.measure] >= sign * value), None)


def end_of(folder: Path) -> tuple[str | None, int]:
    """Return why a run ended (None if it has not) and its last step."""
    lines = [entry for entry in entries(folder / "metrics.jsonl") if entry.get("kind") in ("step", "resume", "end")]
    last = lines[-1] if lines else {}
    return str(last.get("reason")) if last.get("kind") == "end" else None, int(last.get("step", 0))


def read_run(folder: Path) -> FinishedRun | None:
    """Return the test results of a run; None if it diverged."""
    points = [entry for entry in entries(folder / "metrics.jsonl") if entry.get("kind") == "test"]
    if end_of(folder)[0] == DIVERGED:
        return None
    if not points:
        raise ValueError(f"{folder} has no test results yet: let it train for one epoch")
    measure = "accuracy" if "accuracy" in points[0] else "loss"
    return FinishedRun(points, measure) if points[-1][measure] is not None else None


def diverged(folders: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the names of the runs that diverged."""
    return [path.name for paths in folders.values() for path in paths if read_run(path) is None]


def comparison_verdict(folders: Mapping[str, Sequence[Path]]) -> str:
    """Return the table of a comparison and its outcome in one sentence.

    ``folders``: the run folders by side, ``"first-order"`` and ``"kfac"``.
    """
    runs = {name: [run for path in folders[name] if (run := read_run(path)) is not None] for name in _TITLES}
    measure = next((run.measure for found in runs.values() for run in found), "loss")
    lines = [f"{'':12} {measure:>10} {'epochs':>8} {'seconds':>9}"]
    for name, found in runs.items():
        if not found:
            lines.append(f"{_TITLES[name]:12} {'–':>10} {'–':>8} {'–':>9}")
            continue
        mean = statistics.fmean(run.last for run in found)
        spread = f" ± {statistics.stdev(run.last for run in found):.4f}" if len(found) > 1 else ""
        epochs = statistics.fmean(float(run.points[-1]["epoch"]) for run in found)
        seconds = statistics.fmean(float(run.points[-1]["seconds"]) for run in found)
        lines.append(f"{_TITLES[name]:12} {mean:10.4f} {epochs:8.1f} {seconds:9.1f}{spread}")
    lost = diverged(folders)
    if lost:
        lines.append(f"diverged and excluded: {', '.join(lost)}")
    return "\n".join([*lines, _outcome(runs, measure)])


def _outcome(runs: Mapping[str, Sequence[FinishedRun]], measure: str) -> str:
    """Return whether K-FAC reaches the final result of the first-order optimizer, and when."""
    for name, found in runs.items():
        if not found:
            return f"{_TITLES[name]}: no run finished, so there is nothing to compare"
    target = statistics.fmean(run.last for run in runs["first-order"])
    reached = [run.reaches(target) for run in runs["kfac"]]
    goal = f"the first-order optimizer's final {measure}, {target:.4f}"
    there = [point for point in reached if point is not None]
    if not there:
        return f"K-FAC does not reach {goal}"
    theirs = [run.reaches(target) or run.points[-1] for run in runs["first-order"]]  # possibly before its last test
    shares = {
        unit: statistics.fmean(float(p[unit]) for p in there) / statistics.fmean(float(p[unit]) for p in theirs)
        for unit in ("epoch", "seconds")
    }
    missed = f" ({len(reached) - len(there)} of {len(reached)} runs do not)" if len(there) < len(reached) else ""
    return (
        f"K-FAC reaches {goal}, in {shares['epoch']:.2f} of its epochs and {shares['seconds']:.2f} of its time{missed}"
    )
