"""Refresh whole stacks without synchronizing with the device.

Input: the running factors of one process. Output: decompositions, overwritten in place, and a report of their outcomes.
Owns: the slices of the refresh in progress and the flags that are being copied from the device.

A refresh that is spread over several steps runs, on a GPU, on its own stream during the next step's forward and
backward pass. Its results are used from that step on, on every device type.

The device decides which new decompositions are valid and overwrites the old ones with those. The host reads these flags
``LOOK_AFTER_STEPS`` steps later, when the copy has long completed; what failed then goes through the fallback ladder of
``fallback.py``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque

import torch
from torch import Tensor

from dkfac.capture.timing import StageTimer
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_damping, layer_factors
from dkfac.decompose.batched_solve import TF32_KEY, StackSlice, is_renewable, solve_in_place
from dkfac.decompose.fallback import Outcome
from dkfac.decompose.report import RefreshReport
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer
from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition
from dkfac.ops.graph_cache import GraphedFunction, GraphPool, own_stream
from dkfac.ops.precision import tf32

LOOK_AFTER_STEPS = 2


def cut(stacks: list[Stack], num_slices: int) -> list[list[StackSlice]]:
    """Partition the layers into slices of about equal cost, keeping the layers of one stack adjacent."""
    costs = [_cost(stack) for stack in stacks]
    total = sum(begin + each * stack.num_layers for (begin, each), stack in zip(costs, stacks, strict=True))
    slices: list[list[StackSlice]] = [[] for _ in range(num_slices)]
    done = 0.0
    for (begin, each), stack in zip(costs, stacks, strict=True):
        done += begin / 2
        for i in range(stack.num_layers):
            parts = slices[min(num_slices - 1, int((done + each / 2) / total * num_slices))]
            if parts and parts[-1][0] is stack:
                parts[-1] = (stack, parts[-1][1], i + 1)
            else:
                parts.append((stack, i, i + 1))
            done += each
        done += begin / 2
    return slices


def _cost(stack: Stack) -> tuple[float, float]:
    """Return the approximate milliseconds on a GPU: the fixed cost of a stack, and the cost of each of its layers."""
    dense = [factor for factor in stack.layers[0].spec.factors if factor.form == "dense"]
    begin = sum(0.4 * math.ceil(factor.dim / decompose.LEAF) for factor in dense)
    return 0.05 + begin, sum(8e-11 * f.num_blocks * f.dim**3 for f in dense) + 1e-3


class RefreshScheduler:
    """Decides what is decomposed at which step, and tracks decompositions whose outcome has not been read yet."""

    def __init__(self, timer: StageTimer) -> None:
        self._timer = timer
        self._graphs: dict[tuple[tuple[int, int, int], ...], GraphedFunction] = {}
        self._pool = GraphPool(own_stream=True)
        self._steps: list[int] = []
        self._slices: list[list[StackSlice]] = []
        self._begin, self._end, self._since, self._counted = 0, -1, 0, False
        """The refresh in progress: the steps that carry it out, the slice of each, its first step, the step after its
        last, the step at which it was due, and whether it has been counted."""
        self._due: list[StackSlice] = []
        """The slice to decompose at the end of the step, once the step no longer reads the old decompositions."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: list[tuple[torch.device, torch.cuda.Event]] = []
        self._pending: deque[tuple[int, list[tuple[Layer, str]], Tensor, torch.cuda.Event | None]] = deque()

    def run(
        self,
        context: StepContext,
        stacks: list[Stack],
        states: dict[str, LayerState],
        new: set[str],
        *,
        use_graphs: bool,
    ) -> tuple[set[str], RefreshReport]:
        """Decompose the slice of layers that is due. Returns the layers that need the synchronous path, and a report.

        ``new`` are the layers that have no decomposition yet. If ``spread_refresh > 1``, the slice is only selected
        here, and ``launch`` decomposes it.
        """
        step, settings = context.step, context.settings
        report = self.look(context, states)
        if not self._begin <= step < self._end:
            self._steps, self._end = settings.refresh_steps(step)
            self._begin, self._slices = step, cut(stacks, len(self._steps))
            self._since = next(n for n in range(step, -1, -1) if settings.rhythm(n)[1])
            self._counted = any(state.decomposed_at >= self._since for state in states.values())
        if step not in self._steps:
            return set(), report
        slice_now = self._steps.index(step)
        parts, careful = [], set()
        for stack, begin, end in self._slices[slice_now]:
            if all(states[la.name].decomposed_at >= self._since for la in stack.layers[begin:end]):
                continue  # already decomposed since this refresh was due: it was the layer's first decomposition
            is_old = new.isdisjoint(layer.name for layer in stack.layers)
            if is_old and is_renewable(stack, states, settings):
                parts.append((stack, begin, end))
            else:
                careful |= {layer.name for layer in stack.layers[begin:end]}
        if settings.spread_refresh == 1:
            report.add(self._launch(parts, context, states, use_graphs=use_graphs))
        else:
            self._due = parts
        if not self._counted and (parts or careful - new):
            report.refreshed = self._counted = True
        if slice_now == 0 and not careful:
            report.dominated_share = 0.0
        return careful, report

    def launch(self, context: StepContext, states: dict[str, LayerState], *, use_graphs: bool) -> RefreshReport:
        """Launch the selected slice with the current running factors. The results are used from the next step on."""
        due, self._due = self._due, []
        report = RefreshReport()
        for device in {stack.device for stack, _, _ in due}:
            parts = [part for part in due if part[0].device == device]
            if device.type != "cuda":
                report.add(self._launch(parts, context, states, use_graphs=use_graphs))
                continue
            if device not in self._streams:
                self._streams[device] = own_stream(device)
            stream = self._streams[device]
            for stack, _, _ in parts:  # allocate the shared tensors on the current stream, which keeps using them
                for key in stack.decompositions(states) or {}:
                    stack.running(states, key)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), self._timer.stage("decompose", device), tf32(False, device):
                report.add(self._launch(parts, context, states, use_graphs=use_graphs))
            self._running.append((device, stream.record_event()))
        return report

    def join(self) -> None:
        """Make the current streams wait for the slice that was launched last. Does not block the host."""
        for device, event in self._running:
            torch.cuda.current_stream(device).wait_event(event)
        self._running.clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the tensors it writes to, or the device, may be gone at interpreter exit
            self.join()

    def _launch(
        self, parts: list[StackSlice], context: StepContext, states: dict[str, LayerState], *, use_graphs: bool
    ) -> RefreshReport:
        """Decompose the running factors of some layers, and start copying the outcome flags to the host."""
        if not parts:
            return RefreshReport()
        names: list[tuple[Layer, str]] = []
        flags: list[Tensor] = []
        solved = self._solve(parts, context, states) if use_graphs else solve_in_place(parts, states, context)
        for (stack, begin, end), found in zip(parts, solved, strict=True):
            for key, good in found.items():
                names += [(layer, key) for layer in stack.layers[begin:end]]
                flags.append(good)
            for layer in stack.layers[begin:end]:
                states[layer.name].decomposed_at = context.step
        told, event = torch.cat([flag.to(flags[0].device) for flag in flags]), None
        if told.is_cuda:
            arrived = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            arrived.copy_(told, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(told.device))
            told = arrived
        self._pending.append((context.step, names, told, event))
        return self.look(context, states) if event is None else RefreshReport()

    def _solve(
        self, parts: list[StackSlice], context: StepContext, states: dict[str, LayerState]
    ) -> list[dict[str, Tensor]]:
        """Decompose some layers by replaying a CUDA graph."""
        name = tuple([(id(stack), begin, end) for stack, begin, end in parts])
        graph = self._graphs.setdefault(name, GraphedFunction(self._pool))
        key: list[object] = [layer_damping.damping_values(context.settings, context.step)]
        for stack, _, _ in parts:
            joined = stack.decompositions(states)
            assert joined is not None
            key += [stack, *joined.values()]
            key += [m for la in stack.layers for m in states[la.name].means.values()]
            key += [t for name in joined for t in stack.running(states, name)]
            kept = ("moments", "momentum") if context.settings.takes_steps else ()
            key += [t for name in kept for t in stack.moments(states, name)]
        work = functools.partial(solve_in_place, parts, states, context)
        return graph.run(key, work, parts[0][0].device)  # type: ignore[no-any-return]

    def look(self, context: StepContext, states: dict[str, LayerState], *, all_of_it: bool = False) -> RefreshReport:
        """Read the outcome flags, count successes, and decompose what failed again with the fallback ladder.

        Only reads flags that are ``LOOK_AFTER_STEPS`` steps old, or all of them with ``all_of_it``; synchronizes with
        their events.
        """
        report = RefreshReport()
        while self._pending:
            step, names, told, event = self._pending[0]
            if event is not None:
                if context.step < step + LOOK_AFTER_STEPS and not all_of_it:
                    break
                event.synchronize()
            self._pending.popleft()
            for (layer, key), good in zip(names, told.tolist(), strict=True):
                if key == TF32_KEY:
                    report.tf32_safe[layer.name] = good
                elif good:
                    report.outcomes["ok"] += 1
                    states[layer.name].failures[key] = 0
                else:
                    report.outcomes[_repair(layer, states[layer.name], key, context)] += 1
                    report.num_repaired += 1
        return report

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


def _repair(layer: Layer, state: LayerState, key: str, context: StepContext) -> Outcome:
    """Decompose one factor again with the fallback ladder, after its batched in-place decomposition failed."""
    settings, device = context.settings, layer.weight.device
    with tf32(False, device), torch.autocast(device.type, enabled=False):
        ((found, outcome),) = layer_factors.decompose(layer, state, [key], settings, context.step).values()
    results = {} if found is None else {key: found}
    old, moments = state.decompositions.get(key), None if state.moments is None else state.moments.value
    layer_factors.adopt(layer, state, {key: outcome}, results, settings, context.step)
    # Write into the old tensors, so that captured graphs stay valid.
    new = state.decompositions.get(key)
    if old is not None and new is not None and new is not old and _is_like(old, new):
        for name, target in old.tensors().items():
            target.copy_(new.tensors()[name])
        state.decompositions[key] = old
    if moments is not None and state.moments is not None and state.moments.value is not moments:
        state.moments.value = moments.copy_(state.moments.value)
    return outcome


def _is_like(one: Decomposition, other: Decomposition) -> bool:
    pairs = one.tensors(), other.tensors()
    forms = [{name: (t.shape, t.dtype, t.device) for name, t in each.items()} for each in pairs]
    return type(one) is type(other) and forms[0] == forms[1]
