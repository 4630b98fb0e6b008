"""``dkfac compare``: the same recipe, or script, with the first-order optimizer and with K-FAC."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dkfac.cli import train


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", help="train a recipe, or your script, with and without K-FAC", allow_abbrev=False,
        description="Trains the same recipe from the same start with the first-order optimizer and with K-FAC, and "
        "says which was where first; with --script, a script of yours that knows nothing of K-FAC.",
    )  # fmt: skip
    parser.add_argument("recipe", nargs="?", help="its name (see `dkfac recipes`)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="starts to compare from (default 1)")
    train.add_options(parser)
    parser.add_argument("--script", type=Path, help="instead of a recipe: your training script")
    parser.add_argument("arguments", nargs="*", help="of the script, after --")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> Callable[[], int] | int:
    if given.script is not None:
        from dkfac.cli.script import compare_scripts

        return compare_scripts(given)
    if given.arguments:
        raise ValueError(f"{given.arguments[0]!r} is not understood: one recipe is compared at a time")
    if given.recipe is None:
        raise ValueError("say which recipe to compare (see `dkfac recipes`), or --script train.py")
    if given.seeds < 1:
        raise ValueError(f"--seeds {given.seeds}: there is at least 1")
    folder = given.out or train.default_folder(f"compare-{given.recipe}")
    jobs, first = [], given.seed or 0
    for seed in range(first, first + given.seeds):
        given.seed = seed
        for name, kfac in (("first-order", False), ("kfac", True)):
            jobs.append(train.read_job(given, kfac=kfac, folder=folder / f"{name}-{given.seed}"))
    if train.starts_ranks(given):
        arguments = [*sys.argv[1:]] if given.out else [*sys.argv[1:], "--out", str(folder)]
        begun = train.start(given.nproc, arguments, f"what was trained is in {folder}")
        return lambda: begun() or conclude(folder)
    if "RANK" in os.environ:
        return lambda: train.train_here(jobs)
    return lambda: train.train_here(jobs) or conclude(folder)


def conclude(folder: Path) -> int:
    """Print who was where first."""
    from dkfac.recipes.verdict import verdict

    print(verdict(folder))
    print(f"a page of it: dkfac report {folder} -o report.html")
    return 0
