"""Copy a few numbers to the host, to be read later without waiting for the device.

Input: a small tensor. Output: its numbers. Owns: pinned memory and an event for each copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy that is under way, or complete if the tensor was on the CPU."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_complete(self) -> bool:
        """Whether the numbers can be read at once, on any rank alike: not whether the device has finished."""
        return self._event is None

    def read(self) -> list[Any]:
        """Return the numbers; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
