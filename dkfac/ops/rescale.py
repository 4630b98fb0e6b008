"""Scale the length of an update, without synchronizing with the device.

Input: norms of the gradient and the update. Output: the scale. Owns: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def match_norm(before: Tensor, after: Tensor) -> Tensor:
    """Return the factor that scales a vector of norm ``after`` to norm ``before``; 1 for a zero vector."""
    limits = torch.finfo(after.dtype)
    return torch.where(after > limits.tiny, (before / after).clamp(max=limits.max), 1.0)
