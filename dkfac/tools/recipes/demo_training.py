"""The training of the demo: a deep autoencoder with sigmoids on handwritten digits, by AdamW alone and with K-FAC.

Input: images, an arm and a seed. Output: the curve of a run. Owns: nothing.

Sigmoid autoencoders are the classical hard case for first-order optimizers: SGD does not leave the mean image at any
learning rate that was tried. ``benchmarks/demo_rates.py`` chose the learning rates.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes.autoencoder import build_autoencoder

BATCH = 300
WARMUP = 0.1
"""Fraction of the steps over which the learning rate rises; then it falls to zero."""
EVALUATIONS = 100
"""How often a run is tested."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison: its own best learning rate, and as many steps as take about the same time. Both are
    AdamW, one with K-FAC."""

    name: str
    lr: float
    steps: int
    kfac: bool


ARMS = (Arm("AdamW", 0.02, 3000, False), Arm("K-FAC", 0.025, 800, True))


@dataclass(frozen=True, slots=True)
class DemoPoint:
    """One evaluation. ``seconds`` is training time since the start, without evaluation."""

    steps: int
    seconds: float
    loss: float


def train_autoencoder(
    images: tuple[Tensor, Tensor],
    arm: Arm,
    seed: int,
    on_point: Callable[[DemoPoint], None] = lambda point: None,
    *,
    place: dkfac.distributed.Place | None = None,
    announce: bool = False,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    clock: Callable[[], float] = time.perf_counter,
) -> list[DemoPoint]:
    """Train and return the curve. ``place``: this rank, if several ranks share each batch through DDP."""
    train, test = images
    torch.manual_seed(seed)
    model = build_autoencoder(nn.Sigmoid)
    network = model if place is None or place.is_alone else nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model.parameters(), lr=arm.lr)
    rise = max(1, round(WARMUP * arm.steps))
    shape = lambda n: min((n + 1) / rise, (arm.steps - n) / max(1, arm.steps - rise))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    generator = torch.Generator().manual_seed(seed)
    curve, seconds = list[DemoPoint](), 0.0
    every = max(1, arm.steps // EVALUATIONS)
    orders = (torch.randperm(len(train), generator=generator) for _ in itertools.count())
    batches = (index for order in orders for index in torch.split(order, BATCH))
    start = clock()
    kfac = dkfac.KFAC(network, optimizer, announce=announce) if arm.kfac else None
    try:
        for step, index in zip(range(1, arm.steps + 1), batches, strict=False):
            x = train[index if place is None else index[place.rank :: place.world_size]]
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(x), x).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if step % every == 0 or step == arm.steps:
                seconds += clock() - start
                with torch.no_grad():
                    loss = float(F.binary_cross_entropy_with_logits(model(test), test))
                curve.append(DemoPoint(step, seconds, loss))
                on_point(curve[-1])
                start = clock()
    finally:
        if kfac is not None:
            kfac.close()
    return curve
