"""What K-FAC reads off the optimizer and the training loop around it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Steps:
    """Tells an optimizer's step from one inside it: hooks run in both where a subclass calls its parent's step."""

    def __init__(self) -> None:
        self._outer: Any = None
        """The frame of torch's wrapper around the step that is under way."""

    def enter(self) -> bool:
        """Return whether the hook that calls this is the outer step's."""
        frame: Any = sys._getframe(2)
        caller = frame
        while frame is not None:
            if frame is self._outer:
                return False
            frame = frame.f_back
        self._outer = caller
        return True

    def leave(self) -> bool:
        """Return whether the step that ends is the outer one."""
        if sys._getframe(2) is not self._outer:
            return False
        self._outer = None
        return True


def is_dummy(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether a step is one without effect, as distributed checkpoints take to make an optimizer's state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if optimizer.state or any(isinstance(lr, Tensor) or lr != 0 for lr in rates):
        return False
    return not any(bool(p.grad.any()) for p in parameters if p.grad is not None)


def learning_rates(
    optimizer: torch.optim.Optimizer | None, parameters: Iterable[Tensor], lr: float | None
) -> dict[int, Any]:
    """Return learning rates by the parameters' ids. ``lr``: given by hand where there is no optimizer."""
    if optimizer is not None:
        return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    if lr is None:
        raise ValueError('rescale="kl-clip" and "norm-kl" need the learning rate: call kfac.step(lr=...)')
    return {id(p): lr for p in parameters}


def check_scaler(optimizer: torch.optim.Optimizer | None, *, has_scaler: bool) -> None:
    if not has_scaler and getattr(optimizer, "grad_scale", None) is not None:
        raise RuntimeError(
            "a GradScaler steps this optimizer: pass KFAC(..., grad_scaler=scaler), so that the loss scale does "
            "not enter the statistics"
        )
