"""Head of the page and table of results.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import DASH, Html, counted, details, html_table, join_html, number, tag, text
from dkfac.tools.report_page.read import RunRecord, as_dict, column, real

Metric = Literal["accuracy", "loss"]
_TAIL = 10
"""The result of a run without tests is the mean loss over the last ``1 / _TAIL`` of its steps."""


@dataclass(frozen=True, slots=True)
class Target:
    """The final result of the first-order runs of a recipe, mean over seeds."""

    metric: Metric
    value: float
    group: Group

    @property
    def words(self) -> str:
        value = f"{100 * self.value:.2f}%" if self.metric == "accuracy" else number(self.value)
        return f"test {self.metric} {value}"

    def reached(self, run: RunRecord) -> dict[str, Any] | None:
        """Return the first test that is at least as good as the target, or None."""
        room = 1e-9 * abs(self.value)  # the mean of equal numbers may differ from them by rounding
        for line in run.tests:
            value = real(line.get(self.metric))
            worse = None if value is None else self.value - value if self.metric == "accuracy" else value - self.value
            if worse is not None and worse <= room:
                return line
        return None


def target_of(groups: Sequence[Group]) -> Target | None:
    """Return the final result of the first group of first-order runs that was tested, or None."""
    for group in groups:
        metrics: tuple[Metric, ...] = ("accuracy", "loss")
        for metric in metrics if not group.is_kfac else ():
            ends = [value for run in group.runs if (value := final_value(run, metric)) is not None]
            if ends:
                return Target(metric, statistics.fmean(ends), group)
    return None


def final_value(run: RunRecord, metric: str) -> float | None:
    return column(run.tests, metric)[-1] if run.tests else None


def best_value(run: RunRecord, metric: str) -> float | None:
    known = [value for value in column(run.tests, metric) if value is not None]
    return None if not known else max(known) if metric == "accuracy" else min(known)


def step_seconds(run: RunRecord) -> list[float]:
    """Return the mean seconds per step between consecutive logged steps."""
    lines = [(real(line.get("step")), real(line.get("seconds"))) for line in run.steps]
    known = [(step, at) for step, at in lines if step is not None and at is not None]
    pairs = itertools.pairwise(known)
    return [(at - before) / (step - last) for (last, before), (step, at) in pairs if step > last]


def mean_step_seconds(run: RunRecord) -> float | None:
    """Return the mean seconds per step of the whole run."""
    step = real(run.steps[-1].get("step")) if run.steps else None
    return run.seconds_at(step) / step if step else None


def head(groups: Sequence[Group]) -> Html:
    """Return the title, the facts about the runs, and warnings."""
    recipes = list(dict.fromkeys(group.recipe for group in groups))
    parts = [tag("h1", f"{', '.join(recipes)}: {_against(groups)}")]
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({str(run.seed) for run in runs if run.seed is not None})
    dates = sorted(str(run.environment["date"])[:10] for run in runs if run.environment.get("date"))
    facts = [
        counted(len(runs), "run"),
        f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else "",
        _each("device {}", runs, lambda run: run.environment.get("device")),
        _each("{} ranks", runs, lambda run: run.settings.get("world_size")).replace("1 ranks", "1 rank"),
        " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "",
    ]
    parts.append(tag("p", " · ".join(fact for fact in facts if fact), class_="facts"))
    said = list(_warnings(runs))
    if said:
        parts.append(tag("ul", *(tag("li", line) for line in said), class_="warnings"))
    return tag("header", *parts)


def result_section(groups: Sequence[Group]) -> Html:
    """Return one table of results for each recipe."""
    parts = []
    recipes = list(dict.fromkeys(group.recipe for group in groups))
    for recipe in recipes:
        ours = [group for group in groups if group.recipe == recipe]
        target = target_of(ours)
        parts += [tag("h3", recipe)] if len(recipes) > 1 else []
        parts.append(_table([(group.label, group.runs) for group in ours], target))
        if target is not None:
            parts.append(tag("p", _explained(target, ours), class_="note"))
        if any(len(group.runs) > 1 for group in ours):
            each = [(group.label_of(run), [run]) for group in ours for run in group.runs]
            parts.append(details("Each run", _table(each, target)))
    return join_html(parts)


def _against(groups: Sequence[Group]) -> str:
    names = list(dict.fromkeys("K-FAC" if group.is_kfac else group.runs[0].optimizer for group in groups))
    names.sort(key=lambda name: name == "K-FAC")
    return " against ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _each(form: str, runs: Sequence[RunRecord], what: Callable[[RunRecord], Any]) -> str:
    found = dict.fromkeys(str(value) for run in runs if (value := what(run)) is not None)
    return form.format(" and ".join(found)) if found else ""


def _warnings(runs: Sequence[RunRecord]) -> Iterable[str]:
    for run in runs:
        step, steps = number(real(run.last.get("step"))), run.settings.get("num_steps")
        at = f"step {step}" if steps is None else f"step {step} of {steps}"
        if run.reason is None:
            yield f"{run.name} has not ended: it is at {at}, so its numbers are not final."
        elif run.reason != "done":
            yield f"{run.name} was stopped at {at} ({run.reason})."
        if any(line.get("loss") is None for line in run.steps):
            yield f"{run.name} has steps with a non-finite loss: its curves have gaps there."
        if run.is_kfac and not run.report:
            yield f"{run.name} has no summary.json yet, so its stages, memory and transfers are not shown."
    if len({str(run.environment.get("device")) for run in runs}) > 1:
        yield "The runs used different devices: their times cannot be compared."
    if len({str(as_dict(run.settings).get("world_size")) for run in runs}) > 1:
        yield "The runs used different numbers of ranks: their times cannot be compared."


def _table(columns: Sequence[tuple[str, Sequence[RunRecord]]], target: Target | None) -> Html:
    """Return a table with one column per group or run, and one row per metric that any of them has."""
    measures: list[tuple[str, Callable[[Sequence[RunRecord]], Any]]] = [
        ("test accuracy, final", lambda runs: _spread([final_value(run, "accuracy") for run in runs], _percent)),
        ("test accuracy, best", lambda runs: _spread([best_value(run, "accuracy") for run in runs], _percent)),
        ("test loss, final", lambda runs: _spread([final_value(run, "loss") for run in runs])),
        ("test loss, best", lambda runs: _spread([best_value(run, "loss") for run in runs])),
        ("training loss, last tenth", lambda runs: _spread([_last_loss(run) for run in runs])),
        ("ms per step, median", lambda runs: _spread([_median_ms(run) for run in runs])),
        ("ms per step, mean", lambda runs: _spread([_mean_ms(run) for run in runs])),
        ("steps", lambda runs: _spread([real(run.last.get("step")) for run in runs])),
        ("epochs", lambda runs: _spread([real(run.last.get("epoch")) for run in runs])),
        ("training time, s", lambda runs: _spread([real(run.last.get("seconds")) for run in runs])),
    ]
    if target is not None:
        measures[5:5] = [
            (f"epochs to {target.words}", lambda runs: _to_target(runs, target, "epoch")),
            (f"seconds to {target.words}", lambda runs: _to_target(runs, target, "seconds")),
        ]
    rows = [[name, *(of(runs) for _, runs in columns)] for name, of in measures]
    shown = [row for row in rows if any(cell != DASH for cell in row[1:])]
    return html_table(["", *(name for name, _ in columns)], shown, class_="result")


def _last_loss(run: RunRecord) -> float | None:
    """Return the mean training loss at the end of a run without tests."""
    lines = run.steps[-max(1, len(run.steps) // _TAIL) :] if not run.tests else []
    known = [value for value in column(lines, "loss") if value is not None]
    return statistics.fmean(known) if known else None


def _median_ms(run: RunRecord) -> float | None:
    found = step_seconds(run)
    return 1e3 * statistics.median(found) if found else None


def _mean_ms(run: RunRecord) -> float | None:
    found = mean_step_seconds(run)
    return None if found is None else 1e3 * found


def _to_target(runs: Sequence[RunRecord], target: Target, unit: str) -> Html:
    """Return the mean over the runs that reach the target, the ratio to the first-order runs and, if some runs do not
    reach it, how many do."""
    found = _times(runs, target, unit)
    if not found:
        return text("not reached")
    parts = [_spread(found, lambda value: number(value, 3))]
    base = _times(target.group.runs, target, unit)
    if runs[0] not in target.group.runs and sum(base) > 0:
        parts.append(tag("small", f"{statistics.fmean(found) / statistics.fmean(base):.2f} × {target.group.label}"))
    if len(found) < len(runs):
        parts.append(tag("small", f"by {len(found)} of {len(runs)} runs"))
    return join_html(parts)


def _times(runs: Sequence[RunRecord], target: Target, unit: str) -> list[float]:
    lines = [line for run in runs if (line := target.reached(run)) is not None]
    return [value for line in lines if (value := real(line.get(unit))) is not None]


def _explained(target: Target, groups: Sequence[Group]) -> str:
    mean = f", mean of {len(target.group.runs)} seeds" if len(target.group.runs) > 1 else ""
    goal = (
        f"Target: {target.words}, the final result of {target.group.label}{mean}; the first test to reach it counts. "
    )
    ranges = "Means over seeds, with minimum and maximum below. " if any(len(g.runs) > 1 for g in groups) else ""
    return f"{goal}{ranges}Seconds are training time, without tests and checkpoints."


def _spread(values: Sequence[float | None], form: Callable[[float], str] = number) -> Html:
    """Return the mean, and below it the minimum and the maximum."""
    known = [value for value in values if value is not None]
    if not known:
        return text(DASH)
    low, high = form(min(known)), form(max(known))
    return join_html([form(statistics.fmean(known)), tag("small", f"{low} to {high}") if low != high else ""])


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"
