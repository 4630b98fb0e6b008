"""CIFAR-10, ResNet-32 and ResNet-18, batch 128 and 1,024: epochs and seconds to the final accuracy of tuned SGD.

For SGD, AdamW, Muon (AdamW for other parameters), K-FAC with SGD and K-FAC with AdamW (Adam in the eigenbasis), the
same number of settings (``GRID`` and ``BEYOND``) is tried on 5,000 held-out training images, with seed 0, for three
quarters of SGD's epochs. (K-FAC's grid at 1,024 was narrowed by the validation accuracies of ``--stage search``, which
tried more settings of K-FAC than of the others.)
The best setting is then run with three seeds for all of SGD's epochs and for fractions of them, with a shortened
schedule (linear warm-up over a fifth, linear decay), the same data and augmentation, and label smoothing 0.1. These
runs share the GPU, so step times are measured separately (``--stage times``), one optimizer after the other, with the
same settings. The same command with the same ``--out`` continues an interrupted study.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import time

import cifar
import torch
import torch.nn.functional as F
from cifar import accuracy, augment, normalise, read_archive
from environment import write
from machine import Machine, known_runs, lines_of
from torch import nn

import dkfac
from dkfac.tools.recipes.resnet import build_cifar_resnet, build_resnet

EPOCHS = 16
FRACTIONS = {
    "sgd": (1.0, 0.75),
    "adamw": (1.0,),
    "muon": (1.0, 0.75),
    "kfac": (1.0, 0.75, 0.625),
    "adam-eigen": (1.0, 0.75),
}
GRID = {
    "sgd": {128: [{"lr": lr} for lr in (0.05, 0.1, 0.2, 0.4)], 1024: [{"lr": lr} for lr in (0.4, 0.8, 1.6, 2.4)]},
    "adamw": {
        128: [{"lr": lr, "decay": wd} for lr, wd in itertools.product((1e-3, 3e-3), (0.05, 0.2))],
        1024: [{"lr": lr, "decay": wd} for lr, wd in itertools.product((3e-3, 8e-3), (0.05, 0.2))],
    },
    "muon": {
        128: [{"lr": lr, "decay": wd} for lr, wd in itertools.product((0.02, 0.06), (0.01, 0.05))],
        1024: [{"lr": lr, "decay": wd} for lr, wd in itertools.product((0.05, 0.15), (0.01, 0.05))],
    },
    "kfac": {
        128: [{"lr": lr, "damping": d} for lr, d in itertools.product((0.1, 0.2), (1e-4, 1e-3))],
        1024: [{"lr": lr, "damping": d} for lr, d in itertools.product((0.8, 1.2), (3e-4, 1e-3))],
    },
}
GRID["adam-eigen"] = GRID["adamw"]
BEYOND: dict[tuple[int, int], dict[str, list[dict]]] = {
    (32, 128): {
        "sgd": [{"lr": 0.8}],
        "adamw": [{"lr": 8e-3, "decay": 0.2}],
        "muon": [{"lr": 0.12, "decay": 0.01}],
        "kfac": [{"lr": 0.05, "damping": 1e-3}],
    },
    (18, 128): {
        "sgd": [{"lr": lr} for lr in (0.0125, 0.025)],
        "adamw": [{"lr": 8e-3, "decay": decay} for decay in (0.05, 0.2)],
        "muon": [{"lr": 0.12, "decay": 0.01}, {"lr": 0.06, "decay": 2e-3}],
        "kfac": [{"lr": 0.05, "damping": d} for d in (1e-4, 1e-3)],
    },
    (18, 1024): {
        "sgd": [{"lr": lr} for lr in (0.05, 0.1, 0.2)],
        "adamw": [{"lr": 0.02, "decay": decay} for decay in (0.05, 0.2)] + [{"lr": 8e-3, "decay": 0.5}],
        "muon": [{"lr": 0.02, "decay": decay} for decay in (0.01, 0.05)] + [{"lr": 0.05, "decay": 0.2}],
        "kfac": [{"lr": 0.4, "damping": d} for d in (3e-4, 1e-3)] + [{"lr": 0.2, "damping": 3e-4}],
    },
}
"""Further settings, as many for each, where the last of a grid was the best."""
FAST = {
    "factor_interval": 10,
    "inverse_interval": 100,
    "statistics_fraction": 0.25,
    "solver": "cholesky",
    "tf32": True,
    "cuda_graph": True,
    "spread_refresh": 100,
}
EIGEN = FAST | {
    "factor_interval": 4,
    "inverse_interval": 20,
    "solver": "warm-eigen",
    "spread_refresh": 20,
    "block_dim": 600,
}
SHORT = {"network": 32, "batch": 1024, "epochs": 0.75 * EPOCHS}
SEARCH: list[dict] = [
    *({"optimizer": "sgd", "lr": lr, "epochs": e} for e in (EPOCHS, 0.75 * EPOCHS) for lr in (1.6, 2.4, 3.2)),
    *({"optimizer": "kfac", "lr": lr, "damping": d, "kfac": FAST}
      for lr, d in itertools.product((0.8, 1.2, 1.6, 2.4), (1e-4, 3e-4, 1e-3, 3e-3))),
    *({"optimizer": "kfac", "lr": 1.2, "decay": decay, "damping": 3e-4, "kfac": FAST} for decay in (2e-4, 1e-3)),
    *({"optimizer": "kfac", "lr": 1.2, "damping": 3e-4, "kfac": FAST | more} for more in (
        {"factor_interval": 2, "inverse_interval": 20, "spread_refresh": 20},
        {"warmup_refresh": [5, 300]},
        {"norm_form": "unit"},
        {"weight_sharing": "reduce"},
        {"factor_decay": 0.8},
        {"curvature": "ekfac", "solver": "warm-eigen", "cuda_graph": False},
        {"solver": "warm-eigen"},
        {"fisher": "sampled", "fisher_loss": "cross-entropy"},
    )),
    {"optimizer": "kfac", "lr": 1.2, "damping": 0.01, "kfac": FAST | {"damping_mode": "relative"}},
    {"optimizer": "kfac", "lr": 1.2, "damping": 0.1, "kfac": FAST | {"damping_mode": "relative"}},
    *({"optimizer": "adam-eigen", "lr": lr, "decay": decay, "kfac": EIGEN}
      for lr, decay in itertools.product((3e-3, 6e-3, 1.2e-2), (0.05, 0.2))),
    {"optimizer": "adam-eigen", "lr": 6e-3, "decay": 0.1, "kfac": EIGEN | {
        "curvature": "adam-eigen", "rescale": "kl-clip", "kl_clip": 1e-4}},
    *({"optimizer": "adamw", "lr": lr, "decay": 0.1} for lr in (3e-3, 6e-3, 1.2e-2)),
    *({"optimizer": "muon", "lr": lr, "decay": 0.02} for lr in (0.02, 0.05, 0.15)),
]  # fmt: skip
"""``--stage search``: the step control of K-FAC, looked at before the study."""

KFAC = {"kfac": FAST | {"rescale": "norm-kl", "warmup_refresh": 1.3}, "adam-eigen": EIGEN}
"""K-FAC's settings besides the damping, in the runs and in the timing. Two are defaults, named to tell these runs from
those before (docs/notes/010-early-steps.md), which are in the same file."""

HOLDS = [
    point | {"optimizer": "kfac", "epochs": 0.75 * EPOCHS, "seed": 0, "kfac": KFAC["kfac"] | hold}
    for point in (
        {"network": 18, "batch": 128, "lr": 0.1, "damping": 1e-3},
        {"network": 18, "batch": 1024, "lr": 0.8, "damping": 3e-4},
        {"network": 32, "batch": 1024, "lr": 1.2, "damping": 3e-4},
    )
    for hold in ({"kl_clip": 3e-3}, {"kl_clip": 1e-2}, {"rescale": "norm-global"})
]
"""``--holds``: how far a step is held back, tried beside the settings; not chosen from."""


class FlatMuon:
    """torch.optim.Muon on convolutions as matrices, which it takes alone, and AdamW for everything else."""

    def __init__(self, model: nn.Module, lr: float, decay: float) -> None:
        kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
        own = {id(p) for p in kernels}
        # Views of the weights, which are laid out with channels last.
        self.pairs = [(p, nn.Parameter(p.detach().permute(0, 2, 3, 1).reshape(len(p), -1))) for p in kernels]
        assert all(flat.data_ptr() == p.data_ptr() for p, flat in self.pairs), "a copy would not be trained"
        rest = [p for p in model.parameters() if id(p) not in own]
        muon = torch.optim.Muon([flat for _, flat in self.pairs], lr=lr, weight_decay=decay)
        self.each = [muon, torch.optim.AdamW(rest, lr=3e-3, weight_decay=decay)]

    def step(self) -> None:
        for p, flat in self.pairs:
            assert p.grad is not None
            flat.grad = p.grad.permute(0, 2, 3, 1).reshape(len(p), -1)
        for optimizer in self.each:
            optimizer.step()


def make(config: dict, device: str) -> tuple[nn.Module, list, object, dkfac.KFAC | None]:
    """Return the model, its optimizers, what steps them, and K-FAC."""
    depth = config["network"]
    model = build_cifar_resnet(32) if depth == 32 else build_resnet(18, 10, small_images=True)
    model = model.to(device, memory_format=torch.channels_last)
    lr, decay, kfac = config["lr"], config.get("decay", 5e-4), None
    if config["optimizer"] == "muon":
        both = FlatMuon(model, lr, decay)
        return model, both.each, both.step, None
    if config["optimizer"] in ("adamw", "adam-eigen"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=decay)
    if "kfac" in config:
        given = {"damping": config["damping"]} if "damping" in config else {}
        kfac = dkfac.KFAC(model, optimizer, announce=False, **given, **config["kfac"])
    return model, [optimizer], optimizer.step, kfac


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(config: dict, data: dict[str, torch.Tensor], device: str) -> dict:
    """Train by a config; with ``most`` only so many steps, for their time."""
    generator, data, held, used = cifar.begin(config, data, device)
    model, optimizers, step, kfac = make(config, device)
    batch = config["batch"]
    per_epoch = len(used) // batch
    total = round(config["epochs"] * per_epoch)
    warm = max(1, total // 5)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            o, lambda n: (n + 1) / warm if n < warm else max(0.0, (total - n) / (total - warm))
        )
        for o in optimizers
    ]
    last, mark, curve, begin = config.get("most", total), (0, 0.0), [], time.perf_counter()
    chunks = iter(())
    for n in range(last):
        if n % per_epoch == 0:
            shuffled = used[torch.randperm(len(used), generator=generator, device=device)]
            chunks = iter(shuffled.split(batch))
        if n == last // 3 and "most" in config:
            wait(device)
            mark = (n, time.perf_counter() - begin)
        images, labels = normalise(augment(data["train_x"][(chunk := next(chunks))], generator)), data["train_y"][chunk]
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        step()
        for schedule in schedules:
            schedule.step()
        if (n + 1) % per_epoch == 0 and "most" not in config:
            curve.append(accuracy(model, data["train_x"][held], data["train_y"][held]))
    wait(device)
    seconds = time.perf_counter() - begin
    if "most" in config:
        return {"config": config, "mark": mark, "seconds": seconds}
    return {
        "config": config,
        "steps": total,
        "validation": accuracy(model, data["train_x"][held], data["train_y"][held]),
        "test": accuracy(model, data["test_x"], data["test_y"]),
        "curve": curve,
        "seconds": seconds,
        "metrics": {} if kfac is None else kfac.metrics(),
    }


def tuning(network: int, batch: int, optimizer: str) -> list[dict]:
    base = {"network": network, "batch": batch, "optimizer": optimizer, "epochs": 0.75 * EPOCHS, "seed": 0}
    base |= {"kfac": KFAC[optimizer]} if optimizer in KFAC else {}
    more = BEYOND.get((network, batch), {}).get(optimizer, [])
    return [base | point for point in [*GRID[optimizer][batch], *more]]


def chosen(runs: list[dict], network: int, batch: int, optimizer: str) -> dict | None:
    """Return the best setting by validation accuracy, if all were tried."""
    wanted = tuning(network, batch, optimizer)
    tried = [run for run in runs if run["config"] in wanted and "test" in run]
    return max(tried, key=lambda r: r["validation"])["config"] if len(tried) == len(wanted) else None


def fractions(network: int, optimizer: str) -> tuple[float, ...]:
    """Return the lengths that an optimizer is run for: K-FAC is ahead by more on ResNet-18."""
    return (*FRACTIONS[optimizer], *((0.5,) if (network, optimizer) == (18, "kfac") else ()))


def final(best: dict, seeds: int) -> list[dict]:
    lengths = fractions(best["network"], best["optimizer"])
    return [best | {"epochs": f * EPOCHS, "seed": s} for f in lengths for s in range(seeds)]


def times(best: dict[str, dict], data, device: str, rounds: int, steps: int) -> dict[str, dict]:
    """Return the seconds of the first steps and those of a later one; the median of rounds in which all take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in best}
    for _ in range(rounds):
        for name, config in best.items():
            run = train(config | {"epochs": EPOCHS, "most": steps}, data, device)
            at, first = run["mark"]
            found[name].append((first, (run["seconds"] - first) / (steps - at)))
    return {
        name: {
            "first_steps": steps // 3,
            "first_seconds": statistics.median(first for first, _ in each),
            "step_ms": 1e3 * statistics.median(later for _, later in each),
            "rounds_ms": [1e3 * later for _, later in each],
        }
        for name, each in found.items()
    }


def table(runs: list[dict], timed: dict[str, dict], seeds: int) -> dict:
    """Return medians of the tests, steps and seconds for each case that was run, optimizer and length."""
    found: dict[str, dict] = {}
    cases = {(run["config"]["network"], run["config"]["batch"]) for run in runs}
    for network, batch in sorted(cases, reverse=True):
        for optimizer in GRID:
            best = chosen(runs, network, batch, optimizer)
            if best is None:
                continue
            for fraction in fractions(network, optimizer):
                same = [r for r in runs if r["config"] in final(best, seeds) and "test" in r]
                same = [r for r in same if r["config"]["epochs"] == fraction * EPOCHS]
                if not same:
                    continue
                tests = sorted(r["test"] for r in same)
                row = {"epochs": fraction * EPOCHS, "steps": same[0]["steps"], "tests": tests}
                row |= {"median": statistics.median(tests), "lr": best["lr"]}
                row |= {k: best[k] for k in ("decay", "damping", "kfac") if k in best}
                if time := timed.get(f"{network} {batch} {optimizer}"):
                    later = row["steps"] - time["first_steps"]
                    row |= {"seconds": time["first_seconds"] + later * time["step_ms"] / 1e3}
                found[f"resnet{network} batch {batch} {optimizer} x{fraction:g}"] = row
                print(f"resnet{network} batch {batch} {optimizer:6} x{fraction:<6g} {row['median']:.4f} "
                      f"({tests[0]:.4f} to {tests[-1]:.4f}) {row.get('seconds', float('nan')):.1f} s")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive")
    parser.add_argument("--cases", default="32/1024,32/128,18/1024,18/128", help="network/batch")
    parser.add_argument("--stage", choices=("search", "accuracy", "times"), default="accuracy")
    parser.add_argument("--optimizers", default=",".join(GRID))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=450, help="steps timed: the first third apart")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=550, help="stop after this long; called again, it goes on")
    parser.add_argument("--holds", action="store_true", help="other limits of K-FAC's step as well")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    cases = [tuple(map(int, case.split("/"))) for case in given.cases.split(",")]
    names = given.optimizers.split(",")
    data = {name: t.contiguous().share_memory_() for name, t in read_archive(given.archive).items()}
    known, timed = known_runs(given.out), known_times(given.out)
    if given.stage == "times":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for network, batch in cases:
            found = {n: chosen(known, network, batch, n) for n in names}
            best = {f"{network} {batch} {n}": config for n, config in found.items() if config is not None}
            timed |= times(best, data, device, given.rounds, given.steps)
            write(given.out, {"table": table(known, timed, given.seeds), "times": timed, "runs": known})
        return
    machine = Machine(data, train, given.workers, given.seconds, known, lines_of(given.out))
    try:
        if given.stage == "search":
            machine.run([SHORT | {"seed": seed} | c for seed in range(given.seeds) for c in SEARCH])
        elif machine.run([c for case in cases for n in names for c in tuning(*case, n)] + HOLDS * given.holds):
            found = [chosen(machine.runs, *case, n) for case in cases for n in names]
            last = [c for best in found if best is not None for c in final(best, given.seeds)]
            # Small batches take longest and come first; Muon's longest runs last, if there is time.
            machine.run(sorted(last, key=lambda c: (c["optimizer"] == "muon" and c["epochs"] == EPOCHS, c["batch"])))
    finally:
        machine.close()
    shown = table(machine.runs, timed, given.seeds)
    write(given.out, {"table": shown, "times": timed, "runs": machine.runs})


def known_times(path: str) -> dict[str, dict]:
    file = pathlib.Path(path)
    return json.loads(file.read_text()).get("times", {}) if file.exists() else {}


if __name__ == "__main__":
    main()
