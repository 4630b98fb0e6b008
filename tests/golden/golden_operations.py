"""How many operations the host gives to torch for K-FAC at each kind of step, which is what small models wait for.

Every call of torch's dispatcher in a step (forward, backward and ``optimizer.step()``) counts, less those of the same
step without K-FAC. ``python tests/golden/golden_operations.py`` writes the numbers to operations.json.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from golden_cases import LOCK, average_gradients, on_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dkfac

OPERATIONS = Path(__file__).resolve().parent / "operations.json"
BATCH, RANKS = 16, 2


class Counter(TorchDispatchMode):
    """Counts the operations of one thread."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def mlp():
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


class Block(nn.Module):
    """What a transformer's block has beside attention."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def transformer():
    return nn.Sequential(nn.Embedding(11, 8), Block(8), Block(8), nn.Linear(8, 3))


MODELS = {
    "mlp": (mlp, (12,), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "cnn": (cnn, (3, 4, 4), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "transformer": (transformer, (6,), lambda p: torch.optim.AdamW(p, lr=1e-3)),
}
FIXED = {"warmup_refresh": None, "factor_interval": 5, "inverse_interval": 10}
SETTINGS = {"default": {}, "fixed": FIXED, "fixed-kfac": FIXED | {"curvature": "kfac", "damping": 1e-3}}
KINDS = {"ordinary": 34, "measure": 35, "refresh": 30}
"""A step of each kind, for fixed intervals. By then each has been taken before: nothing is made for the first time."""
DEFAULT_KINDS = {"ordinary": 24, "refresh": 25}
"""The same for default settings, where a step that measures refreshes too."""


def step_counts(model_name, settings, rank, world_size, steps):
    """Return the number of operations of each step; ``settings`` None: without K-FAC."""
    make, shape, make_optimizer = MODELS[model_name]
    with LOCK:
        torch.manual_seed(0)
        model = make()
    optimizer = make_optimizer(model.parameters())
    kfac = None if settings is None else dkfac.KFAC(model, optimizer, announce=False, **settings)
    counts = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        if model_name == "transformer":
            x = torch.randint(0, 11, (BATCH, *shape), generator=generator)
            y = x % 3
        else:
            x = torch.randn(BATCH, *shape, generator=generator)
            y = x.flatten(1)[:, :3].argmax(1)
        optimizer.zero_grad()
        counter = Counter()
        with counter:
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        if world_size > 1:
            average_gradients(model)
        with counter:
            optimizer.step()
        counts.append(counter.count)
    if kfac is not None:
        kfac.close()
    return counts


def extra_counts(model_name, settings, world_size, steps):
    """Return for each step what K-FAC adds, all ranks together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = step_counts(model_name, None, 0, 1, 3)[-1]
        if world_size == 1:
            ranks = [step_counts(model_name, settings, 0, 1, steps)]
        else:
            ranks = on_threads(world_size, lambda rank: step_counts(model_name, settings, rank, world_size, steps))
    return [sum(counts) - world_size * plain for counts in zip(*ranks, strict=True)]


def kinds_of(model_name, settings_name):
    return DEFAULT_KINDS if settings_name == "default" else KINDS


def count(model_name, settings_name, world_size):
    """Return ``{"model settings way kind": number}``."""
    kinds = kinds_of(model_name, settings_name)
    counts = extra_counts(model_name, SETTINGS[settings_name], world_size, max(kinds.values()) + 1)
    way = "one" if world_size == 1 else "two"
    return {f"{model_name} {settings_name} {way} {kind}": counts[step] for kind, step in kinds.items()}


def all_combinations():
    return [(model, settings, ranks) for model in MODELS for settings in SETTINGS for ranks in (1, RANKS)]


def main():
    torch.set_num_threads(1)
    found = {}
    for combination in all_combinations():
        found |= count(*combination)
    OPERATIONS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} numbers in {OPERATIONS}", file=sys.stderr)


if __name__ == "__main__":
    main()
