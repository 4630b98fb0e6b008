"""Find the ``GradScaler`` that steps the optimizer, if K-FAC was not given it.

Input: the scaler whose ``step`` is on the call stack of ``optimizer.step()``. Output: a capture that knows the loss
scale, or an error that names the argument. Owns: the scaler that was found.

The scale is needed only when a step's statistics are divided by it, so it is early enough to find the scaler then.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from dkfac.capture.collector import Collector
from dkfac.capture.hooks import CaptureContext, half_error
from dkfac.config.settings import Settings
from dkfac.ops.torch_private import scaled_step

SCALED_STEP = torch.amp.GradScaler.step.__code__
SCALED_STEP_IF_FINITE = scaled_step.__code__
"""A ``GradScaler`` calls ``optimizer.step()`` from one of these."""


class ScalerSearch:
    def __init__(self, context: CaptureContext, collector: Collector, settings: Settings) -> None:
        self.context, self.found = context, None
        self._collector, self._has_graphs = collector, settings.cuda_graph

    def use(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Use the scaler that called this step. None: the optimizer was stepped directly."""
        if scaler is None and self.context.half is not None:
            scaler = _scaler_that_unscaled(optimizer)
            if scaler is None:
                raise RuntimeError(half_error(self.context.half))
        if scaler is None or not scaler.is_enabled():
            return
        if self._has_graphs and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler steps this fused optimizer, whose gradients K-FAC's CUDA graphs would take for unscaled: "
                "pass KFAC(..., grad_scaler=scaler)"
            )
        self.found = scaler
        self._collector.use_scaler(scaler)
        self.context.use_scaler()


def _scaler_that_unscaled(optimizer: torch.optim.Optimizer) -> Any:
    """Return the scaler whose ``unscale_(optimizer)`` preceded a direct ``optimizer.step()``, searching the heap: this
    happens once, and only after a forward in float16."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.amp.GradScaler) and id(optimizer) in thing._per_optimizer_states:
            return thing
    return None
