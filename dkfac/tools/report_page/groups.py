"""Runs of one setting with different seeds belong together: one label, one colour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dkfac.tools.report_page.read import Run, flat

NOT_SETTINGS = ("hyper.seed", "command", "resumed_from")
NUM_NAMED = 3
"""Differing settings in a label, at most."""


@dataclass(frozen=True, slots=True)
class Group:
    label: str
    runs: list[Run]
    number: int
    """Its place among all, which is its colour."""

    @property
    def recipe(self) -> str:
        return self.runs[0].recipe

    @property
    def is_kfac(self) -> bool:
        return self.runs[0].is_kfac

    def label_of(self, run: Run) -> str:
        """Return what a line of one run is called."""
        if len(self.runs) == 1:
            return self.label
        alike = [other for other in self.runs if other.seed == run.seed]
        return f"{self.label}, {run.name}" if len(alike) > 1 else f"{self.label}, seed {run.seed}"


def group(runs: Sequence[Run]) -> list[Group]:
    """Return the runs by setting, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    each = list(found.values())
    return [Group(label, one, i) for i, (label, one) in enumerate(zip(_labels(each), each, strict=True))]


def differences(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names whose values differ, or that only some have."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [n for n in names if len({json.dumps(one[n], sort_keys=True) if n in one else "" for one in settings}) > 1]


def _settings(run: Run) -> dict[str, Any]:
    return {name: value for name, value in flat(run.settings).items() if name not in NOT_SETTINGS}


def _labels(each: list[list[Run]]) -> list[str]:
    """Name groups by optimizer, then by recipe, then by the settings that tell them apart, then by folder."""
    firsts = [runs[0] for runs in each]
    labels = ["K-FAC" if run.is_kfac else run.optimizer for run in firsts]
    if len({run.recipe for run in firsts}) > 1:
        labels = [f"{run.recipe}: {label}" for run, label in zip(firsts, labels, strict=True)]
    result = list(labels)
    for label in dict.fromkeys(labels):
        alike = [i for i, other in enumerate(labels) if other == label]
        if len(alike) == 1:
            continue
        settings = [_settings(firsts[i]) for i in alike]
        names = differences(settings)[:NUM_NAMED]
        for i, one in zip(alike, settings, strict=True):
            told = ", ".join(f"{name.split('.')[-1]}={_short(one[name])}" for name in names if name in one)
            result[i] = f"{label}, {told}" if told else label
    return [
        f"{label} ({run.name})" if result.count(label) > 1 else label for label, run in zip(result, firsts, strict=True)
    ]


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
