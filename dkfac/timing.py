"""Seconds by stage, without waiting for the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Adds up how long each stage takes; on CUDA by events that are read when they have passed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield  # its time is that of the graph's replay
            return
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(device)
            start.record(stream)
            yield
            end.record(stream)
            self._open.append((name, start, end))
            self._harvest(wait=False)
            return
        begin = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin

    def seconds(self, *, wait: bool = True) -> dict[str, float]:
        """Return the sums so far; without ``wait``, of what the device has finished."""
        self._harvest(wait=wait)
        return dict(self._seconds)

    def _harvest(self, *, wait: bool) -> None:
        while self._open and (wait or self._open[0][2].query()):  # type: ignore[no-untyped-call]
            name, start, end = self._open.pop(0)
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000
