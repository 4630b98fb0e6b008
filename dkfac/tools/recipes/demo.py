"""The demo: train a deep autoencoder on handwritten digits with AdamW and with K-FAC, from the same initial weights.

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
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import torch

import dkfac
from dkfac.tools.recipes.autoencoder import load_images
from dkfac.tools.recipes.demo_training import ARMS, Arm, DemoPoint, train_autoencoder

_COLOURS = ("#8a8a8a", "#c1440e")
Curves = dict[str, list[list[DemoPoint]]]
"""For each arm, alone first, one curve per seed."""


@dataclass(frozen=True, slots=True)
class Options:
    arms: tuple[Arm, ...]
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
        print(f"the demo needs {error.name}, which is missing: pip install scikit-learn matplotlib", file=sys.stderr)
        return 1
    if options.processes > 1 and "RANK" not in os.environ:
        return _start_ranks(options.processes, sys.argv[1:] if argv is None else list(argv))
    # A network this small gains nothing from a second thread, and on a busy machine threads waiting for each other
    # make it ten times slower.
    torch.set_num_threads(1)
    place = dkfac.distributed.init()
    warnings.filterwarnings("ignore", "K-FAC may not pay off")  # by time per step; the demo shows whether it does
    images = load_images()
    if place.rank == 0:
        print(introduction(images, options, place.world_size))
    curves = train_arms(images, options, place)
    dkfac.distributed.end()
    if place.rank > 0:
        return 0
    print("", result_table(curves), "", *verdicts(curves), sep="\n")
    path = options.out / "autoencoder.png"
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
        prog="dkfac.tools.recipes.demo",
        description="Train a deep autoencoder on digits with AdamW and with K-FAC.",
    )
    parser.add_argument("--seeds", type=_integer("seeds", 1, 20), help="number of seeds to compare (default 5)")
    parser.add_argument("--processes", type=_integer("processes", 1, 16), default=2,
                        help="number of processes that share each batch (default %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the plot (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the steps, 1 seed: a smoke test")
    flags = parser.parse_args(argv)
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: out={str(flags.out)!r} cannot be created as a folder: {error.strerror}")
    arms = tuple([replace(arm, steps=arm.steps // 20) for arm in ARMS]) if flags.quick else ARMS
    return Options(arms, flags.seeds or (1 if flags.quick else 5), flags.processes, flags.out)


def _integer(name: str, low: int, high: int) -> Any:
    def convert(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{name}={text!r} is not an integer from {low} to {high}")
        return int(text)

    return convert


def introduction(images: tuple[torch.Tensor, torch.Tensor], options: Options, processes: int) -> str:
    how = "one process" if processes == 1 else f"{processes} processes, which share each batch through DDP"
    alone, other = options.arms
    return (
        f"Handwritten digits: {len(images[0]):,} training and {len(images[1])} test images of 8x8 pixels. "
        f"An autoencoder of eight layers with sigmoids compresses them to 8 numbers.\n"
        f"AdamW alone (lr {alone.lr:g}, {alone.steps:,} steps) and with K-FAC's one line (lr {other.lr:g}, "
        f"{other.steps:,} steps): each at its best learning rate of a sweep (benchmarks/demo_rates.py), with steps for "
        f"about the same time, the same initial weights and form of schedule, {options.seeds} seeds, on {how}."
    )


# --- training ------------------------------------------------------------------------------------------------


def train_arms(images: tuple[torch.Tensor, torch.Tensor], options: Options, place: dkfac.distributed.Place) -> Curves:
    """Train each arm from each seed; they alternate in which one goes first."""
    # A warm-up run: the first steps of a process load kernels, which must not count as training time of either
    # arm. It also prints K-FAC's one-line announcement.
    train_autoencoder(images, replace(options.arms[1], steps=20), 0, place=place, announce=True)
    curves: Curves = {arm.name: [] for arm in options.arms}
    progress = ProgressBar(sys.stderr if place.rank == 0 else io.StringIO(), num_parts=2 * options.seeds)
    for seed in range(options.seeds):
        for arm in options.arms if seed % 2 == 0 else reversed(options.arms):

            def show(point: DemoPoint, label: str = f"seed {seed} {arm.name}", steps: int = arm.steps) -> None:
                progress.show(label, point.steps / steps, f"step {point.steps:4}  test loss {point.loss:.4f}")

            curves[arm.name].append(train_autoencoder(images, arm, seed, show, place=place))
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


def seconds_to_match(curves: Curves) -> list[tuple[float, float | None]]:
    """Return for each seed when the first arm reached its lowest test loss, and when the second one was as low."""
    alone, other = curves.values()
    found = []
    for a, b in zip(alone, other, strict=True):
        best = min(a, key=lambda point: point.loss)
        found.append((best.seconds, next((point.seconds for point in b if point.loss <= best.loss), None)))
    return found


def result_table(curves: Curves) -> str:
    """Return a table of means over the seeds, with ranges."""
    rows: list[tuple[str, ...]] = [("", "final test loss", "lowest test loss", "steps", "seconds in all")]
    for name, runs in curves.items():
        losses = [run[-1].loss for run in runs], [min(point.loss for point in run) for run in runs]
        seconds = fmean(run[-1].seconds for run in runs)
        rows.append((name, *map(_mean_and_range, losses), f"{runs[0][-1].steps:,}", f"{seconds:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _mean_and_range(values: list[float]) -> str:
    mean = f"{fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4f} to {max(values):.4f})"


def verdicts(curves: Curves) -> list[str]:
    """Return who wins in seconds and in the final loss, by how much and in how many seeds."""
    (alone, alones), (other, others) = curves.items()
    times = seconds_to_match(curves)
    reached = [(a, b) for a, b in times if b is not None]
    if len(reached) < len(times):
        first = f"{other} comes to {alone}'s lowest loss in {len(reached)} of {len(times)} seeds"
        first = f"In seconds, {alone} wins: {first}."
    else:
        a, b = (fmean(column) for column in zip(*reached, strict=True))
        first = (
            f"In seconds, {other if b < a else alone} wins: {other} comes to {alone}'s lowest loss after {b:.1f} s, "
            f"{alone} after {a:.1f} s; {other} is faster in {sum(b < a for a, b in reached)} of {len(times)} seeds."
        )
    ends = [(a[-1].loss, b[-1].loss) for a, b in zip(alones, others, strict=True)]
    lower = sum(b < a for a, b in ends)
    a, b = (fmean(column) for column in zip(*ends, strict=True))
    second = (
        f"In the final test loss, {other if b < a else alone} wins: {other} {b:.4f}, {alone} {a:.4f}; {other} is lower "
        f"in {lower} of {len(ends)} seeds."
    )
    return [first, second]


def plot(curves: Curves, path: Path) -> None:
    """Plot test loss against seconds: a thin line per seed, a thick one for the mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for colour, (name, runs) in zip(_COLOURS, curves.items(), strict=True):
        xs, ys = ([[getattr(p, what) for p in run] for run in runs] for what in ("seconds", "loss"))
        for x, y in zip(xs, ys, strict=True):
            panel.plot(x, y, color=colour, linewidth=0.8, alpha=0.35)
        mean_x, mean_y = [[fmean(column) for column in zip(*rows, strict=True)] for rows in (xs, ys)]
        panel.plot(mean_x, mean_y, color=colour, linewidth=2.2, label=name)
    panel.set_title(verdicts(curves)[0].partition(";")[0].replace(": ", ":\n", 1), loc="left", fontsize=10)
    panel.set_xlabel("seconds of training")
    panel.set_ylabel("test loss")
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", linewidth=0.4, alpha=0.5)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    try:
        sys.exit(run_demo())
    except KeyboardInterrupt:
        sys.exit(130)
