"""autoencoder: a deep autoencoder on handwritten digits, with the sampled Fisher (Martens and Grosse 2015).

Input: hyperparameters. Output: data, model and session of the recipe. Owns: nothing.
"""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes import digits
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.recipe import Examples, Recipe, ScheduledSession, Session
from dkfac.tools.recipes.tensors import Tensors

SIZES = (64, 128, 64, 32, 8, 32, 64, 128, 64)


def _load(path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    if path is not None:
        raise ValueError("autoencoder has its own data: omit --data")
    train, test = load_images()
    return Tensors(train, train), Tensors(test, test)


def load_images(held_out: digits.EvalSplit = "test") -> tuple[Tensor, Tensor]:
    """Return training and held-out images, ``[N, 64]``, between 0 and 1."""
    found = digits.load_digit_images(held_out)
    low = min(float(found.train_images.min()), float(found.held_out_images.min()))
    high = max(float(found.train_images.max()), float(found.held_out_images.max()))
    train, test = ((t.flatten(1) - low) / (high - low) for t in (found.train_images, found.held_out_images))
    return train, test


def _build(examples: Examples, hyper: Hyper) -> nn.Module:
    return build_autoencoder()


def build_autoencoder(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(SIZES)):
        layers.append(nn.Linear(a, b))
        if i not in (len(SIZES) // 2 - 1, len(SIZES) - 2):  # the code and the logits are linear
            layers.append(activation())
    return nn.Sequential(*layers)


def _begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    return ScheduledSession(hyper, lambda x, y, generator: (x, y))


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, targets)


AUTOENCODER = Recipe(
    name="autoencoder",
    about="8x8 handwritten digits (in scikit-learn), an autoencoder of eight layers",
    data="none: the images are part of scikit-learn",
    hyper=Hyper(lr=3.0, batch=200, epochs=60, weight_decay=0.0),
    kfac={"fisher": "sampled", "fisher_loss": "bernoulli", "factor_interval": 1, "inverse_interval": 5},
    load=_load,
    build=_build,
    begin=_begin,
    loss=_loss,
    unused=("size", "label_smoothing"),
)
