"""What K-FAC reads from the optimizer and the training loop.

Input: the optimizer. Output: learning rates, or an error. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def learning_rates(
    optimizer: torch.optim.Optimizer | None, parameters: Iterable[Tensor], lr: float | None
) -> dict[int, Any]:
    """Return learning rates by ``id(parameter)``. ``lr`` is used if there is no optimizer."""
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
