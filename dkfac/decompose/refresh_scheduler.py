"""Decide which layers are decomposed at which step, and update decompositions without waiting for the device.

Input: running factors. Output: decompositions, updated in place, and a report of their outcomes. Owns: the slices of
the refresh in progress, and the flags that are being copied from the device.

A refresh that is spread over several steps decomposes some layers after each of them. With one process and a GPU, it
does so on a stream of its own, during the next step's forward and backward pass. The results are used from the next
step on, on every device type and any number of ranks.

The device decides which new decompositions are valid (``renewal.py``). The host reads these flags ``LOOK_AFTER_STEPS``
steps later, when the copy has long completed; what failed then goes through the fallback ladder of ``fallback.py``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from dataclasses import dataclass

import torch

from dkfac.capture.timing import StageTimer
from dkfac.comm.transport import Transport
from dkfac.config.settings import SCHEDULES
from dkfac.config.step_context import FactorName, StepContext
from dkfac.decompose import layer_damping, layer_factors
from dkfac.decompose.refresh_sync import check_schedules
from dkfac.decompose.renewal import Flags, factors_of, may_renew, renew
from dkfac.decompose.report import RefreshReport
from dkfac.factors.layer_state import LayerState
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import decompose
from dkfac.ops.graph_cache import GraphedFunction, GraphPool, own_stream
from dkfac.ops.host_copy import HostCopy
from dkfac.ops.precision import tf32
from dkfac.plan.spec import FactorSpec, LayerSpec

LOOK_AFTER_STEPS = 2


def cut(layers: list[LayerSpec], num_slices: int) -> list[list[int]]:
    """Partition layers into slices of about equal cost, as lists of indices; layers of equal shape stay adjacent."""
    alike: dict[tuple[FactorSpec, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        alike.setdefault(layer.factors, []).append(i)
    costs = {factors: _cost(factors) for factors in alike}
    total = sum(costs[factors][0] + costs[factors][1] * len(found) for factors, found in alike.items())
    slices: list[list[int]] = [[] for _ in range(num_slices)]
    done = 0.0
    for factors, found in alike.items():
        begin, each = costs[factors]
        done += begin / 2
        for i in found:
            slices[min(num_slices - 1, int((done + each / 2) / total * num_slices))].append(i)
            done += each
        done += begin / 2
    return slices


def _cost(factors: tuple[FactorSpec, ...]) -> tuple[float, float]:
    """Return the approximate milliseconds on a GPU: the fixed cost of a shape, and the cost of each of its layers."""
    dense = [factor for factor in factors if factor.form == "dense"]
    begin = sum(0.4 * math.ceil(factor.dim / decompose.LEAF) for factor in dense)
    return 0.05 + begin, sum(8e-11 * f.num_blocks * f.dim**3 for f in dense) + 1e-3


@dataclass(frozen=True, slots=True)
class PendingFlags:
    """The flags of a renewal that the host has not read yet."""

    step: int
    layers: list[Layer]
    flags: HostCopy
    error: BaseException | None


class RefreshScheduler:
    """Decides what is decomposed at which step, and tracks decompositions whose outcome has not been read yet."""

    def __init__(self, timer: StageTimer) -> None:
        self._timer = timer
        self._graphs: dict[tuple[str, ...], GraphedFunction] = {}
        self._pool = GraphPool(own_stream=True)
        self._steps: list[int] = []
        self._slices: list[list[int]] = []
        self._begin, self._end, self._since, self._counted = 0, -1, 0, False
        """The refresh in progress: the steps that carry it out, the slice of each, its first step, the step after its
        last, the step at which it was due, and whether it has been counted."""
        self._due: list[Layer] = []
        """The layers to decompose at the end of the step, once the step no longer reads the old decompositions."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: list[tuple[torch.device, torch.cuda.Event]] = []
        self._pending: deque[PendingFlags] = deque()

    def run(
        self,
        context: StepContext,
        ranks: RankPlan,
        states: dict[str, LayerState],
        new: set[str],
        transport: Transport,
        *,
        use_graphs: bool,
    ) -> tuple[set[str], RefreshReport]:
        """Decompose the slice of layers that is due. Returns the layers that need the synchronous path, and a report.

        ``new`` are the layers that have no decomposition yet. If ``spread_refresh > 1``, the slice is only selected
        here, and ``launch`` decomposes it.
        """
        step, settings, report = context.step, context.settings, RefreshReport()
        if not self._begin <= step < self._end:
            self._steps, self._end = settings.refresh_steps(step)
            self._begin, self._slices = step, cut([layer.spec for layer in ranks.layers], len(self._steps))
            self._since = next(n for n in range(step, -1, -1) if settings.rhythm(n)[1])
            self._counted = any(state.decomposed_at >= self._since for state in states.values())
        if step not in self._steps:
            return set(), report
        slice_now = self._steps.index(step)
        chosen, careful, in_place = list[Layer](), set[str](), may_renew(settings)
        for layer in [ranks.layers[i] for i in self._slices[slice_now]]:
            state = states[layer.name]
            if state.decomposed_at >= self._since:
                continue  # already decomposed since this refresh was due: it was the layer's first decomposition
            if in_place and layer.name not in new and layer_factors.is_ready(layer, state):
                chosen.append(layer)
            else:
                careful.add(layer.name)
        if settings.spread_refresh == 1:
            self._renew(chosen, context, ranks, states, transport, use_graphs=use_graphs)
        else:
            self._due = chosen
        if not self._counted and (chosen or careful - new):
            report.refreshed = self._counted = True
        if slice_now == 0 and not careful:
            report.dominated_share = 0.0
        return careful, report

    def launch(
        self,
        context: StepContext,
        ranks: RankPlan,
        states: dict[str, LayerState],
        transport: Transport,
        *,
        use_graphs: bool,
    ) -> None:
        """Decompose the selected layers with the current running factors. The results are used from the next step on.
        Collective."""
        due, self._due = self._due, []
        if not due:
            return
        device = due[0].weight.device
        if device.type != "cuda" or transport.program.transfers or len({la.weight.device for la in due}) > 1:
            with self._timer.stage("decompose", device), tf32(False, device):
                self._renew(due, context, ranks, states, transport, use_graphs=use_graphs)
            return
        stream = self._streams.setdefault(device, own_stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), self._timer.stage("decompose", device), tf32(False, device):
            self._renew(due, context, ranks, states, transport, use_graphs=use_graphs)
        self._running.append((device, stream.record_event()))

    def join(self) -> None:
        """Make the current streams wait for the slice that was launched last. Does not block the host."""
        for device, event in self._running:
            torch.cuda.current_stream(device).wait_event(event)
        self._running.clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the tensors it writes to, or the device, may be gone at interpreter exit
            self.join()

    def _renew(
        self,
        layers: list[Layer],
        context: StepContext,
        ranks: RankPlan,
        states: dict[str, LayerState],
        transport: Transport,
        *,
        use_graphs: bool,
    ) -> None:
        """Update the decompositions of some layers, and start copying the flags to the host."""
        if not layers:
            return
        work = functools.partial(renew, layers, ranks, states, context, transport)
        if use_graphs:
            graph = self._graphs.setdefault(tuple([la.name for la in layers]), GraphedFunction(self._pool))
            key: list[object] = [layer_damping.damping_values(context.settings, context.step), ranks, transport]
            if transport.program.stage("means"):  # what ranks send each other of them is captured
                key.append(tuple([context.at(name) for name in SCHEDULES]))
            key += [tuple([(states[layer.name].momentum_is_rotated, layer.bias_is_live) for layer in layers])]
            key += [tensor for layer in layers for tensor in states[layer.name].tensors()]
            found: tuple[Flags, BaseException | None] = graph.run(key, work, layers[0].weight.device)
        else:
            found = work()
        flags, error = found
        for layer in layers:
            states[layer.name].decomposed_at = context.step
        self._pending.append(PendingFlags(context.step, layers, HostCopy(flags.joined()), error))

    def look(
        self, context: StepContext, states: dict[str, LayerState], transport: Transport, *, all_of_it: bool = False
    ) -> tuple[set[FactorName], RefreshReport]:
        """Read the flags of renewals. Returns the factors that failed and were not decomposed since, and a report.

        Only reads flags that are ``LOOK_AFTER_STEPS`` steps old, or all of them with ``all_of_it``; waits for these.
        Raises on all ranks what was raised on one.
        """
        report, failed = RefreshReport(), set[FactorName]()
        while self._pending:
            first = self._pending[0]
            if not (first.flags.is_complete or all_of_it or context.step >= first.step + LOOK_AFTER_STEPS):
                break
            self._pending.popleft()
            told = first.flags.read()
            num_schedules = len(SCHEDULES) if transport.program.stage("means") else 0
            has_failed, disagreed, told = told[0], told[1 : 1 + num_schedules], told[1 + num_schedules :]
            if has_failed:
                transport.raise_everywhere(first.error)
            check_schedules(disagreed, first.step)
            factors = factors_of(first.layers)
            for (layer, factor), is_valid in zip(factors, told, strict=False):
                name = layer.name, factor.key
                failed.discard(name)
                if is_valid:
                    report.outcomes["ok"] += 1
                    states[layer.name].failures[factor.key] = 0
                else:
                    failed.add(name)
            safe = told[len(factors) :]
            report.tf32_safe |= {la.name: bool(flag) for la, flag in zip(first.layers, safe, strict=False)}
        return failed, report

    def forget(self) -> None:
        """Reset: drop everything in flight, because the step and the layer states are about to be replaced."""
        self.join()
        self._pending.clear()
        self._due.clear()
        self.rewind()

    def rewind(self) -> None:
        """Partition the layers again at the next step, and drop the captured graphs."""
        self._end = -1
        self._graphs.clear()
