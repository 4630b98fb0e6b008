"""``dkfac compare``: train a recipe, or a script, with the first-order optimizer and with K-FAC.

Input: options of the command line. Output: a folder of runs, ``first-order-SEED`` and ``kfac-SEED``, and a verdict.
The same command continues an interrupted comparison: finished runs are kept, an unfinished one is resumed. Owns: that
folder.
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


def add_compare_command(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", help="train a recipe, or your script, with and without K-FAC", allow_abbrev=False,
        description="Trains a recipe from the same initial weights with the first-order optimizer and with K-FAC, and "
        "reports which reaches the result first. With --script it runs your own script, which need not use K-FAC. To "
        "continue an interrupted comparison, repeat the command with the same --out.",
    )  # fmt: skip
    parser.add_argument("recipe", nargs="?", help="name of the recipe (see `dkfac recipes`)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds to compare (default 1)")
    train.add_options(parser)
    parser.add_argument("--script", type=Path, help="instead of a recipe: your training script")
    parser.add_argument(
        "--target", help="for a script with several optimizers: the number of one, or its class or its model's class"
    )
    parser.add_argument("arguments", nargs="*", help="arguments of the script, after --")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> Callable[[], int] | int:
    train.read_config(given)
    if given.script is not None:
        from dkfac.tools.cli.script import compare_scripts

        return compare_scripts(given)
    if given.arguments:
        raise ValueError(f"{given.arguments[0]!r} is not understood: only one recipe can be compared at a time")
    if given.recipe is None:
        raise ValueError("name a recipe to compare (see `dkfac recipes`), or use --script train.py")
    if given.target is not None:
        raise ValueError(f"--target {given.target}: it is for --script; a recipe has one optimizer")
    if given.seeds < 1:
        raise ValueError(f"--seeds {given.seeds}: must be 1 or more")
    folder = given.out or train.default_folder(f"compare-{given.recipe}")
    jobs, first = [], given.seed or 0
    for seed in range(first, first + given.seeds):
        given.seed = seed
        for name, kfac in (("first-order", False), ("kfac", True)):
            jobs.append(train.read_job(given, kfac=kfac, folder=folder / f"{name}-{given.seed}"))
    if train.starts_ranks(given):
        _check_folder(jobs, given.nproc)
        arguments = [*sys.argv[1:]] if given.out else [*sys.argv[1:], "--out", str(folder)]
        begun = train.launch_ranks(given.nproc, arguments, _how_to_continue(folder))
        return lambda: begun() or _status(jobs)
    return lambda: train.as_rank(lambda place, say: train_all(jobs, place, say, is_told=given.nproc > 1))


def _how_to_continue(folder: Path) -> str:
    return f"to continue, repeat the command with --out {folder}"


def _check_folder(jobs: Sequence[Any], world_size: int) -> None:
    """Refuse a folder that has runs with other settings."""
    from dkfac.tools.recipes.verdict import end_of

    for name, job in (("first-order", jobs[0]), ("kfac", jobs[1])):
        for file in sorted(job.folder.parent.glob(f"{name}-*/metrics.jsonl")):
            place, theirs = file.parent, _saved(file.parent)
            for key, ours in _asked(job, world_size).items():
                if theirs.get(key) != ours:
                    raise ValueError(
                        f"{place} was started with {key}={theirs.get(key)!r}, not {ours!r}: use another --out"
                    )
            reason, step = end_of(place)
            last = min(theirs["num_steps"], job.max_steps or theirs["num_steps"])
            if place in [one.folder for one in jobs] and (step > last or (reason == "done" and step < last)):
                raise ValueError(f"{place} ended at step {step}, not {last}: use another --out")


def _saved(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    try:
        saved = json.loads(file.read_text())
        return {"num_steps": 0, **saved, **saved["hyper"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): use another --out") from None


def _asked(job: Any, world_size: int) -> dict[str, Any]:
    """Return the settings that compared runs must share, all but the seed, in the format of ``settings.json``."""
    hyper = {**asdict(replace(job.hyper, more={})), **job.hyper.more}
    about = {"recipe": job.recipe.name, "data": job.data, "options": job.kfac, "world_size": world_size, **hyper}
    found: dict[str, Any] = json.loads(json.dumps(about, default=str))
    return {name: value for name, value in found.items() if name not in ("seed", "more")}


def train_all(jobs: Sequence[Any], place: Any, say: Callable[[str], None], *, is_told: bool) -> int:
    """Train the runs that have not finished; rank 0 prints the verdict.

    ``is_told``: whether the parent process prints how to continue after a signal.
    """
    from dkfac.distributed import from_first

    folder = Path(from_first(str(jobs[0].folder.parent), place))
    jobs = [replace(job, folder=folder / job.folder.name) for job in jobs]
    _check_folder(jobs, place.world_size)
    try:
        reason = _each(jobs, place, say)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {_how_to_continue(folder)}") from error
    if reason != "done":
        if not is_told:
            say(_how_to_continue(folder))
        return train.STATUS[reason]
    if place.rank == 0:
        _print_verdict(jobs)
    return _status(jobs) if place.is_alone else 0


def _each(jobs: Sequence[Any], place: Any, say: Callable[[str], None]) -> str:
    """Train the jobs one after the other, skipping finished ones; return why it ended."""
    from dkfac.distributed import from_first
    from dkfac.tools.recipes.training import Diverged
    from dkfac.tools.recipes.verdict import DIVERGED, end_of

    for job in jobs:
        has_run = (job.folder / "metrics.jsonl").exists()
        ended = end_of(job.folder)[0] if has_run else None
        stage = from_first("keep" if ended in ("done", DIVERGED) else "resume" if has_run else "begin", place)
        if stage == "keep":
            say(f"{job.folder} has already ended: {ended}")
            continue
        try:
            reason = train.train_one(replace(job, resume=stage == "resume"), place, say)
        except Diverged as error:
            say(f"{job.folder.name} diverged, the other runs continue: {str(error).partition(';')[0]}")
            if place.rank == 0:
                _mark(job.folder)
            continue
        if reason != "done":
            return reason
    return "done"


def _mark(folder: Path) -> None:
    """Mark a run as diverged, so that it is not started again."""
    from dkfac.tools.recipes.verdict import DIVERGED, end_of

    line = {"kind": "end", "step": end_of(folder)[1], "reason": DIVERGED}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def _status(jobs: Sequence[Any]) -> int:
    from dkfac.tools.recipes.verdict import diverged

    return 1 if diverged(_folders(jobs)) else 0


def _print_verdict(jobs: Sequence[Any]) -> None:
    """Print the verdict."""
    from dkfac.tools.recipes.verdict import comparison_verdict

    print(comparison_verdict(_folders(jobs)))
    print(f"for a report: dkfac report {jobs[0].folder.parent} -o report.html")


def _folders(jobs: Sequence[Any]) -> dict[str, list[Path]]:
    sides = {"first-order": [job for job in jobs if job.kfac is None], "kfac": [j for j in jobs if j.kfac is not None]}
    return {name: [job.folder for job in ours] for name, ours in sides.items()}
