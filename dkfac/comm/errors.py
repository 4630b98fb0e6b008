"""Propagate one rank's error to all ranks.

Input: an error of this rank's part of a step, and a flag that was summed over ranks. Output: the error, raised on all
ranks; with a single rank immediately. Owns: the error that other ranks do not know of yet.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dkfac.comm import hangs
from dkfac.comm.replicas import Replicas, header_agrees
from dkfac.comm.transport import Transport
from dkfac.ops.host_copy import HostCopy


class ErrorChannel:
    """Carries one rank's error from where it was caught to where all ranks raise it."""

    def __init__(self, transport: Transport, replicas: Replicas | None = None) -> None:
        """``replicas``: the comparison of ranks that should hold the same; None: they are not compared."""
        self._transport, self.replicas = transport, replicas
        self._caught: BaseException | None = None
        self._announced: BaseException | None = None
        self._watch: hangs.RankWatch | None = None
        self._told: HostCopy | None = None
        """What the header of the last measured step said: how many ranks failed, and whether all are alike."""

    def watch(self, patience: float | None, where: Callable[[], tuple[int, str]]) -> None:
        """From now on raise on all ranks if one does not arrive (``comm/hangs.py``)."""
        self._watch = hangs.start(self._transport.groups, patience, where)

    def close(self) -> None:
        """End the watch over the other ranks."""
        if self._watch is not None:
            self._watch.close()

    def keep(self, error: BaseException) -> None:
        """Keep the first error until all ranks learn of it; a single rank raises it immediately."""
        self._caught = self._caught or self._transport.defer(error)

    def take(self) -> BaseException | None:
        """Return the error that was kept, to be sent in a header or status, and clear it."""
        error, self._caught = self._caught, None
        return error

    def flags(self) -> tuple[BaseException | None, list[float]]:
        """Return the error that was kept, and what the header says of it, of the step and of learning rates."""
        error = self.take()
        return error, [float(error is not None), *([0.0] * 5 if self.replicas is None else self.replicas.header())]

    def announce(self, told: Tensor, error: BaseException | None) -> None:
        """Raise on all ranks if ``told``, summed over ranks, says that one failed; on a GPU at the next step."""
        self._announced, self._told = error, HostCopy(told)
        if self._told.is_complete:
            self.raise_announced()

    def raise_announced(self) -> None:
        """Raise what was announced at the last measured step."""
        if self._told is not None:
            (num_failed, *alike), self._told = self._told.read(), None  # it was copied a step ago
            if num_failed > 0:
                self._transport.raise_everywhere(self._announced)
            if self.replicas is not None and not header_agrees(alike):
                self.replicas.raise_difference()

    def forget(self) -> None:
        """Drop what was said in the last measured step, because another state was loaded."""
        self._told = None
        if self.replicas is not None:
            self.replicas.begin_anew()
