"""Scikit-learn's handwritten digits (8x8 pixels, nothing to download) and a small CNN that classifies them.

Input: scikit-learn's images, a configuration. Output: a trained model's accuracy curve. Owns: the fixed split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dkfac

EvalSplit = Literal["test", "validation"]
"""The held-out split that a run is evaluated on: ``"test"`` in the demo, ``"validation"`` to choose settings."""

NUM_TEST, NUM_VALIDATION = 400, 300
SPLIT_SEED = 20


@dataclass(frozen=True, slots=True)
class Digits:
    """Images ``[N, 1, 8, 8]``, standardized with the mean and standard deviation of the training images; labels
    ``[N]``."""

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsConfig:
    """Configuration of a run that SGD and K-FAC share in a comparison."""

    lr: float = 0.05
    """Peak of the schedule: linear warm-up over a tenth of the steps, then linear decay to zero. The default is SGD's
    best value in {0.01 ... 0.5} on the validation images (benchmarks/digits_defaults.py)."""

    epochs: int = 10
    batch_norm: bool = True
    """Whether each convolution is followed by batch norm. Without it SGD's best lr is 0.1, the limit at which K-FAC
    can diverge."""

    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 0
    """Seed of the initial weights, the order of the examples and their shifts."""


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation during a run. ``seconds`` is training time since the start, without evaluation."""

    epochs: float
    seconds: float
    train_loss: float
    held_out_loss: float
    accuracy: float


def load_digit_images(part: EvalSplit = "test") -> Digits:
    """Return the digits in a fixed split. ``"validation"`` contains no test images."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise RuntimeError("the digits come with scikit-learn: pip install scikit-learn") from error
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
    """Return a CNN of three convolutions (8x8, 4x4, 2x2 pixels) and a linear layer with ten classes."""
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


def batches(digits: Digits, recipe: DigitsConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a run, determined by the seed. Each image is shifted by up to one pixel."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        order = torch.randperm(len(digits.train_labels), generator=generator)
        for first in range(0, len(order), recipe.batch_size):
            index = order[first : first + recipe.batch_size]
            yield _shift(digits.train_images[index], generator), digits.train_labels[index]


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by -1, 0 or 1 pixels in both directions, padding with the background value."""
    count, _, height, width = images.shape
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=float(images.min()))
    dy, dx = torch.randint(0, 3, (2, count, 1, 1), generator=generator)
    rows = dy + torch.arange(height)[None, :, None]
    columns = dx + torch.arange(width)[None, None, :]
    return padded[torch.arange(count)[:, None, None], 0, rows, columns].unsqueeze(1)


def train_digits(
    digits: Digits,
    recipe: DigitsConfig,
    kfac: Mapping[str, Any] | None,
    on_point: Callable[[Point], None] = lambda point: None,
    clock: Callable[[], float] = time.perf_counter,
    place: dkfac.distributed.Place | None = None,
) -> list[Point]:
    """Train a model and return its curve, one point per quarter of an epoch and one at the end.

    ``kfac``: options for K-FAC; None trains with SGD alone. ``place``: this rank, if several ranks share each batch
    through DDP.
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
    """Return the first point with at least that accuracy, or None."""
    return next((point for point in curve if point.accuracy >= accuracy), None)


def _triangle(step: int, num_steps: int) -> float:
    """Return the learning rate of the next step, ``step``, as a fraction of its peak."""
    warmup = max(1, num_steps // 10)
    return min((step + 1) / warmup, max(0, num_steps - step) / max(1, num_steps - warmup))
