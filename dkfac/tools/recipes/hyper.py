"""The hyperparameters of a recipe that the command line can change. Does not import torch, which takes seconds.

Input: numbers. Output: a frozen ``Hyper``, or an error that names the field. Owns: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """Hyperparameters that the command line can change."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    batch: int = 128
    micro_batch: int | None = None
    """Examples per forward pass on each rank; None: the rank's whole share of the batch."""
    epochs: float = 10.0
    warmup: float = 0.1
    """Fraction of the steps over which the learning rate rises linearly."""
    decay: Literal["linear", "steps"] = "linear"
    milestones: tuple[float, ...] = ()
    """Epochs after which ``"steps"`` divides the learning rate by ten."""
    label_smoothing: float = 0.0
    size: int | None = None
    """Pixels per side that images are resized to; None: no resizing, or the recipe's default for large images."""
    seed: int = 0
    autocast: bool = True
    """Whether to use bfloat16 autocast on a GPU."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters that only this recipe has (``--more``)."""

    def __post_init__(self) -> None:
        for name in ("lr", "batch", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        for name in ("micro_batch", "size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        for name, most in (("momentum", 1), ("label_smoothing", 1), ("weight_decay", math.inf), ("seed", 2**40)):
            if not 0 <= getattr(self, name) < most:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, {most})")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup={self.warmup} must be in [0, 1]: it is a fraction of the steps")
