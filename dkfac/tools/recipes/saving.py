"""Save a run to a checkpoint and resume it. Both are collective calls.

Input: a training run. Output: files below ``checkpoints/``, or the restored run. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dkfac.distributed import from_first
from dkfac.tools.recipes import checkpoints
from dkfac.tools.recipes.folder import peak_memory
from dkfac.tools.recipes.job import TrainingRun


def save_checkpoint(run: TrainingRun, say: Callable[[str], None]) -> bool:
    """Write a checkpoint, to which each rank adds what it holds; return whether it is complete. A collective call. If
    one rank cannot write, all ranks discard it, and older checkpoints stay."""
    folder, rank = run.job.folder / "checkpoints", run.place.rank
    kfac = None if run.kfac is None else run.kfac.state_dict(shard=True)
    error: OSError | None = None
    try:
        checkpoints.write_state(folder, run.step, f"rank-{rank}", {"session": run.session.state_dict(), "kfac": kfac})
        if rank == 0:
            state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
            checkpoints.write_state(folder, run.step, "common", {**state, "step": run.step, "seconds": run.seconds})
    except OSError as caught:
        error = caught
    failed = sum(numbers[0] for numbers in run.gather([float(error is not None)]))
    if not failed and rank == 0:
        try:
            about = {"recipe": run.job.recipe.name, "world_size": run.place.world_size}
            checkpoints.commit(folder, run.step, about)
        except OSError as caught:
            error = caught
    failed = sum(numbers[0] for numbers in run.gather([float(error is not None)]))
    if failed:
        checkpoints.abandon(folder, run.step)
        reason = error or "another rank could not write"
        say(f"no checkpoint at step {run.step} ({reason}); training continues, older checkpoints are kept")
    run.log.summarise(peak_memory(run.device), run.gather, run.describe)
    return not failed


def how_to_save(run: TrainingRun) -> str:
    """Return what became of a run whose last checkpoint could not be written."""
    folder = run.job.folder / "checkpoints"
    found = checkpoints.newest(folder, [])
    kept = "there is no checkpoint" if found is None else f"the newest checkpoint is {found.name}"
    return (
        f"the run has ended at step {run.step}, but its weights are not saved: {folder} could not be written, and "
        f"{kept}; make room there and resume the run, which repeats the steps since"
    )


def load_checkpoint(run: TrainingRun, say: Callable[[str], None]) -> None:
    """Load the newest complete checkpoint, or the requested one. Rank 0 chooses it for all ranks."""
    folder, said = run.job.folder / "checkpoints", list[str]()
    name = from_first(_chosen(run, said) if run.place.rank == 0 else "", run.place)
    for line in said:
        say(line)
    if not name and not from_first("some" if said else "", run.place):
        say(f"{folder} has no checkpoint yet: the run starts from the beginning")
        return
    if not name:
        raise ValueError(f"{folder} has no complete checkpoint to resume from: start again with another --out")
    place = folder / name
    here = (place / "manifest.json").is_file() and (place / "common.pt").is_file()
    seen = [numbers[0] for numbers in run.gather([float(here)])]
    if not all(seen):
        raise ValueError(f"rank {seen.index(0.0)} cannot see {place}: all ranks need a shared folder")
    manifest = checkpoints.read_manifest(place)
    if manifest["recipe"] != run.job.recipe.name:
        raise ValueError(f"{place} is from recipe {manifest['recipe']}, not {run.job.recipe.name}: use that recipe")
    common = checkpoints.read_state(place, "common", run.device)
    files = [f"rank-{rank}" for rank in range(manifest["world_size"])]
    own: list[Any] = [checkpoints.read_state(place, name, torch.device("cpu")).get("kfac") for name in files]
    own = [common["kfac"]] if "kfac" in common else own  # where rank 0 saved the state of all
    if (run.kfac is None) != (own[0] is None):
        was = "with" if run.kfac is None else "without"
        raise ValueError(f"{place} is from a run {was} K-FAC: resume it the same way")
    try:
        run.model.load_state_dict(common["model"])
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{place} is from another model ({reason}...): resume with the same model") from error
    run.optimizer.load_state_dict(common["optimizer"])
    if run.kfac is not None:
        run.kfac.load_state_dict(own)
    if manifest["world_size"] == run.place.world_size:
        run.session.load_state_dict(checkpoints.read_state(place, f"rank-{run.place.rank}", run.device)["session"])
    else:
        say(
            f"{place} is from {manifest['world_size']} ranks, this run has {run.place.world_size}: results will be "
            f"close, not bitwise equal"
        )
    run.step, run.seconds = int(common["step"]), float(common["seconds"])
    say(f"resumed from {place}")


def _chosen(run: TrainingRun, said: list[str]) -> str:
    """Return the name of the checkpoint to load, or an empty string. Messages about skipped ones go to ``said``."""
    folder = run.job.folder / "checkpoints"
    if run.job.resume_at is None:
        found = checkpoints.newest(folder, said)
        return "" if found is None else found.name
    wrong = checkpoints.fault(folder / run.job.resume_at)
    if wrong is not None:
        said.append(f"{folder / run.job.resume_at} cannot be used: {wrong}")
    return run.job.resume_at if wrong is None else ""
