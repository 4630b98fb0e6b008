"""Calls of layers that are alike, summed together: a launch costs the host as much for one as for ten.

In a backward pass a call only leaves its input and output gradient here. They are summed when there are many bytes of
them, and at the end of the pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dkfac.layers.conv import strip_taps
from dkfac.layers.layer import Layer
from dkfac.layers.rows import PATCH_BYTES, Sample, block_of, rows_of
from dkfac.ops.precision import tf32
from dkfac.sums import gradient_sum, input_sum
from dkfac.window import Sums

if TYPE_CHECKING:
    from dkfac.tape import Tape

WAITING_BYTES = 512 * 2**20
"""Inputs and gradients that are kept beyond their time."""


@dataclass(slots=True)
class Call:
    layer: Layer
    sums: Sums
    x: Tensor
    g: Tensor


class Waiting:
    """Calls that are not summed yet, by what must be equal to sum them together."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._calls: dict[Any, list[Call]] = {}
        self._num_bytes = 0

    def clear(self) -> None:
        self._calls.clear()
        self._num_bytes = 0

    def add(self, layer: Layer, sums: Sums, x: Tensor, g: Tensor, examples: int, weight: float) -> bool:
        """Take a call in, if it is of a kind that can wait."""
        sample, ratio = self._tape.sample, 1.0
        module: Any = layer.module
        form: tuple[Any, ...] = ()
        if layer.kind == "conv":
            if x.ndim != 2 + len(module.kernel_size) or x.shape[0] != examples:
                return False
            positions = math.prod(g.shape[2:])
            if sample.every > 1 and positions > 1:
                begin, end = block_of(examples, sample)
                ratio, examples = examples / (end - begin), end - begin
                x, g = x[begin:end], g[begin:end]
            num_bytes = positions * x.shape[0] * module.in_channels * strip_taps(module) * x.element_size()
            form = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups)
            form += (module.padding_mode,)
            sample = Sample()
        elif layer.kind in ("linear", "conv1d-transposed"):
            if x.ndim < 2 or x.shape[0] != examples or self._tape.settings.batch_dim != 0:
                return False
            num_bytes = x.numel() * x.element_size()
        else:
            return False
        if num_bytes > PATCH_BYTES:
            return False
        alike = (layer.kind, layer.spec.factors, layer.has_bias, x.shape, g.shape, x.dtype, g.dtype, layer.dtype,
                 x.device, form, examples, weight * ratio, sample)  # fmt: skip
        self._calls.setdefault(alike, []).append(Call(layer, sums, x, g))
        self._num_bytes += (x.numel() + g.numel()) * x.element_size()
        if self._num_bytes > WAITING_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Sum what waits."""
        calls, tape = self._calls, self._tape
        self._calls, self._num_bytes = {}, 0
        for alike, waiting in calls.items():
            x = waiting[0].x
            *_, examples, weight, sample = alike
            module: nn.Module = waiting[0].layer.module
            taps = strip_taps(module) if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else 1
            most = max(1, PATCH_BYTES // max(1, x.numel() * x.element_size() * taps))
            device = x.device
            plain = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), plain, tf32(tape.settings.tf32, device), tape.timer.stage("capture", device):
                for start in range(0, len(waiting), most):
                    self._sum(waiting[start : start + most], examples, weight, sample)

    def _sum(self, calls: list[Call], examples: int, weight: float, sample: Sample) -> None:
        parts, layer, settings = len(calls), calls[0].layer, self._tape.settings
        x, g = calls[0].x, calls[0].g
        if parts > 1:
            x, g = torch.cat([call.x for call in calls]), torch.cat([call.g for call in calls])
        (rows,) = rows_of(
            layer, x, g, examples=examples * parts, batch_dim=0, batch_stats=False, sample=sample, whole=True
        )
        inputs, count = input_sum(layer, rows, None, settings, parts=parts)
        factor = layer.spec.factor("G")
        gradients = gradient_sum(layer, factor, rows, weight * rows.ratio, settings, parts=parts)
        each = zip(torch.split(inputs, factor.num_blocks), torch.split(gradients, factor.num_blocks), strict=True)
        for call, (a, b) in zip(calls, each, strict=True):
            call.sums.add("A", a)
            call.sums.add("G", b)
            call.sums.rows = call.sums.rows + count
