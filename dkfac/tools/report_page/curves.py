"""Section with curves of accuracy and loss against steps, epochs and seconds.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dkfac.tools.report_page.chart import Axes, Series, colour, line_chart
from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import (
    Html,
    charts,
    details,
    html_table,
    join_html,
    legend,
    number,
    tag,
    unit_of_seconds,
)
from dkfac.tools.report_page.read import RunRecord, column, real
from dkfac.tools.report_page.result import target_of
from dkfac.tools.report_page.scale import Number, sample

WHICH = ("step", "epoch", "seconds")
_MAX_ROWS = 25


def curves_section(groups: Sequence[Group]) -> Html:
    """Return the charts of each recipe for each x axis, with a switch between the axes."""
    recipes = list(dict.fromkeys(group.recipe for group in groups))
    known = [which for which in WHICH if _is_known(groups, which)]
    parts = []
    for recipe in recipes:
        ours = [group for group in groups if group.recipe == recipe]
        parts += [tag("h3", recipe)] if len(recipes) > 1 else []
        parts.append(legend((group.label, colour(group.number)) for group in ours))
        parts += [tag("div", _charts(ours, which), class_=f"by by-{which}") for which in known]
        parts.append(details("Data of these charts", _table(ours)))
    switch = []
    for i, which in enumerate(known):
        button = Html(f'<input type="radio" name="by" id="by-{which}"{"" if i else " checked"}>')
        switch += [button, tag("label", which if which == "seconds" else f"{which}s", for_=f"by-{which}")]
    said = tag("span", "against", class_="against", aria_hidden="true")
    return tag("div", said, *switch, *parts, class_="switched", role="group", aria_label="x axis")


def _is_known(groups: Sequence[Group], which: str) -> bool:
    """Return whether any run logs this quantity: a user's script has no epochs."""
    runs = [run for group in groups for run in group.runs]
    return any(value is not None for run in runs for value in column([*run.steps, *run.tests], which))


def _charts(groups: Sequence[Group], which: str) -> Html:
    runs = [(group, run) for group in groups for run in group.runs]
    ends = [real(run.last.get("seconds")) or 0.0 for _, run in runs]
    unit, factor = unit_of_seconds(max(ends)) if which == "seconds" else ("", 1.0)
    x = f"training time, {unit}" if which == "seconds" else which

    def lines(of: str, name: str, times: float = 1.0) -> list[Series]:
        found = []
        for group, run in runs:
            rows = run.tests if of == "test" else run.steps
            xs = _times(column(rows, which), 1 / factor)
            found.append(Series(group.label_of(run), xs, _times(column(rows, name), times), colour(group.number)))
        return found

    target = target_of(groups)
    level = None
    if target is not None and len(groups) > 1:
        level = (target.value * (100 if target.metric == "accuracy" else 1), f"{target.group.label} ends here")
    on = {metric: level if target is not None and target.metric == metric else None for metric in ("accuracy", "loss")}
    return charts(
        line_chart("Test accuracy", lines("test", "accuracy", 100), Axes(x, "test accuracy, %", level=on["accuracy"])),
        line_chart("Test error", _errors(lines("test", "accuracy")), Axes(x, "100% − accuracy, %", True)),
        line_chart("Test loss", lines("test", "loss"), Axes(x, "test loss", None, level=on["loss"])),
        line_chart("Training loss", lines("step", "loss"), Axes(x, "training loss", None)),
    )


def _errors(lines: Sequence[Series]) -> list[Series]:
    """Return error rates in percent instead of accuracies, which distinguishes high accuracies better."""
    return [replace(line, ys=[None if y is None else 100 * (1 - y) for y in line.ys]) for line in lines]


def _times(values: Sequence[Number], factor: float) -> list[Number]:
    return [None if value is None else value * factor for value in values]


def _table(groups: Sequence[Group]) -> Html:
    head = ["run", "step", "epoch", "seconds", "test accuracy, %", "test loss", "training loss"]
    rows = [row for group in groups for run in group.runs for row in _rows(group.label_of(run), run)]
    return join_html([html_table(head, rows), tag("p", f"At most {_MAX_ROWS} rows per run.", class_="note")])


def _rows(name: str, run: RunRecord) -> list[list[Any]]:
    """Return a sample of a run's tests, or of its steps if it has no tests, each with the training loss."""
    losses = {real(line.get("step")): real(line.get("loss")) for line in run.steps}
    lines = run.tests or run.steps
    rows: list[list[Any]] = []
    for i in sample(len(lines), _MAX_ROWS):
        line = lines[i]
        accuracy = real(line.get("accuracy"))
        cells = [real(line.get(which)) for which in WHICH]
        cells += [None if accuracy is None else 100 * accuracy, real(line.get("loss")) if run.tests else None]
        rows.append([name, *map(number, cells), number(losses.get(real(line.get("step"))))])
    return rows
