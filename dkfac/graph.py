"""A step's own arithmetic as CUDA graphs, for models whose steps are launches more than work.

A graph reads and writes memory, not tensors, and gradients lie elsewhere at each step. So their addresses are written
to a tensor that stays, and the graph looks there (``ops/many.py``); where Triton does not run, gradients are copied to
and from buffers that stay. A graph is captured again when a buffer, a decomposition or a setting in it is another one.
"""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import held, stages
from dkfac.adam_graph import AdamSteps
from dkfac.ops import many
from dkfac.ops.fused import finish_
from dkfac.ops.precision import tf32
from dkfac.replay import Captured, Pool
from dkfac.stacks import Stack, write_back

if TYPE_CHECKING:
    from dkfac.run import Runner

LARGE = 2**22
"""Elements of a gradient of no layer's from which on it is not copied but looked at where it is."""


class StepGraph:
    """The two halves of a step: are the gradients finite, and what are the updates?"""

    def __init__(self, pool: Pool) -> None:
        self._reading, self._writing = Captured(pool), Captured(pool)
        self._adam = AdamSteps()
        self._stacks: list[Stack] = []
        self._parameters: list[Tensor] = []
        self._forms: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._used: list[Tensor] = []
        """The layers' parameters and the small ones of no layer's."""
        self._large: list[Tensor] = []
        self._others: list[Tensor] = []
        self._views: list[Tensor] = []
        self._items: list[many.Items] | None = None
        """How gradients and buffers belong together, for each stack and the others; None: they are copied."""
        self._pointers = self._flat = self._good = self._before = self._told = self._rates = torch.zeros(0)
        self._is_told = False

    def begin(self, runner: Runner, parameters: list[Tensor], optimizer: Any) -> Tensor | None:
        """Read the gradients; returns whether they are finite, or None if a layer has none."""
        if any(weight.grad is None for weight in runner.weights):
            self._stacks = []  # others will write to the buffers
            return None
        stacks, device = runner.stacks, runner.stacks[0].device
        given = [p for p in parameters if p.grad is not None]
        is_known = self._stacks is stacks and len(given) == len(self._parameters)
        if not is_known or any(map(operator.is_not, given, self._parameters)):
            self._prepare(runner, given, device)
        grads = [p.grad for p in self._used if p.grad is not None]
        forms = [(g.stride(), g.dtype) for g in grads]
        if forms != self._forms:
            self._forms, self._items = forms, _describe(stacks, self._used, self._views)
        if self._items is None:
            self._copy_in(stacks)
        else:
            self._pointers.copy_(many.on_its_way([g.data_ptr() for g in grads], device), non_blocking=True)
        flat, good, before = self._flat, self._good, self._before

        def read() -> None:
            if self._items is not None:
                for items, buffer in zip(self._items, [*(stack.buffer for stack in stacks), flat], strict=True):
                    many.gather(self._pointers, items, buffer)
            before.copy_(torch.cat([stack.norms(stack.buffer) for stack in stacks]))
            rest = torch.linalg.vector_norm(flat) if len(flat) else flat.new_zeros(())
            good.copy_(torch.isfinite(before).all() & torch.isfinite(rest))

        self._reading.run([*stacks, flat, self._items], read, device)
        if self._large:
            good &= torch.isfinite(stages.norms(stages.gradients(self._large), device)).all()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            good &= found_inf.to(device).reshape(()) == 0
        return good

    def _prepare(self, runner: Runner, given: list[Tensor], device: torch.device) -> None:
        """Make room for the step's results and for the small gradients of no layer's."""
        mine = {id(p) for layer in runner.layers for p in layer.parameters()}
        rest, dtype = [p for p in given if id(p) not in mine], runner.stacks[0].dtype
        small = [p for p in rest if p.numel() < LARGE and p.dtype == dtype and p.device == device
                 and p.grad is not None and not p.grad.is_sparse]  # fmt: skip
        chosen = {id(p) for p in small}
        self._stacks, self._parameters, self._others, self._forms = runner.stacks, given, small, []
        self._large = [p for p in rest if id(p) not in chosen]
        self._flat = torch.zeros(sum(p.numel() for p in small), device=device, dtype=dtype)
        parts = torch.split(self._flat, [p.numel() for p in small]) if small else ()
        self._views = [part.view(p.shape) for p, part in zip(small, parts, strict=True)]
        for stack in runner.stacks:
            stack.read()  # which makes the buffers
        mine_first = [p for stack in runner.stacks for layer in stack.layers for p in layer.parameters()]
        self._used = [p for p in (*mine_first, *small) if p.grad is not None]
        self._pointers = torch.zeros(len(self._used), dtype=torch.int64, device=device)
        self._good = torch.ones((), dtype=torch.bool, device=device)
        self._before = torch.zeros(sum(map(len, runner.stacks)), device=device, dtype=dtype)
        self._told = torch.ones(3, device=device, dtype=dtype)
        """The norms of all gradients and updates, and what held the latter back most."""
        self._rates = torch.zeros_like(self._before)
        """Of the layers: squared learning rates over what all of them together may predict."""

    def _copy_in(self, stacks: list[Stack]) -> None:
        for stack in stacks:
            stack.read()
        if self._others:
            torch._foreach_copy_(self._views, stages.gradients(self._others))

    def finish(self, runner: Runner, optimizer: Any, rates: dict[int, Any]) -> bool:
        """Turn the gradients read into updates and write them, or step; False if not all layers can go together.

        ``rates``: of learning, by the parameters' ids, where the length depends on them.
        """
        stacks, flat, good, before, told = runner.stacks, self._flat, self._good, self._before, self._told
        bound, is_held = self._bound(runner, optimizer), runner.settings.rescale == "norm-kl"
        if bound is None or (is_held and not self._bring_rates(runner, optimizer, rates)):
            self._stacks = []  # others will write to the buffers
            return False

        rounding = tuple([runner.may_round(stack) for stack in stacks])

        def write() -> None:
            updates = []
            self._adam.factors.clear()
            for stack, rounds in zip(stacks, rounding, strict=True):
                with tf32(rounds, flat.device):
                    updates.append(
                        self._adam.directions(runner, stack, good)
                        if runner.is_adam
                        else stages.directions(stack, runner, stack.buffer)
                    )
            after = torch.cat([stack.norms(update) for stack, update in zip(stacks, updates, strict=True)])
            sane = torch.isfinite(after)
            after = torch.where(sane, after, before)
            scales = stages.scales(runner.settings.rescale, before, after, sane)
            if is_held:
                pairs = zip(stacks, updates, strict=True)
                settings, step = runner.settings, runner.step
                dots = torch.cat([held.dots(stack, stack.buffer, update, settings, step) for stack, update in pairs])
                most = held.longest(torch.where(sane, dots * self._rates, 0.0), 1.0)
                scales, told[2] = held.hold(scales, sane, most)
            told[:2] = torch.stack((before, after * scales)).square().sum(1).sqrt()
            if self._adam.factors:
                told[2:] = torch.stack(self._adam.factors).amin()
            if runner.is_adam:
                self._adam.take(stacks, updates, sane, good)
            else:
                self._put(stacks, updates, scales, sane)
            self._put_others(scales)

        self._writing.run([*stacks, *bound, rounding, flat, self._rates, self._items], write, flat.device)
        if self._items is None:
            if self._others:
                torch._foreach_copy_(stages.gradients(self._others), self._views)
            if not runner.is_adam:
                write_back(stacks)
        if runner.is_adam:
            runner.stepped += self._adam.parameters
        loss_scale = getattr(optimizer, "grad_scale", None)
        if is_held or (runner.is_adam and runner.settings.rescale == "kl-clip"):
            runner.note_clip(told[2].clone())
        norms = told[:2] if loss_scale is None else told[:2] / loss_scale.to(told.device)
        runner.device["grad_norm"], runner.device["update_norm"] = norms.unbind()
        if self._large:
            stages.zero_where(~good, stages.gradients(self._large))
        return True

    def _bring_rates(self, runner: Runner, optimizer: Any, rates: dict[int, Any]) -> bool:
        """Bring the layers' learning rates to where the graph reads them; False if there is not one for each."""
        lrs = held.rates_of([layer for stack in runner.stacks for layer in stack.layers], rates)
        if lrs is None or any(isinstance(lr, Tensor) for lr in lrs):
            if not self._is_told:
                self._is_told = True
                what = "weights and biases that have different ones" if lrs is None else "one that is a tensor"
                warnings.warn(f"cuda_graph: no graph of a step held back by its learning rate: {what}", stacklevel=2)
            return False
        kl_clip = runner.settings.at("kl_clip", runner.step)
        numbers = many.on_its_way([float(lr) ** 2 / kl_clip for lr in lrs], self._rates.device, self._rates.dtype)
        self._rates.copy_(numbers, non_blocking=True)
        loss_scale = getattr(optimizer, "grad_scale", None)
        if loss_scale is not None:
            self._rates /= loss_scale.to(self._rates).square()
        return True

    def _bound(self, runner: Runner, optimizer: Any) -> list[Any] | None:
        """Return what the second half is bound to, None if it cannot be taken from a graph."""
        joined = [stack.decompositions(runner.states) for stack in runner.stacks]
        is_ready = all(stages.is_ready(layer, runner.states[layer.name]) for layer in runner.layers)
        if not is_ready or any(d is None or not stages.is_uniform(d, runner.settings) for d in joined):
            return None
        bound: list[Any] = [d for found in joined if found is not None for d in found.values()]
        if runner.is_adam:
            steps = self._adam.prepare(runner, optimizer)
            return None if steps is None else bound + steps
        if runner.settings.damping_mode == "relative":
            bound += [mean for layer in runner.layers for mean in runner.states[layer.name].means.values()]
        return [*bound, stages.damping_values(runner.settings, runner.step)]

    def _put(self, stacks: list[Stack], updates: list[Tensor], scales: Tensor, sane: Tensor) -> None:
        """Bring updates to the right length, in the gradients themselves or, to be copied, in the buffers."""
        lengths = [len(stack) for stack in stacks]
        every = zip(stacks, updates, torch.split(scales, lengths), torch.split(sane, lengths), strict=True)
        for i, (stack, update, scale, is_sane) in enumerate(every):
            if self._items is None:
                flat = (len(stack), -1)
                finish_(stack.buffer.view(flat), update.view(flat), scale, is_sane, self._good)
            else:
                many.scatter(self._pointers, self._items[i], stack.buffer, update, scale, is_sane, self._good)

    def _put_others(self, scales: Tensor) -> None:
        """Leave the gradients of no layer's as they are, or make zeros of them."""
        if self._items is None:
            self._flat.masked_fill_(~self._good, 0)
        elif self._others:
            never = torch.zeros(1, dtype=torch.bool, device=self._good.device)
            many.scatter(self._pointers, self._items[-1], self._flat, self._flat, scales, never, self._good)


def _describe(stacks: list[Stack], used: list[Tensor], views: list[Tensor]) -> list[many.Items] | None:
    """Return which gradients belong to which parts of the stacks' buffers and, last, of the others' buffer.

    ``used``: the parameters, in this order. None where Triton does not run or they are laid out in no simple way.
    """
    slots, found = {id(p): i for i, p in enumerate(used)}, list[many.Items | None]()
    rest = dict(slots)
    if not many.usable(*(stack.buffer for stack in stacks), *(p.grad for p in used if p.grad is not None)):
        return None
    for stack in stacks:
        grads, inner, places, index = list[Tensor](), list[Tensor](), list[int](), list[int]()
        for i, (layer, parts) in enumerate(stack.parts()):
            for p, part in zip(layer.parameters(), parts, strict=True):
                if p.grad is not None:
                    grads.append(p.grad)
                    inner.append(part)
                    places.append(rest.pop(id(p)))
                    index.append(i)
        found.append(many.describe(grads, inner, places, index))
    others = [p.grad for p in used if id(p) in rest and p.grad is not None]
    found.append(many.describe(others, views, list(rest.values()), [0] * len(others)))
    return None if any(items is None for items in found) else [items for items in found if items is not None]


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
