"""``dkfac selftest``: check and time K-FAC's collectives on the ranks that torchrun started.

Input: options of the command line. Output: a report file, a table, and status 1 if a check failed. Owns: nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any


def add_selftest_command(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest", help="check and time K-FAC's collectives on these ranks", allow_abbrev=False,
        description="Under torchrun: every strategy against one process, the bytes that are sent, the time of each "
        "collective, overlap on and off. torchrun --nproc-per-node N -m dkfac selftest",
    )  # fmt: skip
    add = parser.add_argument
    add("-o", "--out", type=Path, default=Path("selftest.json"), help="the report (default selftest.json)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    add("--backend", help="default: NCCL on a GPU, gloo otherwise")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds after which a check is given up (default 60)")
    add("--quick", action="store_true", help="fewer strategies and smaller buffers")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    import torch

    from dkfac import distributed
    from dkfac.comm import groups
    from dkfac.tools.selftest.run_checks import run_selftest
    from dkfac.tools.selftest.table import render

    if not (math.isfinite(given.timeout) and given.timeout > 0):
        raise ValueError(f"--timeout {given.timeout}: must be a number of seconds > 0")
    if given.out.is_dir() or not given.out.parent.is_dir():
        raise ValueError(f"-o {given.out}: must be a file in a folder that exists")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    is_on_cpu = given.device == "cpu" or not torch.cuda.is_available()
    place = distributed.init(given.backend or ("gloo" if is_on_cpu else None), timeout_seconds=4 * given.timeout)
    try:
        if not groups.is_joined():
            raise ValueError("it needs ranks: start it as torchrun --nproc-per-node N -m dkfac selftest")
        device = torch.device("cpu") if is_on_cpu else place.device
        say = (lambda line: print(line, file=sys.stderr)) if place.rank == 0 else (lambda line: None)
        options = {"out": given.out, "is_quick": given.quick, "timeout": given.timeout}
        report = run_selftest(place, device, say=say, **options)
        if place.rank == 0:
            print(f"{render(report)}\nwrote {given.out}")
        return 0 if report["passed"] else 1
    finally:
        distributed.end()
