"""Which settings suit a run of a few hundred steps? SGD and K-FAC on the digits, judged on the validation images.

One axis at a time around the defaults, at SGD's best learning rate, three seeds each. About five minutes of one core:

    ./run bench digits_defaults
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import dkfac
from dkfac.recipes import digits

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DAMPINGS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
INTERVALS = tuple((factor, inverse) for factor in (1, 2, 10) for inverse in (10, 20, 100))
FIRST_SEED = 1000
"""Other starts than the demo's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "digits_defaults_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = digits.load("validation")
    digits.train(data, digits.Recipe(epochs=1), {"announce": False})  # the first run pays for loading the kernels
    start = time.process_time()
    rows: list[dict[str, Any]] = []
    for row in study(data, arguments.epochs, arguments.seeds):
        rows.append(row)
        print(as_line(row), flush=True)
    used = time.process_time() - start
    result = {"environment": environment(), "cpu_seconds": round(used, 1), "epochs": arguments.epochs, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{used:.0f} s of one core; wrote {arguments.out}", file=sys.stderr)


def study(data: digits.Digits, epochs: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per setting; the learning rate of the later axes is the one with SGD's lowest validation loss."""

    def run(recipe: digits.Recipe, options: dict[str, Any] | None) -> list[digits.Point]:
        # Seconds of this process: other work on the machine stretches the clock on the wall, at one thread not this.
        return digits.train(data, recipe, options, clock=time.process_time)

    def measure(axis: str, lr: float, kfac: dict[str, Any] | None) -> dict[str, Any]:
        recipes = [digits.Recipe(lr=lr, epochs=epochs, seed=FIRST_SEED + i) for i in range(seeds)]
        options = None if kfac is None else {**kfac, "announce": False}
        return summary(axis, lr, kfac, [run(recipe, options) for recipe in recipes])

    sgd = []
    for lr in RATES:
        sgd.append(measure("lr", lr, None))
        yield sgd[-1]
        yield measure("lr", lr, {})
    best = min(sgd, key=lambda row: row["loss"])["lr"]
    for damping in DAMPINGS:
        yield measure("damping", best, {"damping": damping})
    for factor, inverse in INTERVALS:
        yield measure(
            "intervals", best, {"factor_interval": factor, "inverse_interval": inverse, "warmup_refresh": None}
        )
    for damping in (1e-2, 1e-3, 3e-4):
        yield measure("norm_form", best, {"norm_form": "unit", "norm_damping": damping})


def summary(axis: str, lr: float, kfac: dict[str, Any] | None, curves: list[list[digits.Point]]) -> dict[str, Any]:
    """Means over the seeds, and each seed's epochs to 97%; a run that never got there counts as one epoch longer."""
    reached = [digits.first_reaching(curve, 0.97) for curve in curves]
    to_target = [curve[-1].epochs + 1 if p is None else p.epochs for p, curve in zip(reached, curves, strict=True)]
    seconds = [2 * curve[-1].seconds if p is None else p.seconds for p, curve in zip(reached, curves, strict=True)]
    return {
        "axis": axis,
        "lr": lr,
        "kfac": kfac,
        "loss": fmean(curve[-1].held_out_loss for curve in curves),
        "accuracy": fmean(curve[-1].accuracy for curve in curves),
        "mean_accuracy_of_the_run": fmean(fmean(point.accuracy for point in curve) for curve in curves),
        "epochs_to_97": fmean(to_target),
        "epochs_to_97_by_seed": [round(value, 2) for value in to_target],
        "seconds_to_97": fmean(seconds),
        "seconds": fmean(curve[-1].seconds for curve in curves),
        "num_missed": reached.count(None),
    }


def as_line(row: dict[str, Any]) -> str:
    what = "SGD" if row["kfac"] is None else "K-FAC " + " ".join(f"{k}={v}" for k, v in row["kfac"].items())
    return (
        f"{row['axis']:10} lr {row['lr']:<5} loss {row['loss']:.4f}  final {row['accuracy']:.2%}  "
        f"run {row['mean_accuracy_of_the_run']:.2%}  to 97%: {row['epochs_to_97']:5.2f} epochs "
        f"{row['seconds_to_97']:5.2f} s  all {row['seconds']:5.2f} s  {what}"
    )


def environment() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dkfac": dkfac.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


if __name__ == "__main__":
    main()
