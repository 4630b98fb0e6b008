"""cifar10-resnet32 and imagenet-resnet50, -101, -152 with the settings of SC'20 (Pauloski et al.).

Learning rates there are per GPU and grow with their number: 0.1 for each 128 pictures on CIFAR-10, 0.0125 for each 32
on ImageNet. Here they belong to a batch (``Hyper``): scale them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes.loading import normalised
from dkfac.tools.recipes.readers import LAYOUT, read
from dkfac.tools.recipes.recipe import Examples, Hyper, Plain, Recipe, Session, hits, whole
from dkfac.tools.recipes.resnet import cifar_resnet, resnet
from dkfac.tools.recipes.techniques import crop_and_flip, soft_cross_entropy, soft_targets

LARGE = 224
"""Pixels of ImageNet's pictures, if no others are asked for. Those of 32 x 32 stay as they are."""


def load(name: str, large: int | None, path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    """Read pictures. ``large``: what those that are not in memory are brought to, if nothing was asked for."""
    if path is None:
        raise ValueError(f"{name} needs --data PATH; {LAYOUT}")
    train, test = (pictures.in_colour() for pictures in read(path))
    size = hyper.size or (large if train.pixels is None or test.pixels is None else None)
    return train.sized(size), test.sized(size)


def adapt(hyper: Hyper, given: Mapping[str, Any]) -> Hyper:
    """Refuse figures that make no ResNet."""
    for name in hyper.more:
        whole(hyper, name)
    return hyper


def num_classes(examples: Examples) -> int:
    return len(examples.classes)  # type: ignore[attr-defined]


def build_cifar(examples: Examples, hyper: Hyper) -> nn.Module:
    return cifar_resnet(int(hyper.more.get("depth", 32)), num_classes(examples))


def build_imagenet(depth: int, examples: Examples, hyper: Hyper) -> nn.Module:
    x, _ = examples.get(torch.zeros(1, dtype=torch.int64), seed=None)
    width = int(hyper.more.get("width", 64))
    return resnet(depth, num_classes(examples), width=width, small_images=x.shape[-1] <= 64)


def begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    def prepare(x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        images = normalised(x)
        if generator is None:
            return images, y
        padding = 4 if images.shape[-1] <= 64 else 0
        images = crop_and_flip(images, padding=padding, generator=generator)
        return images, soft_targets(y, num_classes(examples), smoothing=hyper.label_smoothing)

    return Plain(hyper, prepare)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return soft_cross_entropy(output, targets) if targets.is_floating_point() else F.cross_entropy(output, targets)


CIFAR = Recipe(
    name="cifar10-resnet32",
    about="CIFAR-10, ResNet-32; SC'20: 100 epochs of K-FAC against 200 of SGD",
    data="CIFAR-10's python batches, or train/ and test/ folders of pictures, or an archive of them",
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
    adapt=adapt,
    load=partial(load, "cifar10-resnet32", None),
    build=build_cifar,
    begin=begin,
    loss=loss,
    judge=hits,
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
        adapt=adapt,
        load=partial(load, name, LARGE),
        build=partial(build_imagenet, depth),
        begin=begin,
        loss=loss,
        judge=hits,
    )  # fmt: skip


IMAGENET = [_imagenet(depth) for depth in (50, 101, 152)]
