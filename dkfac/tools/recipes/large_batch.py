"""imagenet-resnet50-large-batch: ResNet-50 with batches of 4,096 to 131,072 (Osawa et al. 2019), on any hardware.

It has the six published sets of hyperparameters. All parameters are preconditioned, norm layers with their own
damping; statistics are refreshed as they change; factors are reduced to their owners in bfloat16. A batch that does not
fit into memory is accumulated over micro-batches, which gives the same step.

Input: images, hyperparameters. Output: settings and session of the recipe. Owns: the mixup state of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes import techniques
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.loading import normalize_pixels
from dkfac.tools.recipes.pictures_resnet import (
    IMAGENET_PIXELS,
    build_imagenet,
    classification_loss,
    load_pictures,
    num_classes,
)
from dkfac.tools.recipes.recipe import Examples, Recipe, count_correct, positive_integer


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published row: learning rate, power and epochs of its decay, momentum, damping, mixup, number of epochs."""

    lr: float
    power: float
    start: float
    end: float
    momentum: float
    damping: float
    mixup: float
    epochs: int
    gpus: int


PUBLISHED_ROWS = {
    4096: PublishedRow(8.18e-3, 11, 1, 53, 0.997, 2.5e-4, 0.4, 35, 128),
    8192: PublishedRow(1.25e-2, 8, 1, 53.5, 0.993, 2.5e-4, 0.4, 35, 256),
    16384: PublishedRow(2.5e-2, 8, 1, 53.5, 0.985, 2.5e-4, 0.4, 35, 512),
    32768: PublishedRow(3.0e-2, 3.5, 1.5, 49.5, 0.97, 2.0e-4, 0.6, 45, 1024),
    65536: PublishedRow(4.0e-2, 2.9, 2, 64.5, 0.95, 1.5e-4, 0.6, 60, 2048),
    131072: PublishedRow(7.0e-2, 3.0, 1, 95, 0.93, 1.0e-4, 1.0, 80, 4096),
}


def row_of(hyper: Hyper) -> PublishedRow:
    number = hyper.batch if hyper.more.get("row") is None else positive_integer(hyper, "row")
    if number not in PUBLISHED_ROWS:
        rows = ", ".join(map(str, PUBLISHED_ROWS))
        raise ValueError(f"batch={number} is none of the published rows {rows}; to try one, use --more row=4096")
    return PUBLISHED_ROWS[number]


def with_published_values(hyper: Hyper, given: Mapping[str, Any]) -> Hyper:
    """Return the hyperparameters with the published values filled in where none were given."""
    row = row_of(hyper)
    positive_integer(hyper, "width")
    own: dict[str, Any] = {"lr": row.lr, "momentum": row.momentum, "epochs": float(row.epochs)}
    return replace(hyper, **{name: value for name, value in own.items() if name not in given})


def _kfac_settings(hyper: Hyper) -> dict[str, Any]:
    """Return the settings of K-FAC: no running average, because a batch is large, and no rescaling of updates."""
    row = row_of(hyper)
    return {
        "damping": row.damping,
        "norm_form": "unit",
        "norm_damping": row.damping,
        "rescale": "none",
        "solver": "cholesky",
        "factor_decay": 0.0,
        "factor_interval": 10,
        "inverse_interval": 10,
        "strategy": "sharded",
        "wire_dtype": "bfloat16",
    }


class LargeBatch:
    """Session with polynomial decay and coupled momentum, rescaled weights, running mixup and random erasing."""

    def __init__(self, model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> None:
        self._hyper, self._row, self._classes = hyper, row_of(hyper), num_classes(examples)
        row = replace(self._row, lr=hyper.lr, momentum=hyper.momentum)
        self._schedule = techniques.polynomial_decay(row.lr, start=row.start, end=row.end, power=row.power)
        x, _ = examples.get(torch.zeros(2, dtype=torch.int64), seed=None)
        self._followed = techniques.norm_followed_layers(model, normalize_pixels(x.to(place.device)))
        techniques.rescale_weights(self._followed)
        self._mixup = techniques.RunningMixup(row.mixup, seed=hyper.seed * 1009 + place.rank)

    def prepare(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        images = normalize_pixels(x)
        if generator is None:
            return images, y
        padding = 4 if images.shape[-1] <= 64 else 0
        images = techniques.crop_and_flip(images, padding=padding, generator=generator)
        images = techniques.zero_random_erasing(images, generator=generator)
        return self._mixup(images, techniques.soft_targets(y, self._classes, smoothing=self._hyper.label_smoothing))

    def before_step(self, optimizer: torch.optim.Optimizer, step: int, num_steps: int, epoch: float) -> None:
        assert isinstance(optimizer, torch.optim.SGD)
        hyper = self._hyper
        techniques.set_lr(optimizer, epoch, self._schedule, lr0=hyper.lr, momentum0=hyper.momentum)

    def after_step(self) -> None:
        techniques.rescale_weights(self._followed)

    def state_dict(self) -> dict[str, Any]:
        return self._mixup.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mixup.load_state_dict(state)


_NAME = "imagenet-resnet50-large-batch"
LARGE_BATCH = Recipe(
    name=_NAME,
    about="ImageNet, ResNet-50, batches of 4,096 to 131,072 (--batch) as published, accumulated if necessary",
    data="train/<class>/*.jpg and val/<class>/*.jpg, an archive of them, or CIFAR-10",
    hyper=Hyper(
        batch=4096, lr=PUBLISHED_ROWS[4096].lr, momentum=PUBLISHED_ROWS[4096].momentum, epochs=35, nesterov=False,
        weight_decay=0.0, label_smoothing=0.1, micro_batch=32, more={"row": None, "width": 64},
    ),
    kfac=_kfac_settings,
    adapt=with_published_values,
    load=partial(load_pictures, _NAME, IMAGENET_PIXELS),
    build=partial(build_imagenet, 50),
    begin=LargeBatch,
    loss=classification_loss,
    judge=count_correct,
    unused=("warmup",),
)  # fmt: skip
