"""Measure seconds by stage without synchronizing with the device.

Input: code that runs in ``stage(name, device)``. Output: ``seconds()``, by stage. Owns: the sums and the CUDA events
that have not been read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Adds up the time of each stage; on CUDA with events that are read once they have completed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self.listener: Callable[[str, float, float], None] | None = None
        """Called as ``listener(name, begin, end)`` after each stage on the CPU."""
        self.step, self.current = 0, ""
        """The step, and the stage that runs now."""
        self.weights: dict[str, int] = {}
        """On CUDA, how many times the current duration of a stage counts; 0: not timed, as events cost host time."""

    def where(self) -> tuple[int, str]:
        """Return the step and the stage that runs, "" outside of them. Other threads may call this."""
        return self.step, self.current

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        weight, self.current = self.weights.get(name, 1), name
        if device.type == "cuda" and (weight == 0 or torch.cuda.is_current_stream_capturing()):
            yield  # captured work is timed when its graph is replayed
            self.current = ""
            return
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(device)
            start.record(stream)
            yield
            end.record(stream)
            self.current = ""
            self._open.append((name, weight, start, end))
            self._harvest(wait=False)
            return
        begin = time.perf_counter()
        yield
        self.current, now = "", time.perf_counter()
        self._seconds[name] += now - begin
        if self.listener is not None:
            self.listener(name, begin, now)

    def seconds(self, *, wait: bool = True) -> dict[str, float]:
        """Return the sums so far; with ``wait`` synchronizes with the device, else only of what it has finished."""
        self._harvest(wait=wait)
        return dict(self._seconds)

    def _harvest(self, *, wait: bool) -> None:
        while self._open and (wait or self._open[0][3].query()):  # type: ignore[no-untyped-call]
            name, weight, start, end = self._open.pop(0)
            end.synchronize()
            self._seconds[name] += weight * start.elapsed_time(end) / 1000
