"""Read run folders for the report page. ``docs/notes/009-recipes.md`` lists the files of a folder.

Input: paths of run folders. Output: one ``RunRecord`` per run. Owns: nothing.

``timeline.json`` is optional. It contains measured and simulated steps as time spans:

    [{"title": "measured, refresh",
      "spans": [{"rank": 0, "stage": "decompose", "stream": "work" or "network", "begin": seconds, "end": seconds}]}]

``begin`` and ``end`` are relative to the beginning of the step. A span may have a ``name``. The stream ``"compute"`` of
``dkfac.plan.timeline`` is read as ``"work"``.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPAN_KEYS = {"rank", "stage", "stream", "begin", "end"}
_MAX_NUMBER = 1e300
"""Numbers must be smaller than this to be drawn, so that the difference of two is finite. Numbers below its inverse
count as zero."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run folder. ``steps``, ``tests`` and ``spectra`` are entries of its metrics file."""

    folder: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    spectra: list[dict[str, Any]]
    resumes: list[int]
    reason: str | None
    """Why the run ended; None if it has not."""
    summary: dict[str, Any]
    timelines: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def recipe(self) -> str:
        return str(self.settings.get("recipe", "a run"))

    @property
    def is_kfac(self) -> bool:
        return self.settings.get("kfac") is not None

    @property
    def optimizer(self) -> str:
        return str(self.settings.get("optimizer", "first-order"))

    @property
    def seed(self) -> Any:
        return as_dict(self.settings.get("hyper")).get("seed")

    @property
    def report(self) -> dict[str, Any]:
        """K-FAC's report at the last checkpoint."""
        return as_dict(self.summary.get("kfac"))

    @property
    def last(self) -> dict[str, Any]:
        """The last entry of a step or a test."""
        return max([*self.steps[-1:], *self.tests[-1:]], key=lambda line: real(line.get("step")) or 0.0)

    def seconds_at(self, step: float) -> float:
        """Return the training time at a step, or at the last logged step before it."""
        place = bisect_right(self.steps, step, key=lambda line: real(line.get("step")) or 0.0)
        return (real(self.steps[place - 1].get("seconds")) or 0.0) if place else 0.0


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Return the run folders, without duplicates. A folder that is not a run folder stands for all run folders below
    it."""
    found: dict[Path, Path] = {}
    for path in given:
        inside = [path] if _is_run(path) else sorted(p.parent for p in path.rglob("metrics.jsonl") if _is_run(p.parent))
        if not inside:
            what = "has no settings.json and metrics.jsonl" if path.is_dir() else "is not a folder"
            raise ValueError(
                f"{path} is not a run folder: it {what}, and contains no run folder; use the --out of `dkfac train`"
            )
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def read_all(given: Sequence[Path], say: Callable[[str], None]) -> list[RunRecord]:
    """Return the runs of all folders. A damaged run is an error if its folder was given; otherwise ``say`` reports it
    and the other runs are returned."""
    named = {path.resolve() for path in given}
    found: list[RunRecord] = []
    wrong: ValueError | None = None
    for folder in find_runs(given):
        try:
            found.append(read_run_folder(folder))
        except ValueError as error:
            if folder.resolve() in named:
                raise
            say(f"skipped: {error}")
            wrong = wrong or error
    if not found and wrong is not None:
        raise wrong
    return found


def read_run_folder(folder: Path) -> RunRecord:
    """Return the contents of a run folder."""
    lines = _lines(folder / "metrics.jsonl")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(str(line.get("kind")), []).append(line)
    if "step" not in kinds and "test" not in kinds:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no entries yet: wait for the first step, or omit {folder}")
    ends = [line for line in lines if line.get("kind") in ("end", "resume", "step")]
    is_over = bool(ends) and ends[-1]["kind"] == "end"
    return RunRecord(
        folder=folder,
        settings=_object(folder / "settings.json"),
        environment=_object(folder / "environment.json"),
        steps=kinds.get("step", []),
        tests=kinds.get("test", []),
        spectra=kinds.get("spectrum", []),
        resumes=[int(real(line.get("step")) or 0) for line in kinds.get("resume", [])],
        reason=str(ends[-1].get("reason")) if is_over else None,
        summary=_object(folder / "summary.json"),
        timelines=_timelines(folder / "timeline.json"),
    )


def real(value: Any) -> float | None:
    """Return the value as a number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not abs(value) < _MAX_NUMBER:  # also true for NaN
        return None
    return float(value) if abs(value) * _MAX_NUMBER > 1 else 0.0


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def experimental(kfac: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with the experimental ones at the top level, where older runs have them."""
    return {**kfac, **as_dict(kfac.get("experimental"))}


def column(lines: Sequence[dict[str, Any]], *path: str) -> list[float | None]:
    """Return one number of each entry; ``path`` is its keys, outermost first."""
    found = []
    for line in lines:
        value: Any = line
        for name in path:
            value = as_dict(value).get(name)
        found.append(real(value))
    return found


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dict such as ``{"kfac.damping": 0.001}``, without empty dicts."""
    if not isinstance(value, dict):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def _is_run(path: Path) -> bool:
    return (path / "settings.json").is_file() and (path / "metrics.jsonl").is_file()


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if line is None and not text.endswith("\n"):
                break  # the run was killed, or is writing this line
            if not isinstance(line, dict):
                raise ValueError(
                    f"{path} is truncated or damaged at line {number}: if the run is active, try again; otherwise "
                    f"delete that line"
                )
            found.append(line)
    return found


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        remedy = f"correct it, or omit {path.parent}" if path.name == "settings.json" else "delete it"
        raise ValueError(f"{path} is not JSON ({error}): {remedy}") from error


def _object(path: Path) -> dict[str, Any]:
    return as_dict(_load(path)) if path.exists() else {}


def _timelines(path: Path) -> list[dict[str, Any]]:
    found = _load(path) if path.exists() else []
    try:
        is_right = all(
            isinstance(one["title"], str)
            and all(span.keys() >= _SPAN_KEYS and isinstance(span["rank"], int) for span in one["spans"])
            for one in found
        )
    except (TypeError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"{path} is not a list of timelines, each {{'title': ..., 'spans': [...]}} with "
            f"{', '.join(sorted(_SPAN_KEYS))} in each span: delete it, or write it again"
        )
    return list(found)
