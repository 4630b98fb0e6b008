"""What a comparison says: a table, and who reached the other's last result first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkfac.tools.recipes.folder import entries

NAMES = {"first-order": "first order", "kfac": "K-FAC"}
DIVERGED = "diverged"
"""The reason of an ``end`` that ``dkfac compare`` adds."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One run's test points, better being larger."""

    points: list[dict[str, Any]]
    measure: str

    @property
    def last(self) -> float:
        return float(self.points[-1][self.measure])

    def reaches(self, value: float) -> dict[str, Any] | None:
        """Return the first point that is as good."""
        sign = 1 if self.measure == "accuracy" else -1
        known = [point for point in self.points if point[self.measure] is not None]
        return next((point for point in known if sign * point[self.measure] >= sign * value), None)


def end_of(folder: Path) -> tuple[str | None, int]:
    """Return why a run ended, None if it has not, and its last step."""
    lines = [entry for entry in entries(folder / "metrics.jsonl") if entry.get("kind") in ("step", "resume", "end")]
    last = lines[-1] if lines else {}
    return str(last.get("reason")) if last.get("kind") == "end" else None, int(last.get("step", 0))


def read_run(folder: Path) -> Ended | None:
    """Return what a run was tested with, None if it diverged."""
    points = [entry for entry in entries(folder / "metrics.jsonl") if entry.get("kind") == "test"]
    if end_of(folder)[0] == DIVERGED:
        return None
    if not points:
        raise ValueError(f"{folder} has no test yet: let it train for a pass over its data")
    measure = "accuracy" if "accuracy" in points[0] else "loss"
    return Ended(points, measure) if points[-1][measure] is not None else None


def diverged(folders: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the names of the runs that did."""
    return [path.name for paths in folders.values() for path in paths if read_run(path) is None]


def verdict(folders: Mapping[str, Sequence[Path]]) -> str:
    """Return a comparison's table and its outcome in words. ``folders``: of the runs of each side."""
    runs = {name: [run for path in folders[name] if (run := read_run(path)) is not None] for name in NAMES}
    measure = next((run.measure for found in runs.values() for run in found), "loss")
    lines = [f"{'':12} {measure:>10} {'epochs':>8} {'seconds':>9}"]
    for name, found in runs.items():
        if not found:
            lines.append(f"{NAMES[name]:12} {'–':>10} {'–':>8} {'–':>9}")
            continue
        mean = statistics.fmean(run.last for run in found)
        spread = f" ± {statistics.stdev(run.last for run in found):.4f}" if len(found) > 1 else ""
        epochs = statistics.fmean(float(run.points[-1]["epoch"]) for run in found)
        seconds = statistics.fmean(float(run.points[-1]["seconds"]) for run in found)
        lines.append(f"{NAMES[name]:12} {mean:10.4f} {epochs:8.1f} {seconds:9.1f}{spread}")
    lost = diverged(folders)
    if lost:
        lines.append(f"diverged, and left out: {', '.join(lost)}")
    return "\n".join([*lines, _outcome(runs, measure)])


def _outcome(runs: Mapping[str, Sequence[Ended]], measure: str) -> str:
    """Return whether and when K-FAC is as good as the first order in the end."""
    for name, found in runs.items():
        if not found:
            return f"{NAMES[name]}: no run came to its end, so there is nothing to compare"
    target = statistics.fmean(run.last for run in runs["first-order"])
    reached = [run.reaches(target) for run in runs["kfac"]]
    told = f"the {measure} that the first order ends with, {target:.4f}"
    there = [point for point in reached if point is not None]
    if not there:
        return f"K-FAC does not reach {told}"
    theirs = [run.reaches(target) or run.points[-1] for run in runs["first-order"]]  # may have been there before
    shares = {
        unit: statistics.fmean(float(p[unit]) for p in there) / statistics.fmean(float(p[unit]) for p in theirs)
        for unit in ("epoch", "seconds")
    }
    missed = f" ({len(reached) - len(there)} of {len(reached)} runs do not)" if len(there) < len(reached) else ""
    return (
        f"K-FAC reaches {told}, in {shares['epoch']:.2f} of the epochs and {shares['seconds']:.2f} of the time that it "
        f"takes the first order{missed}"
    )
