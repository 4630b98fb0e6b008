"""The learning rates of the demo: each arm at several rates, judged on validation images that the demo trains on.

The demo takes the rate with the lowest final loss, medians of the seeds. SGD with Nesterov's momentum is tried too; it
is not in the demo, because it never leaves the mean image.
"""

import argparse
from dataclasses import replace
from statistics import median

import torch
from environment import write

from dkfac.tools.recipes import demo_training as demo
from dkfac.tools.recipes.autoencoder import load_images

RATES = {
    "AdamW": (0.005, 0.01, 0.02, 0.03),
    "K-FAC": (0.0125, 0.025, 0.05, 0.1),
    "SGD": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
}


def sgd(parameters, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/results/demo_rates_cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data, arms = load_images("validation"), {arm.name: arm for arm in demo.ARMS}
    arms["SGD"] = replace(arms["AdamW"], name="SGD")
    found = []
    for name, rates in RATES.items():
        for lr in rates:
            how = {"make_optimizer": sgd} if name == "SGD" else {}
            arm = replace(arms[name], lr=lr)
            runs = [demo.train_autoencoder(data, arm, seed, **how) for seed in range(given.seeds)]
            row = {"arm": name, "lr": lr, "steps": arms[name].steps, "final": [run[-1].loss for run in runs]}
            found.append(row | {"median": median(row["final"]), "seconds": [run[-1].seconds for run in runs]})
            print(f"{name:6} lr {lr:6g}: {found[-1]['median']:.4f}", *(f"{x:.4f}" for x in row["final"]), flush=True)
    best = {name: min((r for r in found if r["arm"] == name), key=lambda r: r["median"])["lr"] for name in RATES}
    print("best:", best)
    write(given.out, {"seeds": given.seeds, "best": best, "runs": found})


if __name__ == "__main__":
    main()
