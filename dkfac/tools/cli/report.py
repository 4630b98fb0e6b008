"""``dkfac report``: write one HTML page about run folders.

Input: run folders. Output: an HTML file. Owns: nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_report_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="write one HTML page about run folders",
        description="Writes one self-contained HTML page about the runs of `dkfac train` and `dkfac compare`: accuracy "
        "and loss, time by stage, plan, memory, step control, spectra, transfers and settings. Runs that differ only "
        "in the seed are grouped. A folder of run folders stands for all run folders in it.",
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, or a folder of run folders")
    add(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the file to write (default: report.html)",
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"-o {given.out}: the page is HTML; use a name that ends in .html")
    if not given.out.parent.is_dir():
        raise ValueError(f"-o {given.out}: there is no folder {given.out.parent}; create it first")
    from dkfac.tools.report_page.html import counted
    from dkfac.tools.report_page.page import build_page

    text, number = build_page(given.runs, lambda line: print(f"dkfac report: {line}", file=sys.stderr))
    given.out.write_text(text, encoding="utf-8")
    runs = counted(number, "run")
    print(f"wrote {given.out}: {runs}, {len(text.encode()) / 1e3:,.0f} kB; open it in a browser")
    return 0
