"""``dkfac compare --script``: run a user's training script for a number of steps, without K-FAC and with it.

Each run is a separate process with the same seed and the same stdin. The recorded losses are those on which the script
calls ``backward()``; the script is ended after the last step. The run without K-FAC tries to attach it, so that an
error shows at its first step and not in the second run. One process only: under torchrun, compare two runs yourself.

Input: options of the command line. Output: two run folders and a verdict. Owns: the two child processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dkfac.tools.cli.recording import FAILED, RUNS, STOPPED, WRONG
from dkfac.tools.cli.run import read_options
from dkfac.tools.cli.train import HYPER, default_folder

_DEFAULT_STEPS = 300
_TAIL = 10
"""The result of a run is the mean loss over the last ``1 / _TAIL`` of its steps."""
_EXIT_SECONDS = 5.0
"""Seconds that an interrupted script has to exit."""
_CHILD_CODE = """
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to clean up before the script runs
from dkfac.tools.cli import recording
sys.exit(recording.record(recording.json.loads(sys.argv[1])))
"""
LossPoints = list[dict[str, Any]]


def compare_scripts(given: argparse.Namespace) -> Callable[[], int]:
    """Check the options and return a function that runs the script twice."""
    if given.recipe is not None:
        given.arguments = [given.recipe, *given.arguments]
    if not given.script.is_file():
        raise ValueError(f"there is no script {given.script}")
    if given.nproc != 1:
        raise ValueError("--script compares on one process: omit --nproc")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--script compares on one process: start it without torchrun")
    foreign = [name for name in (*HYPER, "data") if name != "seed" and getattr(given, name) is not None]
    foreign += ["seeds"] if given.seeds != 1 else []
    foreign += [name for name in ("more", "tensorboard", "save_every") if getattr(given, name)]
    if foreign:
        option = f"--{foreign[0].replace('_', '-')}"
        raise ValueError(f"{option} is for recipes: pass the script's own arguments after --")
    if given.steps is not None and given.steps < _TAIL:
        raise ValueError(f"--steps {given.steps}: at least {_TAIL} are needed to compare")
    given.strategy = given.damping = None
    options = read_options(given)
    folder = given.out or default_folder(f"compare-{given.script.stem}")
    for path in sorted(folder.glob("*/metrics.jsonl")):
        if path.stat().st_size:  # an empty file is from a run without steps
            raise ValueError(f"{path.parent} already has a run: use another --out")
    return lambda: _compare(given, options, given.steps or _DEFAULT_STEPS, folder)


def _compare(given: argparse.Namespace, options: dict[str, Any], steps: int, folder: Path) -> int:
    found: dict[str, LossPoints] = {}
    read = bytearray()
    for name, run_title in RUNS.items():
        place = folder / f"{name}-0"
        place.mkdir(parents=True, exist_ok=True)
        task = {"script": str(given.script), "arguments": given.arguments, "options": options, "target": given.target,
                "steps": steps, "seed": given.seed or 0, "name": name, "folder": str(place)}  # fmt: skip
        print(f"{name}: {steps} steps of {given.script}", file=sys.stderr, flush=True)
        status = _start(task, read)
        if status == STOPPED:
            print(f"dkfac compare: stopped; a script cannot be resumed: use another --out than {folder}, or delete it",
                  file=sys.stderr)  # fmt: skip
        elif status not in (0, FAILED, WRONG):
            print(f"dkfac compare: the script ended with status {status} in the run {run_title}", file=sys.stderr)
        if status:
            return status if status in (WRONG, STOPPED) else FAILED
        lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        found[name] = [line for line in lines if line["kind"] == "step"]
        if len(found[name]) < _TAIL:
            print(f"dkfac compare: {name}: {len(found[name])} steps were taken, at least {_TAIL} are needed to compare",
                  file=sys.stderr)  # fmt: skip
            return WRONG
    print(conclusion(found))
    print(f"for a report: dkfac report {folder} -o report.html")
    return FAILED if any(_diverged(points) for points in found.values()) else 0


def _start(task: dict[str, Any], read: bytearray) -> int:
    """Run the script in a child process and return its exit status. ``read``: the bytes read from stdin so far."""
    command = [sys.executable, "-c", _CHILD_CODE, json.dumps(task)]
    process = subprocess.Popen(command, stdin=None if os.isatty(0) else subprocess.PIPE)
    try:
        if process.stdin is not None:
            _feed(process, process.stdin, read)
        status = process.wait()
        return STOPPED if status == -signal.SIGINT else status
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
        process.kill()
        process.wait()
        return STOPPED


def _feed(process: subprocess.Popen[bytes], pipe: Any, read: bytearray) -> None:
    """Send a process the stdin that the previous one got, then further input while it runs."""
    with contextlib.suppress(OSError), pipe:  # the process may exit early, and there may be no stdin
        pipe.write(read)
        pipe.flush()
        while process.poll() is None:
            if select.select([0], [], [], 0.2)[0]:
                chunk = os.read(0, 65536)
                if not chunk:
                    break
                read += chunk
                pipe.write(chunk)
                pipe.flush()


def conclusion(found: dict[str, LossPoints]) -> str:
    """Return a table of both runs and the verdict, from mean losses over tenths of the steps."""
    lines = [f"{'':12} {'loss':>9} {'steps':>6} {'seconds':>9} {'ms/step':>10}"]
    ends = {}
    for name, points in found.items():
        known = [p["loss"] for p in points[-(len(points) // _TAIL) :] if p["loss"] is not None]
        ends[name] = statistics.fmean(known) if known else math.nan
        pace = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(points)]
        median_ms = 1e3 * statistics.median(pace)
        lines.append(f"{name:12} {ends[name]:9.4g} {len(points):6} {points[-1]['seconds']:9.1f} {median_ms:10.1f}")
    for name, points in found.items():
        step = _diverged(points)
        if step is not None:
            is_first = name == "first-order"
            who, rest = ("the first-order run", "; there is no target to reach") if is_first else ("K-FAC", "")
            lines.append(f"{who} diverged: its loss is not finite from step {step} on{rest}")
    if not any(_diverged(points) for points in found.values()):
        lines.append(_outcome(found, ends["first-order"]))
    return "\n".join(lines)


def _diverged(points: LossPoints) -> int | None:
    """Return the first step after which no loss is finite; None if the last one is."""
    finite = [p["step"] for p in points if p["loss"] is not None]
    last = finite[-1] if finite else 0
    return last + 1 if last < points[-1]["step"] else None


def _outcome(found: dict[str, LossPoints], target: float) -> str:
    """Return whether K-FAC reaches the final loss of the first-order run, and when."""
    width = max(1, len(found["kfac"]) // _TAIL)
    losses = [math.inf if p["loss"] is None else p["loss"] for p in found["kfac"]]
    for i in range(width, len(losses) + 1):
        if statistics.fmean(losses[i - width : i]) <= target:
            steps = i / len(found["first-order"])
            share = found["kfac"][i - 1]["seconds"] / found["first-order"][-1]["seconds"]
            what = "the final loss of the first-order run"
            return f"K-FAC reaches {what} in {steps:.2f} of its steps and {share:.2f} of its time"
    return "K-FAC does not reach the final loss of the first-order run"
