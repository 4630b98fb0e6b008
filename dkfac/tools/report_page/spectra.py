"""Section on the eigenvalues and condition numbers of some layers' factors over time.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dkfac.tools.report_page.chart import Axes, Series, colour, line_chart, ramp
from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import Html, charts, details, html_table, join_html, number, tag
from dkfac.tools.report_page.read import RunRecord, real
from dkfac.tools.report_page.scale import sample

NUM_STEPS = 5
"""Number of steps whose eigenvalues are drawn per factor."""

Key = tuple[str, str]
"""A layer and a factor."""


def spectra_section(groups: Sequence[Group]) -> Html | None:
    """Return the spectra of the first run of each group that logged any."""
    chosen = [(group, run) for group in groups if (run := next((r for r in group.runs if r.spectra), None))]
    if not chosen:
        return None
    parts = []
    for group, run in chosen:
        is_named = len(chosen) > 1 or len(group.runs) > 1
        parts += [tag("h3", group.label_of(run))] if is_named else []
        parts.append(_run(run))
    return join_html(parts)


def _run(run: RunRecord) -> Html:
    found: dict[Key, list[dict[str, Any]]] = {}
    for line in run.spectra:
        found.setdefault((str(line.get("layer")), str(line.get("factor"))), []).append(line)
    layers = list(dict.fromkeys(layer for layer, _ in found))
    conditions = [
        Series(
            f"{layer} {factor}",
            [real(line.get("step")) for line in lines],
            [real(line.get("condition")) for line in lines],
            colour(layers.index(layer)),
            is_dashed=not factor.startswith("A"),
        )
        for (layer, factor), lines in found.items()
    ]
    each = [_eigenvalues(layer, factor, lines) for (layer, factor), lines in found.items()]
    said = (
        "A: inputs, G: output gradients (dashed in the first chart). Eigenvalues of the running factors, before "
        "damping, from the largest to the smallest; for large factors a sample. Zeros are not drawn on the log scale. "
        "Condition: largest eigenvalue over the smallest one that is not zero up to rounding."
    )
    rows = [_row(key, lines[i]) for key, lines in found.items() for i in sample(len(lines), 2 * NUM_STEPS)]
    head = ["layer", "factor", "step", "condition", "largest", "median", "smallest"]
    return join_html([
        charts(line_chart("Condition numbers", conditions, Axes("step", "condition", True), key=True), *each),
        tag("p", said, class_="note"),
        details("Data of these charts", html_table(head, rows)),
    ])  # fmt: skip


def _eigenvalues(layer: str, factor: str, lines: Sequence[dict[str, Any]]) -> Html:
    chosen = [lines[i] for i in sample(len(lines), NUM_STEPS)]
    drawn = []
    for place, line in enumerate(chosen):
        values = _values(line)
        xs = [100 * i / max(1, len(values) - 1) for i in range(len(values))]
        name = f"step {number(real(line.get('step')), 7)}"
        drawn.append(Series(name, xs, values, ramp(place, len(chosen)), is_dashed=False))
    short = layer if len(layer) <= 28 else f"…{layer[-27:]}"
    return line_chart(f"{short}, {factor}", drawn, Axes("% of the eigenvalues", "eigenvalue", True), key=True)


def _values(line: dict[str, Any]) -> list[float | None]:
    values = line.get("eigenvalues")
    return [real(value) for value in values] if isinstance(values, list) else []


def _row(key: Key, line: dict[str, Any]) -> list[Any]:
    values = _values(line)
    ends = [values[0], values[len(values) // 2], values[-1]] if values else [None] * 3
    return [*key, number(real(line.get("step")), 7), number(real(line.get("condition"))), *map(number, ends)]
