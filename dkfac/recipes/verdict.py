"""What a comparison says: a table, and who reached the other's last result first."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkfac.recipes.folder import entries

NAMES = {"first-order": "first order", "kfac": "K-FAC"}


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
        return next((point for point in self.points if sign * point[self.measure] >= sign * value), None)


def read_run(folder: Path) -> Ended:
    points = [entry for entry in entries(folder / "metrics.jsonl") if entry["kind"] == "test"]
    if not points:
        raise ValueError(f"{folder} has no test yet: let it train for a pass over its data")
    return Ended(points, "accuracy" if "accuracy" in points[0] else "loss")


def verdict(folder: Path) -> str:
    """Return a comparison's table and its outcome in words."""
    runs = {name: [read_run(path) for path in sorted(folder.glob(f"{name}-*"))] for name in NAMES}
    measure = runs["kfac"][0].measure
    lines = [f"{'':12} {measure:>10} {'epochs':>8} {'seconds':>9}"]
    for name, found in runs.items():
        mean = statistics.fmean(run.last for run in found)
        spread = f" ± {statistics.stdev(run.last for run in found):.4f}" if len(found) > 1 else ""
        epochs = statistics.fmean(float(run.points[-1]["epoch"]) for run in found)
        seconds = statistics.fmean(float(run.points[-1]["seconds"]) for run in found)
        lines.append(f"{NAMES[name]:12} {mean:10.4f} {epochs:8.1f} {seconds:9.1f}{spread}")
    target = statistics.fmean(run.last for run in runs["first-order"])
    reached = [run.reaches(target) for run in runs["kfac"]]
    told = f"the {measure} that the first order ends with, {target:.4f}"
    if all(point is None for point in reached):
        return "\n".join([*lines, f"K-FAC does not reach {told}"])
    there = [point for point in reached if point is not None]
    shares = {
        unit: statistics.fmean(float(p[unit]) for p in there)
        / statistics.fmean(float(run.points[-1][unit]) for run in runs["first-order"])
        for unit in ("epoch", "seconds")
    }
    missed = f" ({len(reached) - len(there)} of {len(reached)} runs do not)" if len(there) < len(reached) else ""
    outcome = (
        f"K-FAC reaches {told}, in {shares['epoch']:.2f} of its epochs and {shares['seconds']:.2f} of its time{missed}"
    )
    return "\n".join([*lines, outcome])
