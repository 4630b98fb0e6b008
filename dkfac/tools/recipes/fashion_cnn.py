"""fashion-cnn: Fashion-MNIST and a CNN of two stages.

Input: a folder of images, hyperparameters. Output: data, model and session of the recipe. Owns: nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.loading import normalize_pixels
from dkfac.tools.recipes.pictures_resnet import num_classes
from dkfac.tools.recipes.readers import read_pictures
from dkfac.tools.recipes.recipe import Examples, Recipe, ScheduledSession, Session, count_correct
from dkfac.tools.recipes.techniques import crop_and_flip

DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package dataset-fashion-mnist installs the files."""


def _load(path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    if path is None and not Path(DEBIAN).exists():
        raise ValueError(
            "fashion-cnn has no data: install Debian's package dataset-fashion-mnist, or set --data to a folder with "
            "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (or .gz)"
        )
    train, test = (pictures.sized(hyper.size) for pictures in read_pictures(path or DEBIAN))
    shapes = [shape_of(pictures) for pictures in (train, test)]
    if shapes[0] != shapes[1] or min(shapes[0][1:]) < 4:
        sides = " and ".join(f"{height} x {width}" for _, height, width in shapes)
        what = f"{path or DEBIAN}: training and test images have {sides} pixels"
        raise ValueError(f"{what}, but fashion-cnn needs one size of at least 4 x 4: set --size, for example --size 28")
    return train, test


def shape_of(examples: Examples) -> torch.Size:
    """Return channels, height and width."""
    return examples.get(torch.zeros(1, dtype=torch.int64), seed=None)[0].shape[1:]


def _build(examples: Examples, hyper: Hyper) -> nn.Module:
    channels, height, width = shape_of(examples)

    def stage(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        both = (inputs, outputs), (outputs, outputs)
        layers = [m for a, b in both for m in (nn.Conv2d(a, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())]
        return *layers, nn.MaxPool2d(2)

    inner = 64 * (height // 4) * (width // 4)
    return nn.Sequential(*stage(channels, 32), *stage(32, 64), nn.Flatten(), nn.Linear(inner, 128), nn.ReLU(),
                         nn.Linear(128, num_classes(examples)))  # fmt: skip


def _begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    def prepare(x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        images = normalize_pixels(x)
        return (images if generator is None else crop_and_flip(images, padding=2, generator=generator)), y

    return ScheduledSession(hyper, prepare)


FASHION_CNN = Recipe(
    name="fashion-cnn",
    about="Fashion-MNIST, a CNN of 0.5 million parameters",
    data="Debian's dataset-fashion-mnist, a folder with the four idx files, or train/ and test/ folders of images",
    hyper=Hyper(lr=0.1, batch=128, epochs=10),
    kfac={},
    load=_load,
    build=_build,
    begin=_begin,
    loss=F.cross_entropy,
    judge=count_correct,
    unused=("label_smoothing",),
)
