"""At a user's own learning rate, is training with dkfac's one line ever worse than the optimizer alone?

Each pair is a task and an optimizer at its usual learning rate, chosen with runs of the optimizer alone. With the same
seed, both runs have the same initial weights and the same batches. Losses are measured on held-out examples, at 10, 25,
50 and 100 % of the steps. A point is within tolerance if K-FAC's median over the seeds exceeds the optimizer's by at
most 2 %, or by the spread of the optimizer's own seeds, (max - min) / median, if that is larger. The control is the
optimizer alone with other seeds, compared in the same way: it shows the effect of chance on the counts.
"""

import argparse
import ast
import itertools
import json
import math
import multiprocessing as mp
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import never_worse_tasks as tasks
import torch
from environment import write
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import dkfac

POINTS = (0.1, 0.25, 0.5, 1.0)
TOLERANCE, MOST = 0.02, 0.1
FIRST_SEED = {"baseline": 0, "kfac": 0, "control": 100}
QUICK = "vae,gpt-untied,mlp-low,mlp-sgd,cnn-sgd,cnn-adamw"


class MyAdamW(AdamW):
    pass


class Lion(Optimizer):
    """The sign of an interpolation of gradient and momentum (Chen et al. 2023)."""

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.lerp(p.grad, average, group["betas"][0]).sign())
                average.lerp_(p.grad, 1 - group["betas"][1])


def warmup(progress: float) -> float:
    return min(1.0, 10 * progress)


def cosine(progress: float) -> float:
    return warmup(progress) * (0.55 + 0.45 * math.cos(math.pi * max(0.0, progress - 0.1) / 0.9))


@dataclass(frozen=True)
class Task:
    model: Callable[[], nn.Module]
    data: Callable[[], tasks.Data]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batch: int = 64
    clip: float | None = None  # gradients, to this norm


TASKS = {
    "vae": Task(tasks.VAE, partial(tasks.digits, 28), tasks.evidence, batch=128),
    "autoencoder": Task(tasks.autoencoder, partial(tasks.digits, 14), tasks.reconstruct),
    "gpt": Task(partial(tasks.gpt, tied=False), tasks.characters, tasks.classify, batch=16),
    "gpt-tied": Task(partial(tasks.gpt, tied=True), tasks.characters, tasks.classify, batch=16),
    "word-transformer": Task(tasks.WordTransformer, tasks.words, tasks.classify, batch=20, clip=0.25),
    "llama": Task(tasks.llama, tasks.characters, tasks.classify, batch=16, clip=1.0),
    "vit": Task(tasks.ViT, partial(tasks.digits, 28), tasks.classify),
    "cnn": Task(tasks.cnn, tasks.moved_digits, tasks.classify),
    "cnn-norm": Task(tasks.resnet, tasks.moved_digits, tasks.classify),
    "mlp": Task(partial(tasks.mlp, 100, 128, 128, 10), tasks.moved_digits, tasks.classify),
    "lstm": Task(tasks.LSTM, tasks.origins, tasks.classify),
    "actor-critic": Task(tasks.ActorCritic, tasks.logged_steps, tasks.act_and_judge, clip=0.5),
    "super-resolution": Task(tasks.super_resolution, partial(tasks.mosaics, halved=True), tasks.regress, batch=32),
    "unet": Task(tasks.UNet, partial(tasks.mosaics, halved=False), tasks.regress, batch=32),
}


@dataclass(frozen=True)
class Pair:
    task: str
    optimizer: Callable[..., Optimizer]
    lr: float
    steps: int
    schedule: Callable[[float], float] | None = None  # the share of lr, by the share of the steps


momentum = partial(SGD, momentum=0.9)
gpt_adamw = partial(AdamW, betas=(0.9, 0.95), weight_decay=0.1)
PAIRS = {
    "vae": Pair("vae", AdamW, 1e-3, 120),
    "autoencoder-adamw": Pair("autoencoder", AdamW, 1e-3, 400),
    "autoencoder-sgd": Pair("autoencoder", momentum, 0.1, 400),
    "gpt-untied": Pair("gpt", gpt_adamw, 1e-3, 160),
    "gpt-tied": Pair("gpt-tied", gpt_adamw, 1e-3, 160),
    "word-transformer-sgd": Pair("word-transformer", SGD, 5.0, 200),
    "word-transformer-adamw": Pair("word-transformer", AdamW, 5e-4, 200, warmup),
    "llama": Pair("llama", gpt_adamw, 1e-3, 120, cosine),
    "vit": Pair("vit", AdamW, 1e-3, 160),
    "cnn-sgd": Pair("cnn", momentum, 0.02, 400),
    "cnn-adamw": Pair("cnn", AdamW, 1e-3, 400),
    "cnn-norm-sgd": Pair("cnn-norm", partial(momentum, weight_decay=5e-4), 0.05, 200, cosine),
    "cnn-norm-adamw": Pair("cnn-norm", AdamW, 1e-3, 200),
    "mlp-low": Pair("mlp", AdamW, 3e-4, 400),
    "mlp-tuned": Pair("mlp", AdamW, 3e-3, 400),
    "mlp-sgd": Pair("mlp", momentum, 0.05, 400),
    "mlp-sgd-low": Pair("mlp", momentum, 0.01, 400),
    "lstm": Pair("lstm", Adam, 1e-3, 300),
    "actor-critic": Pair("actor-critic", partial(Adam, eps=1e-5), 3e-4, 400),
    "super-resolution": Pair("super-resolution", Adam, 1e-3, 300),
    "unet": Pair("unet", AdamW, 1e-3, 200),
    "rmsprop-cnn": Pair("cnn", RMSprop, 1e-3, 400),
    "nadam-mlp": Pair("mlp", NAdam, 2e-3, 400),
    "subclass-mlp": Pair("mlp", MyAdamW, 1e-3, 400),
    "adagrad-mlp": Pair("mlp", Adagrad, 1e-2, 400),
    "lion-gpt": Pair("gpt", partial(Lion, weight_decay=0.1), 3e-4, 160),
}


def batches(task: Task, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches, pass after pass."""
    (x, y), _ = task.data()
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chunk in torch.randperm(len(x), generator=generator).split(task.batch):
            if len(chunk) == task.batch:
                yield x[chunk], y[chunk]


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> float:
    """Return the loss of what is held out, with noise that is always the same; infinite where it is no number."""
    x, y = task.data()[1]
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        losses = [task.loss(model, x[i : i + task.batch], y[i : i + task.batch]) for i in range(0, len(x), task.batch)]
    model.train()
    loss = float(torch.stack(losses).mean())
    return loss if math.isfinite(loss) else math.inf


def train(pair: Pair, task: Task, model: nn.Module, optimizer: Optimizer, seed: int) -> Iterator[float]:
    """Train, and yield the held-out loss at each of the points."""
    share = pair.schedule
    schedule = share and LambdaLR(optimizer, lambda step: share((step + 1) / pair.steps))
    points = {round(point * pair.steps) for point in POINTS}
    for step, (x, y) in enumerate(itertools.islice(batches(task, seed), pair.steps)):
        optimizer.zero_grad()
        task.loss(model, x, y).backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if step + 1 in points:
            yield evaluate(task, model)


def run(name: str, arm: str, seed: int, options: dict | None = None) -> dict:
    """Train once, with K-FAC if ``arm`` is "kfac". An error of K-FAC makes the losses that follow infinite."""
    pair, task = PAIRS[name], TASKS[PAIRS[name].task]
    task.data()  # is read once, and not timed
    losses, error = [], None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = task.model()
        optimizer = pair.optimizer(model.parameters(), lr=pair.lr)
        begin = time.perf_counter()
        with dkfac.KFAC(model, optimizer, announce=False, **(options or {})) if arm == "kfac" else nullcontext():
            torch.manual_seed(seed)
            try:
                for loss in train(pair, task, model, optimizer, seed):
                    losses.append(loss)
            except Exception as problem:
                if arm != "kfac":
                    raise
                error = repr(problem)
        seconds = time.perf_counter() - begin
    losses += [math.inf] * (len(POINTS) - len(losses))
    about = {"pair": name, "arm": arm, "seed": seed, "lr": pair.lr, "steps": pair.steps}
    return about | {"losses": losses, "seconds": round(seconds, 2), "error": error}


def excess(loss: float, baseline: float) -> float:
    return loss / baseline - 1 if math.isfinite(baseline) else 0.0 if math.isinf(loss) else -1.0


def judge(runs: list[dict]) -> dict:
    """Return a pair's medians at each point, the tolerances, and how far each other arm is above the baseline."""
    at = {arm: list(zip(*(r["losses"] for r in runs if r["arm"] == arm), strict=True)) for arm in FIRST_SEED}
    losses = {arm: [median(point) for point in points] for arm, points in at.items() if points}
    spread = [(max(x) - min(x)) / median(x) if math.isfinite(max(x)) else math.inf for x in at["baseline"]]
    other = losses.keys() - {"baseline"}
    above = {arm: [excess(*both) for both in zip(losses[arm], losses["baseline"], strict=True)] for arm in other}
    return {
        "pair": runs[0]["pair"],
        "losses": losses,
        "tolerance": [max(TOLERANCE, s) for s in spread],
        "excess": above,
        "seconds": {arm: median(r["seconds"] for r in runs if r["arm"] == arm) for arm in losses},
        "errors": sorted({r["error"] for r in runs if r["error"]}),
    }


def compare(pair_name: str, seeds: int, options: dict | None = None) -> dict:
    """Return the verdict on one pair, without the control, in this process."""
    return judge([run(pair_name, arm, seed, options) for arm in ("baseline", "kfac") for seed in range(seeds)])


def summarise(pairs: list[dict], arm: str) -> dict:
    points = [both for p in pairs for both in zip(p["excess"][arm], p["tolerance"], strict=True)]
    counts = {"points": len(points), "within_tolerance": sum(e <= t for e, t in points) / len(points)}
    below = sum(p["losses"][arm][-1] < p["losses"]["baseline"][-1] for p in pairs) / len(pairs)
    return counts | {"largest_excess": max(e for e, _ in points), "pairs": len(pairs), "finally_below": below}


def row(pair: dict) -> str:
    both = zip(pair["excess"]["kfac"], pair["tolerance"], strict=True)
    losses = " | ".join(" ".join(f"{x:8.4g}" for x in pair["losses"][arm]) for arm in ("baseline", "kfac"))
    above = " ".join(f"{100 * e:+6.1f}{'*' if e > t else ' '}{'!' if e > MOST else ' '}" for e, t in both)
    return f"{pair['pair']:22} | {losses} | {above} | {100 * pair['excess']['control'][-1]:+7.1f}"


def study(names: list[str], seeds: int, options: dict, workers: int, reused: dict[tuple, dict]) -> Iterator[list[dict]]:
    """Yield each pair's runs, several at a time in processes of their own."""
    with mp.get_context("spawn").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs: dict[str, list] = {name: [] for name in names}
        for name, (arm, first), i in itertools.product(names, FIRST_SEED.items(), range(seeds)):
            known = reused.get((name, arm, first + i, PAIRS[name].lr, PAIRS[name].steps))
            jobs[name].append(known or pool.apply_async(run, (name, arm, first + i, options)))
        for of_pair in jobs.values():
            yield [job if isinstance(job, dict) else job.get() for job in of_pair]


def option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, help="default 3, with --quick 1")
    add("--workers", type=int, default=2)
    add("--pairs", help=f"separated by commas; default all of {', '.join(PAIRS)}")
    add("--quick", action="store_true", help=f"only {QUICK}")
    add("--options", nargs="*", type=option, default=[], metavar="NAME=VALUE", help="given to KFAC")
    add("--baseline-from", help="take the runs without K-FAC from this JSON where it has them")
    add("--out", help="JSON to write, as benchmarks/results/never_worse_cpu.json; default: print only")
    given = parser.parse_args()
    names = (given.pairs or (QUICK if given.quick else ",".join(PAIRS))).split(",")
    if unknown := [name for name in names if name not in PAIRS]:
        parser.error(f"no pair is called {', '.join(unknown)}: there are {', '.join(PAIRS)}")
    seeds, options, reused = given.seeds or (1 if given.quick else 3), dict(given.options), {}
    if given.baseline_from:
        runs = json.loads(pathlib.Path(given.baseline_from).read_text())["runs"]
        keys = ("pair", "arm", "seed", "lr", "steps")
        reused = {tuple(r[key] for key in keys): r for r in runs if r["arm"] != "kfac"}
    begin, runs, pairs = time.perf_counter(), [], []
    at = "10, 25, 50, 100 %"
    print(f"{'pair':22} | {'alone at ' + at:35} | {'with K-FAC':35} | {'above, %':35} | control", flush=True)
    for of_pair in study(names, seeds, options, given.workers, reused):
        runs += of_pair
        pairs.append(judge(of_pair))
        print(row(pairs[-1]), *pairs[-1]["errors"], flush=True)
    summary = {arm: summarise(pairs, arm) for arm in ("kfac", "control")}
    for arm, s in summary.items():
        print(f"{arm:7}: {s['within_tolerance']:.1%} of {s['points']} points within tolerance (goal 95 %), largest "
              f"excess {s['largest_excess']:.1%} (goal 10 %), finally below the optimizer alone in "
              f"{s['finally_below']:.1%} of {s['pairs']} pairs (goal 81 %)")  # fmt: skip
    seconds = round(time.perf_counter() - begin, 1)
    print(f"seeds: {seeds}, workers: {given.workers}, {seconds:.0f} s")
    if given.out:
        figures = {"seeds": seeds, "options": options, "baseline_from": given.baseline_from, "at": POINTS}
        write(given.out, figures | {"seconds": seconds, "summary": summary, "pairs": pairs, "runs": runs})


if __name__ == "__main__":
    main()
