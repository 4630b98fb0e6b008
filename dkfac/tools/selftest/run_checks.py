"""Run the checks, and write one report, also if a check hangs.

Input: the ranks, a device, the report's file. Output: the report. Owns: the process groups of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dkfac import __version__, distributed
from dkfac.comm import agree
from dkfac.comm.groups import Groups, backends_of, make_groups, only, sends_by_nccl
from dkfac.tools.selftest.checks import NamedCheck, all_checks
from dkfac.tools.selftest.table import vacuous
from dkfac.tools.selftest.timing import BUFFER_SIZES, time_collectives

HANGS = 3
"""Exit status after a check that took too long."""


def run_selftest(
    place: distributed.Place, device: torch.device, *, out: Path, is_quick: bool = False, timeout: float = 60.0,
    say: Callable[[str], Any] = print, leave: Callable[[int], Any] = os._exit,
) -> dict[str, Any]:  # fmt: skip
    """Return the report, which rank 0 writes to ``out`` after each check. A collective call.

    A check that takes more than ``timeout`` seconds on a rank ends that process by ``leave``, after it is noted.
    """
    groups = make_groups()
    report = _begin(place, device, groups)

    def write() -> None:
        if place.rank == 0:
            out.write_text(json.dumps(report, indent=1) + "\n")

    def give_up(name: str) -> None:
        report["hung"] = name
        write()
        what = f"rank {place.rank}: {name!r} took more than {timeout:.0f} s; is a rank stuck or its network slow?"
        print(f"dkfac selftest: {what} The report is {out}", file=sys.stderr, flush=True)
        leave(HANGS)

    try:
        alone = only(groups)
        with _deadline(timeout, "timing", give_up):
            report["timings"] = time_collectives(groups, device, BUFFER_SIZES[:2] if is_quick else BUFFER_SIZES)
        for check in all_checks((place.rank, place.world_size), device, alone, is_quick=is_quick):
            report["running"] = check.name
            write()
            with _deadline(timeout, check.name, give_up):
                report["checks"].append(_result(check, device))
            say(f"{check.name}: {'passed' if report['checks'][-1]['passed'] else 'FAILED'}")
    finally:
        groups.close()
    del report["running"]
    report["vacuous"] = vacuous(report)
    report["passed"] = all(check["passed"] for check in report["checks"])
    write()
    return report


def _begin(place: distributed.Place, device: torch.device, groups: Groups) -> dict[str, Any]:
    hosts = agree.exchange_text(groups, socket.gethostname(), device)
    is_nccl = sends_by_nccl(device)
    return {
        "version": 1,
        "dkfac": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": place.world_size,
        "num_hosts": len(set(hosts)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": "nccl" if is_nccl else "gloo" if "gloo" in backends_of() else backends_of(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_nccl else None,  # type: ignore[no-untyped-call]
        "checks": [],
        "timings": [],
        "running": "timing",
    }


def _result(check: NamedCheck, device: torch.device) -> dict[str, Any]:
    """Run a check; the report has the worst number of all ranks."""
    begin, reason = time.perf_counter(), None
    details: dict[str, Any] = {}
    try:
        mine, details = check.run()
    except (ValueError, RuntimeError) as error:
        mine, reason = float("inf"), f"{type(error).__name__}: {error}"
    values = [row[0] for row in distributed.gather([mine], device)]
    worst = max(values)
    found = {
        "name": check.name,
        "what": check.what,
        "value": worst,
        "limit": check.limit,
        "passed": worst <= check.limit,
    }
    found |= {"seconds": time.perf_counter() - begin, "worst_rank": values.index(worst), **details}
    return found | ({} if reason is None else {"error": reason})


@contextlib.contextmanager
def _deadline(seconds: float, name: str, give_up: Callable[[str], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, give_up, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
