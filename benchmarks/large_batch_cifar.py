"""CIFAR-10, ResNet-20: accuracy of SGD and K-FAC with large batches, and the benefit of adaptive staleness.

``--study batches``: for each batch size, SGD and K-FAC are tuned over the same number of settings (``RATES``,
``DAMPINGS``) on 5,000 held-out training images with seed 0, and the best setting is run with more seeds, K-FAC also
with 60% of the steps. 30 epochs, linear warm-up over a fifth and linear decay, label smoothing 0.1, weight decay 5e-4,
Nesterov momentum 0.9, the same augmentation.
``--study staleness``: fixed intervals against intervals that depend on how factors change, at batch 1,024 or the size
in ``--batches``; refreshes are counted by factor. Several processes share a GPU, so times are not comparable.
"""

import argparse
import json
import statistics
import time

import cifar
import torch
import torch.nn.functional as F
from cifar import accuracy, augment, normalise, read_archive
from environment import write
from machine import Machine, known_runs

import dkfac
from dkfac.config.experimental import EXPERIMENTAL_NAMES
from dkfac.layers.find import find_layers
from dkfac.tools.recipes.resnet import build_cifar_resnet

EPOCHS = 30
RATES = {
    256: (0.1, 0.2, 0.3, 0.4, 0.6, 0.8),
    1024: (0.2, 0.4, 0.8, 1.2, 1.6, 2.4),
    4096: (0.4, 0.8, 1.2, 1.6, 2.4, 3.2),
    8192: (0.1, 0.2, 0.4, 0.8, 1.2, 1.6),
}
DAMPINGS = (3e-4, 3e-3)
RHYTHM = {256: (4, 40), 1024: (1, 10), 4096: (1, 4), 8192: (1, 2)}
"""Factors and inverses: about as often in an epoch."""


def kfac_of(batch: int, **more) -> dict:
    factors, inverses = RHYTHM[batch]
    return {
        "factor_interval": factors,
        "inverse_interval": inverses,
        "warmup_refresh": None,
        "solver": "cholesky",
        **more,
    }


def settings_of(options: dict) -> dkfac.Settings:
    """Return settings, the same on every device. Experimental ones stand in the options by name, as in the committed
    runs, so that a study that goes on knows those again."""
    extra = {name: value for name, value in options.items() if name in EXPERIMENTAL_NAMES}
    kept = {name: value for name, value in options.items() if name not in extra}
    return dkfac.Settings(announce=False, experimental=extra, **kept)


def train(config: dict, data: dict[str, torch.Tensor], device: str) -> dict:
    generator, data, held, used = cifar.begin(config, data, device)
    model = build_cifar_resnet(20).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, nesterov=True, weight_decay=5e-4)
    kfac = None if config["kfac"] is None else dkfac.KFAC(model, optimizer, settings=settings_of(config["kfac"]))
    total = round(config["epochs"] * len(used) / config["batch"])
    warm = max(1, total // 5)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / warm if step < warm else max(0.0, (total - step) / (total - warm))
    )
    begin, waiting, curve = time.perf_counter(), used[:0], []
    for step in range(total):
        if len(waiting) < config["batch"]:
            waiting = torch.cat([waiting, used[torch.randperm(len(used), generator=generator, device=device)]])
        chunk, waiting = waiting[: config["batch"]], waiting[config["batch"] :]
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            output = model(normalise(augment(data["train_x"][chunk], generator)))
            loss = F.cross_entropy(output, data["train_y"][chunk], label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, total // 15) == 0:
            curve.append([step + 1, accuracy(model, data["train_x"][held], data["train_y"][held])])
    report = {} if kfac is None else kfac.report()
    return {
        "config": config,
        "steps": total,
        "validation": accuracy(model, data["train_x"][held], data["train_y"][held]),
        "test": accuracy(model, data["test_x"], data["test_y"]),
        "curve": curve,
        "seconds": time.perf_counter() - begin,
        "refreshed_factors": report.get("refreshed_factors"),
        "refreshes": None if kfac is None else kfac.metrics()["refreshes"],
        "intervals": intervals(report.get("interval_history", [])) if config["seed"] == 0 else {},
    }


def intervals(history: list[dict]) -> dict[str, str]:
    """Return the intervals that each factor was given, as "step:interval step:interval ..."."""
    found: dict[str, list[str]] = {}
    for entry in history:
        found.setdefault(f"{entry['layer']} {entry['factor']}", []).append(f"{entry['step']}:{entry['interval']}")
    return {name: " ".join(given) for name, given in found.items()}


def grid(batch: int) -> list[dict]:
    base = {"batch": batch, "epochs": EPOCHS, "seed": 0}
    found = [base | {"label": "sgd", "lr": lr, "kfac": None} for lr in RATES[batch]]
    return found + [
        base | {"label": "kfac", "lr": lr, "kfac": kfac_of(batch, damping=damping)}
        for lr in RATES[batch][1::2]
        for damping in DAMPINGS
    ]


def best(runs: list[dict], batch: int) -> dict[str, dict]:
    """Return the configs that did best on validation images, once all of a grid have been run."""
    found: dict[str, dict] = {}
    wanted = grid(batch)
    tried = [run for run in runs if run["config"] in wanted]
    if len(tried) < len(wanted):
        return {}
    for label in ("sgd", "kfac"):
        done = [run for run in tried if run["config"]["label"] == label and "test" in run]
        if done:
            found[f"{label} {batch}"] = max(done, key=lambda run: run["validation"])["config"]
    return found


def further(chosen: dict[str, dict], seeds: int) -> list[dict]:
    """Return the best with more seeds, K-FAC's in 60% of the steps too; those that take longest first."""
    found = []
    for config in sorted(chosen.values(), key=lambda config: config["kfac"] is None):
        found += [config | {"seed": seed} for seed in range(1, seeds)]
        if config["kfac"]:
            short = config | {"epochs": 0.6 * EPOCHS, "label": "kfac 60%"}
            found += [short | {"seed": seed} for seed in range(seeds)]
    return found


def batches(machine: Machine, sizes: list[int], seeds: int) -> dict:
    tuned = [more for batch in sizes for more in further(best(machine.runs, batch), seeds)]
    if not machine.run(tuned + [config for batch in sizes for config in grid(batch)]):
        return {}
    chosen = {name: config for batch in sizes for name, config in best(machine.runs, batch).items()}
    machine.run(further(chosen, seeds))
    return chosen


def summary(done: list[dict], best: dict) -> dict:
    found = {}
    for name, chosen in best.items():
        for label, epochs in ((name, EPOCHS), (f"{name} in 60%", 0.6 * EPOCHS)):
            same = [
                r["test"] for r in done
                if "test" in r and r["config"]["epochs"] == epochs and r["config"]["batch"] == chosen["batch"]
                and r["config"]["lr"] == chosen["lr"] and r["config"]["kfac"] == chosen["kfac"]
            ]  # fmt: skip
            if same:
                found[label] = {
                    "median": statistics.median(same),
                    "tests": same,
                    "lr": chosen["lr"],
                    "kfac": chosen["kfac"],
                }
                print(f"{label:24} lr {chosen['lr']}: {statistics.median(same):.4f} {[round(t, 4) for t in same]}")
    return found


def staleness(machine: Machine, batch: int, seeds: int) -> dict:
    """Fixed intervals, at which factors are measured and decomposed alike, against those that follow the factors."""
    epochs, lr, damping = {1024: (20, 0.8, 1e-3), 4096: (30, 1.6, 3e-4)}[batch]
    base = {"batch": batch, "epochs": epochs, "lr": lr}
    own = {"damping": damping, "solver": "cholesky", "warmup_refresh": None}
    kinds = {f"fixed {n}": {"factor_interval": n, "inverse_interval": n, **own} for n in (1, 4, 10, 25, 60)}
    for how, threshold in (("change", 0.1), ("change", 0.2), ("change", 0.4), ("basis", 0.1), ("basis", 0.2)):
        more = {"staleness": how, "staleness_threshold": threshold, **own}
        kinds[f"{how} {threshold}"] = more if how == "change" else more | {"solver": "eigen"}
    configs = [base | {"label": label, "kfac": kfac, "seed": s} for s in range(seeds) for label, kfac in kinds.items()]
    machine.run(configs)
    done, found = machine.runs, {}
    for label in kinds:
        runs = [r for r in done if r["config"]["label"] == label and "test" in r]
        if runs:
            number = len(find_layers(build_cifar_resnet(20), dkfac.Settings(), None)[0]) * 2
            refreshed = [r["refreshed_factors"] or r["refreshes"] * number for r in runs]
            tests = [r["test"] for r in runs]
            found[label] = {"median": statistics.median(tests), "tests": tests, "refreshes": refreshed}
            print(f"{label:14} {statistics.median(tests):.4f} {[round(t, 4) for t in tests]}, refreshed: {refreshed}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive")
    parser.add_argument("--study", choices=("batches", "staleness"), default="batches")
    parser.add_argument("--batches", default="256,1024,4096,8192")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument(
        "--seconds",
        type=float,
        default=560,
        help="stop and write what there is after this long; called again, it goes on",
    )
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    data = {name: t.contiguous().share_memory_() for name, t in read_archive(given.archive).items()}
    machine = Machine(data, train, given.workers, given.seconds, known_runs(given.out))
    try:
        if given.study == "batches":
            chosen = batches(machine, json.loads(f"[{given.batches}]"), given.seeds)
            table = summary(machine.runs, chosen)
        else:
            sizes = json.loads(f"[{given.batches}]")
            table = staleness(machine, sizes[0] if len(sizes) == 1 else 1024, given.seeds)
    finally:
        machine.close()
    write(given.out, {"table": table, "runs": machine.runs})


if __name__ == "__main__":
    main()
