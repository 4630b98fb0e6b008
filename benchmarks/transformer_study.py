"""Compare optimizers on a small transformer: AdamW, Muon, SOAP, K-FAC into AdamW, Adam in the eigenbasis of K-FAC.

Runs take all steps or a fraction of them with a shortened schedule: how many steps does an optimizer need to reach
AdamW's loss? For each number of steps, every optimizer gets the same number of learning rates (``GRIDS``); the best one
by validation loss is repeated with more seeds. Several runs share the machine, so times are measured separately: whole
runs without validation, one after the other on an idle machine, the minimum of ``--rounds``, so that compilation does
not count. ``char_gpt.py`` and ``cifar_vit.py`` define the tasks. ``adam-eigen@name`` is adam-eigen with other options.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import time

import torch
import torch.nn.functional as F
from environment import write
from soap import SOAP
from torch import Tensor, nn

import dkfac

GRIDS = {
    "adamw": [1e-3, 3e-3, 6e-3, 1e-2, 2e-2],
    "muon": [3e-3, 1e-2, 2e-2, 4e-2, 8e-2],
    "soap": [1e-3, 3e-3, 6e-3, 1e-2, 2e-2],
    "kfac-adamw": [3e-3, 6e-3, 1e-2, 2e-2, 4e-2],
    "adam-eigen": [3e-3, 6e-3, 1e-2, 2e-2, 4e-2],
}


WARMUP = 0.2
"""Of the steps. All of them do better than with a twentieth, AdamW by most."""


class Task:
    """What is learned: subclasses bring a model, batches and the data."""

    terms = "batch"

    def __init__(self, data, size: dict, device: str) -> None:
        self.data, self.size, self.device = data, size, device

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batch(self, generator: torch.Generator, *, held: bool = False) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            output = model(x)
        return F.cross_entropy(output.flatten(0, -2).float(), y.flatten())

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        model.eval()
        generator = torch.Generator(self.device).manual_seed(12345)
        losses = [self.loss(model, *self.batch(generator, held=True)) for _ in range(20)]
        model.train()
        return float(torch.stack(losses).mean())


def optimizers(name: str, model: nn.Module, lr: float, options: dict) -> list[torch.optim.Optimizer]:
    """Return what steps the model; K-FAC is attached to the last."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks")]
    inner = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inner]
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    if name == "muon":
        return [torch.optim.AdamW(rest, lr=3e-3, **adamw), torch.optim.Muon(matrices, lr=lr, weight_decay=0.01)]
    if name == "soap":
        every = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return [torch.optim.AdamW(rest, lr=lr, **adamw), SOAP(every, lr=lr, frequency=options.get("frequency", 10))]
    return [torch.optim.AdamW(model.parameters(), lr=lr, **adamw)]


def attach(config: dict, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> dkfac.KFAC | None:
    name = config["optimizer"].partition("@")[0]
    if name not in ("kfac-adamw", "adam-eigen"):
        return None
    given = {"factor_interval": 2, "inverse_interval": 20, "loss_terms": task.terms}
    if name == "adam-eigen":
        given["curvature"] = "adam-eigen"
    else:
        given |= {"curvature": "kfac", "damping": 1e-2, "damping_mode": "relative"}
    settings = dkfac.Settings(announce=False, **(given | config.get("options", {})))  # the same on every device
    return dkfac.KFAC(model, optimizer, settings=settings)


def train(config: dict, make: type[Task], data, device: str) -> dict:
    task = make(data, config["size"], device)
    steps = round(config["size"]["steps"] * config.get("fraction", 1.0))
    torch.manual_seed(config["seed"])
    generator = torch.Generator(device).manual_seed(config["seed"])
    model = task.model().to(device)
    used = optimizers(config["optimizer"], model, config["lr"], config.get("options", {}))
    kfac = attach(config, task, model, used[-1])
    warm = max(1, round(steps * WARMUP))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / warm) * max(0.0, 1 - t / steps)) for o in used
    ]
    curve, seconds, alone = [], 0.0, config.get("alone", False)
    for step in range(steps + 1):
        if step % max(1, steps // 20) == 0:
            curve.append({"step": step, "seconds": seconds} | ({} if alone else {"loss": task.validate(model)}))
        if step == steps:
            break
        begin = time.perf_counter()
        x, y = task.batch(generator)
        for o in used:
            o.zero_grad()
        task.loss(model, x, y).backward()
        for o, schedule in zip(used, schedules, strict=True):
            o.step()
            schedule.step()
        if device == "cuda" and (step % 60 == 59 or step + 1 == steps):  # often would be what is measured
            torch.cuda.synchronize()
        seconds += time.perf_counter() - begin
    if alone:
        return {"seconds": seconds, "curve": curve}
    metrics = {} if kfac is None else kfac.metrics()
    if kfac is not None and "intervals" in (report := kfac.report()):
        metrics |= {"intervals": report["intervals"], "refreshed_factors": report["refreshed_factors"]}
    result = {"config": config, "steps": steps, "final": curve[-1]["loss"], "seconds": seconds}
    return result | {"curve": curve, "metrics": metrics}


def run_times(best: dict[tuple[str, float], dict], make: type[Task], data, device: str, rounds: int) -> dict:
    """Return how long each run takes and how that grows, the shortest of rounds in which all take turns."""
    found: dict[tuple[str, float], list[dict]] = {which: [] for which in best}
    for _ in range(rounds):
        for which, config in best.items():
            found[which].append(train(config | {"alone": True}, make, data, device))
    shortest = {which: min(runs, key=lambda r: r["seconds"]) for which, runs in found.items()}
    return {which: run | {"rounds": [r["seconds"] for r in found[which]]} for which, run in shortest.items()}


def run_all(configs: list[dict], make: type[Task], data, device: str, workers: int) -> list[dict]:
    """Train all, several at a time, in processes of their own."""
    if workers <= 1:
        return [said(train(config, make, data, device)) for config in configs]
    with mp.get_context("spawn").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.apply_async(train, (config, make, data, device)) for config in configs]
        return [said(job.get()) for job in jobs]


def said(run: dict) -> dict:
    c = run["config"]
    print(f"{c['optimizer']:12} lr {c['lr']:<7g} seed {c['seed']} x{c.get('fraction', 1.0):<5g} {c.get('options', '')} "
          f"loss {run['final']:.4f} in {run['seconds']:.1f} s", flush=True)  # fmt: skip
    return run


def add_arguments(parser: argparse.ArgumentParser, sizes: dict) -> None:
    add = parser.add_argument
    add("--size", default="tiny", choices=sizes)
    add("--steps", type=int, help="instead of the size's")
    add("--optimizers", default=",".join(GRIDS))
    add("--seeds", type=int, default=3)
    add("--fractions", default="0.5,0.33", help="of the steps, which are tried too")
    add("--fractions-of", help="optimizers that take fewer steps too; by default all")
    add("--never-all", default="", help="optimizers that do not take all steps")
    add("--options", default="{}", help="JSON: further settings of K-FAC, by optimizer")
    add("--lrs", default="{}", help="JSON: learning rates instead of the grids, by optimizer")
    add("--workers", type=int, default=2)
    add("--rounds", type=int, default=2, help="in which whole runs are timed")
    add("--out")


def study(args: argparse.Namespace, make: type[Task], sizes: dict, data, name: str) -> None:
    """Tune, run with further seeds, time, and write it down."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = sizes[args.size] | ({"steps": args.steps} if args.steps else {})
    names, options = args.optimizers.split(","), json.loads(args.options)
    base = {name: {"size": size, "optimizer": name, "options": options.get(name, {})} for name in names}
    grids = {n: GRIDS[n.partition("@")[0]] for n in names} | json.loads(args.lrs)
    fractions = [1.0, *(float(f) for f in args.fractions.split(",") if f)]
    shortened = (args.fractions_of or args.optimizers).split(",")
    wanted = [(n, f) for f in fractions for n in names if n in shortened or f == 1]
    wanted = [(n, f) for n, f in wanted if n not in args.never_all.split(",") or f < 1]
    parameters = sum(p.numel() for p in make(data, size, "cpu").model().parameters())
    out = args.out or f"benchmarks/results/{name}_{args.size}_{'h200' if device == 'cuda' else 'cpu'}.json"
    figures = {"size": size, "parameters": parameters, "workers": args.workers, "grids": {n: grids[n] for n in names}}
    grid = [base[n] | {"lr": lr, "seed": 0, "fraction": f} for n, f in wanted for lr in grids[n]]
    runs = run_all(grid, make, data, device, args.workers)
    write(out, figures | {"runs": runs})  # what follows may not be reached
    best = {}
    for n, fraction in wanted:
        tried = [r for r in runs if (r["config"]["optimizer"], r["config"]["fraction"]) == (n, fraction)]
        best[n, fraction] = min(tried, key=lambda r: r["final"])["config"]
    further = [config | {"seed": seed} for config in best.values() for seed in range(1, args.seeds)]
    runs += run_all(further, make, data, device, args.workers)
    write(out, figures | {"runs": runs})
    times, table = run_times(best, make, data, device, args.rounds), {}
    for (n, fraction), config in best.items():
        chosen = [r for r in runs if r["config"] | {"seed": 0} == config]
        losses = [r["final"] for r in chosen]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        alone = times[n, fraction]
        entry = {"lr": config["lr"], "loss": statistics.mean(losses), "stdev": spread, "seeds": len(losses)}
        table[f"{n} x{fraction:g}"] = entry | {"seconds": alone["seconds"], "rounds": alone["rounds"]}
        table[f"{n} x{fraction:g}"]["elapsed"] = alone["curve"]
        seconds, each = alone["seconds"], 1e3 * alone["seconds"] / chosen[0]["steps"]
        print(f"{n:12} x{fraction:<5g} lr {config['lr']:<7g} loss {entry['loss']:.4f} +- {spread:.4f} "
              f"in {seconds:.1f} s, {each:.1f} ms a step", flush=True)  # fmt: skip
    write(out, figures | {"table": table, "runs": runs})
