"""A deep autoencoder on handwritten digits: K-FAC against SGD in updates, and damping found by Levenberg-Marquardt.

64-128-64-32-8-32-64-128-64, tanh, binary cross-entropy of pixels, torch's default initialization. SGD uses momentum
0.9, linear warm-up over a tenth of the updates, linear decay, and the best learning rate of a grid; K-FAC with SGD uses
the same with a quarter of the updates. K-FAC's quadratic_step needs no learning rate, momentum or schedule: they follow
from the quadratic model of the loss.
Runs are compared by the loss on all training images after the last update; the best rate is repeated with more seeds.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from environment import write
from sklearn.datasets import load_digits
from torch import nn

import dkfac
from dkfac.tools.recipes.autoencoder import build_autoencoder

RATES = (0.3, 1.0, 3.0, 10.0, 30.0)
DAMPINGS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
BATCH = 200
KFAC = {"fisher": "sampled", "fisher_loss": "bernoulli", "factor_interval": 1, "inverse_interval": 5}
KFAC |= {"warmup_refresh": None, "announce": False}


def data() -> torch.Tensor:
    return torch.from_numpy(load_digits().data).float() / 16


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_autoencoder()


def train(x: torch.Tensor, updates: int, seed: int, lr: float | None, kfac: dict | None = None) -> dict:
    """``lr`` None: by ``quadratic_step``."""
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr or 0.0, momentum=0.9)
    second = None if kfac is None else dkfac.KFAC(model, optimizer, **(KFAC | kfac))
    warm = max(1, updates // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / warm) * max(0.0, 1 - t / updates)
    )
    generator = torch.Generator().manual_seed(seed)
    curve, seconds = [], 0.0
    for step in range(updates + 1):
        if step % max(1, updates // 20) == 0:
            with torch.no_grad():
                curve.append((step, seconds, float(F.binary_cross_entropy_with_logits(model(x), x))))
        if step == updates or not curve[-1][2] < 10:
            break
        begin = time.perf_counter()
        rows = x[torch.randint(len(x), (BATCH,), generator=generator)]

        def both(rows: torch.Tensor = rows) -> tuple[torch.Tensor, torch.Tensor]:
            output = model(rows)
            return F.binary_cross_entropy_with_logits(output, rows), output

        optimizer.zero_grad()
        both()[0].backward()
        if lr is None:
            second.quadratic_step(both)
        else:
            optimizer.step()
            schedule.step()
        seconds += time.perf_counter() - begin
    final = curve[-1][2] if curve[-1][0] == updates and curve[-1][2] == curve[-1][2] else float("inf")
    return {"updates": updates, "lr": lr, "seed": seed, "final": final, "seconds": seconds, "curve": curve}


def reaches(run: dict, loss: float) -> int | None:
    """Return the updates after which a loss was seen to be reached."""
    return next((step for step, _, value in run["curve"] if value <= loss), None)


def tuned(x: torch.Tensor, updates: int, seeds: int, name: str, kfac: dict | None = None) -> dict:
    runs = [train(x, updates, 0, lr, kfac) for lr in RATES]
    best = min(runs, key=lambda run: run["final"])["lr"]
    more = [train(x, updates, seed, best, kfac) for seed in range(1, seeds)]
    finals = [run["final"] for run in runs if run["lr"] == best] + [run["final"] for run in more]
    print(f"{name} {updates} updates: " + ", ".join(f"lr {r['lr']:g} {r['final']:.4f}" for r in runs)
          + f"; best lr {best:g}: median {statistics.median(finals):.4f} of {len(finals)} seeds, "
          f"{1e3 * runs[0]['seconds'] / updates:.1f} ms an update", flush=True)  # fmt: skip
    return {"best_lr": best, "finals": finals, "median": statistics.median(finals), "runs": runs + more}


def by_model(x: torch.Tensor, updates: int, seeds: int, name: str, damping, target: float) -> dict:
    """``damping``: a function that returns one for a run."""
    options = {"rescale": "none"}
    runs = [train(x, updates, seed, None, options | {"damping": damping()}) for seed in range(seeds)]
    finals = [run["final"] for run in runs]
    steps = [reaches(run, target) for run in runs]
    print(f"{name}: median {statistics.median(finals):.4f} of {[round(f, 4) for f in finals]}, SGD's after {steps} "
          f"updates; {1e3 * runs[0]['seconds'] / updates:.1f} ms an update", flush=True)  # fmt: skip
    return {"finals": finals, "median": statistics.median(finals), "updates_to_sgd": steps, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/results/autoencoder_cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    x, quarter = data(), given.updates // 4
    floor = float(F.binary_cross_entropy(x.clamp(1e-7, 1 - 1e-7), x))
    print(f"no autoencoder can be below {floor:.4f}")
    body: dict = {"least_possible": floor, "sgd": tuned(x, given.updates, given.seeds, "SGD")}
    target = body["sgd"]["median"]
    body["kfac with sgd"] = tuned(x, quarter, given.seeds, "K-FAC, damping 1e-2,", {"damping": 1e-2})
    body["levenberg-marquardt"] = by_model(
        x, quarter, given.seeds, "quadratic_step, LM", lambda: dkfac.LevenbergMarquardt(1e-2), target
    )
    for damping in DAMPINGS:
        name = f"quadratic_step, damping {damping:g}"
        body[name] = by_model(x, quarter, given.seeds, name, lambda value=damping: value, target)
    best = min(body[f"quadratic_step, damping {d:g}"]["median"] for d in DAMPINGS)
    body["levenberg_marquardt_over_best_fixed"] = body["levenberg-marquardt"]["median"] / best
    print(f"LM's loss over that of the best fixed damping: {body['levenberg_marquardt_over_best_fixed']:.4f}")
    write(given.out, body)


if __name__ == "__main__":
    main()
