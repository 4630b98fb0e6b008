"""digits-cnn: scikit-learn's handwritten digits and a small CNN. Nothing to download; trains in seconds on a laptop.

Input: hyperparameters. Output: data, model and session of the recipe. Owns: nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes import digits
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.recipe import Examples, Recipe, ScheduledSession, Session, count_correct
from dkfac.tools.recipes.techniques import crop_and_flip
from dkfac.tools.recipes.tensors import Tensors


def _load(path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    if path is not None:
        raise ValueError("digits-cnn has its own data: omit --data")
    found = digits.load_digit_images()
    return Tensors(found.train_images, found.train_labels), Tensors(found.held_out_images, found.held_out_labels)


def _build(examples: Examples, hyper: Hyper) -> nn.Module:
    return digits.build_model(hyper.seed)


def _begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    def prepare(x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if generator is None:
            return x, y
        background = x.amin()  # a shift by up to one pixel
        return crop_and_flip(x - background, padding=1, flip=0.0, generator=generator) + background, y

    return ScheduledSession(hyper, prepare)


DIGITS_CNN = Recipe(
    name="digits-cnn",
    about="8x8 handwritten digits (in scikit-learn), a CNN of 25,000 parameters",
    data="none: the images are part of scikit-learn",
    hyper=Hyper(lr=0.05, batch=64, epochs=10),
    kfac={},
    load=_load,
    build=_build,
    begin=_begin,
    loss=F.cross_entropy,
    judge=count_correct,
    unused=("size", "label_smoothing"),
)
