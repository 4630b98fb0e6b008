"""The demo: train a small CNN on handwritten digits with SGD and with K-FAC, from the same initial weights.

Input: command-line flags. Output: a table, a verdict and a plot. Owns: nothing between runs.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TextIO

import torch

import dkfac
from dkfac.tools.recipes import digits

TARGET = 0.97
_OPTIMIZERS = ("SGD", "K-FAC")
_COLOURS = {"SGD": "#8a8a8a", "K-FAC": "#c1440e"}
Curves = dict[str, list[list[digits.Point]]]
"""For each optimizer, one curve per seed."""


@dataclass(frozen=True, slots=True)
class Options:
    epochs: int
    seeds: int
    processes: int
    out: Path


def run_demo(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 on success, 1 if a package is missing, 2 for an invalid flag."""
    options = parse(argv)
    try:
        for package in ("matplotlib", "sklearn"):
            importlib.import_module(package)
    except ImportError as error:
        print(f"the demo needs {error.name}, which is not installed: pip install scikit-learn matplotlib", file=sys.stderr)
        return 1
    if options.processes > 1 and "RANK" not in os.environ:
        return _start_ranks(options.processes, sys.argv[1:] if argv is None else list(argv))
    # A network this small gains nothing from a second thread, and on a busy machine threads waiting for each other
    # make it ten times slower.
    torch.set_num_threads(1)
    place = dkfac.distributed.init()
    data, recipe = digits.load_digit_images(), digits.DigitsConfig(epochs=options.epochs)
    if place.rank == 0:
        print(introduction(data, recipe, options.seeds, place.world_size))
    curves = train_both(data, recipe, options.seeds, place)
    dkfac.distributed.end()
    if place.rank > 0:
        return 0
    verdicts = [target_verdict(curves, "epochs"), target_verdict(curves, "seconds"), accuracy_verdict(curves)]
    print("", target_table(curves), "", *verdicts, sep="\n")
    path = options.out / "digits.png"
    plot(curves, path)
    print(f"plot: {path}")
    return 0


def _start_ranks(num_processes: int, flags: list[str]) -> int:
    """Run the demo on ``num_processes`` ranks with torchrun; return the exit code."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [sys.executable, *torchrun, "-m", "dkfac.tools.recipes.demo", *flags]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            return child.wait()  # torchrun received the signal too and stops the ranks


def parse(argv: Sequence[str] | None) -> Options:
    """Parse and check the flags. An invalid flag exits with code 2 before anything starts."""
    parser = argparse.ArgumentParser(
        prog="dkfac.tools.recipes.demo", description="Train a small CNN on handwritten digits with SGD and with K-FAC."
    )
    parser.add_argument("--epochs", type=_integer("epochs", 1, 200), help="length of each run (default 10)")
    parser.add_argument("--seeds", type=_integer("seeds", 1, 20), help="number of seeds to compare (default 5)")
    parser.add_argument("--processes", type=_integer("processes", 1, 16), default=2,
                        help="number of processes that share each batch (default %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the plot (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 epochs and 1 seed unless set: a smoke test")
    flags = parser.parse_args(argv)
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: out={str(flags.out)!r} cannot be created as a folder: {error.strerror}")
    epochs, seeds = (2, 1) if flags.quick else (10, 5)
    return Options(flags.epochs or epochs, flags.seeds or seeds, flags.processes, flags.out)


def _integer(name: str, low: int, high: int) -> Any:
    def convert(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{name}={text!r} is not an integer from {low} to {high}")
        return int(text)

    return convert


def introduction(data: digits.Digits, recipe: digits.DigitsConfig, seeds: int, processes: int) -> str:
    how = "one process" if processes == 1 else f"{processes} processes, which share each batch through DDP"
    return (
        f"Handwritten digits: {len(data.train_labels):,} training and {len(data.held_out_labels)} test images of 8x8 "
        f"pixels.\n"
        f"SGD and K-FAC with default settings, same {seeds} seeds, same batches, same schedule: "
        f"{recipe.epochs} epochs, batch {recipe.batch_size}, lr {recipe.lr:g} (SGD's best of a sweep), on {how}."
    )


# --- training ------------------------------------------------------------------------------------------------


def train_both(data: digits.Digits, recipe: digits.DigitsConfig, seeds: int, place: dkfac.distributed.Place) -> Curves:
    """Train with both optimizers from each seed; they alternate in which one goes first."""
    # A warm-up run: the first steps of a process load kernels, which must not count as training time of either
    # optimizer. It also prints K-FAC's one-line announcement.
    digits.train_digits(data, replace(recipe, epochs=1), {}, place=place)
    curves: Curves = {name: [] for name in _OPTIMIZERS}
    progress = ProgressBar(sys.stderr if place.rank == 0 else io.StringIO(), num_parts=2 * seeds)
    for seed in range(seeds):
        for name in _OPTIMIZERS if seed % 2 == 0 else reversed(_OPTIMIZERS):
            label = f"seed {seed} {name}"

            def show(point: digits.Point, label: str = label) -> None:
                note = f"epoch {point.epochs:4.1f}  test accuracy {point.accuracy:.1%}"
                progress.show(label, point.epochs / recipe.epochs, note)

            options = {"announce": False} if name == "K-FAC" else None
            curves[name].append(digits.train_digits(data, replace(recipe, seed=seed), options, show, place=place))
            progress.next_part()
    return curves


class ProgressBar:
    """A progress bar that is redrawn on a terminal; on other streams, one line per finished part."""

    def __init__(self, stream: TextIO, num_parts: int) -> None:
        self._stream, self._num_parts, self._num_done = stream, num_parts, 0
        self._start, self._last = time.perf_counter(), ""

    def show(self, label: str, share: float, note: str) -> None:
        """Show the progress of the current part."""
        total = (self._num_done + share) / self._num_parts
        seconds = time.perf_counter() - self._start
        filled = round(24 * total)
        bar = "█" * filled + "·" * (24 - filled)
        self._last = f"{label:12} {note}"
        if self._stream.isatty():
            left = f"{seconds / total - seconds:3.0f} s left"
            self._stream.write(f"\r\x1b[K{bar} {total:4.0%} {left}  {self._last}")
            self._stream.flush()

    def next_part(self) -> None:
        """Mark the current part as finished."""
        self._num_done += 1
        if not self._stream.isatty():
            print(f"[{self._num_done}/{self._num_parts}] {self._last}", file=self._stream, flush=True)
        elif self._num_done == self._num_parts:
            self._stream.write("\r\x1b[K")


# --- results -------------------------------------------------------------------------------------------------


def to_target(curves: list[list[digits.Point]], unit: str) -> list[float | None]:
    """Return the epochs or seconds to the target accuracy for each seed; None where it was not reached."""
    points = [digits.first_reaching(curve, TARGET) for curve in curves]
    return [None if point is None else float(getattr(point, unit)) for point in points]


def target_table(curves: Curves) -> str:
    """Return a table of means over the seeds, with the range of epochs and seconds to the target."""
    rows: list[tuple[str, ...]] = [
        ("", f"epochs to {TARGET:.0%}", f"seconds to {TARGET:.0%}", "final accuracy", "seconds per epoch")
    ]
    for name, runs in curves.items():
        accuracy = fmean(run[-1].accuracy for run in runs)
        pace = fmean(run[-1].seconds / run[-1].epochs for run in runs)
        cells = [_mean_and_range(to_target(runs, unit)) for unit in ("epochs", "seconds")]
        rows.append((name, *cells, f"{accuracy:.1%}", f"{pace:.2f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _mean_and_range(values: list[float | None]) -> str:
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return f"reached in {len(reached)} of {len(values)}"
    mean = f"{fmean(reached):.2f}"
    return mean if len(reached) == 1 else f"{mean} ({min(reached):.2f} to {max(reached):.2f})"


def target_verdict(curves: Curves, unit: str) -> str:
    """Return which optimizer reaches the target in fewer epochs or seconds, by how much and in how many seeds."""
    sgd, kfac = (to_target(curves[name], unit) for name in _OPTIMIZERS)
    reached = [sum(value is not None for value in values) for values in (sgd, kfac)]
    if sum(reached) < 2 * len(sgd):
        counts = f"{TARGET:.0%} was reached by SGD in {reached[0]} and by K-FAC in {reached[1]} of {len(sgd)} runs"
        if reached[0] == reached[1]:
            return f"In {unit}, no verdict: {counts}."
        return f"In {unit}, {_OPTIMIZERS[reached[1] > reached[0]]} wins: {counts}."
    pairs = [(s, k) for s, k in zip(sgd, kfac, strict=True) if s is not None and k is not None]
    means = fmean(s for s, _ in pairs), fmean(k for _, k in pairs)
    if means[0] == means[1]:
        return f"In {unit}, a draw: {means[0]:.2f} each."
    winner, loser = (1, 0) if means[1] < means[0] else (0, 1)
    gaps = [pair[loser] - pair[winner] for pair in pairs]
    # Compare the gap with its standard error over the seeds: a gap that a few more seeds could reverse is no win.
    clear = len(gaps) > 1 and fmean(gaps) > 2 * stdev(gaps) / len(gaps) ** 0.5
    share = 1 - means[winner] / means[loser]
    return (
        f"In {unit}, {_OPTIMIZERS[winner]} {'wins' if clear else 'is ahead'}: {means[winner]:.2f} against "
        f"{means[loser]:.2f}, {share:.0%} less, in {sum(gap > 0 for gap in gaps)} of {len(gaps)} seeds"
        f"{'' if clear else ', which may be chance'}."
    )


def accuracy_verdict(curves: Curves) -> str:
    """Return which optimizer ends with the higher accuracy, and in how many seeds."""
    pairs = list(zip(*([run[-1].accuracy for run in curves[name]] for name in _OPTIMIZERS), strict=True))
    means = [fmean(column) for column in zip(*pairs, strict=True)]
    if means[0] == means[1]:
        return f"Final accuracy: a draw, {means[0]:.1%} each."
    winner, loser = (1, 0) if means[1] > means[0] else (0, 1)
    num_ahead = sum(pair[winner] > pair[loser] for pair in pairs)
    return (
        f"Final accuracy: {_OPTIMIZERS[winner]} is ahead, {means[winner]:.1%} against {means[loser]:.1%}, "
        f"in {num_ahead} of {len(pairs)} seeds."
    )


def plot(curves: Curves, path: Path) -> None:
    """Plot test accuracy against epochs and against seconds: a thin line per seed, a thick one for the mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, unit in zip(panels, ("epochs", "seconds"), strict=True):
        for name, runs in curves.items():
            xs = [[float(getattr(point, unit)) for point in run] for run in runs]
            ys = [[point.accuracy for point in run] for run in runs]
            for x, y in zip(xs, ys, strict=True):
                panel.plot(x, y, color=_COLOURS[name], linewidth=0.8, alpha=0.35)
            mean_x, mean_y = [[fmean(column) for column in zip(*rows, strict=True)] for rows in (xs, ys)]
            panel.plot(mean_x, mean_y, color=_COLOURS[name], linewidth=2.2, label=name)
        panel.axhline(TARGET, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set_title(", ".join(target_verdict(curves, unit).split(", ")[:2]).rstrip("."), loc="left", fontsize=10)
        panel.set_xlabel("epochs" if unit == "epochs" else "seconds of training")
        panel.set_xlim(left=0)
        panel.set_ylim(0.8, 1.0)
        panel.set_yticks([0.8, 0.85, 0.9, 0.95, 1.0])
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", linewidth=0.4, alpha=0.5)
    panels[0].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(frameon=False, loc="lower right")
    panels[1].annotate(f"{TARGET:.0%}", (1, TARGET), xycoords=("axes fraction", "data"), xytext=(3, -3),
                       textcoords="offset points", fontsize=9)  # fmt: skip
    num_seeds = len(curves["SGD"])
    figure.suptitle(
        f"Handwritten digits, a small CNN: same initial weights, lr and schedule, "
        f"{num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    try:
        sys.exit(run_demo())
    except KeyboardInterrupt:
        sys.exit(130)
