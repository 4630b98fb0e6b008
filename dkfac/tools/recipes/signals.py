"""Signals that make a run save a checkpoint, and agreement between ranks on whether one arrived.

Input: SIGINT, SIGTERM, SIGUSR1 on any rank. Output: the same signal name on all ranks. Owns: the signal handlers.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import dkfac

_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
"""In order of priority."""
LATENCY, MOST_STEPS = 1.0, 50
"""Ranks exchange signals about every ``LATENCY`` seconds, and at least every ``MOST_STEPS`` steps."""
ECHO = 1.0
"""Seconds in which a second SIGINT or SIGTERM counts as a repetition: a terminal and a launcher both forward it."""


class Signals:
    """Records signals instead of terminating. A second SIGINT or SIGTERM raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._arrived: set[str] = set()
        self._ending_since: float | None = None
        self._before: dict[str, Any] = {}
        self._next, self._last = 0, (0, time.monotonic())

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNAL_NAMES:
                self._before[name] = signal.signal(getattr(signal, name), self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for name, before in self._before.items():
            signal.signal(getattr(signal, name), before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name != "SIGUSR1":
            now = time.monotonic()
            if self._ending_since is not None and now - self._ending_since > ECHO:
                raise KeyboardInterrupt
            if self._ending_since is None:
                self._ending_since = now
        self._arrived.add(name)

    def agreed(self, step: int, place: dkfac.distributed.Place) -> str | None:
        """Return a signal that any rank received, or None. Ranks exchange signals only at some steps. A collective
        call."""
        found = set(self._arrived)
        if not place.is_alone:
            if step < self._next:
                return None
            (before, then), now = self._last, time.monotonic()
            own = [(now - then) / max(1, step - before), *(float(name in found) for name in _SIGNAL_NAMES)]
            took, *received = zip(*dkfac.distributed.gather(own, place.device), strict=True)
            self._next = step + min(MOST_STEPS, max(1, int(LATENCY / max(1e-6, *took))))
            self._last = (step, now)
            found = {name for name, ranks in zip(_SIGNAL_NAMES, received, strict=True) if any(ranks)}
        first = next((name for name in _SIGNAL_NAMES if name in found), None)
        self._arrived.discard(first or "")
        return first
