"""Lines over an axis, as inline SVG. Its size suits a phone; the page puts several in a row where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dkfac.tools.report_page.html import Html, join, legend, tag
from dkfac.tools.report_page.scale import Number, Scale, fit, labels, thin, wants_log

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 28, 42
NUM_COLOURS = 9
NUM_DOTS = 60
"""Lines with at most so many points show them."""


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    xs: Sequence[Number]
    ys: Sequence[Number]
    colour: str
    """In CSS."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes show, with units; ``is_log`` None: where numbers are of very different sizes."""

    x: str
    y: str
    is_log: bool | None = False
    is_steps: bool = False
    """Whether a value holds until the next."""
    level: tuple[float, str] | None = None
    """A height to mark, and what it is."""


def colour(number: int) -> str:
    """Return the colour of a group or stage; after the last they begin again."""
    return f"var(--c{number % NUM_COLOURS})"


def ramp(place: int, count: int) -> str:
    """Return the colour of one in a sequence, from the first to the last."""
    share = 100 * place // max(1, count - 1)
    return f"color-mix(in oklch, var(--late) {share}%, var(--early))"


def line_chart(title: str, lines: Sequence[Line], axes: Axes, *, key: bool = False) -> Html:
    """Return a figure, or nothing if there is no number to show. ``key``: with its own legend."""
    every = [y for line in lines for x, y in zip(line.xs, line.ys, strict=True) if x is not None]
    is_log = wants_log(every) if axes.is_log is None else axes.is_log
    shown = [y if y is not None and (y > 0 or not is_log) else None for y in every]
    if axes.level is not None and any(y is not None for y in shown):
        shown.append(axes.level[0])
    across = fit([x for line in lines for x in line.xs], LEFT, WIDTH - RIGHT, zero=True)
    up = fit(shown, HEIGHT - BOTTOM, TOP, is_log=is_log)
    if across is None or up is None:
        return Html("")
    up = _with_room(up)
    told = f"{axes.y}{' (log scale)' if up.is_log else ''}"
    body = [frame(across, up, axes.x, told), *(_line(line, across, up, axes) for line in lines)]
    if axes.level is not None:
        body.append(_level(axes.level, up))
    picture = tag(
        "svg",
        tag("title", f"{title}: {told} against {axes.x}; lines: {_names(lines)}"),
        *body,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_="lines",
        data_x=_numbers(across),
        data_y=_numbers(up),
        data_unit=axes.x,
    )
    below = [legend((line.label, _swatch(line)) for line in lines)] if key else []
    return tag("figure", tag("figcaption", title), picture, *below)


def frame(across: Scale, up: Scale, x: str, y: str) -> Html:
    """Return grid lines, the numbers at them, and what the axes are."""
    left, right, low, high = across.begin, across.end, up.begin, up.end
    parts = []
    for value, told in _ticks(up):
        at = f"{up(value):.1f}"
        parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", told, x=left - 5, y=at, class_="tick end middle"))
    for value, told in _ticks(across):
        at = f"{across(value):.1f}"
        parts.append(tag("line", x1=at, x2=at, y1=low, y2=low + 4, class_="axis"))
        parts.append(tag("text", told, x=at, y=low + 16, class_="tick centre"))
    parts.append(tag("line", x1=left, x2=right, y1=low, y2=low, class_="axis"))
    parts.append(tag("text", y, x=4, y=high - 12, class_="title"))
    parts.append(tag("text", x, x=right, y=low + 34, class_="title end"))
    return join(parts)


def _ticks(scale: Scale) -> list[tuple[float, str]]:
    found = scale.ticks()
    return list(zip(found, labels(found), strict=True))


def _with_room(up: Scale) -> Scale:
    if up.is_log:
        return up
    room = 0.04 * (up.high - up.low)
    low = up.low if up.low == 0 else up.low - room
    return Scale(low if up.low < 0 else max(low, 0.0), up.high + room, up.begin, up.end)


def _line(line: Line, across: Scale, up: Scale, axes: Axes) -> Html:
    """Return a path with gaps where there are no numbers; a point alone is a dot."""
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
    return join([path, *(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=1.8, style=fill) for x, y in dots)])


def _swatch(line: Line) -> str:
    is_dashed, of = line.is_dashed, line.colour
    return f"repeating-linear-gradient(90deg, {of} 0 3px, transparent 3px 5px)" if is_dashed else of


def _level(level: tuple[float, str], up: Scale) -> Html:
    at = up(level[0])
    line = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="level")
    place = at + 13 if at < TOP + 14 else at - 4  # not in the title
    return join([line, tag("text", level[1], x=LEFT + 3, y=f"{place:.1f}", class_="tick")])


def _names(lines: Sequence[Line]) -> str:
    names = list(dict.fromkeys(line.label for line in lines))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _numbers(scale: Scale) -> str:
    """What the page's script needs to read a place as a number."""
    return f"{scale.low!r} {scale.high!r} {scale.begin} {scale.end} {'log' if scale.is_log else 'linear'}"
