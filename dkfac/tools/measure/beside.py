"""Record one refresh step of a run as a timeline, and simulate the same step.

Input: a training run. Output: ``timeline.json`` in its folder, with both timelines. Owns: nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.plan.models import Shape, scaled
from dkfac.plan.plan import Plan
from dkfac.plan.preset import load_cluster
from dkfac.plan.simulate import Kind, simulate
from dkfac.plan.timeline import Timeline
from dkfac.runtime.report import Instruments
from dkfac.tools.measure.record import Recorder

_FIRST_RECORDED_STEP = 10
"""Earlier steps are not representative: kernels are loaded and memory is allocated."""


class RefreshStepRecorder:
    """Records the first refresh step after the warm-up, once per run and on the CPU only."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_done = folder, False

    @contextlib.contextmanager
    def __call__(
        self, step: int, kfac: Instruments | None, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Iterator[None]:
        """Return a context manager around a step with one forward pass. A collective call."""
        is_too_early = self._is_done or step < _FIRST_RECORDED_STEP
        if is_too_early or kfac is None or not _is_example(kfac.settings, kfac.layers, step):
            yield
            return
        self._is_done = True
        with Recorder(kfac.timer, kfac.transport.gather, network, optimizer) as recorder:
            yield
        found = recorder.timelines()
        if found:
            shapes = [Shape(layer.spec, max(1, int(kfac.rows_seen.get(layer.name, 1)))) for layer in kfac.layers]
            overlap = kfac.settings.experimental.overlap
            simulated = _simulated(kfac.transport.plan, shapes, found[-1], overlap=overlap)
            body = [_as_json("measured, refresh", found[-1]), _as_json(*simulated)]
            with contextlib.suppress(OSError):  # the log reports that the folder cannot be written
                (self._folder / "timeline.json").write_text(json.dumps(body))


def _is_example(settings: Settings, layers: list[Layer], step: int) -> bool:
    on_cpu = all(layer.weight.device.type == "cpu" for layer in layers)
    return on_cpu and settings.experimental.staleness == "fixed" and settings.rhythm(step)[1]


def _simulated(plan: Plan, shapes: list[Shape], measured: Timeline, *, overlap: bool) -> tuple[str, Timeline]:
    """Return the simulated step. Forward, backward and measuring take as long as measured; other costs are a
    preset's."""
    busy = measured.busy(0)
    work = scaled(shapes, busy.get("forward", 0.0) + busy.get("backward", 0.0), busy.get("measure", 1e-6))
    cluster = load_cluster("cpu-2-cores")
    kind = Kind(measures=True, decomposes=True, overlap=overlap)
    found = simulate(plan, cluster, work, kind, keep=plan.world_size)
    return f"simulated with the costs of {cluster.name}, refresh", found


def _as_json(title: str, timeline: Timeline) -> dict[str, Any]:
    return {"title": title, "spans": [asdict(span) for span in timeline.spans]}
