"""The demo: a small network on handwritten digits, trained with SGD and with K-FAC from the same starts."""

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
NAMES = ("SGD", "K-FAC")
COLOURS = {"SGD": "#8a8a8a", "K-FAC": "#c1440e"}
Curves = dict[str, list[list[digits.Point]]]
"""Per optimizer, a curve per seed."""


@dataclass(frozen=True, slots=True)
class Options:
    epochs: int
    seeds: int
    processes: int
    out: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 done, 1 something is missing, 2 a bad flag."""
    options = parse(argv)
    try:
        for package in ("matplotlib", "sklearn"):
            importlib.import_module(package)
    except ImportError as error:
        print(f"the demo needs {error.name}, which is not installed: pip install 'dkfac[demo]'", file=sys.stderr)
        return 1
    if options.processes > 1 and "RANK" not in os.environ:
        return start(options.processes, sys.argv[1:] if argv is None else list(argv))
    # A network this small gains nothing from a second thread, and on a busy machine threads that wait for each
    # other make it ten times slower.
    torch.set_num_threads(1)
    place = dkfac.distributed.init()
    data, recipe = digits.load(), digits.Recipe(epochs=options.epochs)
    if place.rank == 0:
        print(introduction(data, recipe, options.seeds, place.world_size))
    curves = compare(data, recipe, options.seeds, place)
    dkfac.distributed.end()
    if place.rank > 0:
        return 0
    print(f"\n{table(curves)}\n\n{verdict(curves, 'epochs')}\n{verdict(curves, 'seconds')}\n{final(curves)}")
    path = options.out / "digits.png"
    plot(curves, path)
    print(f"plot: {path}")
    return 0


def start(num_processes: int, flags: list[str]) -> int:
    """Run the demo on so many processes, as torchrun would; returns the exit code."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [sys.executable, *torchrun, "-m", "dkfac.tools.recipes.demo", *flags]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            return child.wait()  # torchrun has been interrupted too, and ends the ranks


def parse(argv: Sequence[str] | None) -> Options:
    """Return the flags, checked; a bad one ends the program with code 2 before anything starts."""
    parser = argparse.ArgumentParser(prog="dkfac.tools.recipes.demo", description=__doc__)
    parser.add_argument("--epochs", type=_integer("epochs", 1, 200), help="length of each run (default 10)")
    parser.add_argument("--seeds", type=_integer("seeds", 1, 20), help="starts to compare from (default 5)")
    parser.add_argument("--processes", type=_integer("processes", 1, 16), default=2,
                        help="how many share each batch (default %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the plot (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 epochs and 1 seed, where not given: only to see it run")
    flags = parser.parse_args(argv)
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: out={str(flags.out)!r} is not a folder that can be made: {error.strerror}")
    epochs, seeds = (2, 1) if flags.quick else (10, 5)
    return Options(flags.epochs or epochs, flags.seeds or seeds, flags.processes, flags.out)


def _integer(name: str, low: int, high: int) -> Any:
    def convert(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{name}={text!r} is not an integer from {low} to {high}")
        return int(text)

    return convert


def introduction(data: digits.Digits, recipe: digits.Recipe, seeds: int, processes: int) -> str:
    how = "one process" if processes == 1 else f"{processes} processes, which share each batch through DDP"
    return (
        f"Handwritten digits: {len(data.train_labels):,} training and {len(data.held_out_labels)} test images of 8x8 "
        f"pixels.\n"
        f"SGD and K-FAC with default settings from the same {seeds} starts, with the same batches and schedule: "
        f"{recipe.epochs} epochs, batch {recipe.batch_size}, lr {recipe.lr:g} (SGD's best of a sweep), on {how}."
    )


# --- training ------------------------------------------------------------------------------------------------


def compare(data: digits.Digits, recipe: digits.Recipe, seeds: int, place: dkfac.distributed.Place) -> Curves:
    """Train with both from each start, one after the other, taking turns in who goes first."""
    # The first steps of a process load kernels, which is nobody's training time. K-FAC introduces itself here.
    digits.train(data, replace(recipe, epochs=1), {}, place=place)
    curves: Curves = {name: [] for name in NAMES}
    progress = Progress(sys.stderr if place.rank == 0 else io.StringIO(), num_parts=2 * seeds)
    for seed in range(seeds):
        for name in NAMES if seed % 2 == 0 else reversed(NAMES):
            label = f"seed {seed} {name}"

            def show(point: digits.Point, label: str = label) -> None:
                note = f"epoch {point.epochs:4.1f}  test accuracy {point.accuracy:.1%}"
                progress.show(label, point.epochs / recipe.epochs, note)

            options = {"announce": False} if name == "K-FAC" else None
            curves[name].append(digits.train(data, replace(recipe, seed=seed), options, show, place=place))
            progress.next_part()
    return curves


class Progress:
    """A bar that is redrawn on a terminal; elsewhere a line per finished part."""

    def __init__(self, stream: TextIO, num_parts: int) -> None:
        self._stream, self._num_parts, self._num_done = stream, num_parts, 0
        self._start, self._last = time.perf_counter(), ""

    def show(self, label: str, share: float, note: str) -> None:
        """Say where the current part is."""
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
        """The current part is finished."""
        self._num_done += 1
        if not self._stream.isatty():
            print(f"[{self._num_done}/{self._num_parts}] {self._last}", file=self._stream, flush=True)
        elif self._num_done == self._num_parts:
            self._stream.write("\r\x1b[K")


# --- what came out -------------------------------------------------------------------------------------------


def to_target(curves: list[list[digits.Point]], unit: str) -> list[float | None]:
    """Return each seed's epochs or seconds to the target accuracy, None where it was not reached."""
    points = [digits.first_reaching(curve, TARGET) for curve in curves]
    return [None if point is None else float(getattr(point, unit)) for point in points]


def table(curves: Curves) -> str:
    """Return means over the seeds, with the range of what the target took."""
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


def verdict(curves: Curves, unit: str) -> str:
    """Say who needs less of a unit to the target, by how much and in how many of the seeds."""
    sgd, kfac = (to_target(curves[name], unit) for name in NAMES)
    reached = [sum(value is not None for value in values) for values in (sgd, kfac)]
    if sum(reached) < 2 * len(sgd):
        counts = f"{TARGET:.0%} was reached by SGD in {reached[0]} and by K-FAC in {reached[1]} of {len(sgd)} runs"
        if reached[0] == reached[1]:
            return f"In {unit} no verdict: {counts}."
        return f"In {unit} {NAMES[reached[1] > reached[0]]} wins: {counts}."
    pairs = [(s, k) for s, k in zip(sgd, kfac, strict=True) if s is not None and k is not None]
    means = fmean(s for s, _ in pairs), fmean(k for _, k in pairs)
    if means[0] == means[1]:
        return f"In {unit} a draw: {means[0]:.2f} each."
    winner, loser = (1, 0) if means[1] < means[0] else (0, 1)
    gaps = [pair[loser] - pair[winner] for pair in pairs]
    # The gap against its own standard error over the seeds: what another few seeds might well turn round is no win.
    clear = len(gaps) > 1 and fmean(gaps) > 2 * stdev(gaps) / len(gaps) ** 0.5
    share = 1 - means[winner] / means[loser]
    return (
        f"In {unit} {NAMES[winner]} {'wins' if clear else 'is ahead'}: {means[winner]:.2f} against "
        f"{means[loser]:.2f}, {share:.0%} less, in {sum(gap > 0 for gap in gaps)} of {len(gaps)} seeds"
        f"{'' if clear else ', which may be chance'}."
    )


def final(curves: Curves) -> str:
    """Say who ends higher, and in how many of the seeds."""
    pairs = list(zip(*([run[-1].accuracy for run in curves[name]] for name in NAMES), strict=True))
    means = [fmean(column) for column in zip(*pairs, strict=True)]
    if means[0] == means[1]:
        return f"At the end a draw: {means[0]:.1%} each."
    winner, loser = (1, 0) if means[1] > means[0] else (0, 1)
    num_ahead = sum(pair[winner] > pair[loser] for pair in pairs)
    return (
        f"At the end {NAMES[winner]} is more accurate: {means[winner]:.1%} against {means[loser]:.1%}, "
        f"in {num_ahead} of {len(pairs)} seeds."
    )


def plot(curves: Curves, path: Path) -> None:
    """Draw test accuracy over epochs and over seconds: each seed thin, their mean thick."""
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
                panel.plot(x, y, color=COLOURS[name], linewidth=0.8, alpha=0.35)
            mean_x, mean_y = [[fmean(column) for column in zip(*rows, strict=True)] for rows in (xs, ys)]
            panel.plot(mean_x, mean_y, color=COLOURS[name], linewidth=2.2, label=name)
        panel.axhline(TARGET, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set_title(verdict(curves, unit).split(",")[0].rstrip("."), loc="left", fontsize=10)
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
        f"Handwritten digits, a small CNN: same starts, lr and schedule, {num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
