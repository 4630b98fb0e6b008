"""Is the best learning rate of an optimizer alone also good with dkfac's one line?

Tasks and optimizers of ``never_worse.py`` at multiples of their usual learning rate. Reports the final held-out loss
with the optimizer alone and with K-FAC, medians over seeds. The best rates should be within a factor of two.
"""

import argparse
import dataclasses
import multiprocessing as mp
from statistics import median

import never_worse
import torch
from environment import write

PAIRS = "mlp-tuned,mlp-sgd,cnn-adamw,cnn-sgd,gpt-untied,cnn-norm-adamw"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def run(name: str, factor: float, arm: str, seed: int) -> dict:
    pair = never_worse.PAIRS[name]
    never_worse.PAIRS[name] = dataclasses.replace(pair, lr=pair.lr * factor)
    try:
        return never_worse.run(name, arm, seed) | {"factor": factor}
    finally:
        never_worse.PAIRS[name] = pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=PAIRS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", help="JSON to write, as benchmarks/results/lr_transfer_cpu.json; default: print only")
    given = parser.parse_args()
    names, runs, table = given.pairs.split(","), [], []
    with mp.get_context("spawn").Pool(given.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [
            pool.apply_async(run, (name, factor, arm, seed))
            for name in names for factor in FACTORS for arm in ("baseline", "kfac") for seed in range(given.seeds)
        ]  # fmt: skip
        runs = [job.get() for job in jobs]
    for name in names:
        row = {"pair": name, "lr": never_worse.PAIRS[name].lr}
        for arm in ("baseline", "kfac"):
            of_arm = [r for r in runs if (r["pair"], r["arm"]) == (name, arm)]
            losses = {f: median(r["losses"][-1] for r in of_arm if r["factor"] == f) for f in FACTORS}
            row[arm] = {"losses": losses, "best": min(losses, key=losses.__getitem__)}
            print(f"{name:16} {arm:8} " + "  ".join(f"x{f:g} {loss:8.4g}" for f, loss in losses.items()), flush=True)
        at_own = row["kfac"]["losses"][row["baseline"]["best"]]
        row["above_best"] = at_own / row["kfac"]["losses"][row["kfac"]["best"]] - 1
        print(f"{name:16} best: alone x{row['baseline']['best']:g}, with K-FAC x{row['kfac']['best']:g}; K-FAC at the "
              f"former is {row['above_best']:.1%} above its best", flush=True)  # fmt: skip
        table.append(row)
    if given.out:
        write(given.out, {"factors": FACTORS, "seeds": given.seeds, "table": table, "runs": runs})


if __name__ == "__main__":
    main()
