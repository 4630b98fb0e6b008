"""``dkfac compare --script``: a training script of the user's, for so many steps, without K-FAC and with it.

Each run is a process of its own from the same seed and with the same stdin. Losses are those that ``backward()`` was
called on; the script ends at the last step. The run without K-FAC tries to attach it, so that what is in the way of the
other is known at its first step. One process: under torchrun, compare two runs by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import runpy
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dkfac.cli.run import read_options
from dkfac.cli.train import HYPER, default_folder

STEPS = 300
TAIL = 10
"""A run's result is the mean loss of the last of so many equal parts."""
RUNS = {"first-order": "without K-FAC", "kfac": "with K-FAC"}
FAILED, WRONG, STOPPED = 1, 2, 130
"""Statuses of a run that has said why itself."""
PATIENCE = 5.0
"""Seconds that an interrupted script has to end."""
BEGIN = """
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the script runs there is nothing to clean up
from dkfac.cli import script
sys.exit(script.record(script.json.loads(sys.argv[1])))
"""
Points = list[dict[str, Any]]


def compare_scripts(given: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the script twice, everything checked that can be before."""
    if given.recipe is not None:
        given.arguments = [given.recipe, *given.arguments]
    if not given.script.is_file():
        raise ValueError(f"there is no script {given.script}")
    if given.nproc != 1:
        raise ValueError("--script compares on one process: leave --nproc out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--script compares on one process: start it without torchrun")
    foreign = [name for name in (*HYPER, "data") if name != "seed" and getattr(given, name) is not None]
    foreign += ["seeds"] if given.seeds != 1 else []
    foreign += [name for name in ("more", "tensorboard", "save_every") if getattr(given, name)]
    if foreign:
        option = f"--{foreign[0].replace('_', '-')}"
        raise ValueError(f"{option} is for recipes: a script has its own arguments, after --")
    if given.steps is not None and given.steps < TAIL:
        raise ValueError(f"--steps {given.steps}: at least {TAIL} are needed to compare")
    given.strategy = given.damping = None
    options = read_options(given)
    folder = given.out or default_folder(f"compare-{given.script.stem}")
    for path in sorted(folder.glob("*/metrics.jsonl")):
        if path.stat().st_size:  # one that took no step is no run
            raise ValueError(f"{path.parent} has a run already: choose another --out")
    return lambda: _compare(given, options, given.steps or STEPS, folder)


def _compare(given: argparse.Namespace, options: dict[str, Any], steps: int, folder: Path) -> int:
    found: dict[str, Points] = {}
    read = bytearray()
    for name, told in RUNS.items():
        place = folder / f"{name}-0"
        place.mkdir(parents=True, exist_ok=True)
        task = {"script": str(given.script), "arguments": given.arguments, "options": options, "target": given.target,
                "steps": steps, "seed": given.seed or 0, "name": name, "folder": str(place)}  # fmt: skip
        print(f"{name}: {steps} steps of {given.script}", file=sys.stderr, flush=True)
        status = _start(task, read)
        if status == STOPPED:
            print(f"dkfac compare: stopped; a script begins anew, so choose another --out than {folder}, or delete it",
                  file=sys.stderr)  # fmt: skip
        elif status not in (0, FAILED, WRONG):
            print(f"dkfac compare: the script ended with status {status} in the run {told}", file=sys.stderr)
        if status:
            return status if status in (WRONG, STOPPED) else FAILED
        lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        found[name] = [line for line in lines if line["kind"] == "step"]
        if len(found[name]) < TAIL:
            print(f"dkfac compare: {name}: {len(found[name])} steps were taken, at least {TAIL} are needed to compare",
                  file=sys.stderr)  # fmt: skip
            return WRONG
    print(conclusion(found))
    print(f"a page of it: dkfac report {folder} -o report.html")
    return FAILED if any(_diverged(points) for points in found.values()) else 0


def _start(task: dict[str, Any], read: bytearray) -> int:
    """Run the script in a process of its own; returns its status. ``read``: what was read from stdin until now."""
    command = [sys.executable, "-c", BEGIN, json.dumps(task)]
    process = subprocess.Popen(command, stdin=None if os.isatty(0) else subprocess.PIPE)
    try:
        if process.stdin is not None:
            _feed(process, process.stdin, read)
        status = process.wait()
        return STOPPED if status == -signal.SIGINT else status
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()
        process.wait()
        return STOPPED


def _feed(process: subprocess.Popen[bytes], pipe: Any, read: bytearray) -> None:
    """Give a process what the one before it got from stdin, then what else comes while it runs."""
    with contextlib.suppress(OSError), pipe:  # it may end early, and there may be no stdin
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


def conclusion(found: dict[str, Points]) -> str:
    """Return a table and who was where first, by means over tenths of the steps."""
    lines = [f"{'':12} {'loss':>9} {'steps':>6} {'seconds':>9} {'ms a step':>10}"]
    ends = {}
    for name, points in found.items():
        known = [p["loss"] for p in points[-(len(points) // TAIL) :] if p["loss"] is not None]
        ends[name] = statistics.fmean(known) if known else math.nan
        pace = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(points)]
        told = 1e3 * statistics.median(pace)
        lines.append(f"{name:12} {ends[name]:9.4g} {len(points):6} {points[-1]['seconds']:9.1f} {told:10.1f}")
    for name, points in found.items():
        step = _diverged(points)
        if step is not None:
            who, rest = ("the first order", "; there is nothing to reach") if name == "first-order" else ("K-FAC", "")
            lines.append(f"{who} diverged: its loss is not a finite number from step {step} on{rest}")
    if not any(_diverged(points) for points in found.values()):
        lines.append(_outcome(found, ends["first-order"]))
    return "\n".join(lines)


def _diverged(points: Points) -> int | None:
    """Return the step from which on the loss is no number until the end."""
    finite = [p["step"] for p in points if p["loss"] is not None]
    last = finite[-1] if finite else 0
    return last + 1 if last < points[-1]["step"] else None


def _outcome(found: dict[str, Points], target: float) -> str:
    """Return when K-FAC is as good as the first order in the end."""
    width = max(1, len(found["kfac"]) // TAIL)
    losses = [math.inf if p["loss"] is None else p["loss"] for p in found["kfac"]]
    for i in range(width, len(losses) + 1):
        if statistics.fmean(losses[i - width : i]) <= target:
            steps = i / len(found["first-order"])
            share = found["kfac"][i - 1]["seconds"] / found["first-order"][-1]["seconds"]
            return f"K-FAC reaches the first order's last loss in {steps:.2f} of its steps and {share:.2f} of its time"
    return "K-FAC does not reach the first order's last loss"


# --- the process of one run ------------------------------------------------------------------------------------


class Enough(SystemExit):
    """The last step was taken."""


class Steps:
    """Writes a line for each step that follows a backward pass, and ends the script at the last."""

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._most = file, most
        self._losses: list[Any] = []
        self._begin: float | None = None
        self._depth = self.taken = 0
        self.device: Any = None

    def watch(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        backward = torch.Tensor.backward

        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and tensor.numel() == 1:
                self._begin = self._begin or time.perf_counter()  # imports and data are not training
                self._losses.append(tensor.detach())
            self._depth += 1
            try:
                return backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self._depth -= 1

        torch.Tensor.backward = noted  # type: ignore[method-assign,assignment]
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if not self._losses or self._begin is None:
            return
        self.taken += 1
        self.device = self._losses[-1].device
        loss = statistics.fmean(float(tensor) for tensor in self._losses)
        self._losses.clear()
        self.add(kind="step", step=self.taken, seconds=time.perf_counter() - self._begin, loss=loss)
        if self.taken >= self._most:
            raise Enough(0)

    def add(self, **entry: Any) -> None:
        from dkfac.recipes.folder import plain

        self._file.write(json.dumps(plain(entry)) + "\n")


def record(task: dict[str, Any]) -> int:
    """Run the script, with K-FAC or to see that it could have it, into a run folder; returns a status."""
    import numpy as np
    import torch

    from dkfac.cli.watch import Watch

    torch.manual_seed(task["seed"])
    random.seed(task["seed"])
    np.random.seed(task["seed"] % 2**32)
    place, is_kfac = Path(task["folder"]), task["name"] == "kfac"
    about = {"recipe": task["script"], "arguments": task["arguments"], "hyper": {"seed": task["seed"]}, "world_size": 1,
             "num_steps": task["steps"], "kfac": task["options"] if is_kfac else None}  # fmt: skip
    _write(place / "settings.json", about)
    watch = Watch(task["options"], task["target"], command="dkfac compare", tries=not is_kfac)
    with open(place / "metrics.jsonl", "w", buffering=1) as file:
        steps = Steps(file, task["steps"])
        steps.watch()
        _refuse_own_kfac()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = _run(task, watch)
        if status in (0, STOPPED) and steps.taken:
            steps.add(kind="end", step=steps.taken, reason="SIGINT" if status else "done")
            _summarise(place, about, watch, steps.device)
    missed = watch.last_word() if status == 0 else None
    if missed is not None:
        print(f"dkfac compare: K-FAC cannot be attached: {missed}", file=sys.stderr)
        return WRONG
    return status


def _refuse_own_kfac() -> None:
    """Let a script that attaches K-FAC itself say so: neither run would be what it is called."""
    from dkfac import kfac
    from dkfac.cli.watch import Refused

    class Own(kfac.KFAC):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise Refused("dkfac compare: the script attaches dkfac.KFAC itself: leave that out for a comparison")

    for module in (kfac, sys.modules["dkfac"]):
        setattr(module, "KFAC", Own)  # noqa: B010 - which a type checker would refuse


def _run(task: dict[str, Any], watch: Any) -> int:
    """Return 0 if the script took its steps or ended well; else a status, having said why."""
    from dkfac.cli.watch import Refused

    sys.argv = [task["script"], *task["arguments"]]
    sys.path[0] = str(Path(task["script"]).resolve().parent)
    try:
        with watch:
            runpy.run_path(os.path.abspath(task["script"]), run_name="__main__")
    except KeyboardInterrupt:
        return STOPPED
    except Refused as reason:
        print(reason.code, file=sys.stderr)
        return WRONG
    except SystemExit as end:
        if end.code in (None, 0):
            return 0
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return _failed(task, end.code if isinstance(end.code, int) else 1)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return _failed(task, 1)
    return 0


def _failed(task: dict[str, Any], status: int) -> int:
    where = f"in the run {RUNS[task['name']]}, see above"
    print(f"dkfac compare: the script ended with status {status} {where}", file=sys.stderr)
    return FAILED


def _summarise(place: Path, about: dict[str, Any], watch: Any, device: Any) -> None:
    """Write what ``dkfac report`` shows beside the steps."""
    from dkfac.recipes.folder import environment, resources

    kfac = watch.attached
    summary: dict[str, Any] = {"peak_memory_bytes": resources(device)}
    if kfac is not None:
        about["kfac"] = kfac.settings.describe()
        summary |= {"kfac": kfac.report(), "plan": json.loads(kfac.plan.to_json()), "layers": repr(kfac)}
    _write(place / "settings.json", about | {"optimizer": watch.optimizer})
    _write(place / "environment.json", environment(device))
    _write(place / "summary.json", summary)


def _write(path: Path, body: Any) -> None:
    from dkfac.recipes.folder import plain

    path.write_text(json.dumps(plain(body), indent=1, default=str) + "\n")
