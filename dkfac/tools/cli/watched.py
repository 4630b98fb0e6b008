"""What is known of one optimizer of a script.

Input: an optimizer. Output: its name, and its question to other ranks. Owns: nothing; the watcher owns the entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakSet

import torch
from torch import nn

from dkfac.tools.cli.owner import trained_parameters


@dataclass(eq=False)
class Watched:
    """What is known of one optimizer of the script."""

    number: int
    is_waiting: bool = True
    """Whether K-FAC is attached at the next training forward of its model."""
    has_said: bool = False
    """Whether the user was told why K-FAC is not attached."""
    kfac: ReferenceType[Any] | None = None
    attempts: int = 0
    state: dict[str, Any] | None = None
    """K-FAC's state from a file, for when it is attached."""
    foreign: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Modules that own none of its parameters."""
    frozen: list[ReferenceType[torch.Tensor]] = field(default_factory=list)
    """Those of its parameters that did not require a gradient when K-FAC was attached."""
    steps_of_other: int = -1
    """Steps of the K-FAC of another optimizer of the same parameters, when this one's step began."""

    def attached(self) -> Any:
        return None if self.kfac is None else self.kfac()


def question(known: Watched) -> str:
    """Return the name under which ranks vote on this optimizer."""
    return f"{known.number}.{known.attempts}"


def label(optimizer: torch.optim.Optimizer, known: Watched) -> str:
    count = sum(p.numel() for p in trained_parameters(optimizer).values())
    return f"{type(optimizer).__name__} (optimizer {known.number}, {count:,} parameters)"
