"""``dkfac report``: one HTML page of run folders."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="one HTML page of run folders",
        description="Writes one HTML page, which needs no network, of what `dkfac train` and `dkfac compare` wrote: "
        "accuracy and loss, time by stage, plan, memory, step control, spectra, transfers and settings. Runs of one "
        "setting with different seeds are shown together; a folder of run folders stands for all in it.",
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder, or a folder of some")
    add("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if given.out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"-o {given.out}: the page is HTML; give a name that ends in .html")
    if not given.out.parent.is_dir():
        raise ValueError(f"-o {given.out}: there is no folder {given.out.parent}; make it first")
    from dkfac.tools.report_page.html import counted
    from dkfac.tools.report_page.page import page

    text, number = page(given.runs, lambda line: print(f"dkfac report: {line}", file=sys.stderr))
    given.out.write_text(text, encoding="utf-8")
    runs = counted(number, "run")
    print(f"wrote {given.out}: {runs}, {len(text.encode()) / 1e3:,.0f} kB; open it in a browser")
    return 0
