"""fashion-cnn: Fashion-MNIST and a CNN of two stages."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.recipes.loading import normalised
from dkfac.recipes.readers import read
from dkfac.recipes.recipe import Examples, Hyper, Plain, Recipe, Session, hits
from dkfac.recipes.techniques import crop_and_flip

DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package dataset-fashion-mnist puts it."""


def load(path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    if path is not None or Path(DEBIAN).exists():
        return read(path or DEBIAN)
    raise ValueError(
        "fashion-cnn has no data: install Debian's package dataset-fashion-mnist, or give --data the folder with "
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (or .gz)"
    )


def build(examples: Examples, hyper: Hyper) -> nn.Module:
    def stage(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        both = (inputs, outputs), (outputs, outputs)
        layers = [m for a, b in both for m in (nn.Conv2d(a, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())]
        return *layers, nn.MaxPool2d(2)

    return nn.Sequential(*stage(1, 32), *stage(32, 64), nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(),
                         nn.Linear(128, 10))  # fmt: skip


def begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    def prepare(x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        images = normalised(x)
        return (images if generator is None else crop_and_flip(images, padding=2, generator=generator)), y

    return Plain(hyper, prepare)


RECIPE = Recipe(
    name="fashion-cnn",
    about="Fashion-MNIST, a CNN of 0.5 million parameters",
    data="Debian's dataset-fashion-mnist, or a folder with the four idx files",
    hyper=Hyper(lr=0.1, batch=128, epochs=10),
    kfac={},
    load=load,
    build=build,
    begin=begin,
    loss=F.cross_entropy,
    judge=hits,
)
