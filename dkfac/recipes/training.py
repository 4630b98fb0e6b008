"""The loop that trains any recipe into a run folder: steps, tests, checkpoints, signals.

See ``docs/notes/009-recipes.md``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dkfac
from dkfac.recipes import checkpoints
from dkfac.recipes.folder import Log, resources, spectra
from dkfac.recipes.loading import ahead, micro_batches, steps
from dkfac.recipes.recipe import Examples, Hyper, Recipe, Session, optimizer_of
from dkfac.recipes.signals import Signals

NUM_LOGGED = 400
"""Steps of a run that are logged, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train, how and where to."""

    recipe: Recipe
    hyper: Hyper
    kfac: dict[str, Any] | None
    """Settings; None: the first-order optimizer alone."""
    folder: Path
    data: str | None = None
    max_steps: int | None = None
    save_every: int = 0
    """Steps between checkpoints; 0: at the end of each pass over the data."""
    resume: bool = False
    tensorboard: bool = False
    command: str = ""


@dataclass(slots=True)
class Run:
    """What is alive while a job runs."""

    job: Job
    place: dkfac.distributed.Place
    model: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    kfac: dkfac.KFAC | None
    session: Session
    train_set: Examples
    test_set: Examples
    num_steps: int
    log: Log
    step: int = 0
    seconds: float = 0.0

    @property
    def epoch(self) -> float:
        return self.step * self.job.hyper.batch / len(self.train_set)

    @property
    def device(self) -> torch.device:
        return self.place.device


Watch = Callable[[int, dkfac.KFAC | None, nn.Module, torch.optim.Optimizer], AbstractContextManager[None]]
"""What surrounds a step: its number, K-FAC, the network and the optimizer."""


def train(
    job: Job,
    place: dkfac.distributed.Place,
    say: Callable[[str], None] = lambda line: None,
    watch: Watch = lambda *given: contextlib.nullcontext(),
) -> str:
    """Train to the end, or to a signal; returns ``"done"``, or the signal's name. ``say``: on rank 0."""
    say = say if place.rank == 0 else lambda line: None
    hyper = job.hyper
    train_set, test_set = job.recipe.load(job.data, hyper)
    if hyper.batch % place.world_size:
        raise ValueError(f"batch={hyper.batch} cannot be shared equally by {place.world_size} ranks: choose a multiple")
    run = _begin(job, place, train_set, test_set)
    try:
        if job.resume:
            _resume(run, say)
        with Signals() as signals, run.log:
            return _steps(run, signals, say, watch)
    finally:
        if run.kfac is not None:
            run.kfac.close()


def _begin(job: Job, place: dkfac.distributed.Place, train_set: Examples, test_set: Examples) -> Run:
    hyper = job.hyper
    torch.manual_seed(hyper.seed)
    model = job.recipe.build(train_set, hyper).to(place.device)
    session = job.recipe.begin(model, train_set, hyper, place)
    network = nn.parallel.DistributedDataParallel(model) if place.world_size > 1 else model
    optimizer = optimizer_of(hyper, model)
    kfac = None
    if job.kfac is not None:
        accumulates = (hyper.micro_batch or hyper.batch) * place.world_size < hyper.batch
        told = {"accumulate": "mean"} if accumulates else {}
        kfac = dkfac.KFAC(network, optimizer, **{**told, **job.recipe.settings(hyper), **job.kfac})
    num_steps = math.ceil(hyper.epochs * len(train_set) / hyper.batch)
    about = {
        "recipe": job.recipe.name,
        "hyper": {**asdict(replace(hyper, more={})), **hyper.more},
        "more": dict(hyper.more),
        "options": job.kfac,
        "data": job.data,
        "kfac": None if kfac is None else kfac.settings.describe(),
        "optimizer": type(optimizer).__name__,
        "world_size": place.world_size,
        "num_steps": num_steps,
        "examples": [len(train_set), len(test_set)],
        "command": job.command,
    }
    log = Log(job.folder, about, place, tensorboard=job.tensorboard, is_resumed=job.resume)
    return Run(job, place, model, network, optimizer, kfac, session, train_set, test_set, num_steps, log)


def _steps(run: Run, signals: Signals, say: Callable[[str], None], watch: Watch) -> str:
    hyper, place = run.job.hyper, run.place
    end = min(run.num_steps, run.job.max_steps or run.num_steps)
    pass_steps = max(1, round(len(run.train_set) / hyper.batch))
    save_every = run.job.save_every or pass_steps
    log_every = max(1, run.num_steps // NUM_LOGGED)
    parts = _parts(run, end)
    losses: list[Tensor] = []
    begin = time.perf_counter()
    with contextlib.closing(ahead(run.train_set, parts, seed=hyper.seed, device=run.device)) as loaded:
        while run.step < end:
            with watch(run.step, run.kfac, run.network, run.optimizer):
                losses.append(_step(run, loaded))
            run.step += 1
            last = run.step == end
            tests = last or run.step % pass_steps == 0
            saves = last or run.step % save_every == 0
            arrived = signals.agreed(run.step, place)
            if run.step % log_every and not (tests or saves or arrived):
                continue
            mean = float(torch.stack(losses).mean())  # waits for the device, so that the clock is right
            losses.clear()
            run.seconds += time.perf_counter() - begin
            _log_step(run, mean)
            if not math.isfinite(mean):
                raise RuntimeError(
                    f"the loss is {mean} at step {run.step}: lower lr or raise damping; the last checkpoint is in "
                    f"{run.job.folder / 'checkpoints'}"
                )
            if tests:
                _test(run, say)
            if saves or arrived:
                _save(run, say)
            if arrived in ("SIGINT", "SIGTERM"):
                run.log.add(kind="end", step=run.step, reason=arrived)
                say(f"stopped by {arrived} at step {run.step}; go on with --resume {run.job.folder}")
                return arrived
            begin = time.perf_counter()
    run.log.add(kind="end", step=run.step, reason="done")
    return "done"


def _parts(run: Run, end: int) -> Iterator[Tensor]:
    hyper, place = run.job.hyper, run.place
    each = steps(len(run.train_set), hyper.batch, seed=hyper.seed, first=run.step)
    for index, _ in zip(each, range(run.step, end), strict=False):
        size = hyper.micro_batch or hyper.batch
        yield from micro_batches(index, size, rank=place.rank, world_size=place.world_size)


def _step(run: Run, loaded: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Take one step; returns its loss. All that is random is drawn anew from seed, step and rank."""
    hyper, place = run.job.hyper, run.place
    seed = (hyper.seed * 1_000_003 + run.step) * 1009 + place.rank
    torch.manual_seed(seed)
    generator = torch.Generator(run.device).manual_seed(seed)
    run.session.before_step(run.optimizer, run.step, run.num_steps, run.epoch)
    run.optimizer.zero_grad()
    share = hyper.batch // place.world_size
    taken, total = 0, torch.zeros((), device=run.device)
    while taken < share:
        x, y = run.session.prepare(*next(loaded), generator)
        taken += len(y)
        is_ranked = isinstance(run.network, nn.parallel.DistributedDataParallel)
        with run.network.no_sync() if is_ranked and taken < share else contextlib.nullcontext():  # type: ignore[operator]
            with _autocast(run):
                output = run.network(x)
            loss = run.job.recipe.loss(output.float(), y)
            (loss * (len(y) / share)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * (len(y) / share)
    run.optimizer.step()
    run.session.after_step()
    return total


def _autocast(run: Run) -> Any:
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.job.hyper.autocast and run.device.type == "cuda")


def _log_step(run: Run, loss: float) -> None:
    metrics = {} if run.kfac is None else {"kfac": run.kfac.metrics()}
    lr = float(run.optimizer.param_groups[0]["lr"])
    run.log.add(kind="step", step=run.step, epoch=run.epoch, seconds=run.seconds, loss=loss, lr=lr, **metrics)


def _test(run: Run, say: Callable[[str], None]) -> None:
    """Judge the model on this rank's share of the test examples, and all ranks' shares together."""
    found = {"loss": 0.0, "right": 0.0, "number": 0.0}
    index = torch.arange(run.place.rank, len(run.test_set), run.place.world_size)
    run.model.eval()
    with torch.no_grad(), contextlib.closing(
        ahead(run.test_set, iter(torch.split(index, 256)), seed=None, device=run.device)
    ) as loaded:  # fmt: skip
        for pair in loaded:
            x, y = run.session.prepare(*pair, None)
            with _autocast(run):
                output = run.model(x).float()
            found["loss"] += float(run.job.recipe.loss(output, y)) * len(y)
            found["number"] += len(y)
            if run.job.recipe.judge is not None:
                found["right"] += float(run.job.recipe.judge(output, y))
    run.model.train()
    loss, right, number = (sum(column) for column in zip(*_gathered(run, list(found.values())), strict=True))
    point = {"loss": loss / number} | ({"accuracy": right / number} if run.job.recipe.judge is not None else {})
    run.log.add(kind="test", step=run.step, epoch=run.epoch, seconds=run.seconds, **point)
    for entry in spectra(run.kfac):
        run.log.add(kind="spectrum", step=run.step, **entry)
    told = "".join(f", {name} {value:.2%}" if name == "accuracy" else f", test loss {value:.4f}"
                   for name, value in point.items())  # fmt: skip
    say(f"step {run.step} of {run.num_steps}, epoch {run.epoch:.2f}{told}, {run.seconds:.1f} s")


def _gathered(run: Run, numbers: list[float]) -> list[list[float]]:
    return dkfac.distributed.gather(numbers, run.device)


def _save(run: Run, say: Callable[[str], None]) -> None:
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
    failed = sum(numbers[0] for numbers in _gathered(run, [float(error is not None)]))
    if not failed and rank == 0:
        try:
            about = {"recipe": run.job.recipe.name, "world_size": run.place.world_size}
            checkpoints.finish(folder, run.step, about)
        except OSError as caught:
            error = caught
    failed = sum(numbers[0] for numbers in _gathered(run, [float(error is not None)]))
    if failed:
        checkpoints.give_up(folder, run.step)
        reason = error or "another rank could not write"
        say(f"no checkpoint at step {run.step} ({reason}); training goes on, older checkpoints stay")
    run.log.summarise(run.kfac, resources(run.device), lambda numbers: _gathered(run, numbers))


def _resume(run: Run, say: Callable[[str], None]) -> None:
    """Take up the newest checkpoint that is whole."""
    folder, said = run.job.folder / "checkpoints", list[str]()
    place = checkpoints.newest(folder, said)
    for line in said:
        say(line)
    if place is None:
        raise ValueError(f"{folder} has no whole checkpoint to resume from: leave --resume out to begin anew")
    told = checkpoints.about(place)
    if told["recipe"] != run.job.recipe.name:
        raise ValueError(f"{place} is of recipe {told['recipe']}, not {run.job.recipe.name}: choose that one")
    common = checkpoints.read(place, "common", run.device)
    run.model.load_state_dict(common["model"])
    run.optimizer.load_state_dict(common["optimizer"])
    if run.kfac is not None and common["kfac"] is not None:
        run.kfac.load_state_dict(common["kfac"])
    name = f"rank-{run.place.rank}"
    if told["world_size"] == run.place.world_size:
        run.session.load_state_dict(checkpoints.read(place, name, run.device)["session"])
    elif run.place.rank == 0:
        say(f"{place} is of {told['world_size']} ranks, this is {run.place.world_size}: close to the same, not bitwise")
    run.step, run.seconds = int(common["step"]), float(common["seconds"])
    run.log.cut(run.step)
    run.log.add(kind="resume", step=run.step)
    say(f"resumed from {place}")
