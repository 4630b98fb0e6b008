"""The length of an update. Everything stays on the device: no value is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor


def match_norm(before: Tensor, after: Tensor) -> Tensor:
    """Return the factor that gives a vector of norm ``after`` the norm ``before``; zero stays zero."""
    limits = torch.finfo(after.dtype)
    return torch.where(after > limits.tiny, (before / after).clamp(max=limits.max), 1.0)
