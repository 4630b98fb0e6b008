"""The training loop of all recipes: steps, tests, checkpoints, signals. See ``docs/notes/009-recipes.md``.

Input: a training job. Output: a run folder, and the reason why training ended. Owns: model, optimizer and K-FAC of the
run while it lasts.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes import saving
from dkfac.tools.recipes.folder import Log, factor_spectra
from dkfac.tools.recipes.job import TrainingJob, TrainingRun
from dkfac.tools.recipes.loading import batch_indices, micro_batches, prefetch
from dkfac.tools.recipes.pace import pace_line
from dkfac.tools.recipes.recipe import Examples, Session, build_optimizer
from dkfac.tools.recipes.signals import Signals

NUM_LOGGED = 400
"""Approximate number of steps of a run that are logged."""
MOST_BAD = 3
"""Consecutive logged losses that may be non-finite before the run is ended."""


class Diverged(RuntimeError):
    """Loss or weights are not finite. Raised on all ranks."""


StepWrapper = Callable[[int, Any, nn.Module, torch.optim.Optimizer], AbstractContextManager[None]]
"""Returns a context manager around one step, from its number, ``kfac.instruments()`` or None, the network and the
optimizer."""


def train_recipe(
    job: TrainingJob,
    place: dkfac.distributed.Place,
    say: Callable[[str], None] = lambda line: None,
    watch: StepWrapper = lambda *given: contextlib.nullcontext(),
) -> str:
    """Train until the last step or a signal; return ``"done"``, ``"unsaved"`` if the last checkpoint could not be
    written, or the signal's name. ``say`` is called on rank 0."""
    say = say if place.rank == 0 else lambda line: None
    hyper = job.hyper
    if hyper.batch % place.world_size:
        raise ValueError(f"batch={hyper.batch} cannot be divided equally by {place.world_size} ranks: use a multiple")
    train_set, test_set = _load(job, place)
    if hyper.batch > len(train_set):
        say(f"a batch of {hyper.batch} exceeds the {len(train_set)} examples: a step sees some of them more than once")
    with Log(job.folder, place, is_resumed=job.resume, tensorboard=job.tensorboard) as log:
        run = _begin(job, place, train_set, test_set, log)
        try:
            if job.resume:
                saving.load_checkpoint(run, say)
            log.begin(_about(run), run.step)
            if run.step:
                log.add(kind="resume", step=run.step)
            with Signals() as signals:
                return _steps(run, signals, say, watch)
        finally:
            if run.kfac is not None:
                run.kfac.close()


def _load(job: TrainingJob, place: dkfac.distributed.Place) -> tuple[Examples, Examples]:
    """Read the data. If it fails on some ranks only, the others raise too instead of waiting."""
    error: Exception | None = None
    try:
        found = job.recipe.load(job.data, job.hyper)
    except (ValueError, OSError) as caught:
        error = caught
    failed = sum(numbers[0] for numbers in dkfac.distributed.gather([float(error is not None)], place.device))
    if error is not None:
        raise error if failed == place.world_size else RuntimeError(str(error)) from error
    if failed:
        raise RuntimeError("another rank could not read its data")
    return found


def _begin(
    job: TrainingJob, place: dkfac.distributed.Place, train_set: Examples, test_set: Examples, log: Log
) -> TrainingRun:
    hyper = job.hyper
    torch.manual_seed(hyper.seed)
    model = job.recipe.build(train_set, hyper).to(place.device)
    session = job.recipe.begin(model, train_set, hyper, place)
    network = model
    if not place.is_alone:
        network = nn.parallel.DistributedDataParallel(model)
        _settle(network, job, session, train_set, place)
    optimizer = build_optimizer(hyper, model)
    kfac = None
    if job.kfac is not None:
        accumulates = (hyper.micro_batch or hyper.batch) * place.world_size < hyper.batch
        accumulate = {"accumulate": "mean"} if accumulates else {}
        kfac = dkfac.KFAC(network, optimizer, **{**accumulate, **job.recipe.settings(hyper), **job.kfac})
    num_steps = math.ceil(hyper.epochs * len(train_set) / hyper.batch)
    return TrainingRun(job, place, model, network, optimizer, kfac, session, train_set, test_set, num_steps, log)


def _settle(
    network: nn.Module, job: TrainingJob, session: Session, train_set: Examples, place: dkfac.distributed.Place
) -> None:
    """Run one backward pass before the first step, so that DDP rebuilds its buckets now and not after that step.

    With three or more ranks, sums depend on where a gradient lies in its bucket. Without this, the first step of a
    resumed run would not be bitwise equal to that step of the original run.
    """
    x, y = (t.to(place.device) for t in train_set.get(torch.arange(min(2, len(train_set))), seed=None))
    x, y = session.prepare(x, y, None)
    network.eval()  # so that nothing but gradients changes
    job.recipe.loss(network(x).float(), y).backward()  # type: ignore[no-untyped-call]
    network.train()
    network.zero_grad()


def _about(run: TrainingRun) -> dict[str, Any]:
    """Return the contents of ``settings.json``."""
    job, hyper = run.job, run.job.hyper
    return {
        "recipe": job.recipe.name,
        "hyper": {**asdict(replace(hyper, more={})), **hyper.more},
        "more": dict(hyper.more),
        "options": job.kfac,
        "data": job.data,
        "kfac": None if run.kfac is None else run.kfac.settings.describe(),
        "optimizer": type(run.optimizer).__name__,
        "world_size": run.place.world_size,
        "num_steps": run.num_steps,
        "examples": [len(run.train_set), len(run.test_set)],
        "command": job.command,
    }


def _steps(run: TrainingRun, signals: Signals, say: Callable[[str], None], watch: StepWrapper) -> str:
    hyper, place = run.job.hyper, run.place
    end = run.num_steps if run.job.max_steps is None else min(run.num_steps, run.job.max_steps)
    pass_steps = max(1, round(len(run.train_set) / hyper.batch))
    save_every = run.job.save_every or pass_steps
    log_every = max(1, run.num_steps // NUM_LOGGED)
    parts = _parts(run, end)
    losses: list[Tensor] = []
    first, before = run.step, run.seconds
    bad, is_saved, begin = 0, True, time.perf_counter()
    with contextlib.closing(prefetch(run.train_set, parts, seed=hyper.seed, device=run.device)) as loaded:
        while run.step < end:
            instruments = None if run.kfac is None else run.kfac.instruments()
            with watch(run.step, instruments, run.network, run.optimizer):
                losses.append(_step(run, loaded))
            run.step += 1
            last = run.step == end
            tests = last or run.step % pass_steps == 0
            saves = last or run.step % save_every == 0
            arrived = signals.agreed(run.step, place)
            if run.step % log_every and not (tests or saves or arrived):
                continue
            means = run.gather(
                [float(torch.stack(losses).mean())]
            )  # synchronizes with the device, so the timing is right
            mean = sum(numbers[0] for numbers in means) / len(means)
            losses.clear()
            run.seconds += time.perf_counter() - begin
            _log_step(run, mean)
            say(pace_line(run, mean, end, (run.step - first) / max(run.seconds - before, 1e-9)))
            bad = 0 if math.isfinite(mean) else bad + 1
            _check(run, mean, bad, checks_weights=bad > 0 or saves or arrived is not None)
            if tests:
                _test(run, say)
            if saves or arrived:
                is_saved = saving.save_checkpoint(run, say)
            if arrived in ("SIGINT", "SIGTERM"):
                run.log.add(kind="end", step=run.step, reason=arrived)
                say(f"stopped by {arrived} at step {run.step}")
                return arrived
            begin = time.perf_counter()
    reason = "done" if is_saved else "unsaved"
    run.log.add(kind="end", step=run.step, reason=reason)
    if not is_saved:
        say(saving.how_to_save(run))
    return reason


def _check(run: TrainingRun, loss: float, bad: int, *, checks_weights: bool) -> None:
    """Raise ``Diverged``, on all ranks, if the run has diverged. ``bad``: consecutive losses that were not finite.

    K-FAC skips a batch whose gradient is not finite, so a single non-finite loss is allowed. Non-finite weights are
    not: they must not be saved.
    """
    if not checks_weights:
        return
    broken = not all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    broken = any(numbers[0] for numbers in run.gather([float(broken)]))
    if bad < MOST_BAD and not broken:
        return
    found = [place.name for place in sorted((run.job.folder / "checkpoints").glob("step-*"))]
    remedy = "lower lr" if run.kfac is None else "lower lr or raise damping"
    again = f"; continue with --resume {run.job.folder}/checkpoints/{found[-1]}" if found else ""
    again += f", or from {found[0]} if that one has already diverged" if len(found) > 1 else ""
    what = "weights are" if broken else "loss is"
    raise Diverged(f"the {what} not finite at step {run.step} (loss {loss:.4g}): {remedy}{again}")


def _parts(run: TrainingRun, end: int) -> Iterator[Tensor]:
    hyper, place = run.job.hyper, run.place
    each = batch_indices(len(run.train_set), hyper.batch, seed=hyper.seed, first=run.step)
    for index, _ in zip(each, range(run.step, end), strict=False):
        size = hyper.micro_batch or hyper.batch
        yield from micro_batches(index, size, rank=place.rank, world_size=place.world_size)


def _step(run: TrainingRun, loaded: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Take one step and return its loss. The random state is set from seed, step and rank."""
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


def _autocast(run: TrainingRun) -> Any:
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.job.hyper.autocast and run.device.type == "cuda")


def _log_step(run: TrainingRun, loss: float) -> None:
    metrics = {} if run.kfac is None else {"kfac": run.kfac.metrics()}
    lr = float(run.optimizer.param_groups[0]["lr"])
    run.log.add(kind="step", step=run.step, epoch=run.epoch, seconds=run.seconds, loss=loss, lr=lr, **metrics)


def _test(run: TrainingRun, say: Callable[[str], None]) -> None:
    """Evaluate the model on this rank's share of the test examples, and log the totals over all ranks."""
    found = {"loss": 0.0, "right": 0.0, "number": 0.0}
    index = torch.arange(run.place.rank, len(run.test_set), run.place.world_size)
    parts = [part for part in torch.split(index, 256) if len(part)]
    dkfac.distributed.broadcast(run.model.buffers(), run.place)  # as DDP does before a step: all ranks test one model
    run.model.eval()
    with torch.no_grad(), contextlib.closing(
        prefetch(run.test_set, iter(parts), seed=None, device=run.device)
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
    loss, right, number = (sum(column) for column in zip(*run.gather(list(found.values())), strict=True))
    point = {"loss": loss / number} | ({"accuracy": right / number} if run.job.recipe.judge is not None else {})
    run.log.add(kind="test", step=run.step, epoch=run.epoch, seconds=run.seconds, **point)
    for entry in factor_spectra({} if run.kfac is None else run.kfac.factors()):
        run.log.add(kind="spectrum", step=run.step, **entry)
    shown = "".join(f", {name} {value:.2%}" if name == "accuracy" else f", test loss {value:.4f}"
                   for name, value in point.items())  # fmt: skip
    say(f"step {run.step} of {run.num_steps}, epoch {run.epoch:.2f}{shown}, {run.seconds:.1f} s")
