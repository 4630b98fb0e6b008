"""Which settings suit a run of a few hundred steps? SGD and K-FAC on the digits, evaluated on the validation images.

Varies one setting at a time around the defaults, at SGD's best learning rate, with three seeds each: five to six
minutes on one core. Three seeds only suggest candidates; the second command compares a few of them with twelve other
seeds. The third command tries high learning rates.

    ./run bench digits_defaults
    ./run bench digits_defaults --confirm
    ./run bench digits_defaults --early

``--no-norm``: use the demo's network without its batch norm layers.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from environment import write

import dkfac
from dkfac.tools.recipes import digits

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DAMPINGS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
INTERVALS = tuple((factor, inverse) for factor in (1, 2, 10) for inverse in (10, 20, 100))
BEFORE: dict[str, Any] = {"rescale": "norm-global", "warmup_refresh": (10, 100)}
"""The defaults until refreshes slowed down and lengths were held back (docs/notes/010-early-steps.md)."""
EARLY: tuple[dict[str, Any] | None, ...] = (
    None,
    BEFORE,
    BEFORE | {"rescale": "norm-kl"},
    BEFORE | {"warmup_refresh": 1.3},
    {},
)
CANDIDATES: tuple[dict[str, Any], ...] = (
    {"rescale": "norm"},
    {},
    {"damping": 1e-3},
    {"damping": 1e-2},
    BEFORE,
)
SGD_BEST_LR = {True: 0.05, False: 0.1}
"""As the first command found it, with and without normalisation layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, help="default 3, with --confirm 12")
    parser.add_argument("--confirm", action="store_true", help="the candidates alone, from other starts")
    parser.add_argument("--early", action="store_true", help="what early refreshes and a held-back length change")
    parser.add_argument("--no-norm", action="store_true", help="the network without normalisation layers")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name, seeds, first_seed, rows_of = ("defaults", 3, 1000, study)
    if arguments.confirm:
        name, seeds, first_seed, rows_of = ("confirm", 12, 2000, confirm)
    if arguments.early:
        name, rows_of = "early", early
    name += "_no_norm" if arguments.no_norm else ""
    out = arguments.out or Path(__file__).parent / "results" / f"digits_{name}_cpu.json"
    recipe = digits.DigitsConfig(epochs=arguments.epochs, batch_norm=not arguments.no_norm)
    recipes = [replace(recipe, seed=first_seed + i) for i in range(arguments.seeds or seeds)]
    torch.set_num_threads(1)
    bench = Bench(digits.load_digit_images("validation"), recipes)
    digits.train_digits(
        bench.data, replace(recipe, epochs=1), {"announce": False}
    )  # the first run pays for loading kernels
    start = time.process_time()
    rows: list[dict[str, Any]] = []
    for row in rows_of(bench):
        rows.append(row)
        print(as_line(row), flush=True)
    used = time.process_time() - start
    result = {
        "cpu_seconds": round(used, 1),
        "epochs": arguments.epochs,
        "batch_norm": not arguments.no_norm,
        "kfac_defaults": dkfac.Settings().describe(),
        "seeds": [recipe.seed for recipe in recipes],
        "rows": rows,
    }
    write(out, result)


@dataclass(frozen=True)
class Bench:
    data: digits.Digits
    recipes: list[digits.DigitsConfig]

    def measure(self, axis: str, lr: float, kfac: dict[str, Any] | None) -> dict[str, Any]:
        """Return a row: one setting from every start. Seconds are those of this process: other work on the
        machine stretches the clock on the wall, at one thread this one hardly."""
        options = None if kfac is None else {**kfac, "announce": False}
        recipes = [replace(recipe, lr=lr) for recipe in self.recipes]
        curves = [digits.train_digits(self.data, recipe, options, clock=time.process_time) for recipe in recipes]
        return summary(axis, lr, kfac, curves)


def study(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row per setting; the learning rate of the later axes is the one with SGD's lowest validation loss."""
    sgd = []
    for lr in RATES:
        sgd.append(bench.measure("lr", lr, None))
        yield sgd[-1]
        yield bench.measure("lr", lr, {})
    best = min((row for row in sgd if row["loss"] is not None), key=lambda row: row["loss"])["lr"]
    for damping in DAMPINGS:
        yield bench.measure("damping", best, {"damping": damping})
    for factor, inverse in INTERVALS:
        rhythm = {"factor_interval": factor, "inverse_interval": inverse, "warmup_refresh": None}
        yield bench.measure("intervals", best, rhythm)
    for damping in (1e-2, 1e-3, 3e-4) if bench.recipes[0].batch_norm else ():
        yield bench.measure("norm_form", best, {"norm_form": "unit", "norm_damping": damping})


def early(bench: Bench) -> Iterator[dict[str, Any]]:
    for lr, kfac in itertools.product(RATES[2:], EARLY):
        yield bench.measure("early", lr, kfac)


def confirm(bench: Bench) -> Iterator[dict[str, Any]]:
    for kfac in (None, *CANDIDATES):
        yield bench.measure("confirm", SGD_BEST_LR[bench.recipes[0].batch_norm], kfac)


def summary(axis: str, lr: float, kfac: dict[str, Any] | None, curves: list[list[digits.Point]]) -> dict[str, Any]:
    """Means over the seeds, and each seed's epochs to 97%.

    A run that never got there counts as one epoch longer than it was and, in seconds, as twice as long. The loss is
    None where a run diverged.
    """
    loss = fmean(curve[-1].held_out_loss for curve in curves)
    reached = [digits.first_reaching(curve, 0.97) for curve in curves]
    to_target = [curve[-1].epochs + 1 if p is None else p.epochs for p, curve in zip(reached, curves, strict=True)]
    seconds = [2 * curve[-1].seconds if p is None else p.seconds for p, curve in zip(reached, curves, strict=True)]
    return {
        "axis": axis,
        "lr": lr,
        "kfac": kfac,
        "loss": loss if loss < 1e6 else None,
        "accuracy": fmean(curve[-1].accuracy for curve in curves),
        "mean_accuracy_of_the_run": fmean(fmean(point.accuracy for point in curve) for curve in curves),
        "epochs_to_97": fmean(to_target),
        "epochs_to_97_standard_error": stdev(to_target) / len(to_target) ** 0.5 if len(to_target) > 1 else None,
        "epochs_to_97_by_seed": [round(value, 2) for value in to_target],
        "seconds_to_97": fmean(seconds),
        "seconds": fmean(curve[-1].seconds for curve in curves),
        "num_missed": reached.count(None),
    }


def as_line(row: dict[str, Any]) -> str:
    what = "SGD" if row["kfac"] is None else "K-FAC " + " ".join(f"{k}={v}" for k, v in row["kfac"].items())
    loss = "  none" if row["loss"] is None else f"{row['loss']:.4f}"
    return (
        f"{row['axis']:10} lr {row['lr']:<5} loss {loss}  final {row['accuracy']:.2%}  "
        f"run {row['mean_accuracy_of_the_run']:.2%}  to 97%: {row['epochs_to_97']:5.2f} epochs "
        f"{row['seconds_to_97']:5.2f} s  all {row['seconds']:5.2f} s  {what}"
    )


if __name__ == "__main__":
    main()
