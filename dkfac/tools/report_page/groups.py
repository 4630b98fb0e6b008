"""Group runs that differ only in the seed. A group has one label and one colour.

Input: runs. Output: groups. Owns: nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dkfac.tools.report_page.read import RunRecord, flat

NOT_SETTINGS = ("hyper.seed", "command", "resumed_from")
NUM_NAMED = 3
"""Most settings that are named in a label."""


@dataclass(frozen=True, slots=True)
class Group:
    label: str
    runs: list[RunRecord]
    number: int
    """Index of the group, which selects its colour."""

    @property
    def recipe(self) -> str:
        return self.runs[0].recipe

    @property
    def is_kfac(self) -> bool:
        return self.runs[0].is_kfac

    def label_of(self, run: RunRecord) -> str:
        """Return the label of one run of the group."""
        if len(self.runs) == 1:
            return self.label
        alike = [other for other in self.runs if other.seed == run.seed]
        return f"{self.label}, {run.name}" if len(alike) > 1 else f"{self.label}, seed {run.seed}"


def group(runs: Sequence[RunRecord]) -> list[Group]:
    """Return the runs grouped by settings, in the given order."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    each = list(found.values())
    return [Group(label, one, i) for i, (label, one) in enumerate(zip(_labels(each), each, strict=True))]


def differences(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names whose values differ, or that are missing in some of the dicts."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [n for n in names if len({json.dumps(one[n], sort_keys=True) if n in one else "" for one in settings}) > 1]


def _settings(run: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in flat(run.settings).items() if name not in NOT_SETTINGS}


def _labels(each: list[list[RunRecord]]) -> list[str]:
    """Return labels of the groups: the optimizer, and as far as needed to distinguish them the recipe, the differing
    settings and the folder."""
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
            named = ", ".join(f"{name.split('.')[-1]}={_short(one[name])}" for name in names if name in one)
            result[i] = f"{label}, {named}" if named else label
    return [
        f"{label} ({run.name})" if result.count(label) > 1 else label for label, run in zip(result, firsts, strict=True)
    ]


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
