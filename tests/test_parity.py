"""R02, R03: the same global batch gives the same weights, whatever the world size and the strategy."""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers_ranks import average_gradients, on_processes, on_threads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC
from dkfac.plan.strategies import FULL_STATISTICS

EXACT = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4, "damping": 1e-3}
BATCH = 64


LOCK = threading.Lock()
"""Ranks that are threads share torch's random numbers."""


def build(dtype=torch.float64):
    with LOCK:
        torch.manual_seed(0)
        return make(dtype)


def make(dtype):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.LayerNorm(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 7),
        nn.Tanh(),
        nn.Linear(7, 3, bias=False),
    ).to(dtype)


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (BATCH,), generator=generator)


def train(model, world_size=1, rank=0, steps=20, average=None, dtype=torch.float64, wrap=None, **options):
    """Return the weights after the steps on this rank's part of each global batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    wrapped = model if wrap is None else wrap(model)
    KFAC(wrapped, optimizer, **(EXACT | options))
    share = BATCH // world_size
    for step in range(steps):
        x, y = batch(step, dtype)
        x, y = (x, y) if world_size == 1 else (x[rank * share :][:share], y[rank * share :][:share])
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        if average:
            average(model)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def on_a_thread(rank, world_size, options):
    return train(build(), world_size, rank, average=average_gradients, **options)


def uneven_batch(world_size):
    """3 does not divide 64: the global batch is cut to a multiple."""
    return BATCH - BATCH % world_size


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("strategy", FULL_STATISTICS)
def test_threads_train_like_one_process(strategy, world_size):
    expected = train(build())
    for weights in on_threads(world_size, on_a_thread, world_size, {"strategy": strategy}):
        for p, q in zip(weights, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
