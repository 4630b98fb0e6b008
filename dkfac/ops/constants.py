"""Cache of constant tensors, so that each is copied to a device only once.

Input: numbers. Output: the same numbers as a tensor on a device. Owns: the cache, and constants that CUDA graphs read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def constant(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``numbers`` as a cached tensor, which must not be modified."""
    found = _constant(numbers, device, dtype)
    if found.is_cuda and torch.cuda.is_current_stream_capturing():
        _IN_GRAPHS.append(found)
    return found


_IN_GRAPHS: list[Tensor] = []
"""Constants whose addresses are in CUDA graphs: they must stay alive even if the cache evicts them."""


@lru_cache(maxsize=1024)
def _constant(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)
