"""Propagate one rank's error to all ranks.

Input: an error of this rank's part of a step, and a flag that was summed over ranks. Output: the error, raised on all
ranks; with a single rank immediately. Owns: the error that other ranks do not know of yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.comm.transport import Transport


class ErrorChannel:
    """Carries one rank's error from where it was caught to where all ranks raise it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._caught: BaseException | None = None
        self._announced: BaseException | None = None
        self._flag: Tensor | None = None
        """Whether a rank failed in the last measured step; copied to the host asynchronously."""
        self._arrived: torch.cuda.Event | None = None

    def keep(self, error: BaseException) -> None:
        """Keep the first error until all ranks learn of it; a single rank raises it immediately."""
        self._caught = self._caught or self._transport.defer(error)

    def take(self) -> BaseException | None:
        """Return the error that was kept, to be sent in a header or status, and clear it."""
        error, self._caught = self._caught, None
        return error

    def announce(self, flag: Tensor, error: BaseException | None) -> None:
        """Raise on all ranks if ``flag``, summed over ranks, says that one failed; on a GPU at the next step."""
        self._announced, self._flag = error, flag
        if flag.device.type == "cuda":
            self._flag = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._flag.copy_(flag, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(flag.device))
        else:
            self.raise_announced()

    def raise_announced(self) -> None:
        """Raise what was announced at the last measured step, if a rank failed."""
        if self._flag is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()  # recorded a step ago
        flag, self._flag = self._flag, None
        if float(flag) > 0:
            self._transport.raise_everywhere(self._announced)

    def forget(self) -> None:
        """Drop the flag of the last measured step, because another state was loaded."""
        self._flag = None
