"""A training job, and its state while it runs.

Input: options of ``dkfac train``. Output: the two dataclasses. Owns: nothing; ``training.py`` updates the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dkfac
from dkfac.tools.recipes.folder import Log
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.recipe import Examples, Recipe, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """What to train, with which settings, and into which folder."""

    recipe: Recipe
    hyper: Hyper
    kfac: dict[str, Any] | None
    """Settings of K-FAC; None: train with the first-order optimizer alone."""
    folder: Path
    data: str | None = None
    max_steps: int | None = None
    save_every: int = 0
    """Steps between checkpoints; 0: one per epoch."""
    resume: bool = False
    resume_at: str | None = None
    """Name of the checkpoint to resume from; None: the newest complete one."""
    tensorboard: bool = False
    command: str = ""


@dataclass(slots=True)
class TrainingRun:
    """State of a job while it runs."""

    job: TrainingJob
    place: dkfac.distributed.Place
    model: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    kfac: dkfac.KFAC | None
    session: Session
    train_set: Examples
    test_set: Examples
    num_steps: int
    log: Log
    step: int = 0
    seconds: float = 0.0

    @property
    def epoch(self) -> float:
        return self.step * self.job.hyper.batch / len(self.train_set)

    @property
    def device(self) -> torch.device:
        return self.place.device

    def describe(self) -> dict[str, Any]:
        """Return what K-FAC reports, for a run's summary; nothing where there is none."""
        if self.kfac is None:
            return {}
        return {"kfac": self.kfac.report(), "plan": json.loads(self.kfac.plan.to_json()), "layers": repr(self.kfac)}

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of all ranks. A collective call."""
        return dkfac.distributed.gather(numbers, self.device)
