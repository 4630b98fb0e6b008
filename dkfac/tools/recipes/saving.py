"""Saving a run and taking it up again: all ranks do either together."""

from __future__ import annotations

from collections.abc import Callable

from dkfac.distributed import from_first
from dkfac.tools.recipes import checkpoints
from dkfac.tools.recipes.folder import resources
from dkfac.tools.recipes.job import Run


def save(run: Run, say: Callable[[str], None]) -> None:
    """Write a checkpoint. A collective call; where a rank cannot write, all learn it and go on."""
    folder, rank = run.job.folder / "checkpoints", run.place.rank
    kfac = None if run.kfac is None else run.kfac.state_dict(gather=True)
    error: OSError | None = None
    try:
        checkpoints.write(folder, run.step, f"rank-{rank}", {"session": run.session.state_dict()})
        if rank == 0:
            state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "kfac": kfac}
            checkpoints.write(folder, run.step, "common", {**state, "step": run.step, "seconds": run.seconds})
    except OSError as caught:
        error = caught
    failed = sum(numbers[0] for numbers in run.gather([float(error is not None)]))
    if not failed and rank == 0:
        try:
            about = {"recipe": run.job.recipe.name, "world_size": run.place.world_size}
            checkpoints.finish(folder, run.step, about)
        except OSError as caught:
            error = caught
    failed = sum(numbers[0] for numbers in run.gather([float(error is not None)]))
    if failed:
        checkpoints.give_up(folder, run.step)
        reason = error or "another rank could not write"
        say(f"no checkpoint at step {run.step} ({reason}); training goes on, older checkpoints stay")
    run.log.summarise(resources(run.device), run.gather, run.describe)


def resume(run: Run, say: Callable[[str], None]) -> None:
    """Take up the newest checkpoint that is whole, or the one that is asked for: rank 0 chooses."""
    folder, said = run.job.folder / "checkpoints", list[str]()
    name = from_first(_chosen(run, said) if run.place.rank == 0 else "", run.place)
    for line in said:
        say(line)
    if not name and not from_first("some" if said else "", run.place):
        say(f"{folder} has no checkpoint yet: the run begins anew")
        return
    if not name:
        raise ValueError(f"{folder} has no whole checkpoint to resume from: begin anew with another --out")
    place = folder / name
    here = (place / "manifest.json").is_file() and (place / "common.pt").is_file()
    seen = [numbers[0] for numbers in run.gather([float(here)])]
    if not all(seen):
        raise ValueError(f"rank {seen.index(0.0)} does not see {place}: all ranks need the same folder")
    told = checkpoints.about(place)
    if told["recipe"] != run.job.recipe.name:
        raise ValueError(f"{place} is of recipe {told['recipe']}, not {run.job.recipe.name}: choose that one")
    common = checkpoints.read(place, "common", run.device)
    if (run.kfac is None) != (common["kfac"] is None):
        raise ValueError(f"{place} is of a run {'with' if run.kfac is None else 'without'} K-FAC: go on as it began")
    try:
        run.model.load_state_dict(common["model"])
    except RuntimeError as error:
        raise ValueError(f"{place} is of another model ({str(error).splitlines()[0]}...): go on as it began") from error
    run.optimizer.load_state_dict(common["optimizer"])
    if run.kfac is not None:
        run.kfac.load_state_dict(common["kfac"])
    if told["world_size"] == run.place.world_size:
        run.session.load_state_dict(checkpoints.read(place, f"rank-{run.place.rank}", run.device)["session"])
    else:
        say(f"{place} is of {told['world_size']} ranks, this is {run.place.world_size}: close to the same, not bitwise")
    run.step, run.seconds = int(common["step"]), float(common["seconds"])
    say(f"resumed from {place}")


def _chosen(run: Run, said: list[str]) -> str:
    """Return the name of a checkpoint, empty if there is none; what is passed over is added to ``said``."""
    folder = run.job.folder / "checkpoints"
    if run.job.resume_at is None:
        found = checkpoints.newest(folder, said)
        return "" if found is None else found.name
    wrong = checkpoints.fault(folder / run.job.resume_at)
    if wrong is not None:
        said.append(f"{folder / run.job.resume_at} cannot be used: {wrong}")
    return run.job.resume_at if wrong is None else ""
