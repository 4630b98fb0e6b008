"""Line charts as inline SVG, small enough for a phone. The page places several in a row if there is room.

Input: series of numbers. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dkfac.tools.report_page.html import Html, join_html, legend, tag
from dkfac.tools.report_page.scale import Number, Scale, fit_scale, labels, thin, wants_log

CHART_WIDTH, _HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 28, 42
NUM_COLOURS = 9
NUM_DOTS = 60
"""Series with at most this many points are drawn with markers."""


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    xs: Sequence[Number]
    ys: Sequence[Number]
    colour: str
    """A CSS colour."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """Labels and kinds of the axes. ``is_log`` None: a log scale if the numbers span several orders of magnitude."""

    x: str
    y: str
    is_log: bool | None = False
    is_steps: bool = False
    """Whether to draw a step function: a value holds until the next one."""
    level: tuple[float, str] | None = None
    """A value to mark with a horizontal line, and its label."""


def colour(number: int) -> str:
    """Return the colour with this number; numbers wrap around after the last colour."""
    return f"var(--c{number % NUM_COLOURS})"


def ramp(place: int, count: int) -> str:
    """Return the colour of item ``place`` in a sequence of ``count``, on a gradient."""
    share = 100 * place // max(1, count - 1)
    return f"color-mix(in oklch, var(--late) {share}%, var(--early))"


def line_chart(title: str, lines: Sequence[Series], axes: Axes, *, key: bool = False) -> Html:
    """Return a figure; empty HTML if there is no number to show. ``key``: add a legend."""
    every = [y for line in lines for x, y in zip(line.xs, line.ys, strict=True) if x is not None]
    is_log = wants_log(every) if axes.is_log is None else axes.is_log
    shown = [y if y is not None and (y > 0 or not is_log) else None for y in every]
    if axes.level is not None and any(y is not None for y in shown):
        shown.append(axes.level[0])
    across = fit_scale([x for line in lines for x in line.xs], _LEFT, CHART_WIDTH - _RIGHT, zero=True)
    up = fit_scale(shown, _HEIGHT - _BOTTOM, _TOP, is_log=is_log)
    if across is None or up is None:
        return Html("")
    up = _with_room(up)
    y_label = f"{axes.y}{' (log scale)' if up.is_log else ''}"
    body = [frame(across, up, axes.x, y_label), *(_line(line, across, up, axes) for line in lines)]
    if axes.level is not None:
        body.append(_level(axes.level, up))
    picture = tag(
        "svg",
        tag("title", f"{title}: {y_label} against {axes.x}; lines: {_names(lines)}"),
        *body,
        viewBox=f"0 0 {CHART_WIDTH} {_HEIGHT}",
        role="img",
        class_="lines",
        data_x=_numbers(across),
        data_y=_numbers(up),
        data_unit=axes.x,
    )
    below = [legend((line.label, _swatch(line)) for line in lines)] if key else []
    return tag("figure", tag("figcaption", title), picture, *below)


def frame(across: Scale, up: Scale, x: str, y: str) -> Html:
    """Return the grid lines, tick labels and axis labels."""
    left, right, low, high = across.begin, across.end, up.begin, up.end
    parts = []
    for value, label in _ticks(up):
        at = f"{up(value):.1f}"
        parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", label, x=left - 5, y=at, class_="tick end middle"))
    for value, label in _ticks(across):
        at = f"{across(value):.1f}"
        parts.append(tag("line", x1=at, x2=at, y1=low, y2=low + 4, class_="axis"))
        parts.append(tag("text", label, x=at, y=low + 16, class_="tick centre"))
    parts.append(tag("line", x1=left, x2=right, y1=low, y2=low, class_="axis"))
    parts.append(tag("text", y, x=4, y=high - 12, class_="title"))
    parts.append(tag("text", x, x=right, y=low + 34, class_="title end"))
    return join_html(parts)


def _ticks(scale: Scale) -> list[tuple[float, str]]:
    found = scale.ticks()
    return list(zip(found, labels(found), strict=True))


def _with_room(up: Scale) -> Scale:
    if up.is_log:
        return up
    room = 0.04 * (up.high - up.low)
    low = up.low if up.low == 0 else up.low - room
    return Scale(low if up.low < 0 else max(low, 0.0), up.high + room, up.begin, up.end)


def _line(line: Series, across: Scale, up: Scale, axes: Axes) -> Html:
    """Return the path of a series, with gaps where numbers are missing; an isolated point is drawn as a dot."""
    words, is_open, last = [], False, 0.0
    points = thin(line.xs, line.ys)
    dots = []
    for x, y in points:
        if x is None or y is None or (up.is_log and y <= 0):
            is_open = False
            continue
        right, height = across(x), up(y)
        if not is_open:
            words.append(f"M{right:.2f} {height:.2f}h0")
        else:
            if axes.is_steps:
                words.append(f"L{right:.2f} {last:.2f}")
            words.append(f"L{right:.2f} {height:.2f}")
        is_open, last = True, height
        dots.append((right, height))
    dash = "5 4" if line.is_dashed else None
    style = f"stroke:{line.colour}"
    path = tag("path", d="".join(words), style=style, stroke_dasharray=dash, data_label=line.label)
    if len(dots) > NUM_DOTS or axes.is_steps:
        return path
    fill = f"fill:{line.colour}"
    return join_html([path, *(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=1.8, style=fill) for x, y in dots)])


def _swatch(line: Series) -> str:
    is_dashed, of = line.is_dashed, line.colour
    return f"repeating-linear-gradient(90deg, {of} 0 3px, transparent 3px 5px)" if is_dashed else of


def _level(level: tuple[float, str], up: Scale) -> Html:
    at = up(level[0])
    line = tag("line", x1=_LEFT, x2=CHART_WIDTH - _RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="level")
    place = at + 13 if at < _TOP + 14 else at - 4  # keep clear of the title
    return join_html([line, tag("text", level[1], x=_LEFT + 3, y=f"{place:.1f}", class_="tick")])


def _names(lines: Sequence[Series]) -> str:
    names = list(dict.fromkeys(line.label for line in lines))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _numbers(scale: Scale) -> str:
    """Return the scale as text, from which the page's script converts a position to a number."""
    return f"{scale.low!r} {scale.high!r} {scale.begin} {scale.end} {'log' if scale.is_log else 'linear'}"
