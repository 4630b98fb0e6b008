"""A refresh of whole stacks that never waits for the device.

One that is spread over steps runs, on a GPU, on a stream of its own beside the next step's forward and backward, and
holds from that step on: so it does on every device.

New decompositions take the place of the old ones where they are to be trusted, which the device decides. What it
decided is looked at ``PATIENCE`` steps later, when it has long arrived; what failed goes down the ladder of
``refresh.py`` then.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dkfac import stages
from dkfac.inplace import ROUNDING, Part, is_renewable, renew
from dkfac.layers.layer import Layer
from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition
from dkfac.ops.precision import tf32
from dkfac.replay import Captured, Pool, own_stream
from dkfac.stacks import Stack

if TYPE_CHECKING:
    from dkfac.run import Runner

PATIENCE = 2


def cut(stacks: list[Stack], num_slices: int) -> list[list[Part]]:
    """Return the layers in slices of about equal work, those of one stack side by side."""
    costs = [_cost(stack) for stack in stacks]
    total = sum(begin + each * len(stack) for (begin, each), stack in zip(costs, stacks, strict=True))
    slices: list[list[Part]] = [[] for _ in range(num_slices)]
    done = 0.0
    for (begin, each), stack in zip(costs, stacks, strict=True):
        done += begin / 2
        for i in range(len(stack)):
            parts = slices[min(num_slices - 1, int((done + each / 2) / total * num_slices))]
            if parts and parts[-1][0] is stack:
                parts[-1] = (stack, parts[-1][1], i + 1)
            else:
                parts.append((stack, i, i + 1))
            done += each
        done += begin / 2
    return slices


def _cost(stack: Stack) -> tuple[float, float]:
    """Return about how many milliseconds it takes on a GPU to begin with a stack, and for each of its layers."""
    dense = [factor for factor in stack.layers[0].spec.factors if factor.form == "dense"]
    begin = sum(0.4 * math.ceil(max(factor.widths) / decompose.LEAF) for factor in dense)
    return 0.05 + begin, sum(8e-11 * f.num_blocks * width**3 for f in dense for width in f.widths) + 1e-3


class Renewal:
    """What was decomposed and not yet looked at."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[tuple[int, int, int], ...], Captured] = {}
        self._pool = Pool(own_stream=True)
        self._steps: list[int] = []
        self._slices: list[list[Part]] = []
        self._begin, self._end, self._since, self._counted = 0, -1, 0, False
        """The steps of the refresh under way, what each decomposes, and from when until when that holds."""
        self._due: list[Part] = []
        """What is to be decomposed when the step is done with the old decompositions."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: list[tuple[torch.device, torch.cuda.Event]] = []
        self._pending: deque[tuple[int, list[tuple[Layer, str]], Tensor, torch.cuda.Event | None]] = deque()

    def run(self, runner: Runner, new: set[str]) -> set[str]:
        """Decompose the slice of the layers that is due anew; returns the layers that have to go the careful way.

        ``new``: layers that have no decomposition yet.
        """
        self.look(runner)
        if not self._begin <= runner.step < self._end:
            self._steps, self._end = runner.settings.refresh_steps(runner.step)
            self._begin, self._slices = runner.step, cut(runner.stacks, len(self._steps))
            self._since = next(n for n in range(runner.step, -1, -1) if runner.settings.rhythm(n)[1])
            self._counted = any(state.decomposed_at >= self._since for state in runner.states.values())
        if runner.step not in self._steps:
            return set()
        slice_now = self._steps.index(runner.step)
        parts, careful = [], set()
        for stack, begin, end in self._slices[slice_now]:
            if all(runner.states[la.name].decomposed_at >= self._since for la in stack.layers[begin:end]):
                continue  # since this refresh was due: at the layer's first decomposition
            is_old = new.isdisjoint(layer.name for layer in stack.layers)
            if is_old and is_renewable(stack, runner.states, runner.settings):
                parts.append((stack, begin, end))
            else:
                careful |= {layer.name for layer in stack.layers[begin:end]}
        if runner.settings.spread_refresh == 1:
            self._launch(parts, runner)
        else:
            self._due = parts
        if not self._counted and (parts or careful - new):
            runner.count_refresh()
            self._counted = True
        if slice_now == 0 and not careful:
            runner.watch(0.0)
        return careful

    def launch(self, runner: Runner) -> None:
        """Decompose a slice for the steps to come, from what the factors are now."""
        due, self._due = self._due, []
        for device in {stack.device for stack, _, _ in due}:
            parts = [part for part in due if part[0].device == device]
            if device.type != "cuda":
                self._launch(parts, runner)
                continue
            if device not in self._streams:
                self._streams[device] = own_stream(device)
            stream = self._streams[device]
            for stack, _, _ in parts:  # common tensors are made on the stream that goes on to use them
                for key in stack.decompositions(runner.states) or {}:
                    stack.running(runner.states, key)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), runner.tape.timer.stage("decompose", device), tf32(False, device):
                self._launch(parts, runner)
            self._running.append((device, stream.record_event()))

    def join(self) -> None:
        """Let what follows come after the slice that was launched last."""
        for device, event in self._running:
            torch.cuda.current_stream(device).wait_event(event)
        self._running.clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # what it writes to may be gone, and the device with it
            self.join()

    def _launch(self, parts: list[Part], runner: Runner) -> None:
        """Decompose the running factors of some layers anew."""
        if not parts:
            return
        names: list[tuple[Layer, str]] = []
        flags: list[Tensor] = []
        for (stack, begin, end), found in zip(parts, self._renewed(parts, runner), strict=True):
            for key, good in found.items():
                names += [(layer, key) for layer in stack.layers[begin:end]]
                flags.append(good)
            for layer in stack.layers[begin:end]:
                runner.states[layer.name].decomposed_at = runner.step
        told, event = torch.cat([flag.to(flags[0].device) for flag in flags]), None
        if told.is_cuda:
            arrived = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            arrived.copy_(told, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(told.device))
            told = arrived
        self._pending.append((runner.step, names, told, event))
        if event is None:
            self.look(runner)

    def _renewed(self, parts: list[Part], runner: Runner) -> list[dict[str, Tensor]]:
        """Decompose some layers, from a graph if that is wanted."""
        if not runner.uses_graphs:
            return renew(parts, runner)
        name = tuple([(id(stack), begin, end) for stack, begin, end in parts])
        graph = self._graphs.setdefault(name, Captured(self._pool))
        key: list[object] = [stages.damping_values(runner.settings, runner.step)]
        for stack, _, _ in parts:
            joined = stack.decompositions(runner.states)
            assert joined is not None
            key += [stack, *joined.values()]
            key += [m for la in stack.layers for m in runner.states[la.name].means.values()]
            key += [t for name in joined for t in stack.running(runner.states, name)]
            kept = ("moments", "momentum") if runner.is_adam else ()
            key += [t for name in kept for t in stack.moments(runner.states, name)]
        return graph.run(key, lambda: renew(parts, runner), parts[0][0].device)  # type: ignore[no-any-return]

    def look(self, runner: Runner, *, all_of_it: bool = False) -> None:
        """Count what went well and decompose what did not once more, with more care. Waits for what is long past."""
        while self._pending:
            step, names, told, event = self._pending[0]
            if event is not None:
                if runner.step < step + PATIENCE and not all_of_it:
                    return
                event.synchronize()
            self._pending.popleft()
            for (layer, key), good in zip(names, told.tolist(), strict=True):
                if key == ROUNDING:
                    runner.note_rounding(layer, good)
                elif good:
                    runner.counters["ok"] += 1
                    runner.states[layer.name].failures[key] = 0
                else:
                    _repair(runner, layer, key)

    def forget(self) -> None:
        """Start anew: the step and the states are others."""
        self.join()
        self._pending.clear()
        self._due.clear()
        self.rewind()

    def rewind(self) -> None:
        """Cut the layers anew."""
        self._end = -1
        self._graphs.clear()


def _repair(runner: Runner, layer: Layer, key: str) -> None:
    """Decompose one factor the careful way, after a decomposition without a look went wrong."""
    state, settings, device = runner.states[layer.name], runner.settings, layer.weight.device
    with tf32(False, device), torch.autocast(device.type, enabled=False):
        ((found, rung),) = stages.decompose(layer, state, [key], settings, runner.step).values()
    runner.counters[rung] += 1
    runner.counters["repaired"] += 1
    results = {} if found is None else {key: found}
    old, moments = state.decompositions.get(key), None if state.moments is None else state.moments.value
    stages.adopt(layer, state, {key: rung}, results, settings, runner.step)
    # In the place of the old ones, so that graphs go on.
    new = state.decompositions.get(key)
    if old is not None and new is not None and new is not old and _is_like(old, new):
        for name, target in old.tensors().items():
            target.copy_(new.tensors()[name])
        state.decompositions[key] = old
    if moments is not None and state.moments is not None and state.moments.value is not moments:
        state.moments.value = moments.copy_(state.moments.value)


def _is_like(one: Decomposition, other: Decomposition) -> bool:
    pairs = one.tensors(), other.tensors()
    forms = [{name: (t.shape, t.dtype, t.device) for name, t in each.items()} for each in pairs]
    return type(one) is type(other) and forms[0] == forms[1]
