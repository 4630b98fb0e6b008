"""Section with the timelines of steps, measured and simulated, on one scale. ``read.py`` describes ``timeline.json``.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dkfac.tools.report_page.bars import stage_colour, stage_legend
from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import Html, details, html_table, join_html, number, tag
from dkfac.tools.report_page.read import RunRecord, real
from dkfac.tools.report_page.scale import Scale, fit_scale, labels

_WIDTH, _LEFT, _RIGHT = 760, 60, 14
_ROW, _GAP, _TITLE = 13, 9, 30
_MAX_RANKS, _MAX_SPANS = 16, 4000
"""Most ranks and spans that are shown of a timeline."""


def timelines_section(groups: Sequence[Group]) -> Html | None:
    """Return the timelines of each run that has any."""
    runs = [(group.label_of(run), run) for group in groups for run in group.runs if run.timelines]
    if not runs:
        return None
    parts = []
    for name, run in runs:
        parts += [tag("h3", name)] if len(runs) > 1 else []
        parts.append(_picture(run))
    return join_html(parts)


def _picture(run: RunRecord) -> Html:
    ends = [real(span["end"]) for one in run.timelines for span in one["spans"]]
    across = fit_scale([0.0, *(None if end is None else 1e3 * end for end in ends)], _LEFT, _WIDTH - _RIGHT, zero=True)
    assert across is not None
    body, rows, stages, top, left_out = list[Html](), list[list[Any]](), list[str](), 0.0, False
    for one in run.timelines:
        spans = [span for span in one["spans"] if span["rank"] < _MAX_RANKS][:_MAX_SPANS]
        left_out |= len(spans) < len(one["spans"])
        drawn, top = _timeline(str(one["title"]), spans, across, top)
        body.append(drawn)
        stages += [str(span["stage"]) for span in spans]
        rows += _rows(str(one["title"]), spans)
    grid = []
    ticks = across.ticks(8)
    for value, text in zip(ticks, labels(ticks), strict=True):
        at = f"{across(value):.1f}"
        grid.append(tag("line", x1=at, x2=at, y1=_TITLE, y2=top, class_="grid"))
        grid.append(tag("text", text, x=at, y=top + 16, class_="tick centre"))
    grid.append(tag("text", "ms from the beginning of the step", x=_WIDTH - _RIGHT, y=top + 36, class_="title end"))
    titles = ", ".join(str(one["title"]) for one in run.timelines)
    title = tag("title", f"Timelines on one scale: {titles}")
    picture = tag("svg", title, *grid, *body, viewBox=f"0 0 {_WIDTH} {top + 44:.0f}", role="img", class_="timeline")
    said = "For each rank, compute above transfers."
    said += f" The first {_MAX_RANKS} ranks and {_MAX_SPANS:,} spans are shown." if left_out else ""
    head = ["timeline", "rank", "stage", "stream", "total ms", "spans"]
    return join_html([
        stage_legend(stages),
        tag("div", picture, class_="scroll", tabindex="0"),
        tag("p", said, class_="note"),
        details("Data of this chart", html_table(head, rows)),
    ])  # fmt: skip


def _timeline(title: str, spans: Sequence[dict[str, Any]], across: Scale, top: float) -> tuple[Html, float]:
    """Return the spans of one timeline, and the vertical position of the next timeline."""
    last = max((end for span in spans if (end := real(span["end"])) is not None), default=0.0)
    parts = [tag("text", f"{title}: {number(1e3 * last)} ms", x=4, y=top + 20, class_="tick strong")]
    top += _TITLE
    for rank in sorted({span["rank"] for span in spans}):
        ours = [span for span in spans if span["rank"] == rank]
        streams = [stream for stream in ("work", "network") if any(_stream(span) == stream for span in ours)]
        parts.append(tag("text", f"rank {rank}", x=4, y=top + _ROW * len(streams) / 2, class_="tick middle"))
        for place, stream in enumerate(streams):
            parts += [_span(span, across, top + place * _ROW) for span in ours if _stream(span) == stream]
        top += _ROW * len(streams) + _GAP
    return join_html(parts), top


def _span(span: dict[str, Any], across: Scale, top: float) -> Html:
    begin, end = real(span["begin"]), real(span["end"])
    if begin is None or end is None or end < begin:
        return Html("")
    left, right = across(1e3 * max(0.0, begin)), across(1e3 * max(0.0, end))
    what = f"{span['stage']} {span.get('name', '')}".strip()
    title = f"rank {span['rank']}, {what}: {number(1e3 * begin)} to {number(1e3 * end)} ms"
    fill = f"fill:{stage_colour(str(span['stage']))}"
    width = f"{max(0.4, right - left):.2f}"
    return tag("rect", tag("title", title), x=f"{left:.2f}", y=f"{top:.1f}", width=width, height=_ROW - 2, style=fill)


def _rows(title: str, spans: Sequence[dict[str, Any]]) -> list[list[Any]]:
    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for span in spans:
        begin, end = real(span["begin"]), real(span["end"])
        if begin is not None and end is not None:
            found[span["rank"], str(span["stage"]), _stream(span)].append(end - begin)
    return [
        [title, rank, stage, stream, number(1e3 * sum(each)), len(each)]
        for (rank, stage, stream), each in sorted(found.items())
    ]


def _stream(span: dict[str, Any]) -> str:
    return "network" if span["stream"] == "network" else "work"
