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
from dkfac.layers.layer import Layer
from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, mean_eigenvalue
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import TF32_TOLERANCE, factored_damping, tf32_error
from dkfac.replay import Captured, Pool
from dkfac.settings import Settings
from dkfac.stacks import Stack
from dkfac.state import LayerState, bias_is_silent

if TYPE_CHECKING:
    from dkfac.run import Runner

PATIENCE = 2
ROUNDING = "rounding"
"""In the place of a factor's key: whether a layer may be preconditioned in TF32."""
Part = tuple[Stack, int, int]
"""Some layers of a stack: from, to."""


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
        self._graphs: dict[tuple[int, int, int], Captured] = {}
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
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
        names: list[tuple[Layer, str]] = []
        flags: list[Tensor] = []
        for stack, begin, end in parts:
            for key, good in self._renewed(stack, begin, end, runner).items():
                names += [(layer, key) for layer in stack.layers[begin:end]]
                flags.append(good)
            for layer in stack.layers[begin:end]:
                runner.states[layer.name].decomposed_at = runner.step
        if not flags:
            return
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

    def _renewed(self, stack: Stack, begin: int, end: int, runner: Runner) -> dict[str, Tensor]:
        """Decompose some layers of a stack, from a graph if that is wanted."""
        if not runner.uses_graphs:
            return _renew(stack, begin, end, runner)
        graph = self._graphs.setdefault((id(stack), begin, end), Captured(self._pool))
        joined = stack.decompositions(runner.states)
        assert joined is not None
        means = [m for la in stack.layers for m in runner.states[la.name].means.values()]
        used = [t for key in joined for t in stack.running(runner.states, key)]
        damping = stages.damping_values(runner.settings, runner.step)
        kept = ("moments", "momentum") if runner.is_adam else ()
        moments = [t for name in kept for t in stack.moments(runner.states, name)]
        key = [stack, *joined.values(), *means, *used, *moments, damping]
        found = graph.run(key, lambda: _renew(stack, begin, end, runner), stack.device)
        return {key: good.clone() for key, good in found.items()}

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
    stages.adopt(layer, state, {key: rung}, results, settings, runner.step)


def is_renewable(stack: Stack, states: dict[str, LayerState], settings: Settings) -> bool:
    """Whether a stack's decompositions can be improved in place: all are there and of the solver's own form."""
    if settings.solver == "eigen" or settings.curvature == "ekfac":
        return False
    if any(bias_is_silent(layer, "A") or not states[layer.name].running for layer in stack.layers):
        return False
    if stack.layers[0].kind == "linear-map":
        return False
    is_split = any(factor.pieces > 1 for factor in stack.layers[0].spec.factors)
    if is_split and any(states[layer.name].decomposed_at < settings.split_warmup for layer in stack.layers):
        return False  # what is there may be whole
    found = stack.decompositions(states)
    form = Inverse if settings.solver == "cholesky" else Eigen
    return found is not None and all(isinstance(d, form) for d in found.values())


def _renew(stack: Stack, begin: int, end: int, runner: Runner) -> dict[str, Tensor]:
    """Replace decompositions where the new ones are good; returns which are, ``[layers]``, by factor."""
    states, settings, blocks = runner.states, runner.settings, stack.blocks
    here = slice(begin * blocks, end * blocks)
    joined = stack.decompositions(states)
    assert joined is not None
    factors: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for key in joined:
        values, weights = stack.running(states, key)
        tiny = torch.finfo(weights.dtype).tiny
        weight = weights[begin:end].clamp(min=tiny).repeat_interleave(blocks)
        factors[key] = values[here] / weight.view(-1, *[1] * (values.ndim - 1))
        means[key] = mean_eigenvalue(values[here]) / weight
    for i, layer in enumerate(stack.layers[begin:end]):
        state = states[layer.name]
        for key, mean in means.items():  # in place: a captured graph reads them
            state.means[key].copy_(mean[i * blocks : (i + 1) * blocks])
    damping = stages.stack_damping(stack, states, settings, runner.step)
    if isinstance(damping, Tensor):
        damping = damping[here].flatten()
    shifts = factored_damping(means, damping)
    good: dict[str, Tensor] = {}
    rotations: dict[str, Tensor] = {}
    carries = any(states[layer.name].moments is not None for layer in stack.layers)
    olds = {key: _part(joined[key], here, factor.shape) for key, factor in factors.items()} if carries else {}
    gathered = _mean_in_basis(stack, states, begin, end, olds) if carries and runner.is_adam else None
    for key, factor in factors.items():
        old = _part(joined[key], here, factor.shape)
        new, sound = decompose.renewed(
            factor, old, shifts[key], stages.pieces(stack.layers[0], key, settings, runner.step)
        )
        for name, target in old.tensors().items():
            chosen = torch.where(sound.view(-1, *[1] * (target.ndim - 1)), new.tensors()[name].to(target.dtype), target)
            if name == "vectors" and runner.is_adam:
                with tf32(settings.tf32, stack.device):
                    rotations[key] = chosen.to(factor.dtype).mT @ target.to(factor.dtype)
            target.copy_(chosen)
        good[key] = sound.view(-1, blocks).all(1)
    if settings.tf32 and not runner.is_adam:
        parts = {key: _part(joined[key], here, factor.shape) for key, factor in factors.items()}
        good[ROUNDING] = (tf32_error(parts, means, damping) < TF32_TOLERANCE).view(-1, blocks).all(1)
    if gathered is not None:
        down, across = stack.sizes
        values, weights = stack.moments(states, "moments")
        bare, squares = values[here, :down, :across], {key: rotation.square() for key, rotation in rotations.items()}
        weight = weights[begin:end].repeat_interleave(blocks)[:, None, None]
        with tf32(settings.tf32, stack.device):
            mean = _turn(stack, gathered, rotations).square() * weight
            bare.copy_(stages.carried(bare, mean, lambda values: _turn(stack, values, squares)))
    return good


def _mean_in_basis(
    stack: Stack, states: dict[str, LayerState], begin: int, end: int, bases: dict[str, Decomposition]
) -> Tensor:
    """Return Adam's momentum of some layers in their bases."""
    down, across = stack.sizes
    values, weights = stack.moments(states, "momentum")
    weight = weights[begin:end].clamp(min=torch.finfo(weights.dtype).tiny).repeat_interleave(stack.blocks)
    mean = values[begin * stack.blocks : end * stack.blocks, :down, :across] / weight[:, None, None]
    vectors = {
        key: d.vectors.to(mean.dtype).mT for key, d in bases.items() if isinstance(d, Eigen) and d.vectors is not None
    }
    return _turn(stack, mean, vectors)


def _turn(stack: Stack, matrices: Tensor, by: dict[str, Tensor]) -> Tensor:
    """Return matrices laid out like the stack's gradients, multiplied from the side that each factor acts on."""
    for key, matrix in by.items():
        from_the_right = (key == "A") != stack.transposed
        matrices = matrices @ matrix.mT if from_the_right else matrix @ matrices
    return matrices


def _part(joined: Decomposition, here: slice, shape: torch.Size) -> Decomposition:
    """Return some blocks of a padded decomposition, without the padding."""
    size = slice(shape[-1])
    parts = {name: t[(here, *[size] * (t.ndim - 1))] for name, t in joined.tensors().items()}
    return decompose.from_tensors(parts)
