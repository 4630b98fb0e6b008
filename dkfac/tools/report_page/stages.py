"""Sections on the time of a step by stage, and on step control: damping, norms, intervals, counters.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dkfac.tools.report_page.bars import Bar, bar_chart, stage_colour
from dkfac.tools.report_page.chart import Axes, Series, colour, line_chart, ramp
from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import DASH, Html, charts, details, html_table, join_html, legend, number, tag
from dkfac.tools.report_page.read import RunRecord, as_dict, column, experimental, real
from dkfac.tools.report_page.result import mean_step_seconds
from dkfac.tools.report_page.scale import sample

REST = "rest of the step"
KNOWN = {
    "lr": "learning rate",
    "damping": "damping",
    "clip_factor": "clip factor",
    "grad_norm": "norm of the gradient",
    "update_norm": "norm of the update",
}
_MAX_ROWS = 12
_COUNTER_PREFIXES = ("refreshes", "skipped", "abandoned", "late_", "fallbacks", "clipped")
"""Prefixes of the names of counters. The other metrics of a step are drawn."""


def step_time(groups: Sequence[Group]) -> Html | None:
    """Return a bar chart with one bar per group: the mean step time by stage."""
    rows = [(group.label, parts) for group in groups if (parts := _mean_parts(group))]
    if not any(len(parts) > 1 for _, parts in rows):
        return None
    stages = list(dict.fromkeys(stage for _, parts in rows for stage in parts if stage != REST))
    colours = {stage: stage_colour(stage) for stage in [*stages, REST]}
    ordered: list[Bar] = [(name, {s: parts[s] for s in [*stages, REST] if s in parts}) for name, parts in rows]
    cells = [
        [name, *(number(parts.get(s)) for s in [*stages, REST]), number(sum(parts.values()))] for name, parts in rows
    ]
    said = (
        "Mean over all steps, including those that measure and refresh. K-FAC's stages are those of rank 0, including "
        f"transfers. “{REST}” is forward, backward and the optimizer."
    )
    return join_html([
        charts(bar_chart("Mean step by stage", ordered, "ms per step", colours)),
        tag("p", said, class_="note"),
        details("Data of this chart, ms", html_table(["setting", *stages, REST, "whole step"], cells)),
    ])  # fmt: skip


def parts_of(run: RunRecord) -> dict[str, float]:
    """Return the milliseconds of the mean step by stage, and the remaining time.

    Stages are timed from the last resume on, so steps and seconds are counted from there.
    """
    report = run.report
    seconds = {name: value for name, item in as_dict(report.get("stage_seconds")).items() if (value := real(item))}
    until = real(report.get("steps"))
    if not seconds or not until:
        mean = mean_step_seconds(run)
        return {} if mean is None else {REST: 1e3 * mean}
    since = max([step for step in run.resumes if step < until], default=0)
    steps = until - since
    whole = run.seconds_at(until) - run.seconds_at(since)
    parts = {name: 1e3 * value / steps for name, value in seconds.items()}
    return {**parts, REST: max(0.0, 1e3 * whole / steps - sum(parts.values()))}


def _mean_parts(group: Group) -> dict[str, float]:
    each = [parts for run in group.runs if (parts := parts_of(run))]
    names = dict.fromkeys(name for parts in each for name in parts)
    return {name: statistics.fmean(parts.get(name, 0.0) for parts in each) for name in names}


def control(groups: Sequence[Group]) -> Html | None:
    """Return charts of learning rate, damping and other metrics of K-FAC over the steps, intervals and counters."""
    ours = [group for group in groups if group.is_kfac]
    if not ours:
        return None
    drawn = [line_chart("Learning rate", _lines(groups, "lr"), Axes("step", "learning rate"))]
    for name in _figures(ours):
        label = KNOWN.get(name, name.replace("_", " "))
        title = label[0].upper() + label[1:]
        drawn.append(line_chart(title, _lines(ours, "kfac", name), Axes("step", label, None)))
    return join_html([
        legend((group.label, colour(group.number)) for group in groups),
        charts(*drawn),
        details("Data of these charts", _table(ours)),
        *(_intervals(group) for group in ours),
        tag("h3", "Refreshes, fallbacks, skipped batches"),
        _counters(ours),
    ])  # fmt: skip


def _figures(groups: Sequence[Group]) -> list[str]:
    """Return the names of the metrics that are not counters, known ones first."""
    lines = [as_dict(line.get("kfac")) for group in groups for run in group.runs for line in run.steps[-1:]]
    names = dict.fromkeys(name for line in lines for name in line)
    others = [n for n in names if n not in KNOWN and n != "step" and not n.startswith(_COUNTER_PREFIXES)]
    return [*(name for name in KNOWN if name in names), *others]


def _lines(groups: Sequence[Group], *path: str) -> list[Series]:
    return [
        Series(group.label_of(run), column(run.steps, "step"), column(run.steps, *path), colour(group.number))
        for group in groups
        for run in group.runs
    ]


def _intervals(group: Group) -> Html:
    """Return charts of the refresh intervals of the group's first run in which each factor has its own interval."""
    run = next((run for run in group.runs if run.report.get("interval_history")), None)
    if run is None:
        return Html("")
    end = real(run.report.get("steps"))
    found = _history(run)
    order = {layer: place for place, layer in enumerate(dict.fromkeys(layer for layer, _ in found))}
    drawn = []
    for is_input, what in ((True, "inputs (A)"), (False, "gradients (G)")):
        lines = []
        for (layer, factor), points in found.items():
            if factor.startswith("A") == is_input:
                xs, ys = [p[0] for p in points], [p[1] for p in points]
                lines.append(Series(f"{layer} {factor}", [*xs, end], [*ys, ys[-1]], ramp(order[layer], len(order))))
        axes = Axes("step", "interval, steps", True, is_steps=True)
        drawn.append(line_chart(f"Refresh intervals of {what}", lines, axes, key=len(lines) <= 8))
    head = tag("h3", f"Refresh intervals by factor: {group.label_of(run)}")
    said = "Colors from the first layer to the last:"
    key = legend([("first", ramp(0, 2)), ("last", ramp(1, 2))])
    return join_html([head, tag("p", said, class_="note"), key, charts(*drawn)])


def _history(run: RunRecord) -> dict[tuple[str, str], list[tuple[float | None, float | None]]]:
    """Return the intervals of each factor and the steps at which they began, in the order of the layers.

    Intervals start at 1 and are logged when they change; a resume logs all of them.
    """
    found: dict[tuple[str, str], list[tuple[float | None, float | None]]] = {}
    first = [] if run.resumes else [(0.0, 1.0)]
    for layer, each in as_dict(run.report.get("intervals")).items():
        for factor in as_dict(each):
            found[layer, factor] = list(first)
    for entry in map(as_dict, run.report["interval_history"]):
        key = (str(entry.get("layer")), str(entry.get("factor")))
        found.setdefault(key, list(first)).append((real(entry.get("step")), real(entry.get("interval"))))
    return {key: points for key, points in found.items() if points}


def _table(groups: Sequence[Group]) -> Html:
    names = _figures(groups)
    rows = []
    for group in groups:
        for run in group.runs:
            for i in sample(len(run.steps), _MAX_ROWS):
                figures = as_dict(run.steps[i].get("kfac"))
                cells = [real(run.steps[i].get("step")), real(run.steps[i].get("lr"))]
                cells += [real(figures.get(name)) for name in names if name != "lr"]
                rows.append([group.label_of(run), *map(number, cells)])
    head = ["run", "step", "learning rate", *(KNOWN.get(n, n.replace("_", " ")) for n in names if n != "lr")]
    return html_table(head, rows)


def _counters(groups: Sequence[Group]) -> Html:
    runs = [(group.label_of(run), run) for group in groups for run in group.runs]
    counted = [_counts(run) for _, run in runs]
    rows = [["intervals", *(_interval_text(as_dict(run.settings.get("kfac"))) for _, run in runs)]]
    for name in dict.fromkeys(name for counts in counted for name in counts):
        rows.append([name.replace("_", " "), *(number(counts.get(name)) for counts in counted)])
    return html_table(["", *(name for name, _ in runs)], rows, class_="counts")


def _counts(run: RunRecord) -> dict[str, float | None]:
    last = as_dict(run.steps[-1].get("kfac")) if run.steps else {}
    last = {name: value for name, value in last.items() if name.startswith(_COUNTER_PREFIXES)}
    found: Mapping[str, Any] = last or as_dict(run.report.get("counters"))
    counts = {name: real(value) for name, value in found.items()}
    if run.report.get("refreshed_factors") is not None:
        counts["refreshed_factors"] = real(run.report["refreshed_factors"])
    return counts


def _interval_text(settings: Mapping[str, Any]) -> str:
    own = experimental(settings)
    if own.get("staleness", "fixed") != "fixed":
        return f"by {own['staleness']}, at least every {own.get('max_interval', DASH)} steps"
    measured, refreshed = (settings.get(name, DASH) for name in ("factor_interval", "inverse_interval"))
    every = f"factors every {measured}, inverses every {refreshed} steps"
    warmup = settings.get("warmup_refresh")
    if isinstance(warmup, list) and len(warmup) == 2:
        return f"{every}, more often before step {warmup[1]}"
    return every if warmup is None else f"{every}, more often at first"
