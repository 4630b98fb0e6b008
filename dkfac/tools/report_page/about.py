"""Section on the settings and the environment of each run, and how they differ.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dkfac.tools.report_page.groups import Group, differences
from dkfac.tools.report_page.html import DASH, Html, details, html_table, join_html, tag
from dkfac.tools.report_page.read import RunRecord, flat


def settings_section(groups: Sequence[Group]) -> Html:
    """Return a table of the differences between the runs, then one of all settings."""
    runs = [run for group in groups for run in group.runs]
    heads = [f"{group.label_of(run)} ({run.name})" for group in groups for run in group.runs]
    each = [_all(run) for run in runs]
    parts = []
    differing = _differing(each)
    if len(runs) > 1:
        parts.append(tag("h3", "Differences between the runs"))
        said = html_table(["name", *heads], _rows(differing, each)) if differing else tag("p", "Nothing but the date.")
        parts.append(said)
    names = list(dict.fromkeys(name for one in each for name in one))
    marked = [i for i, name in enumerate(names) if name in set(differing)]
    rows = _rows(names, each)
    for i in marked:
        rows[i][0] = f"≠ {rows[i][0]}"
    title = "All settings and the environment" + (", differences marked ≠" if marked else "")
    parts.append(details(title, html_table(["name", *heads], rows, marked=marked)))
    return join_html(parts)


def _all(run: RunRecord) -> dict[str, Any]:
    """Return settings and environment in one dict; a run without K-FAC has no settings of K-FAC."""
    settings = {name: value for name, value in flat(run.settings).items() if (name, value) != ("kfac", None)}
    return {
        "K-FAC": run.is_kfac,
        **settings,
        **{f"environment.{name}": value for name, value in flat(run.environment).items()},
    }


def _differing(each: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of relevant differences. Settings of K-FAC are compared among runs with K-FAC; date and command
    are ignored."""
    ours = [one for one in each if one["K-FAC"]]
    found = differences([{name: v for name, v in one.items() if not name.startswith("kfac.")} for one in each])
    found += differences([{name: v for name, v in one.items() if name.startswith("kfac.")} for one in ours])
    return [name for name in found if name not in ("environment.date", "command")]


def _rows(names: Sequence[str], each: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [[name, *(_value(one[name]) if name in one else DASH for one in each)] for name in names]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
