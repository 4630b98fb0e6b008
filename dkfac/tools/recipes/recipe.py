"""A recipe: data, model, loss and hyperparameters as one value. ``training.py`` has the loop that trains any recipe.

Input: functions and numbers of one recipe. Output: optimizer and learning rates. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes.hyper import Hyper


class Examples(Protocol):
    """A split of a data set."""

    def __len__(self) -> int: ...

    def get(self, index: Tensor, *, seed: int | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the examples at ``index``, on the CPU.

        ``seed``: for random crops; None: no augmentation.
        """
        ...


class Session(Protocol):
    """Hooks of a recipe around the steps of one run."""

    def prepare(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for the model, on the device.

        ``generator``: draws the augmentation of a training batch; None: a batch for evaluation.
        """
        ...

    def before_step(self, optimizer: torch.optim.Optimizer, step: int, num_steps: int, epoch: float) -> None: ...

    def after_step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    about: str
    """Description in one line."""
    data: str
    """The data it needs, and in which layout."""
    hyper: Hyper
    kfac: Mapping[str, Any] | Callable[[Hyper], Mapping[str, Any]]
    """Settings of K-FAC that differ from its defaults."""
    load: Callable[[str | None, Hyper], tuple[Examples, Examples]]
    build: Callable[[Examples, Hyper], nn.Module]
    begin: Callable[[nn.Module, Examples, Hyper, dkfac.distributed.Place], Session]
    loss: Callable[[Tensor, Tensor], Tensor]
    judge: Callable[[Tensor, Tensor], Tensor] | None = None
    """Returns how many predictions of a batch are correct; None: evaluate the loss only."""
    adapt: Callable[[Hyper, Mapping[str, Any]], Hyper] = lambda hyper, given: hyper
    """Returns the hyperparameters with those that depend on the given ones filled in, or raises ValueError."""
    first_order: str = "SGD"
    unused: tuple[str, ...] = ()
    """Hyperparameters that have no effect in this recipe."""

    def settings(self, hyper: Hyper) -> Mapping[str, Any]:
        """Return the settings of K-FAC."""
        return self.kfac(hyper) if callable(self.kfac) else self.kfac


def positive_integer(hyper: Hyper, name: str) -> int:
    """Return a hyperparameter of ``--more``, checked to be an integer >= 1."""
    value = hyper.more[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"--more {name}={value!r} is not an integer >= 1")
    return value


def build_optimizer(hyper: Hyper, model: nn.Module) -> torch.optim.Optimizer:
    if hyper.optimizer == "adamw":
        betas = (hyper.momentum, 0.95)
        return torch.optim.AdamW(model.parameters(), lr=hyper.lr, betas=betas, weight_decay=hyper.weight_decay)
    return torch.optim.SGD(
        model.parameters(), lr=hyper.lr, momentum=hyper.momentum, nesterov=hyper.nesterov and hyper.momentum > 0,
        weight_decay=hyper.weight_decay,
    )  # fmt: skip


def lr_fraction(hyper: Hyper, step: int, num_steps: int, epoch: float) -> float:
    """Return the learning rate of a step as a fraction of its peak: linear warm-up, then linear or stepwise decay."""
    rise = max(1, math.ceil(hyper.warmup * num_steps)) if hyper.warmup else 0
    share = min(1.0, (step + 1) / rise) if rise else 1.0
    if hyper.decay == "steps":
        return float(share * 0.1 ** sum(epoch >= milestone for milestone in hyper.milestones))
    return share * min(1.0, (num_steps - step) / max(1, num_steps - rise))


class ScheduledSession:
    """A session without state: a function that prepares each batch, and the learning-rate schedule."""

    def __init__(
        self, hyper: Hyper, prepare: Callable[[Tensor, Tensor, torch.Generator | None], tuple[Tensor, Tensor]]
    ) -> None:
        self._hyper, self._prepare = hyper, prepare

    def prepare(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return self._prepare(x, y, generator)

    def before_step(self, optimizer: torch.optim.Optimizer, step: int, num_steps: int, epoch: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._hyper.lr * lr_fraction(self._hyper, step, num_steps, epoch)

    def after_step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def count_correct(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of correct predictions. Targets are class indices, or probabilities."""
    truth = targets.argmax(-1) if targets.is_floating_point() else targets
    return (output.argmax(-1) == truth).sum()
