"""Record the timeline of real training steps, in the format of the simulator. CPU only, where host time is device time.

Input: K-FAC, a model, an optimizer. Output: timelines on rank 0. Owns: its hooks, and K-FAC's timing listeners.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from dkfac.capture.timing import StageTimer
from dkfac.comm import collectives
from dkfac.plan.timeline import Span, Timeline

_SIMULATOR_STAGE_NAMES = {"capture": "measure"}
"""Stages of K-FAC that have another name in the simulator."""


class Recorder:
    """Context manager that records spans: ``with Recorder(timer, gather, model, optimizer) as recorder: ...``.

    A step begins with the model's forward pass and ends with the optimizer's step. ``timelines()`` returns the steps
    of all ranks on rank 0.
    """

    def __init__(
        self,
        timer: StageTimer,
        gather: Callable[[Any], list[Any] | None],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """``timer`` is K-FAC's; ``gather`` returns every rank's value on rank 0, and None on the others."""
        self._timer, self._gather, self._model, self._optimizer = timer, gather, model, optimizer
        if next(model.parameters()).device.type != "cpu":
            raise ValueError("timelines are recorded on the CPU; on a GPU use benchmarks/gpu_profile.py")
        self._steps: list[list[tuple[str, str, str, float, float]]] = []
        self._begin = self._turn = self._last = 0.0
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        self._timer.listener = self._stage
        collectives.listener = self._transfer
        self._handles = [
            self._model.register_forward_pre_hook(self._forward_begins),
            self._model.register_forward_hook(self._forward_ends),
            self._optimizer.register_step_post_hook(self._step_ends),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._timer.listener = None
        collectives.listener = None
        for handle in self._handles:
            handle.remove()

    def _forward_begins(self, *_: Any) -> None:
        self._steps.append([])
        self._begin = self._turn = self._last = time.perf_counter()

    def _forward_ends(self, *_: Any) -> None:
        now = time.perf_counter()
        self._note("compute", "forward", "", self._begin, now)
        self._turn = self._last = now

    def _stage(self, name: str, begin: float, end: float) -> None:
        """Record a stage of K-FAC. The time between stages in the backward pass is the model's own backward."""
        if name != "capture" and self._turn:
            self._note("compute", "backward", "", self._last, begin)
            self._turn = 0.0
        elif name == "capture":
            self._note("compute", "backward", "", self._last, begin)
        self._note("compute", _SIMULATOR_STAGE_NAMES.get(name, name), "", begin, end)
        self._last = end

    def _transfer(self, how: str, begin: float, end: float) -> None:
        self._note("network", how, "", begin, end)

    def _step_ends(self, *_: Any) -> None:
        self._note("compute", "optimizer", "", self._last, time.perf_counter())

    def _note(self, stream: str, stage: str, name: str, begin: float, end: float) -> None:
        if self._steps and end > begin:
            self._steps[-1].append((stream, stage, name, begin, end))

    def timelines(self) -> list[Timeline]:
        """Return one timeline per step with the spans of all ranks on rank 0, and an empty list on other ranks.

        Under torch.distributed, a collective call. Times are relative to the beginning of each rank's own step.
        """
        mine = [[(*span[:3], span[3] - steps[0][3], span[4] - steps[0][3]) for span in steps] for steps in self._steps]
        every = self._gather(mine)
        if every is None:
            return []
        found = []
        for step in range(len(mine)):
            spans = [Span(rank, *span) for rank, steps in enumerate(every) for span in steps[step]]
            found.append(Timeline(tuple(spans), max((span.end for span in spans), default=0.0)))
        return found
