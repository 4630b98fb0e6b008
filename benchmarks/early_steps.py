"""The first steps of K-FAC at high learning rates, and the effect of early refreshes and a limited step length.

ResNet-18 with a quarter of the width on CIFAR-10, batch 512, two CPU cores. Reports the loss, and ``lr^2 u^T (A x G)
u`` over all layers with the current factors: the mean square, over examples, of the change of the loss that a step
predicts. K-FAC itself only estimates it, because its decompositions are older than the factors.
"""

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

import cifar
import torch
import torch.nn.functional as F
from cifar import augment, normalise, read_archive
from environment import write

import dkfac
from dkfac.tools.recipes.resnet import build_resnet

WIDTH, BATCH, WARMUP, TOTAL = 16, 512, 80, 400
BEFORE = {"rescale": "norm-global", "warmup_refresh": (10, 100)}
CASES = {
    "as it was: every ten steps, the gradient's length": BEFORE,
    "held back": BEFORE | {"rescale": "norm-kl"},
    "refreshes that slow down": BEFORE | {"warmup_refresh": 1.3},
    "both": {},
}


def predicted(kfac: dkfac.KFAC, model: torch.nn.Module, lr: float) -> float:
    """Return ``lr^2 u^T (A x G) u`` of the updates in the gradients."""
    total = 0.0
    for name, factors in kfac.factors().items():
        module = model.get_submodule(name)
        update = module.weight.grad.flatten(1)
        if module.bias is not None:
            update = torch.cat([update, module.bias.grad[:, None]], 1)
        total += float((factors["G"] @ update @ factors["A"] * update).sum())
    return lr * lr * total


def train(job: tuple) -> dict:
    name, options, lr, seed, steps, data = job
    torch.set_num_threads(1)
    generator, data, _, used = cifar.begin({"seed": seed}, data, "cpu")
    model = build_resnet(18, 10, width=WIDTH, small_images=True).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    common = {"solver": "cholesky", "statistics_fraction": 0.25, "announce": False}
    kfac = dkfac.KFAC(model, optimizer, **common, **options)
    losses, changes = [], []
    optimizer.register_step_pre_hook(
        lambda opt, *_: changes.append(predicted(kfac, model, opt.param_groups[0]["lr"]))
    )  # after K-FAC's own
    chunks = iter(used[torch.randperm(len(used), generator=generator)].split(BATCH))
    for step in range(steps):
        now = (step + 1) / WARMUP if step < WARMUP else (TOTAL - step) / (TOTAL - WARMUP)
        optimizer.param_groups[0]["lr"] = lr * now
        chunk = next(chunks)
        x = normalise(augment(data["train_x"][chunk], generator)).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), data["train_y"][chunk], label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = kfac.metrics().get("clipped_steps", 0.0) / steps
    return {"case": name, "lr": lr, "seed": seed, "losses": losses, "changes": changes, "held": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive")
    parser.add_argument("--rates", default="2.4,0.8")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="benchmarks/results/early_steps_cpu.json")
    given = parser.parse_args()
    data = read_archive(given.archive)
    rates = [float(rate) for rate in given.rates.split(",")]
    every = itertools.product(rates, CASES.items(), range(given.seeds))
    jobs = [(name, options, lr, seed, given.steps, data) for lr, (name, options), seed in every]
    runs = []
    with ProcessPoolExecutor(given.workers) as pool:
        for run in pool.map(train, jobs):
            runs.append(run)
            print(f"lr {run['lr']:g} seed {run['seed']} {run['case']:50} loss {fmean(run['losses'][-20:]):.3f}, worst "
                  f"after step 10 {max(run['losses'][10:]):.2f}; most predicted {max(run['changes']):.4f}; "
                  f"held {run['held']:.0%}", flush=True)  # fmt: skip
            write(given.out, {"runs": runs})


if __name__ == "__main__":
    main()
