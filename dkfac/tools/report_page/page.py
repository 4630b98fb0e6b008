"""The page: one HTML file that needs nothing else, of the sections that have something to show."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from dkfac.tools.report_page.about import about
from dkfac.tools.report_page.curves import curves
from dkfac.tools.report_page.groups import Group, group
from dkfac.tools.report_page.html import Html, tag
from dkfac.tools.report_page.plan_picture import plans
from dkfac.tools.report_page.read import read_all
from dkfac.tools.report_page.result import head, result
from dkfac.tools.report_page.spectra import spectra
from dkfac.tools.report_page.stages import control, step_time
from dkfac.tools.report_page.timelines import timelines
from dkfac.tools.report_page.wire import wire

HERE = Path(__file__).parent
SECTIONS: tuple[tuple[str, str, Callable[[Sequence[Group]], Html | None]], ...] = (
    ("result", "Result", result),
    ("curves", "Accuracy and loss", curves),
    ("time", "Time of a step", step_time),
    ("plan", "Who does what", plans),
    ("timeline", "Timeline", timelines),
    ("control", "Step control and refreshes", control),
    ("spectra", "Spectra", spectra),
    ("wire", "Bytes on the wire", wire),
    ("settings", "Settings and environment", about),
)


def page(folders: Sequence[Path], say: Callable[[str], None] = lambda line: None) -> tuple[str, int]:
    """Return the page of run folders, or of folders of such, and how many runs it shows. ``say``: which it does not."""
    runs = read_all(folders, say)
    groups = group(runs)
    found = [(key, title, body) for key, title, make in SECTIONS if (body := make(groups))]
    links = [tag("a", title, href=f"#{key}") for key, title, _ in found]
    sections = [tag("section", tag("h2", title), body, id=key) for key, title, body in found]
    top = head(groups)
    return _document(Html(f"{top}{tag('nav', *links)}{tag('main', *sections)}"), _title(groups)), len(runs)


def _title(groups: Sequence[Group]) -> str:
    return f"dkfac: {', '.join(dict.fromkeys(one.recipe for one in groups))}"


def _document(body: Html, title: str) -> str:
    """Return the whole file. Its policy lets nothing be loaded, and no script run but its own."""
    style, script = (Html((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    whole = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"{tag('title', title)}\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
    return whole.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON can hold, is no text
