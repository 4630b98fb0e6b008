"""Settings and environment of each run, and where they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dkfac.tools.report_page.groups import Group, differences
from dkfac.tools.report_page.html import DASH, Html, details, join, table, tag
from dkfac.tools.report_page.read import Run, flat


def about(groups: Sequence[Group]) -> Html:
    """Return what differs between the runs, then everything."""
    runs = [run for group in groups for run in group.runs]
    heads = [f"{group.label_of(run)} ({run.name})" for group in groups for run in group.runs]
    each = [_all(run) for run in runs]
    parts = []
    differing = _differing(each)
    if len(runs) > 1:
        parts.append(tag("h3", "What differs between the runs"))
        said = table(["name", *heads], _rows(differing, each)) if differing else tag("p", "Nothing but the date.")
        parts.append(said)
    names = list(dict.fromkeys(name for one in each for name in one))
    marked = [i for i, name in enumerate(names) if name in set(differing)]
    rows = _rows(names, each)
    for i in marked:
        rows[i][0] = f"≠ {rows[i][0]}"
    told = "All settings and the environment" + (", differences marked ≠" if marked else "")
    parts.append(details(told, table(["name", *heads], rows, marked=marked)))
    return join(parts)


def _all(run: Run) -> dict[str, Any]:
    """Return settings and environment under one roof; without K-FAC, its settings are missing."""
    settings = {name: value for name, value in flat(run.settings).items() if (name, value) != ("kfac", None)}
    return {
        "K-FAC": run.is_kfac,
        **settings,
        **{f"environment.{name}": value for name, value in flat(run.environment).items()},
    }


def _differing(each: Sequence[dict[str, Any]]) -> list[str]:
    """Return what differs and could matter: K-FAC's settings among the runs that have it, and not the time of day."""
    ours = [one for one in each if one["K-FAC"]]
    found = differences([{name: v for name, v in one.items() if not name.startswith("kfac.")} for one in each])
    found += differences([{name: v for name, v in one.items() if name.startswith("kfac.")} for one in ours])
    return [name for name in found if name not in ("environment.date", "command")]


def _rows(names: Sequence[str], each: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [[name, *(_value(one[name]) if name in one else DASH for one in each)] for name in names]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
