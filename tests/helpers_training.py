"""A small network, its batches and a loop for one of several ranks, for tests that look at what ranks do together."""

import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dkfac import KFAC

LOCK = threading.Lock()
"""Ranks that are threads share torch's random numbers."""
RHYTHM = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4}
SHARE = 6
"""Examples per rank."""


def build(dtype=torch.float64, seed=0):
    """Return a network with blocks (a grouped convolution) and layers of several sizes."""
    with LOCK:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.Tanh(),
            nn.Linear(5, 6, bias=False),
            nn.Tanh(),
            nn.Linear(6, 3),
        ).to(dtype)


def batch(step, world_size, dtype=torch.float64):
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SHARE * world_size, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (len(x),), generator=generator)


def attach(model, lr=0.05, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return optimizer, KFAC(model, optimizer, **(RHYTHM | options))


def backward(model, step, rank, world_size, dtype=torch.float64):
    """Run this rank's part of a batch and average the gradients over ranks."""
    x, y = batch(step, world_size, dtype)
    mine = slice(rank * SHARE, (rank + 1) * SHARE)
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    if dist.is_initialized():
        average_gradients(model)


def average_gradients(model):
    """What DDP does, in two collectives; a gradient that no rank has stays None."""
    parameters = list(model.parameters())
    has = torch.tensor([float(p.grad is not None) for p in parameters])
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    dist.all_reduce(has)
    dist.all_reduce(flat)
    pieces = (flat / dist.get_world_size()).split([p.numel() for p in parameters])
    for p, some, piece in zip(parameters, has.tolist(), pieces, strict=True):
        p.grad = piece.reshape(p.shape).clone() if some else None


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_ranks_are_bitwise_equal(results):
    for rank, found in enumerate(results[1:], 1):
        for i, (p, q) in enumerate(zip(found, results[0], strict=True)):
            assert torch.equal(p, q), f"tensor {i} of rank {rank} differs from rank 0's by {(p - q).abs().max()}"
