"""With a learning rate tuned for each: the optimizer alone, the former defaults of dkfac, and the one line today.

Tasks: a GPT of 10.8M on characters and a ViT of 4.8M on CIFAR-10 with AdamW, ResNet-18 on CIFAR-10 with SGD. Arms:
"alone" is AdamW or SGD; "former" is what ``dkfac.KFAC(model, optimizer)`` did on a GPU before ``curvature="adaptive"``
and ``block_dim``; "today" is the one line. All arms of a task get the same five learning rates with seed 0, and one
more beyond the lowest or highest where that is an arm's best (at most two). The best rate of each arm, and for K-FAC
also the best of the optimizer alone, get two more seeds. K-FAC is also trained with whole factors ("whole") at its two
rates. Losses are those of held-out data, without label smoothing.
Is today no worse than former? Does the rate chosen for the optimizer alone do for K-FAC?

Runs share the GPU, so their seconds say nothing. No run begins after ``--seconds``; the same command goes on with the
runs in ``--out`` and in the lines beside it. ``none --device cpu --tiny`` is a smoke test of the script.
"""

import argparse
import math
import os
import pathlib
import time
from functools import partial
from statistics import median

import torch
from char_gpt import read_text
from cifar import read_archive
from environment import write
from machine import Machine, known_runs, lines_of
from tuned_tasks import CASES, train

ARMS = ("alone", "former", "today")
PAIRS = (
    ("today", "alone"), ("today", "former"), ("at_alone", "today"), ("today", "whole"), ("at_alone", "whole_at_alone"),
)  # fmt: skip
"""What is compared: how far is the one above the other?"""
FURTHER = 2
"""Rates that a task may get beyond its five."""


def config_of(name: str, arm: str, lr: float, seed: int, *, tiny: bool) -> dict:
    """Return all that a run depends on, as JSON has it: a run in a file is recognised by it."""
    case = CASES[name]
    given = {"former": case.former, "today": {}, "whole": {"block_dim": None}}
    options = case.options | given[arm] if arm in given else None
    size = case.tiny if tiny else case.size
    return {"task": name, "arm": arm, "lr": lr, "seed": seed, "size": size, "options": options}


class Found:
    """What is known of a task: its learning rates, and its runs by arm, rate and seed."""

    def __init__(self, name: str, runs: list[dict], *, tiny: bool) -> None:
        self.config = partial(config_of, name, tiny=tiny)
        self.rates = list(CASES[name].rates[1:4] if tiny else CASES[name].rates)
        own = [(run, run["config"]) for run in runs if run["config"]["task"] == name]
        self.runs = {(c["arm"], c["lr"], c["seed"]): run for run, c in own}
        self.runs = {key: run for key, run in self.runs.items() if run["config"] == self.config(*key)}
        ratio = self.rates[1] / self.rates[0]
        for _ in range(FURTHER):
            best = self.best().values()
            if self.rates[0] in best:
                self.rates.insert(0, float(f"{self.rates[0] / ratio:.2g}"))
            elif self.rates[-1] in best:
                self.rates.append(float(f"{self.rates[-1] * ratio:.2g}"))

    def figure(self, name: str, *key) -> float:
        return self.runs[key].get(name, math.inf)  # infinite after an error

    def best(self) -> dict[str, float]:
        """Return the best rate of each arm with seed 0; nothing before all were tried."""
        if any((arm, lr, 0) not in self.runs for arm in ARMS for lr in self.rates):
            return {}
        return {arm: min(self.rates, key=lambda lr: self.figure("loss", arm, lr, 0)) for arm in ARMS}

    def chosen(self) -> dict[str, tuple[str, float]]:
        """Return what gets several seeds: each arm at its best rate, and K-FAC at that of the optimizer alone."""
        chosen = {arm: (arm, lr) for arm, lr in self.best().items()}
        if not chosen:
            return {}
        best, alone = chosen["today"][1], chosen["alone"][1]
        more = {"at_alone": ("today", alone), "whole": ("whole", best), "whole_at_alone": ("whole", alone)}
        return chosen | more

    def table(self, seeds: int) -> dict[str, dict]:
        """Return the medians of what was chosen and has all its seeds."""
        rows = {}
        for label, (arm, lr) in self.chosen().items():
            if all((arm, lr, seed) in self.runs for seed in range(seeds)):
                rows[label] = {"lr": lr, "at_edge": lr in (self.rates[0], self.rates[-1])}
                for name in ("loss", "error_rate"):
                    each = [self.figure(name, arm, lr, seed) for seed in range(seeds)]
                    rows[label] |= {name: median(each), f"{name}_of_seeds": each}
        return rows


def wanted(runs: list[dict], names: list[str], seeds: int, *, tiny: bool = False) -> list[dict]:
    """Return all runs that the study needs, as far as the runs so far tell: rates first, then seeds."""
    found = [Found(name, runs, tiny=tiny) for name in names]
    first = [f.config(arm, lr, 0) for f in found for lr in f.rates for arm in ARMS]
    chosen = [(f, key) for f in found for key in dict.fromkeys(f.chosen().values())]  # K-FAC's rate may be chosen twice
    more = [f.config(*key, seed) for f, key in chosen for seed in range(seeds)]
    return first + more


def judge(tables: dict[str, dict]) -> dict:
    """Print the table and what follows from it; return by how much one arm's median is above another's."""
    print(f"{'task':9} {'arm':9} {'best lr':>8} {'loss':>8} {'error':>8}   losses of the seeds")
    verdict: dict[str, dict] = {}
    for name, rows in tables.items():
        for label, r in rows.items():
            each = " ".join(f"{x:.4f}" for x in r["loss_of_seeds"])
            print(f"{name:9} {label:9} {r['lr']:8g} {r['loss']:8.4f} {r['error_rate']:8.2%}   {each}"
                  f"{'  (at an end of the rates)' if r['at_edge'] and label in ARMS else ''}")  # fmt: skip
        verdict[name] = {}
        for one, other in PAIRS:
            if one in rows and other in rows:
                of = {n: rows[one][n] / max(rows[other][n], 1e-9) - 1 for n in ("loss", "error_rate")}
                verdict[name][f"{one}_above_{other}"] = of
    for name, v in verdict.items():
        if above := v.get("today_above_former"):
            losses = tables[name]["former"]["loss_of_seeds"]
            spread = (max(losses) - min(losses)) / median(losses)
            said = "no worse" if above["loss"] <= 0 else "within its spread" if above["loss"] <= spread else "WORSE"
            print(f"{name}: today against former at their best rates: loss {above['loss']:+.2%}, error "
                  f"{above['error_rate']:+.2%}, spread of former's seeds {spread:.2%}: {said}")  # fmt: skip
    for figure in ("loss", "error_rate"):
        above = {n: v["at_alone_above_today"][figure] for n, v in verdict.items() if "at_alone_above_today" in v}
        if above:
            each, middle = ", ".join(f"{n} {x:+.2%}" for n, x in above.items()), median(above.values())
            said = "within 1%" if middle <= 0.01 else "MORE THAN 1%"
            print(f"K-FAC's {figure} at the rate chosen for the optimizer alone, above that at its own: {each}; median "
                  f"of {len(above)} tasks {middle:+.2%}: {said}")  # fmt: skip
    return verdict


def read(archive: str, names: list[str], *, tiny: bool) -> dict:
    """Return what the tasks learn from, in memory that processes share."""
    data: dict = {}
    if "gpt" in names:
        *texts, kinds = read_text(100_000 if tiny else 4_000_000)
        data["text"] = (*(text.share_memory_() for text in texts), kinds)
    if names != ["gpt"]:
        x, y = torch.randint(256, (600, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (600,))
        images = {"train_x": x, "train_y": y} if archive == "none" else read_archive(archive)
        data["images"] = {n: images[n].contiguous().share_memory_() for n in ("train_x", "train_y")}
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("archive", help="of images, as for cifar.py; none: random images")
    add("--tasks", default=",".join(CASES))
    add("--seeds", type=int, default=3)
    add("--workers", type=int, default=12, help="runs at a time")
    add("--seconds", type=float, default=450, help="no run begins after so long; called again, it goes on")
    add("--grace", type=float, default=90, help="seconds that the runs under way then have to end")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--tiny", action="store_true", help="small models, few steps and three rates, to try the script")
    add("--out", required=True)
    given = parser.parse_args()
    begin, names = time.perf_counter(), given.tasks.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no task is called {', '.join(unknown)}: there are {', '.join(CASES)}")
    needs = partial(wanted, names=names, seeds=given.seeds, tiny=given.tiny)
    data, known = read(given.archive, names, tiny=given.tiny), known_runs(given.out)
    pathlib.Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    left = given.seconds - (time.perf_counter() - begin)
    machine = Machine(data, train, given.workers, left, known, lines_of(given.out), given.device)
    try:
        finished = machine.follow(needs, given.grace)
    finally:
        machine.close()
    found = {name: Found(name, machine.runs, tiny=given.tiny) for name in names}
    tables = {name: f.table(given.seeds) for name, f in found.items()}
    verdict, seconds = judge(tables), round(time.perf_counter() - begin, 1)
    failed = sum("error" in run for run in machine.runs)
    print(f"{len(machine.runs)} runs, {len(machine.runs) - len(known)} new, {failed} failed, {seconds:.0f} s"
          f"{'' if finished else '; NOT FINISHED: call again'}")  # fmt: skip
    shared = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
    figures = {"finished": finished, "workers": given.workers, "mps": shared, "seconds": seconds}
    rates = {name: f.rates for name, f in found.items()}
    write(given.out, figures | {"rates": rates, "table": tables, "verdict": verdict, "runs": machine.runs})


if __name__ == "__main__":
    main()
