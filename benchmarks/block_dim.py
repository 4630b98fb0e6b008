"""What factors in pieces (``block_dim``) save, and what they change, on this machine.

``sizes``: elements of all factors of well-known models, relative to whole factors: what is kept, and what a factor step
sends. ``steps``: seconds of whole steps, forward and backward included. The optimizer alone and K-FAC by the one line
with each ``block_dim`` take turns, a step each; ``first`` is the mean of the first ``--first`` steps, ``later`` of the
others. ``losses``: training loss of a char GPT whose factors are up to 1,024 wide, mean of the last tenth of the steps.
"""

import argparse
import time
import warnings
from itertools import pairwise
from statistics import fmean, median

import torch
import torch.nn.functional as F
from adaptive_cost import gpt, mlp
from environment import write
from torch import nn

import dkfac
from dkfac.plan.models import MODELS
from dkfac.plan.spec import cut_layer
from dkfac.tools.recipes.char_gpt import GPT

DIMS = (None, 512, 256, 128)


def sizes() -> dict:
    found: dict = {}
    for name in ("resnet50", "vit-b", "gpt2", "bert-large"):
        layers = [shape.spec for shape in MODELS[name]()]
        for dim in DIMS:
            factors = [factor for layer in layers for factor in cut_layer(layer, dim).factors]
            found.setdefault(name, {})[str(dim)] = {
                "packed_elements": sum(factor.packed_elements for factor in factors),
                "state_elements": sum(factor.num_elements + factor.eigen_elements for factor in factors),
                "sum_of_cubes": sum(factor.num_blocks * factor.dim**3 for factor in factors),
                "pieces": sum(factor.num_blocks for factor in factors),
                "widths": len({factor.dim for factor in factors}),
            }
        whole = found[name]["None"]
        for dim, row in found[name].items():
            row["packed_ratio"] = row["packed_elements"] / whole["packed_elements"]
            row["state_ratio"] = row["state_elements"] / whole["state_elements"]
            print(f"{name} block_dim={dim}: packed {row['packed_ratio']:.3f}, state {row['state_ratio']:.3f} of whole, "
                  f"{row['pieces']} pieces of {row['widths']} widths", flush=True)  # fmt: skip
    return found


def cnn():
    x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def make():
        sizes = [3, 64, 128, 128]
        body = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(sizes)]  # fmt: skip
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(512, 10))

    return make, lambda model: model(x).square().mean()


CASES = {
    "MLP of width 1,024, SGD": ("sgd", lambda: mlp(1024)),
    "MLP of width 1,024, AdamW": ("adamw", lambda: mlp(1024)),
    "GPT of width 256, AdamW": ("adamw", lambda: gpt(256, 2, 16)),
    "CNN of up to 128 channels, SGD": ("sgd", cnn),
}
RULES = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


def steps(number: int, first: int) -> dict:
    found = {}
    for name, (kind, case) in CASES.items():
        make, loss = case()
        arms = []
        for arm in ("alone", *DIMS):
            torch.manual_seed(0)
            model = make()
            optimizer = RULES[kind](model.parameters())
            if arm != "alone":
                dkfac.KFAC(model, optimizer, announce=False, block_dim=arm)
            arms.append((str(arm), model, optimizer))
        taken: dict[str, list[float]] = {}
        for _ in range(number):
            for arm, model, optimizer in arms:
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
                taken.setdefault(arm, []).append(time.perf_counter() - begin)
        row = {arm: {"first_ms": 1e3 * fmean(s[:first]), "later_ms": 1e3 * fmean(s[first:]),
                     "median_ms": 1e3 * median(s[first:]), "longest_ms": 1e3 * max(s[1:])}
               for arm, s in taken.items()}  # fmt: skip
        alone = row["alone"]
        for arm, times in row.items():
            times["first_ratio"] = times["first_ms"] / alone["first_ms"]
            times["later_ratio"] = times["later_ms"] / alone["later_ms"]
            print(f"{name}, {arm}: first {times['first_ratio']:.2f}, later {times['later_ratio']:.2f}, longest "
                  f"{times['longest_ms']:.0f} ms, median {times['median_ms']:.1f} ms", flush=True)  # fmt: skip
        found[name] = row
    return found


def losses(number: int, seeds: int) -> dict:
    """Train on text: this file's own folder of sources."""
    from pathlib import Path

    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text])
    found: dict = {}
    for rate in (1e-3, 3e-3):
        for dim in ("alone", *DIMS):
            ends = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                model = GPT(len(letters), 64, 2, 256, 4)
                optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
                if dim != "alone":
                    dkfac.KFAC(model, optimizer, announce=False, block_dim=dim, loss_terms="token")
                draw, seen = torch.Generator().manual_seed(seed), []
                for _ in range(number):
                    begins = torch.randint(len(data) - 65, (16,), generator=draw)
                    x = torch.stack([data[b : b + 65] for b in begins.tolist()])
                    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    seen.append(loss.item())
                ends.append(fmean(seen[-number // 10 :]))
            found[f"lr {rate:g}, {dim}"] = ends
            print(f"GPT, lr {rate:g}, {dim}: {median(ends):.3f} ({', '.join(f'{e:.3f}' for e in ends)})", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--train", type=int, default=150, help="steps of the char GPT; 0: none")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", help="JSON to write, as benchmarks/results/block_dim_cpu.json; default: print only")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {"sizes": sizes(), "steps": steps(given.steps, given.first)}
    if given.train:
        found["losses"] = losses(given.train, given.seeds)
    if given.out:
        write(given.out, found)


if __name__ == "__main__":
    main()
