"""Stacked horizontal bar charts as inline SVG.

Input: bars with named parts. Output: HTML. Owns: the colours of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dkfac.tools.report_page.chart import CHART_WIDTH, colour
from dkfac.tools.report_page.html import Html, join_html, legend, number, tag
from dkfac.tools.report_page.scale import fit_scale, labels

_OTHER = 8
_STAGE_COLOURS = {
    "forward": 0, "backward": 5, "capture": 1, "measure": 1, "pack": 6, "average": 6, "decompose": 3,
    "precondition": 2, "gradients": 4, "weights": 4, "factors": 7, "decompositions": 3, "optimizer": _OTHER,
}  # fmt: skip
"""Colour numbers of stages, the same everywhere on the page. Other stages share the last one."""

Bar = tuple[str, Mapping[str, float]]
"""The label of a bar, and the values of its parts."""


def stage_colour(stage: str) -> str:
    return colour(_STAGE_COLOURS.get(stage, _OTHER))


def stage_legend(stages: Iterable[str]) -> Html:
    return _legend({stage: stage_colour(stage) for stage in stages})


def bar_chart(title: str, rows: Sequence[Bar], unit: str, colours: Mapping[str, str]) -> Html:
    """Return a figure with bars on one axis; empty HTML if there is nothing to show. Short names are placed beside the
    bars, long ones above."""
    if not any(value > 0 for _, parts in rows for value in parts.values()):
        return Html("")
    is_short = all(len(name) <= 8 for name, _ in rows)
    left, each, thick = (58, 20, 14) if is_short else (8, 42, 16)
    totals = [sum(parts.values()) for _, parts in rows]
    across = fit_scale([0.0, *totals], left, CHART_WIDTH - (58 if is_short else 14), zero=True)
    assert across is not None
    bottom, body = 8 + each * len(rows), []
    ticks = across.ticks(4)
    for value, label in zip(ticks, labels(ticks), strict=True):
        at = f"{across(value):.1f}"
        body.append(tag("line", x1=at, x2=at, y1=4, y2=bottom, class_="grid"))
        body.append(tag("text", label, x=at, y=bottom + 14, class_="tick centre"))
    for i, ((name, parts), total) in enumerate(zip(rows, totals, strict=True)):
        top = 8 + i * each + (0 if is_short else each - thick - 4)
        body.append(_name(name, f"{number(total, 3)} {unit.split(' ')[0]}", top, thick, across(total), is_short))
        start = 0.0
        for part, value in parts.items():
            begin, end = across(start), across(start + value)
            what = tag("title", f"{name}, {part}: {number(value)} {unit}")
            fill = f"fill:{colours[part]}"
            place = {"x": f"{begin:.2f}", "y": top, "width": f"{max(0.0, end - begin):.2f}", "height": thick}
            body.append(tag("rect", what, class_="part", style=fill, **place))
            start += value
        body.append(tag("line", x1=left, x2=left, y1=top - 2, y2=top + thick + 2, class_="axis"))
    body.append(tag("text", unit, x=CHART_WIDTH - 14, y=bottom + 32, class_="title end"))
    names = ", ".join(name for name, _ in rows[:8])
    picture = tag(
        "svg",
        tag("title", f"{title}, {unit}: {names}{' and more' if len(rows) > 8 else ''}"),
        *body,
        viewBox=f"0 0 {CHART_WIDTH} {bottom + 40}",
        role="img",
    )
    used = dict.fromkeys(part for _, parts in rows for part in parts)
    below = [_legend({part: colours[part] for part in used})] if len(used) > 1 else []
    return tag("figure", tag("figcaption", title), picture, *below)


def _legend(colours: Mapping[str, str]) -> Html:
    """Return a legend of the parts; parts of the same colour share one entry."""
    found: dict[str, list[str]] = {}
    for part, of in colours.items():
        found.setdefault(of, []).append(part)
    return legend((", ".join(parts), of) for of, parts in found.items())


def _name(name: str, total: str, top: float, thick: float, end: float, is_short: bool) -> Html:
    if is_short:
        beside = {"y": f"{top + thick / 2:.1f}", "class_": "tick middle"}
        return join_html([tag("text", name, x=4, **beside), tag("text", total, x=f"{end + 5:.1f}", **beside)])
    shown = name if len(name) <= 38 else f"{name[:37]}…"
    parts = [tag("text", tag("title", name), shown, x=8, y=top - 6, class_="tick strong")]
    parts.append(tag("text", total, x=CHART_WIDTH - 14, y=top - 6, class_="tick end strong"))
    return join_html(parts)
