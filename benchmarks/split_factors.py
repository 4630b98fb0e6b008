"""What it buys to decompose the largest factors in pieces (``split_dim``), and what it costs.

Predicted: ResNet-50's refreshing and mean steps on the published 64-GPU cluster and on H200s, from 1 to 64 ranks.
Measured here: the decomposition of one wide factor, and what digits are learnt with factors in pieces.
"""

import argparse
import dataclasses
import statistics
import time

import torch
from environment import write

from dkfac.decompose.fallback import refresh
from dkfac.ops import decompose
from dkfac.plan.make import Choices
from dkfac.plan.models import MODELS, work_of
from dkfac.plan.preset import PRESETS, load_cluster
from dkfac.plan.search import search
from dkfac.tools.recipes import digits

RANKS = (1, 8, 16, 32, 64)
SPLITS = (None, 2304, 1152)


def predicted(cluster_name: str, solver: str, intervals: tuple[int, int], batch: int) -> dict:
    cluster = load_cluster(cluster_name).with_hosts_of(8)
    shapes = list(MODELS["resnet50"]())
    layers, work = [shape.spec for shape in shapes], work_of(shapes, batch, cluster.costs)
    choices = Choices(solver=solver, factor_interval=intervals[0], inverse_interval=intervals[1])
    found = {}
    for split_dim in SPLITS:
        rows = []
        for ranks in RANKS:
            best = search(layers, ranks, cluster, work, choices, split_dims=(split_dim,))[0]
            refreshing = best.steps[0][2]
            rows.append(
                {
                    "ranks": ranks,
                    "strategy": best.name,
                    "mean_ms": 1e3 * best.seconds,
                    "refreshing_ms": 1e3 * refreshing.seconds,
                }
            )
        found[str(split_dim)] = rows
        print(
            f"{cluster_name} {solver} {intervals} split_dim={split_dim}: "
            + ", ".join(f"{row['ranks']}: {row['mean_ms']:.1f} ({row['refreshing_ms']:.0f})" for row in rows)
        )
    return found


def decompositions(dim: int) -> dict:
    """Time one factor on one core, whole and in pieces."""
    torch.manual_seed(0)
    rows = torch.randn(2 * dim, dim)
    factor = (rows.T @ rows / len(rows))[None]
    shift = torch.full((1,), 1e-3)
    found = {}
    for solver in ("eigen", "cholesky"):
        for number in (1, 2, 4):
            pieces = tuple(dim // number for _ in range(number))
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                _, rung = refresh(factor, None, solver, shift, pieces)
                seconds.append(time.perf_counter() - begin)
                assert rung == "ok"
            found[f"{solver}, {number} pieces"] = min(seconds)
            print(f"dim {dim} {solver} in {number}: {min(seconds):.3f} s")
    return found


def learnt(seeds: int) -> dict:
    """Train on the digits, judged on the validation images; the widest factors are 288 wide."""
    data = digits.load("validation")
    found = {}
    for split_dim in (None, 144, 72, 36):
        runs = []
        for seed in range(seeds):
            recipe = digits.Recipe(seed=seed, epochs=5)
            options = {"announce": False, "split_dim": split_dim}
            runs.append(digits.train(data, recipe, options)[-1])
        found[str(split_dim)] = [dataclasses.asdict(run) for run in runs]
        losses = [run.held_out_loss for run in runs]
        train_losses = [run.train_loss for run in runs]
        print(
            f"digits split_dim={split_dim}: held-out loss {statistics.median(losses):.4f} "
            f"({min(losses):.4f} to {max(losses):.4f}), training loss {statistics.median(train_losses):.4f}"
        )
    sgd = [digits.train(data, digits.Recipe(seed=seed, epochs=5), None)[-1] for seed in range(seeds)]
    found["sgd"] = [dataclasses.asdict(run) for run in sgd]
    print(f"digits sgd: held-out loss {statistics.median(run.held_out_loss for run in sgd):.4f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=2304)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results/split_factors_cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    body = {"predicted": {"spd-kfac-64 cholesky 1/1": predicted("spd-kfac-64", "cholesky", (1, 1), 32)}}
    if "h200" in PRESETS:
        for solver in ("eigen", "cholesky"):
            body["predicted"][f"h200 {solver} 10/100"] = predicted("h200", solver, (10, 100), 128)
    body["one_core_seconds"] = {f"dim {given.dim}, leaf {decompose.LEAF}": decompositions(given.dim)}
    body["digits"] = learnt(given.seeds)
    write(given.out, body)


if __name__ == "__main__":
    main()
