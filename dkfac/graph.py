"""A step's own arithmetic as CUDA graphs, for models whose steps are launches more than work.

A graph reads and writes memory, not tensors: it serves a step that finds everything where it was when it was captured,
which is so for most once a loop has come to its rhythm. A graph is captured again when a buffer, a decomposition or a
setting in it is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import reduce, stages
from dkfac.ops.fused import finish_, write_
from dkfac.ops.precision import tf32
from dkfac.replay import Captured, Placed, place
from dkfac.stacks import Stack, write_back
from dkfac.waiting import Call
from dkfac.window import Measured, Sums

if TYPE_CHECKING:
    from dkfac.run import Runner

LARGE = 2**22
"""Elements of a gradient of no layer's from which on it is not copied but looked at where it is."""


class StatisticsGraph:
    """What a measured step does to the running factors, if it finds all it uses where it found it before."""

    def __init__(self) -> None:
        self._placed = Placed()
        self._good: Tensor | None = None

    def average(self, runner: Runner, measured: Measured, good: Tensor, decay: float) -> Tensor | None:
        """Absorb what a step measured; returns whether it was good, None if it is summed but not absorbed."""
        waiting = runner.tape.waiting
        calls = waiting.take()
        scale = reduce.scale_alone(runner, measured)
        spoilt = next((call.layer.name for call in calls if not call.is_intact), None)
        if spoilt is not None:
            runner.tape.stop_waiting(spoilt)
            for sums in measured.layers.values():
                sums.factors.clear()
            return None
        told, found = None, measured.layers.values()
        is_plain = not any(isinstance(s.rows, Tensor) or s.moments is not None for s in found)
        if is_plain and not isinstance(scale, Tensor):
            if self._good is None:
                self._good = good.clone()
            told = self._absorb(runner, measured, calls, self._good.copy_(good), (scale, decay, measured.num_passes))
        if told is None:
            runner.tape.guarded(lambda: waiting.sum(calls))
        return told

    def _absorb(
        self, runner: Runner, measured: Measured, calls: list[Call], flag: Tensor, numbers: tuple[float, float, int]
    ) -> Tensor | None:
        waiting = runner.tape.waiting

        def absorb() -> Tensor:
            sums = {name: Sums(factors=dict(s.factors), rows=s.rows) for name, s in measured.layers.items()}
            waiting.sum([Call(c.layer, sums[c.layer.name], c.x, c.g, c.alike) for c in calls])
            fresh = Measured(sums, measured.terms, measured.num_passes, measured.unit)
            return reduce.absorb_alone(runner, fresh, flag, numbers[1])

        done = tuple([(n, s.rows, *s.factors, place(s.factors.values())) for n, s in measured.layers.items()])
        coming = tuple([(c.layer.name, c.alike, place((c.x, c.g))) for c in calls])
        running = [average.value for la in runner.layers for average in runner.states[la.name].running.values()]
        found = self._placed.run([*runner.stacks, *running, flag, numbers], (done, coming), absorb, flag.device)
        return None if found is None else found[0]


class StepGraph:
    """The two halves of a step: are the gradients finite, and what are the updates?

    Where the gradients lie as they did before, both are one graph each, which reads and writes them; elsewhere they are
    copied to and from buffers that stay.
    """

    def __init__(self) -> None:
        self._reading, self._writing = Placed(), Placed()
        self._norms, self._updates = Captured(), Captured()
        self._stacks: list[Stack] = []
        self._written: list[Stack] = []
        self._parameters: list[Tensor] = []
        self._read_here: list[Tensor] = []
        """The layers' parameters and small ones of no layer's; the rest are large."""
        self._others: list[Tensor] = []
        self._large: list[Tensor] = []
        self._views: list[Tensor] = []
        self._flat = self._good = self._before = self._told = torch.zeros(0)
        self._places: Any = None

    def begin(self, runner: Runner, parameters: list[Tensor], optimizer: Any) -> Tensor | None:
        """Read the gradients; returns whether they are finite, or None if a layer has none."""
        if any(weight.grad is None for weight in runner.weights):
            return None
        stacks, device = runner.stacks, runner.stacks[0].device
        given = [p for p in parameters if p.grad is not None]
        is_known = self._stacks is stacks and len(given) == len(self._parameters)
        if not is_known or any(map(_differ, given, self._parameters)):
            self._prepare(runner, given, device)
        flat, good, before = self._flat, self._good, self._before

        def norms() -> None:
            before.copy_(torch.cat([stack.norms(stack.buffer) for stack in stacks]))
            rest = torch.linalg.vector_norm(flat) if len(flat) else flat.new_zeros(())
            good.copy_(torch.isfinite(before).all() & torch.isfinite(rest))

        def read() -> None:
            self._read(stacks)
            norms()

        self._places = place([p.grad for p in self._read_here if p.grad is not None])
        key = [*stacks, flat]
        if self._reading.run(key, self._places, read, device) is None:
            self._read(stacks)
            self._norms.run(key, norms, device)
        if self._large:
            good &= torch.isfinite(stages.norms(stages.gradients(self._large), device)).all()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            good &= found_inf.to(device).reshape(()) == 0
        return good

    def _prepare(self, runner: Runner, given: list[Tensor], device: torch.device) -> None:
        """Make room for the step's results and for the small gradients of no layer's."""
        mine = {id(p) for layer in runner.layers for p in layer.parameters()}
        rest = [p for p in given if id(p) not in mine]
        dtype = runner.stacks[0].dtype
        small = [p for p in rest if p.numel() < LARGE and p.dtype == dtype and p.device == device
                 and p.grad is not None and not p.grad.is_sparse]  # fmt: skip
        chosen = {id(p) for p in small}
        self._stacks, self._parameters, self._others = runner.stacks, given, small
        self._large = [p for p in rest if id(p) not in chosen]
        large = {id(p) for p in self._large}
        self._read_here = [p for p in given if id(p) not in large]
        self._flat = torch.zeros(sum(p.numel() for p in small), device=device, dtype=dtype)
        parts = torch.split(self._flat, [p.numel() for p in small]) if small else ()
        self._views = [part.view(p.shape) for p, part in zip(small, parts, strict=True)]
        self._good = torch.ones((), dtype=torch.bool, device=device)
        self._before = torch.zeros(sum(map(len, runner.stacks)), device=device, dtype=dtype)
        self._told = torch.zeros(2, device=device, dtype=dtype)

    def _read(self, stacks: list[Stack]) -> None:
        for stack in stacks:
            stack.read()
        if self._others:
            torch._foreach_copy_(self._views, stages.gradients(self._others))

    def _write(self, stacks: list[Stack]) -> None:
        if self._others:
            torch._foreach_copy_(stages.gradients(self._others), self._views)
        write_back(stacks)

    def finish(self, runner: Runner, loss_scale: Any) -> bool:
        """Turn the gradients read into updates and write them; False if not all layers can go together."""
        stacks, flat, good, before, told = runner.stacks, self._flat, self._good, self._before, self._told
        joined = [stack.decompositions(runner.states) for stack in stacks]
        if not all(stages.is_ready(layer, runner.states[layer.name]) for layer in runner.layers):
            return False
        if any(d is None or not stages.is_uniform(d, runner.settings) for d in joined):
            return False
        damping = stages.damping_values(runner.settings, runner.step)
        objects: list[Any] = [d for found in joined if found is not None for d in found.values()]
        if runner.settings.damping_mode == "relative":
            objects += [mean for layer in runner.layers for mean in runner.states[layer.name].means.values()]

        def updates(*, direct: bool = False) -> None:
            with tf32(runner.settings.tf32, flat.device):
                flat.masked_fill_(~good, 0)
                told.copy_(update_in_place(runner, stacks, before, good, direct=direct))

        def write() -> None:
            updates(direct=True)
            self._write([stack for stack in stacks if stack.whole(stack.buffer) is None])

        key = [*stacks, *objects, flat, damping]
        if self._writing.run(key, self._places, write, flat.device) is None:
            if self._written is not stacks:  # kernels are compiled before they are captured
                self._written = stacks
                write()
            else:
                self._updates.run(key, updates, flat.device)
                self._write(stacks)
        norms = told if loss_scale is None else told / loss_scale.to(told.device)
        runner.device["grad_norm"], runner.device["update_norm"] = norms.unbind()
        if self._large:
            stages.zero_where(~good, stages.gradients(self._large))
        return True


def look_at_gradients(
    runner: Runner, optimizer: Any, parameters: list[Tensor], device: torch.device
) -> tuple[stages.Norms | None, Tensor]:
    """Return the gradients' norms, None where a graph has them, and whether they are finite."""
    if runner.uses_graphs:
        good = runner.graph.begin(runner, parameters, optimizer)
        if good is not None:
            return None, good
    norms = stages.Norms(parameters, device)
    return norms, norms.are_finite(getattr(optimizer, "found_inf", None))


def wants_graphs(runner: Runner) -> bool:
    """Whether a step is to be taken from graphs: they are asked for, and there is one process with one GPU."""
    devices = {layer.weight.device for layer in runner.layers}
    one = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return runner.settings.cuda_graph and runner.exchange is None and one


def _differ(one: Tensor, other: Tensor) -> bool:
    return one is not other


def update_in_place(
    runner: Runner, stacks: list[Stack], before: Tensor, good: Tensor, *, direct: bool = False
) -> Tensor:
    """Turn the gradients in the stacks' buffers into updates; returns the norms before and after.

    ``direct``: write to the parameters' own gradients, where these are laid out alike.
    """
    found = [(stack, stages.directions(stack, runner, stack.buffer)) for stack in stacks]
    after = torch.cat([stack.norms(update) for stack, update in found])
    sane = torch.isfinite(after)
    after = torch.where(sane, after, before)
    scales = stages.scales(runner.settings.rescale, before, after, sane)
    begin = 0
    for stack, update in found:
        here, flat = slice(begin, begin := begin + len(stack)), (len(stack), -1)
        if direct and (parts := stack.whole(stack.buffer)) is not None:
            for i, (weight, bias, raw) in enumerate(parts, here.start):
                write_(weight, bias, raw, update[i - here.start], scales[i : i + 1], sane[i : i + 1], good)
            continue
        finish_(stack.buffer.view(flat), update.view(flat), scales[here], sane[here], good)
    return torch.stack((before, after * scales)).square().sum(1).sqrt()
