"""Scikit-learn's handwritten digits (8x8 pixels, nothing to download) and a small convolutional network for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dkfac

Part = Literal["test", "validation"]
"""What a run is judged on: ``"test"`` in the demo, ``"validation"`` where settings are chosen."""

NUM_TEST, NUM_VALIDATION = 400, 300
SPLIT_SEED = 20


@dataclass(frozen=True, slots=True)
class Digits:
    """Images ``[N, 1, 8, 8]``, standardised with the training images' mean and deviation, and labels ``[N]``."""

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything of a run but the optimizer's direction: both sides of a comparison share it."""

    lr: float = 0.05
    """Peak of the schedule: linear warm-up over a tenth of the steps, then linear decay to zero. SGD's best of
    {0.01 ... 0.5} on the validation images (benchmarks/digits_defaults.py)."""

    epochs: int = 10
    batch_norm: bool = True
    """Normalise after each convolution. Without it SGD's best lr is 0.1, an edge where K-FAC can diverge."""

    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 0
    """Decides the start, the order of the examples and their shifts."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run stands; ``seconds`` is training time since the start, evaluation left out."""

    epochs: float
    seconds: float
    train_loss: float
    held_out_loss: float
    accuracy: float


def load(part: Part = "test") -> Digits:
    """Return the digits in a split that never changes. The test images are in neither side of ``"validation"``."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise RuntimeError("the digits come with scikit-learn: pip install 'dkfac[demo]'") from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)[order]
    targets = torch.from_numpy(labels).long()[order]
    if part == "validation":
        images, targets = images[NUM_TEST:], targets[NUM_TEST:]
    num_held_out = NUM_TEST if part == "test" else NUM_VALIDATION
    mean, deviation = images[num_held_out:].mean(), images[num_held_out:].std()
    images = (images - mean) / deviation
    return Digits(images[num_held_out:], targets[num_held_out:], images[:num_held_out], targets[:num_held_out])


def build_model(seed: int, *, batch_norm: bool = True) -> nn.Module:
    """Return a network of three convolutions and a linear layer, 8x8 to 4x4 to 2x2 to ten classes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *_stage(1, 16, batch_norm),
        *_stage(16, 32, batch_norm),
        nn.MaxPool2d(2),
        *_stage(32, 32, batch_norm),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def _stage(num_in: int, num_out: int, batch_norm: bool) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(num_in, num_out, 3, padding=1, bias=not batch_norm)
    return (convolution, nn.BatchNorm2d(num_out), nn.ReLU()) if batch_norm else (convolution, nn.ReLU())


def batches(digits: Digits, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the run's batches, the same for the same seed; each image is shifted by up to one pixel."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        order = torch.randperm(len(digits.train_labels), generator=generator)
        for first in range(0, len(order), recipe.batch_size):
            index = order[first : first + recipe.batch_size]
            yield _shift(digits.train_images[index], generator), digits.train_labels[index]


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by -1, 0 or 1 pixels in both directions; what comes in is background."""
    count, _, height, width = images.shape
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=float(images.min()))
    dy, dx = torch.randint(0, 3, (2, count, 1, 1), generator=generator)
    rows = dy + torch.arange(height)[None, :, None]
    columns = dx + torch.arange(width)[None, None, :]
    return padded[torch.arange(count)[:, None, None], 0, rows, columns].unsqueeze(1)


def train(
    digits: Digits,
    recipe: Recipe,
    kfac: Mapping[str, Any] | None,
    on_point: Callable[[Point], None] = lambda point: None,
    clock: Callable[[], float] = time.perf_counter,
    place: dkfac.distributed.Place | None = None,
) -> list[Point]:
    """Train from the recipe's start and return the curve, a point each quarter of an epoch and at the end.

    ``kfac``: K-FAC's options, None for plain SGD. ``place``: among ranks that share each batch, through DDP.
    """
    model = build_model(recipe.seed, batch_norm=recipe.batch_norm)
    is_alone = place is None or place.is_alone
    network = model if is_alone else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
    )
    steps_per_epoch = -(-len(digits.train_labels) // recipe.batch_size)
    num_steps = recipe.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _triangle(step, num_steps))
    quarters = {-(-num_steps * i // (4 * recipe.epochs)) for i in range(1, 4 * recipe.epochs + 1)}
    curve: list[Point] = []
    losses: list[Tensor] = []
    seconds, start = 0.0, clock()
    second_order = None if kfac is None else dkfac.KFAC(network, optimizer, **kfac)
    try:
        for step, (images, labels) in enumerate(batches(digits, recipe), 1):
            if place is not None:
                images, labels = images[place.rank :: place.world_size], labels[place.rank :: place.world_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            if step in quarters:
                seconds += clock() - start
                train_loss = float(torch.stack(losses).mean())
                curve.append(Point(step / steps_per_epoch, seconds, train_loss, *evaluate(model, digits)))
                on_point(curve[-1])
                losses.clear()
                start = clock()
    finally:
        if second_order is not None:
            second_order.close()
    return curve


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Return loss and accuracy on the held-out images."""
    model.eval()
    output = model(digits.held_out_images)
    model.train()
    loss = nn.functional.cross_entropy(output, digits.held_out_labels)
    return float(loss), float((output.argmax(1) == digits.held_out_labels).double().mean())


def first_reaching(curve: list[Point], accuracy: float) -> Point | None:
    """Return the first point with that accuracy, None if it was never reached."""
    return next((point for point in curve if point.accuracy >= accuracy), None)


def _triangle(step: int, num_steps: int) -> float:
    """The learning rate's share of its peak; ``step`` is the coming one."""
    warmup = max(1, num_steps // 10)
    return min((step + 1) / warmup, max(0, num_steps - step) / max(1, num_steps - warmup))
