"""``dkfac train`` and ``dkfac recipes``: train a recipe into a run folder; list the recipes.

Input: options of the command line. Output: a run folder and an exit status. Owns: nothing; ``recipes/`` owns the run.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import shlex
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dkfac.tools.cli.run import read_options
from dkfac.tools.recipes.hyper import Hyper

HYPER = (
    "lr",
    "batch",
    "micro_batch",
    "epochs",
    "momentum",
    "weight_decay",
    "warmup",
    "label_smoothing",
    "size",
    "seed",
)
UNLESS_GIVEN = {"nproc": 1, "save_every": 0, "tensorboard": False, "no_kfac": False, "seeds": 1}
"""Values of options that are not given, other than None."""
STATUS = {"done": 0, "unsaved": 1, "SIGINT": 130, "SIGTERM": 143}


def add_train_command(commands: Any) -> None:
    parser = commands.add_parser(
        "train", help="train a recipe, with checkpoints and a log", allow_abbrev=False,
        description="Trains a recipe (see `dkfac recipes`) into a run folder, which `dkfac report` turns into a page.",
    )  # fmt: skip
    parser.add_argument("recipe", nargs="?", help="name of the recipe (or in the file of --config)")
    parser.add_argument("--no-kfac", action="store_true", help="train with the first-order optimizer alone")
    add_options(parser)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume the run in this folder, bitwise")
    parser.set_defaults(run=_run)
    listing = commands.add_parser("recipes", help="list the recipes", description="Lists the recipes.")
    listing.set_defaults(run=list_recipes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``train`` and ``compare`` share."""
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="a TOML file with these options, [set] and [more]; others win")
    add("--data", metavar="PATH", help="path of the data, if the recipe needs any")
    add("--out", type=Path, metavar="RUN", help="the run folder (default runs/RECIPE-TIME)")
    add("--nproc", type=int, default=1, metavar="N", help="processes on this machine (default 1)")
    add("--steps", type=int, metavar="N", help="stop after N steps; the schedule does not change")
    add("--save-every", type=int, default=0, metavar="N", help="steps between checkpoints (default: an epoch)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of K-FAC; can be repeated",
    )
    add(
        "--more",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a hyperparameter that only this recipe has; can be repeated",
    )
    add("--tensorboard", action="store_true", help="also write TensorBoard events")
    kinds = hyper_types()
    for name in HYPER:
        kind = int if "int" in kinds[name] else float
        add(f"--{name.replace('_', '-')}", type=kind, default=None, metavar="X", help="overrides the recipe's value")


def read_config(given: argparse.Namespace) -> None:
    """Fill in the options of the file of ``--config``, where they are not given on the command line."""
    if given.config is None:
        return
    try:
        found = tomllib.loads(given.config.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config {given.config}: cannot be read ({error})") from None
    kinds = {"recipe": str, "data": str, "out": str, "nproc": int, "steps": int, "save_every": int, "tensorboard": bool}
    kinds |= {"no_kfac": bool} if hasattr(given, "no_kfac") else {"seeds": int}
    kinds |= {name: int if "int" in str(kind) else float for name, kind in hyper_types().items()}
    for name, value in found.items():
        if name in ("set", "more") and isinstance(value, dict):
            said = {text.partition("=")[0] for text in getattr(given, name)}
            setattr(given, name, getattr(given, name) + [f"{k}={v!r}" for k, v in value.items() if k not in said])
            continue
        if name not in kinds:
            near = difflib.get_close_matches(name, [*kinds, "set", "more"], 1)
            hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(kinds)}, [set] and [more]"
            raise ValueError(f"--config {given.config}: there is no option {name!r}; {hint}")
        is_number = kinds[name] is float and type(value) is int
        if type(value) is not kinds[name] and not is_number:
            raise ValueError(f"--config {given.config}: {name} = {value!r} is not of type {kinds[name].__name__}")
        if getattr(given, name) in (None, UNLESS_GIVEN.get(name)):
            setattr(given, name, Path(value) if name == "out" else value)


def hyper_types() -> dict[str, str]:
    """Return the types of the hyperparameters that options can change, as they are annotated."""
    return {field.name: str(field.type) for field in fields(Hyper) if field.name in HYPER}


def list_recipes(given: argparse.Namespace) -> int:
    from dkfac.tools.recipes.every import RECIPES

    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"{name:{width}}  {recipe.about}\n{'':{width}}  data: {recipe.data}")
    return 0


def _run(given: argparse.Namespace) -> Callable[[], int] | int:
    """Check the options and return a function that trains."""
    from dkfac.distributed import from_first

    read_config(given)
    if given.recipe is None and given.resume is None:
        raise ValueError("name a recipe to train (see `dkfac recipes`)")
    at = None
    if given.resume is not None:
        if given.out is not None:
            raise ValueError("--resume continues in the run's own folder: omit --out")
        if given.resume.parent.name == "checkpoints":
            at, given.resume = given.resume.name, given.resume.parent.parent
        given.out = given.resume
        _restore_options(given)
    job = read_job(given, kfac=not given.no_kfac, folder=given.out or default_folder(given.recipe), at=at)
    if starts_ranks(given):
        arguments = [*sys.argv[1:]] if given.out else [*sys.argv[1:], "--out", str(job.folder)]
        return launch_ranks(given.nproc, arguments, f"to continue: dkfac train {given.recipe} --resume {job.folder}")

    def train_job(place: Any, say: Callable[[str], None]) -> int:
        own = replace(job, folder=Path(from_first(str(job.folder), place)))
        reason = train_one(own, place, say)
        if reason != "done" and given.nproc == 1:  # otherwise the parent process prints it
            say(f"to continue: dkfac train {given.recipe} --resume {own.folder}")
        return STATUS[reason]

    return lambda: as_rank(train_job)


def _restore_options(given: argparse.Namespace) -> None:
    """Fill in the options that the run was started with, where none are given now."""
    folder = given.resume
    file = folder / "settings.json"
    if not file.is_file():
        raise ValueError(f"--resume {folder}: that is not a run folder, it has no settings.json")
    try:
        saved = json.loads(file.read_text())
        hyper, options, more = saved["hyper"], saved["options"], dict(saved.get("more", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): correct it, or start a new run") from None
    given.recipe = given.recipe or saved.get("recipe")
    for name in HYPER:
        if getattr(given, name) is None and name in hyper:
            setattr(given, name, hyper[name])
        elif name in ("batch", "seed") and getattr(given, name) != hyper.get(name):
            raise ValueError(
                f"--{name} {getattr(given, name)}: the run in {folder} was started with {hyper.get(name)}, and its "
                f"position in the data depends on it; omit the option"
            )
    if given.no_kfac and options is not None:
        raise ValueError(f"--no-kfac: the run in {folder} was started with K-FAC; start another run without it")
    given.no_kfac = options is None
    given.data = given.data or saved.get("data")
    said = {text.partition("=")[0] for text in given.more}
    given.more += [f"{name}={value!r}" for name, value in more.items() if name not in said]
    said = {text.partition("=")[0] for text in given.set}
    given.set += [f"{name}={value!r}" for name, value in (options or {}).items() if name not in said]


def starts_ranks(given: argparse.Namespace) -> bool:
    """Return whether this process has to start the ranks, and is not one of them."""
    from dkfac import distributed

    return given.nproc > 1 and "RANK" not in os.environ and not distributed.is_step_of_slurm()


def launch_ranks(num_processes: int, arguments: list[str], again: str) -> Callable[[], int]:
    """Return a function that runs the same command on ``num_processes`` ranks. ``again``: how to continue if one of
    them fails."""
    from dkfac import distributed

    def launched() -> int:
        status = distributed.launch(num_processes, "dkfac", arguments)
        if status in STATUS.values() and status:
            print(f"dkfac: stopped; {again}", file=sys.stderr)
        elif status not in (0, 2):
            print(f"dkfac: a process ended with status {status} and the others were stopped; {again}", file=sys.stderr)
        return status

    return launched


def default_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def read_job(given: argparse.Namespace, *, kfac: bool, folder: Path, at: str | None = None) -> Any:
    """Return the job that the options describe."""
    from dkfac.tools.recipes.every import find_recipe
    from dkfac.tools.recipes.job import TrainingJob

    recipe = find_recipe(given.recipe)
    for name, least in (("steps", 1), ("save_every", 0)):
        if getattr(given, name) is not None and getattr(given, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(given, name)}: must be {least} or more")
    unused = [name for name in recipe.unused if getattr(given, name) not in (None, getattr(recipe.hyper, name))]
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')}: {recipe.name} does not use it; omit it")
    if given.set and not kfac and not hasattr(given, "script"):
        raise ValueError(f"--set {given.set[0]}: settings are for K-FAC, but --no-kfac is given")
    said: dict[str, Any] = {name: getattr(given, name) for name in HYPER if getattr(given, name) is not None}
    more = dict(recipe.hyper.more)
    for text in given.more:
        name, equals, value = text.partition("=")
        if not equals or name not in more:
            known = ", ".join(more) or "none"
            raise ValueError(f"--more {text}: {recipe.name} has no such hyperparameter; it has {known}")
        try:
            more[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"--more {text}: {value!r} is not a number") from None
    hyper = recipe.adapt(replace(recipe.hyper, **said, more=more), said)
    if given.nproc < 1:
        raise ValueError(f"--nproc {given.nproc}: must be 1 or more")
    if hyper.batch % given.nproc:
        raise ValueError(f"batch={hyper.batch} cannot be divided equally by {given.nproc} ranks: use a multiple")
    given.strategy = given.damping = None
    options = read_options(given, recipe.settings(hyper)) if kfac else None
    return TrainingJob(
        recipe=recipe, hyper=hyper, kfac=options, folder=folder, data=given.data, max_steps=given.steps,
        save_every=given.save_every, resume=getattr(given, "resume", None) is not None, resume_at=at,
        tensorboard=given.tensorboard, command=shlex.join(["dkfac", *sys.argv[1:]]),
    )  # fmt: skip


def as_rank(work: Callable[[Any, Callable[[str], None]], int]) -> int:
    """Run ``work`` in this process, the only one or one of the ranks, and print errors in one line.

    ``work`` gets this rank's place and a function that prints a line on rank 0, and returns the exit status.
    """
    import torch

    from dkfac import distributed
    from dkfac.tools.cli.progress import LinePrinter

    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    place = distributed.init()
    progress = LinePrinter(sys.stderr) if place.rank == 0 else None
    try:
        return work(place, (lambda line: None) if progress is None else progress.say)
    except (ValueError, OSError) as error:
        if place.rank == 0:
            print(f"dkfac: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dkfac: rank {place.rank}: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"dkfac: rank {place.rank}: {error}", file=sys.stderr)
        return 1
    finally:
        if progress is not None:
            progress.close()
        distributed.end()


def train_one(job: Any, place: Any, say: Callable[[str], None]) -> str:
    """Train a job and record the timeline of one step; return why it ended, a key of ``STATUS``."""
    from dkfac.tools.measure.beside import RefreshStepRecorder
    from dkfac.tools.recipes.training import train_recipe

    say(f"{job.recipe.name}, {'K-FAC' if job.kfac is not None else job.recipe.first_order}, into {job.folder}")
    one = (job.hyper.micro_batch or job.hyper.batch) * place.world_size >= job.hyper.batch
    return train_recipe(job, place, say, RefreshStepRecorder(job.folder)) if one else train_recipe(job, place, say)
