"""Build HTML from untrusted text: everything that is not ``Html`` is escaped.

Input: text and numbers. Output: ``Html``. Owns: nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

DASH = "–"


class Html(str):
    """Text that is already HTML, written by this package."""

    __slots__ = ()


def text(value: Any) -> Html:
    """Return a value as HTML, escaped unless it is ``Html``."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join_html(parts: Iterable[Any]) -> Html:
    return Html("".join(text(part) for part in parts))


def tag(name: str, *body: Any, **attributes: Any) -> Html:
    """Return an element. ``class_`` becomes ``class``, ``data_x`` becomes ``data-x``; None attributes are omitted."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{rendered}>{join_html(body)}</{name}>")


def html_table(
    head: Sequence[Any], rows: Iterable[Sequence[Any]], *, marked: Iterable[int] = (), class_: str = ""
) -> Html:
    """Return a table in a scrollable box. The first cell of each row is its header. ``marked``: rows to highlight."""
    highlighted = set(marked)
    body = [
        tag(
            "tr",
            *(tag("td", cell) if i else tag("th", cell, scope="row") for i, cell in enumerate(row)),
            class_="marked" if number in highlighted else None,
        )
        for number, row in enumerate(rows)
    ]
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    whole = tag("table", top, tag("tbody", *body), class_=class_ or None)
    return tag("div", whole, class_="scroll", tabindex="0")


def details(summary: str, *body: Any) -> Html:
    return tag("details", tag("summary", summary), *body)


def legend(items: Iterable[tuple[str, str]]) -> Html:
    """Return labels with their colours, as (label, CSS colour)."""
    return tag(
        "ul",
        *(tag("li", tag("i", style=f"background:{colour}"), label) for label, colour in dict(items).items()),
        class_="legend",
    )


def charts(*figures: Html) -> Html:
    """Return the nonempty figures side by side."""
    kept = [figure for figure in figures if figure]
    return tag("div", *kept, class_="charts") if kept else Html("")


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits, with commas in large numbers."""
    if value is None or not math.isfinite(value):
        return DASH
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def counted(how_many: int, what: str) -> str:
    """``1, "run" -> 1 run``; ``3, "run" -> 3 runs``."""
    return f"{how_many} {what}{'s' * (how_many > 1)}"


def size(num_bytes: float | None) -> str:
    """Return a number of bytes as text with a unit."""
    if num_bytes is None:
        return DASH
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def unit_of_bytes(largest: float) -> tuple[str, float]:
    """Return a suitable unit for numbers of bytes up to ``largest``, and its bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= factor:
            return unit, factor
    return "B", 1.0


def unit_of_seconds(largest: float) -> tuple[str, float]:
    """Return a suitable unit for times up to ``largest`` seconds, and its seconds."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if largest >= 10 * factor:
            return unit, factor
    return "s", 1.0
