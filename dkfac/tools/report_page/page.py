"""Assemble the report page: one self-contained HTML file with the sections that have data.

Input: run folders. Output: the HTML text. Owns: the order of the sections.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from dkfac.tools.report_page.about import settings_section
from dkfac.tools.report_page.curves import curves_section
from dkfac.tools.report_page.groups import Group, group
from dkfac.tools.report_page.html import Html, tag
from dkfac.tools.report_page.plan_picture import plans_section
from dkfac.tools.report_page.read import read_all
from dkfac.tools.report_page.result import head, result_section
from dkfac.tools.report_page.spectra import spectra_section
from dkfac.tools.report_page.stages import control, step_time
from dkfac.tools.report_page.timelines import timelines_section
from dkfac.tools.report_page.wire import wire_section

HERE = Path(__file__).parent
SECTIONS: tuple[tuple[str, str, Callable[[Sequence[Group]], Html | None]], ...] = (
    ("result", "Result", result_section),
    ("curves", "Accuracy and loss", curves_section),
    ("time", "Time of a step", step_time),
    ("plan", "Distribution of work", plans_section),
    ("timeline", "Timeline", timelines_section),
    ("control", "Step control and refreshes", control),
    ("spectra", "Spectra", spectra_section),
    ("wire", "Bytes on the wire", wire_section),
    ("settings", "Settings and environment", settings_section),
)


def build_page(folders: Sequence[Path], say: Callable[[str], None] = lambda line: None) -> tuple[str, int]:
    """Return the page for the given folders and the number of runs on it. ``say`` is called for each skipped run."""
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
    """Return the HTML document. Its content security policy allows no loading and no script but the page's own."""
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
    return whole.encode("utf-8", "replace").decode()  # JSON can contain lone surrogates, UTF-8 cannot
