"""Signals that ask a run to save, and agreement of ranks on whether one has come."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import dkfac

AGREED_EVERY = 5
"""Steps after which ranks tell each other."""
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


class Signals:
    """Notes signals instead of dying of them; the second SIGINT interrupts as usual."""

    def __init__(self) -> None:
        self._arrived = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number, name in enumerate(NAMES, 1):
                self._before[number] = signal.signal(getattr(signal, name), self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(getattr(signal, NAMES[number - 1]), before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self._arrived == NAMES.index(name) + 1:
            raise KeyboardInterrupt
        self._arrived = NAMES.index(name) + 1

    def agreed(self, step: int, place: dkfac.distributed.Place) -> str | None:
        """Return a signal that one of the ranks got, at a step at which they tell each other. A collective call."""
        if place.world_size > 1 and step % AGREED_EVERY:
            return None
        told = [int(numbers[0]) for numbers in dkfac.distributed.gather([float(self._arrived)], place.device)]
        arrived = min((number for number in told if number), default=0)
        if arrived:
            self._arrived = 0
        return NAMES[arrived - 1] if arrived else None
