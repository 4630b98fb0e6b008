"""``dkfac compare``: the same recipe, or script, with the first-order optimizer and with K-FAC.

A comparison of recipes is a folder of runs, ``first-order-SEED`` and ``kfac-SEED``. The same command goes on in it:
runs that have ended are kept, one that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dkfac.tools.cli import train


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", help="train a recipe, or your script, with and without K-FAC", allow_abbrev=False,
        description="Trains the same recipe from the same start with the first-order optimizer and with K-FAC, and "
        "says which was where first; with --script, a script of yours that knows nothing of K-FAC. Interrupted, the "
        "same command with the same --out goes on.",
    )  # fmt: skip
    parser.add_argument("recipe", nargs="?", help="its name (see `dkfac recipes`)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="starts to compare from (default 1)")
    train.add_options(parser)
    parser.add_argument("--script", type=Path, help="instead of a recipe: your training script")
    parser.add_argument(
        "--target", help="of a script with several optimizers: the number of one, or the class of it or of its model"
    )
    parser.add_argument("arguments", nargs="*", help="of the script, after --")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> Callable[[], int] | int:
    if given.script is not None:
        from dkfac.tools.cli.script import compare_scripts

        return compare_scripts(given)
    if given.arguments:
        raise ValueError(f"{given.arguments[0]!r} is not understood: one recipe is compared at a time")
    if given.recipe is None:
        raise ValueError("say which recipe to compare (see `dkfac recipes`), or --script train.py")
    if given.target is not None:
        raise ValueError(f"--target {given.target}: it is for --script; a recipe has one optimizer")
    if given.seeds < 1:
        raise ValueError(f"--seeds {given.seeds}: there is at least 1")
    folder = given.out or train.default_folder(f"compare-{given.recipe}")
    jobs, first = [], given.seed or 0
    for seed in range(first, first + given.seeds):
        given.seed = seed
        for name, kfac in (("first-order", False), ("kfac", True)):
            jobs.append(train.read_job(given, kfac=kfac, folder=folder / f"{name}-{given.seed}"))
    if train.starts_ranks(given):
        check(jobs, given.nproc)
        arguments = [*sys.argv[1:]] if given.out else [*sys.argv[1:], "--out", str(folder)]
        begun = train.start(given.nproc, arguments, again(folder))
        return lambda: begun() or status(jobs)
    return lambda: train.as_rank(lambda place, say: train_all(jobs, place, say, is_told=given.nproc > 1))


def again(folder: Path) -> str:
    return f"go on with the same command and --out {folder}"


def check(jobs: Sequence[Any], world_size: int) -> None:
    """Refuse a folder in which runs were begun with something else."""
    from dkfac.tools.recipes.verdict import end_of

    for name, job in (("first-order", jobs[0]), ("kfac", jobs[1])):
        for file in sorted(job.folder.parent.glob(f"{name}-*/metrics.jsonl")):
            place, theirs = file.parent, _saved(file.parent)
            for key, ours in _asked(job, world_size).items():
                if theirs.get(key) != ours:
                    raise ValueError(
                        f"{place} was begun with {key}={theirs.get(key)!r}, not {ours!r}: choose another --out"
                    )
            reason, step = end_of(place)
            last = min(theirs["num_steps"], job.max_steps or theirs["num_steps"])
            if place in [one.folder for one in jobs] and (step > last or (reason == "done" and step < last)):
                raise ValueError(f"{place} has gone to step {step}, not {last}: choose another --out")


def _saved(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    try:
        saved = json.loads(file.read_text())
        return {"num_steps": 0, **saved, **saved["hyper"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): choose another --out") from None


def _asked(job: Any, world_size: int) -> dict[str, Any]:
    """Return what has to be the same of runs that are compared, but for the seed, as a run's folder holds it."""
    hyper = {**asdict(replace(job.hyper, more={})), **job.hyper.more}
    about = {"recipe": job.recipe.name, "data": job.data, "options": job.kfac, "world_size": world_size, **hyper}
    found: dict[str, Any] = json.loads(json.dumps(about, default=str))
    return {name: value for name, value in found.items() if name not in ("seed", "more")}


def train_all(jobs: Sequence[Any], place: Any, say: Callable[[str], None], *, is_told: bool) -> int:
    """Train what is left to train; rank 0 prints the verdict.

    ``is_told``: whether another process says how to go on after a signal.
    """
    from dkfac.distributed import from_first

    folder = Path(from_first(str(jobs[0].folder.parent), place))
    jobs = [replace(job, folder=folder / job.folder.name) for job in jobs]
    check(jobs, place.world_size)
    try:
        reason = _each(jobs, place, say)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {again(folder)}") from error
    if reason != "done":
        if not is_told:
            say(again(folder))
        return train.STATUS[reason]
    if place.rank == 0:
        conclude(jobs)
    return status(jobs) if place.is_alone else 0


def _each(jobs: Sequence[Any], place: Any, say: Callable[[str], None]) -> str:
    """Train one after the other, passing over what has ended; returns ``"done"``, or the name of a signal."""
    from dkfac.distributed import from_first
    from dkfac.tools.recipes.training import Diverged
    from dkfac.tools.recipes.verdict import DIVERGED, end_of

    for job in jobs:
        has_run = (job.folder / "metrics.jsonl").exists()
        ended = end_of(job.folder)[0] if has_run else None
        stage = from_first("keep" if ended in ("done", DIVERGED) else "resume" if has_run else "begin", place)
        if stage == "keep":
            say(f"{job.folder} has ended already: {ended}")
            continue
        try:
            reason = train.train_one(replace(job, resume=stage == "resume"), place, say)
        except Diverged as error:
            say(f"{job.folder.name} diverged, the others go on: {str(error).partition(';')[0]}")
            if place.rank == 0:
                _mark(job.folder)
            continue
        if reason != "done":
            return reason
    return "done"


def _mark(folder: Path) -> None:
    """Note that a run diverged, so that it is not begun again."""
    from dkfac.tools.recipes.verdict import DIVERGED, end_of

    line = {"kind": "end", "step": end_of(folder)[1], "reason": DIVERGED}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def status(jobs: Sequence[Any]) -> int:
    from dkfac.tools.recipes.verdict import diverged

    return 1 if diverged(_folders(jobs)) else 0


def conclude(jobs: Sequence[Any]) -> None:
    """Print who was where first."""
    from dkfac.tools.recipes.verdict import verdict

    print(verdict(_folders(jobs)))
    print(f"a page of it: dkfac report {jobs[0].folder.parent} -o report.html")


def _folders(jobs: Sequence[Any]) -> dict[str, list[Path]]:
    sides = {"first-order": [job for job in jobs if job.kfac is None], "kfac": [j for j in jobs if j.kfac is not None]}
    return {name: [job.folder for job in ours] for name, ours in sides.items()}
