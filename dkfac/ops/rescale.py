"""The length of an update. Everything stays on the device: no value is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor


def match_norm(before: Tensor, after: Tensor) -> Tensor:
    """Return the factor that gives a vector of norm ``after`` the norm ``before``; zero stays zero."""
    limits = torch.finfo(after.dtype)
    return torch.where(after > limits.tiny, (before / after).clamp(max=limits.max), 1.0)


def kl_factor(products: Tensor, kl_clip: float) -> Tensor:
    """Return ``min(1, sqrt(kl_clip / |sum of lr^2 <v, grad>|))``, 1 where the sum is 0."""
    total = products.sum().abs()
    factor = (kl_clip / total).sqrt().clamp(max=1.0)
    return torch.where(total > 0, factor, torch.ones_like(factor))
