"""Adam's steps in the eigenbasis (``adam.py``) inside a CUDA graph.

A graph reads memory: learning rates and weight decay, which schedulers change, are brought to tensors that stay.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import adam, adaptive
from dkfac.layers.layer import Layer
from dkfac.ops import many
from dkfac.stacks import Stack

if TYPE_CHECKING:
    from dkfac.run import Runner


class AdamSteps:
    """The steps of all layers, and what they are bound to."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self._rules: dict[int, adam.Rule] = {}
        self._places: list[Any] = []
        self._items: list[many.Items] | None = None
        """How parameters and the stacks' buffers belong together; None: Triton does not run."""
        self._is_told = False
        self._pointers = self._rates = self._most = torch.zeros(0)
        """The parameters' addresses, and ``[2, parameters]``: learning rate, and what weight decay leaves of them."""
        self._limits: dict[Stack, Tensor] | None = None
        """By stack: what holds its layers back, if anything does; parts of ``_most``, which stays."""
        self.factors: list[Tensor] = []
        """By what it did."""

    def prepare(self, runner: Runner, optimizer: Any) -> list[Any] | None:
        """Bring what changes to the device; returns what the graph is bound to, None if no graph can take the steps."""
        rules = self._rules = adam.rules(optimizer)
        stacks = runner.stacks
        given = [p for stack in stacks for layer in stack.layers for p in layer.parameters() if p.grad is not None]
        known = [rules[id(p)] for p in given if id(p) in rules]
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        reason = None
        if is_scaled or any(isinstance(rule.lr, Tensor) for rule in known):
            reason = "a GradScaler with a fused optimizer" if is_scaled else "a learning rate that is a tensor"
        elif not adam.hides(runner.settings, optimizer):
            reason = f"{type(optimizer).__name__}, whose own step is measured first"
        if reason is not None:
            self._warn(reason)
            return None
        if len(known) < len(given):
            return None
        if not all(adam.is_alike(stack.layers, rules) for stack in stacks):
            return None
        places = [(stacks, *((p.data_ptr(), p.stride(), p.dtype) for p in given))]
        self.parameters = given
        if self._places != places:
            self._places = places
            self._items = _describe(stacks, given)
            device = stacks[0].device
            self._pointers = torch.tensor([p.data_ptr() for p in given], dtype=torch.int64, device=device)
            self._rates = torch.zeros(2, len(given), dtype=stacks[0].dtype, device=device)
            self._most = torch.zeros(sum(map(len, stacks)), dtype=stacks[0].dtype, device=device)
        left = [1 - float(rule.lr) * rule.weight_decay if rule.decoupled else 1.0 for rule in known]
        rates = many.on_its_way([float(rule.lr) for rule in known] + left, self._rates.device, self._rates.dtype)
        self._rates.view(-1).copy_(rates, non_blocking=True)
        self._limits = None
        if runner.settings.rescale == "kl-clip":
            kl_clip = runner.settings.at("kl_clip", runner.step)
            each = [limit for stack in stacks for limit in adam.limits(stack.layers, rules, kl_clip)]
            self._most.copy_(many.on_its_way(each, self._most.device, self._most.dtype), non_blocking=True)
            self._limits = dict(zip(stacks, torch.split(self._most, [len(stack) for stack in stacks]), strict=True))
        kinds = tuple([(r.betas, r.eps, r.sign, r.decoupled or r.weight_decay, r.nesterov) for r in known])
        moments = [stack.moments(runner.states, name) for stack in stacks for name in ("momentum", "moments")]
        kept = [t for pair in moments for t in pair]
        if runner.settings.curvature == "adaptive":
            kept += [t for stack in stacks for t in stack.adaptive(runner.states)]
        return [self._rates, self._most, kinds, *kept]

    def _warn(self, what: str) -> None:
        if not self._is_told:
            self._is_told = True
            warnings.warn(f"cuda_graph: steps are taken without a graph, because of {what}", stacklevel=2)

    def directions(self, runner: Runner, stack: Stack, good: Tensor) -> Tensor:
        """Absorb the gradients that were read into the moments, and return Adam's updates."""
        if runner.settings.curvature == "adaptive":
            return adaptive.directions(stack, runner.states, stack.buffer, self._rules, good, None)
        limits = None if self._limits is None else self._limits[stack]
        update, factor = adam.directions(stack, runner.states, stack.buffer, self._rules, good, None, limits)
        self.factors += [] if factor is None else [factor.amin()]
        return update

    def take(self, stacks: list[Stack], updates: list[Tensor], sane: Tensor, good: Tensor) -> None:
        """Step, in the graph. ``sane``: whether each layer's update is finite; if not it only decays."""
        begin = 0
        flags = torch.split(sane, [len(stack) for stack in stacks])
        for i, (stack, update, healthy) in enumerate(zip(stacks, updates, flags, strict=True)):
            pairs = _pairs(stack, update)
            rates = self._rates[:, begin : begin + len(pairs)]
            begin += len(pairs)
            if self._items is not None:
                many.step(self._pointers, self._items[i], update, rates[0], rates[1], healthy, good)
                continue
            for n, (j, _, p, part) in enumerate(pairs):
                p.mul_(torch.where(good, rates[1, n], 1.0))
                p.sub_(torch.where(good & healthy[j], rates[0, n] * part, 0))


def _pairs(stack: Stack, grads: Tensor) -> list[tuple[int, Layer, Tensor, Tensor]]:
    """Return the parameters that have gradients, with their parts of a tensor shaped like the stack's buffer."""
    return [
        (i, layer, p, part)
        for i, (layer, parts) in enumerate(stack.parts(grads))
        for p, part in zip(layer.parameters(), parts, strict=True)
        if p.grad is not None
    ]


def _describe(stacks: list[Stack], parameters: list[Tensor]) -> list[many.Items] | None:
    if not many.usable(*(stack.buffer for stack in stacks), *parameters):
        return None
    found, begin = list[many.Items | None](), 0
    for stack in stacks:
        pairs = _pairs(stack, stack.buffer)
        slots = range(begin, begin + len(pairs))
        begin += len(pairs)
        inner, outer = [part for *_, part in pairs], [p for *_, p, _ in pairs]
        found.append(many.describe(outer, inner, slots, [i for i, *_ in pairs]))
    return None if any(items is None for items in found) else [items for items in found if items is not None]
