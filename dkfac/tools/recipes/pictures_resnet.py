"""cifar10-resnet32 and imagenet-resnet50, -101, -152 with the settings of SC'20 (Pauloski et al.).

The paper's learning rates are per GPU and grow with the number of GPUs: 0.1 per 128 images on CIFAR-10, 0.0125 per 32
images on ImageNet. Here the learning rate is for the whole batch (``Hyper``): scale it with the batch size.

Input: images, hyperparameters. Output: data, model, loss and session of the recipes. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.loading import normalize_pixels
from dkfac.tools.recipes.readers import LAYOUT, read_pictures
from dkfac.tools.recipes.recipe import (
    Examples,
    Recipe,
    ScheduledSession,
    Session,
    count_correct,
    positive_integer,
)
from dkfac.tools.recipes.resnet import build_cifar_resnet, build_resnet
from dkfac.tools.recipes.techniques import crop_and_flip, soft_cross_entropy, soft_targets

IMAGENET_PIXELS = 224
"""Default pixels per side for ImageNet. Images of 32 x 32 pixels are not resized."""


def load_pictures(name: str, large: int | None, path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    """Read training and test images. ``large``: pixels per side for images that are not in memory, by default."""
    if path is None:
        raise ValueError(f"{name} needs --data PATH; {LAYOUT}")
    train, test = (pictures.in_colour() for pictures in read_pictures(path))
    size = hyper.size or (large if train.pixels is None or test.pixels is None else None)
    return train.sized(size), test.sized(size)


def _check_sizes(hyper: Hyper, given: Mapping[str, Any]) -> Hyper:
    """Refuse sizes that no ResNet can have."""
    for name in hyper.more:
        positive_integer(hyper, name)
    return hyper


def num_classes(examples: Examples) -> int:
    return len(examples.classes)  # type: ignore[attr-defined]


def build_cifar(examples: Examples, hyper: Hyper) -> nn.Module:
    return build_cifar_resnet(int(hyper.more.get("depth", 32)), num_classes(examples))


def build_imagenet(depth: int, examples: Examples, hyper: Hyper) -> nn.Module:
    x, _ = examples.get(torch.zeros(1, dtype=torch.int64), seed=None)
    width = int(hyper.more.get("width", 64))
    return build_resnet(depth, num_classes(examples), width=width, small_images=x.shape[-1] <= 64)


def _begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    def prepare(x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        images = normalize_pixels(x)
        if generator is None:
            return images, y
        padding = 4 if images.shape[-1] <= 64 else 0
        images = crop_and_flip(images, padding=padding, generator=generator)
        return images, soft_targets(y, num_classes(examples), smoothing=hyper.label_smoothing)

    return ScheduledSession(hyper, prepare)


def classification_loss(output: Tensor, targets: Tensor) -> Tensor:
    return soft_cross_entropy(output, targets) if targets.is_floating_point() else F.cross_entropy(output, targets)


CIFAR = Recipe(
    name="cifar10-resnet32",
    about="CIFAR-10, ResNet-32; SC'20: 100 epochs of K-FAC against 200 of SGD",
    data="CIFAR-10's python batches, or train/ and test/ folders of images, or an archive of them",
    hyper=Hyper(
        lr=0.1,
        batch=128,
        epochs=100,
        warmup=0.05,
        decay="steps",
        milestones=(35, 75, 90),
        weight_decay=5e-4,
        more={"depth": 32},
    ),
    kfac={"damping": 0.003, "factor_interval": 1, "inverse_interval": 10, "rescale": "kl-clip", "kl_clip": 1e-3},
    adapt=_check_sizes,
    load=partial(load_pictures, "cifar10-resnet32", None),
    build=build_cifar,
    begin=_begin,
    loss=classification_loss,
    judge=count_correct,
)


def _imagenet(depth: int) -> Recipe:
    name = f"imagenet-resnet{depth}"
    return Recipe(
        name=name,
        about=f"ImageNet, ResNet-{depth}; SC'20: 55 epochs of K-FAC against 90 of SGD",
        data="train/<class>/*.jpg and val/<class>/*.jpg",
        hyper=Hyper(
            lr=0.1, batch=256, epochs=55, warmup=5 / 55, decay="steps", milestones=(25, 35, 40, 45, 50),
            weight_decay=5e-5, label_smoothing=0.1, micro_batch=32, more={"width": 64},
        ),
        kfac={"damping": 0.001, "factor_interval": 10, "inverse_interval": 100, "rescale": "kl-clip", "kl_clip": 1e-3},
        adapt=_check_sizes,
        load=partial(load_pictures, name, IMAGENET_PIXELS),
        build=partial(build_imagenet, depth),
        begin=_begin,
        loss=classification_loss,
        judge=count_correct,
    )  # fmt: skip


IMAGENET = [_imagenet(depth) for depth in (50, 101, 152)]
