"""``dkfac compare --script``: a training script of the user's, for so many steps, without K-FAC and with it.

Each run is a process of its own from the same seed. Losses are those that ``backward()`` was called on; the script
ends at the last step. One process: under torchrun, compare two runs by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dkfac.cli.run import read_options
from dkfac.cli.train import HYPER

STEPS = 300
TAIL = 10
"""A run's result is the mean loss of the last of so many equal parts."""


def compare_scripts(given: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the script twice, everything checked that can be before."""
    if given.recipe is not None:
        given.arguments = [given.recipe, *given.arguments]
    if not given.script.is_file():
        raise ValueError(f"there is no script {given.script}")
    if given.nproc != 1:
        raise ValueError("--script compares on one process: leave --nproc out")
    foreign = [name for name in (*HYPER, "data") if name != "seed" and getattr(given, name) is not None]
    foreign += ["seeds"] if given.seeds != 1 else []
    foreign += [name for name in ("more", "tensorboard", "save_every") if getattr(given, name)]
    if foreign:
        option = f"--{foreign[0].replace('_', '-')}"
        raise ValueError(f"{option} is for recipes: a script has its own arguments, after --")
    given.strategy = given.damping = None
    options, steps = read_options(given), given.steps or STEPS
    folder = given.out or Path("runs") / f"compare-{given.script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return lambda: _compare(given, options, steps, folder)


def _compare(given: argparse.Namespace, options: dict[str, Any], steps: int, folder: Path) -> int:
    found = {}
    for name, kfac in (("first-order", None), ("kfac", options)):
        place = folder / f"{name}-0"
        place.mkdir(parents=True, exist_ok=True)
        (place / "metrics.jsonl").unlink(missing_ok=True)
        about = {"recipe": str(given.script), "hyper": {"seed": given.seed or 0}, "kfac": kfac, "world_size": 1}
        (place / "settings.json").write_text(json.dumps(about, indent=1))
        task = {"script": str(given.script), "arguments": given.arguments, "kfac": kfac, "steps": steps,
                "seed": given.seed or 0, "out": str(place / "metrics.jsonl")}  # fmt: skip
        print(f"{name}: {steps} steps of {given.script}", file=sys.stderr, flush=True)
        status = subprocess.run([sys.executable, "-m", "dkfac.cli.script", json.dumps(task)], check=False).returncode
        if status:
            print(f"dkfac compare: the script ended with status {status} {name}", file=sys.stderr)
            return 1
        found[name] = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    try:
        print(conclusion(found))
    except ValueError as error:
        print(f"dkfac compare: {error}", file=sys.stderr)
        return 2
    print(f"a page of it: dkfac report {folder} -o report.html")
    return 0


def conclusion(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table and who was where first, by means over tenths of the steps."""
    lines = [f"{'':12} {'loss':>9} {'steps':>6} {'seconds':>9} {'ms a step':>10}"]
    ends = {}
    for name, points in found.items():
        if len(points) < TAIL:
            raise ValueError(f"{name}: {len(points)} steps were taken, at least {TAIL} are needed to compare")
        ends[name] = statistics.fmean(p["loss"] for p in points[-(len(points) // TAIL) :])
        pace = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(points)]
        told = 1e3 * statistics.median(pace)
        lines.append(f"{name:12} {ends[name]:9.4f} {len(points):6} {points[-1]['seconds']:9.1f} {told:10.1f}")
    width = max(1, len(found["kfac"]) // TAIL)
    losses = [p["loss"] for p in found["kfac"]]
    for i in range(width, len(losses) + 1):
        if statistics.fmean(losses[i - width : i]) <= ends["first-order"]:
            steps, seconds = i / len(found["first-order"]), found["kfac"][i - 1]["seconds"]
            share = seconds / found["first-order"][-1]["seconds"]
            return "\n".join([*lines, f"K-FAC reaches the first order's last loss in {steps:.2f} of its steps and "
                              f"{share:.2f} of its time"])  # fmt: skip
    return "\n".join([*lines, "K-FAC does not reach the first order's last loss"])


class Enough(SystemExit):
    """The last step was taken."""


def record(task: dict[str, Any]) -> int:
    """Run the script, with K-FAC if it is asked for, and write a line for each step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from dkfac.cli.watch import Watch

    torch.manual_seed(task["seed"])
    last: list[Any] = []
    backward, depth = torch.Tensor.backward, [0]

    def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0 and tensor.numel() == 1:
            begin[0] = begin[0] or time.perf_counter()  # imports and data are not training
            last.append(tensor.detach())
        depth[0] += 1
        try:
            return backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            depth[0] -= 1

    torch.Tensor.backward = noted  # type: ignore[method-assign,assignment]
    begin = [0.0]
    taken = 0
    with open(task["out"], "w") as file:

        def stepped(*_: Any) -> None:
            nonlocal taken
            if not last:
                return
            taken += 1
            loss = float(torch.stack([t.double().reshape(()).cpu() for t in last]).mean())
            last.clear()
            seconds = time.perf_counter() - begin[0]
            line = {"kind": "step", "step": taken, "epoch": taken, "seconds": seconds, "loss": loss}
            file.write(json.dumps(line) + "\n")
            if taken >= task["steps"]:
                raise Enough(0)

        register_optimizer_step_post_hook(stepped)
        sys.argv = [task["script"], *task["arguments"]]
        sys.path[0] = str(Path(task["script"]).resolve().parent)
        watch = Watch(task["kfac"], None) if task["kfac"] is not None else None
        try:
            if watch is None:
                runpy.run_path(os.path.abspath(task["script"]), run_name="__main__")
            else:
                with watch:
                    runpy.run_path(os.path.abspath(task["script"]), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    missed = None if watch is None else watch.last_word()
    if missed is not None:
        print(f"dkfac compare: K-FAC was not attached: {missed}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(record(json.loads(sys.argv[1])))
