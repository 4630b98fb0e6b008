"""Step time of ``curvature="adaptive"`` relative to the former defaults, on this machine.

Three variants alternate step by step: the optimizer alone, K-FAC with the former defaults (``adam-eigen`` with AdamW,
``kfac`` with SGD) and K-FAC with the current ones, at the same intervals. Times are of whole steps, including forward
and backward; medians and means without the first ``--skip`` steps. Run it on an otherwise idle machine.
"""

import argparse
import time
import warnings
from statistics import fmean, median

import never_worse
import torch
import torch.nn.functional as F
from environment import write
from torch import nn

import dkfac
from dkfac.tools.recipes.char_gpt import GPT

BEFORE = {"adamw": "adam-eigen", "sgd": "kfac"}


def gpt(width: int, layers: int, batch: int):
    x = torch.randint(0, 90, (batch, 65), generator=torch.Generator().manual_seed(0))
    make = lambda: GPT(90, 64, layers, width, 4)  # noqa: E731
    return make, lambda model: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def of_pair(name: str):
    task = never_worse.TASKS[never_worse.PAIRS[name].task]
    x, y = next(never_worse.batches(task, 0))
    return task.model, lambda model: task.loss(model, x, y)


def mlp(width: int):
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(0))
    make = lambda: nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.Tanh())))  # noqa: E731
    return make, lambda model: model(x).square().mean()


CASES = {
    "GPT of width 64, 2 layers": ("adamw", lambda: gpt(64, 2, 16)),
    "GPT of width 256, 2 layers": ("adamw", lambda: gpt(256, 2, 16)),
    "MLP of width 512": ("adamw", lambda: mlp(512)),
    "small ResNet": ("sgd", lambda: of_pair("cnn-norm-sgd")),
    "MLP of width 512 with SGD": ("sgd", lambda: mlp(512)),
}


def arms(kind: str, case):
    make, loss = case()
    for name, curvature in {"alone": None, "before": BEFORE[kind], "adaptive": "adaptive"}.items():
        torch.manual_seed(0)
        model = make()
        rule = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
        optimizer = rule(model.parameters(), lr=1e-3, **({"momentum": 0.9} if kind == "sgd" else {}))
        if curvature is not None:
            dkfac.KFAC(model, optimizer, announce=False, curvature=curvature)
        yield name, model, optimizer, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=20)
    parser.add_argument(
        "--out", help="JSON to write, as benchmarks/results/adaptive_cost_cpu.json; default: print only"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name, (kind, case) in CASES.items():
        taken: dict[str, list[float]] = {}
        every = list(arms(kind, case))
        for _ in range(given.steps):
            for arm, model, optimizer, loss in every:
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
                taken.setdefault(arm, []).append(time.perf_counter() - begin)
        kept = {arm: seconds[given.skip :] for arm, seconds in taken.items()}
        row = {arm: {"median_ms": 1e3 * median(s), "mean_ms": 1e3 * fmean(s)} for arm, s in kept.items()}
        ratios = {unit: row["adaptive"][unit] / row["before"][unit] for unit in ("median_ms", "mean_ms")}
        found[name] = row | {"adaptive_over_before": ratios}
        print(f"{name:28} " + "  ".join(f"{a} {r['median_ms']:.2f} ms ({r['mean_ms']:.2f})" for a, r in row.items())
              + f"  adaptive over before {ratios['median_ms']:.3f} ({ratios['mean_ms']:.3f})", flush=True)  # fmt: skip
    if given.out:
        write(given.out, {"steps": given.steps, "skip": given.skip, "cases": found})


if __name__ == "__main__":
    main()
