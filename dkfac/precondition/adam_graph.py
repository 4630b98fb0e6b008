"""Adam's steps in the eigenbasis (``adam_eigen.py``, ``adaptive.py``) inside a CUDA graph.

Input: gradients in the stacks' buffers and the optimizer's hyperparameters. Output: parameters stepped in place. Owns:
the device buffers for hyperparameters and parameter addresses.

A graph reads fixed memory, so learning rates and weight decay, which schedulers change, are copied to persistent
tensors.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dkfac.config import optimizer_rules
from dkfac.config.settings import Settings
from dkfac.config.step_context import StepContext
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.ops import many
from dkfac.ops.constants import constant
from dkfac.ops.precision import tf32
from dkfac.precondition import adam_eigen, adaptive, adaptive_steps
from dkfac.precondition.adaptive_steps import AdaptiveSteps
from dkfac.precondition.buffer_items import describe_parameters, describe_together, pairs_of
from dkfac.precondition.step_length import spread_length


class AdamSteps:
    """Steps all layers from a CUDA graph."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self._rules: dict[int, optimizer_rules.Rule] = {}
        self._places: list[Any] = []
        self._items: list[many.Items] | None = None
        """Mapping between parameters and the buffer of each stack; None if Triton is not available."""
        self._together: many.Items | None = None
        """Mapping between all parameters and the memory of all buffers."""
        self._memory: Tensor | None = None
        self._kept: list[Any] = []
        """What the tables of ``adaptive`` were made for."""
        self.adaptive: AdaptiveSteps | None = None
        """Computes the steps of ``curvature="adaptive"``, if kernels can."""
        self._is_told = False
        self._pointers = self._rates = self._most = torch.zeros(0)
        """Parameter addresses; ``[3, parameters]``: learning rates, the factors of decoupled weight decay, and coupled
        weight decay; limits by layer."""
        self._alike: tuple[Any, ...] = ()
        self._is_coupled = False
        """Whether weight decay is added to gradients."""
        self.elements: Tensor | None = None
        """The number of elements of each layer, if the length of the updates is to be spread over the layers."""
        self._limits: dict[Stack, Tensor] | None = None
        """By stack, the limits on its layers' updates: views of ``_most``, which persists; None if there are no limits.
        """
        self.factors: list[Tensor] = []
        """For each stack, the smallest factor by which the limits shortened an update."""

    def prepare(
        self, stacks: list[Stack], states: dict[str, LayerState], context: StepContext, optimizer: Any,
        decompositions: list[Any], may_round: Callable[[Stack], bool], memory: Tensor | None,
    ) -> list[Any] | None:  # fmt: skip
        """Copy what changes between steps to the device. Returns the objects that the graph depends on, or None if the
        steps cannot be taken from a graph.

        ``memory``: that of all buffers, if kernels can read it.
        """
        rules = self._rules = optimizer_rules.rules(optimizer)
        settings = context.settings
        given = [p for stack in stacks for layer in stack.layers for p in layer.parameters() if p.grad is not None]
        known = [rules[id(p)] for p in given if id(p) in rules]
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        reason = None
        if is_scaled or any(isinstance(rule.lr, Tensor) for rule in known):
            reason = "a GradScaler with a fused optimizer" if is_scaled else "a learning rate that is a tensor"
        elif not optimizer_rules.hides(settings, optimizer):
            reason = f"{type(optimizer).__name__}, whose own step is measured first"
        if reason is not None:
            self._warn(reason)
            return None
        if len(known) < len(given):
            return None
        if not all(adam_eigen.is_alike(stack.layers, rules) for stack in stacks):
            return None
        places = [(stacks, *((p.data_ptr(), p.stride(), p.dtype) for p in given))]
        self.parameters = given
        if self._places != places or memory is not self._memory:
            self._places, self._memory = places, memory
            self._items, self._together = describe_parameters(stacks, given), None
            if self._items is not None and memory is not None and settings.adapts_damping:
                self._together = describe_together(stacks, given)
            device = stacks[0].device
            self._pointers = torch.tensor([p.data_ptr() for p in given], dtype=torch.int64, device=device)
            self._rates = torch.zeros(3, len(given), dtype=stacks[0].dtype, device=device)
            self._most = torch.zeros(sum(stack.num_layers for stack in stacks), dtype=stacks[0].dtype, device=device)
        left = [1 - float(rule.lr) * rule.weight_decay if rule.decoupled else 1.0 for rule in known]
        self._is_coupled = any(rule.weight_decay and not rule.decoupled for rule in known)
        coupled = [0.0 if rule.decoupled else rule.weight_decay for rule in known]
        rates = many.on_its_way(
            [float(rule.lr) for rule in known] + left + coupled, self._rates.device, self._rates.dtype
        )
        self._rates.view(-1).copy_(rates, non_blocking=True)
        self._limits = None
        if settings.rescale == "kl-clip":
            kl_clip = context.at("kl_clip")
            each = [limit for stack in stacks for limit in adam_eigen.limits(stack.layers, rules, kl_clip)]
            self._most.copy_(many.on_its_way(each, self._most.device, self._most.dtype), non_blocking=True)
            parts = torch.split(self._most, [stack.num_layers for stack in stacks])
            self._limits = dict(zip(stacks, parts, strict=True))
        kinds = tuple([(r.betas, r.eps, r.sign, r.decoupled or r.weight_decay, r.nesterov) for r in known])
        layers = [layer for stack in stacks for layer in stack.layers]
        sizes = tuple([float(la.spec.grad_elements) for la in layers if rules[id(la.weight)].length == "sgd"])
        self.elements = constant(sizes, self._most.device, self._most.dtype) if sizes else None
        adam_eigen.rotate_momentum(layers, states, rules, is_adaptive=settings.adapts_damping)
        moments = [stack.moments(states, name) for stack in stacks for name in ("momentum", "moments")]
        kept = [t for pair in moments for t in pair]
        if settings.adapts_damping:
            kept += [t for stack in stacks for t in stack.adaptive(states)]
            self._prepare_adaptive(stacks, states, [*kept, *decompositions, memory], kinds, may_round)
        return [self._rates, self._most, self.elements, kinds, self.adaptive, *kept]

    def _prepare_adaptive(
        self, stacks: list[Stack], states: dict[str, LayerState], kept: list[Any], kinds: tuple[Any, ...],
        may_round: Callable[[Stack], bool],
    ) -> None:  # fmt: skip
        """Make the tables of addresses again if one of the tensors was replaced."""
        alike = (stacks, kinds, [may_round(stack) for stack in stacks])
        is_known = len(kept) == len(self._kept) and self._alike == alike
        if is_known and not any(map(operator.is_not, kept, self._kept)):
            return
        self._kept, self._alike, self.adaptive = kept, alike, None
        if self._together is not None and adaptive_steps.can_step(stacks, states):
            self.adaptive = AdaptiveSteps(stacks, states, self._rules, may_round)

    def _warn(self, what: str) -> None:
        if not self._is_told:
            self._is_told = True
            warnings.warn(f"cuda_graph: steps are taken without a graph, because of {what}", stacklevel=2)

    def take_adaptive(self, before: Tensor, good: Tensor) -> Tensor | None:
        """Step the parameters inside the graph by the gradients in the stacks' buffers. Returns the norms of the
        updates; None if kernels cannot."""
        steps, items, memory = self.adaptive, self._together, self._memory
        if steps is None or items is None or memory is None:
            return None
        if self._is_coupled:
            many.add_tensors(self._pointers, items, memory, self._rates[2])
        steps.run(good, before)
        if self.elements is not None:
            factors = spread_length(steps.after, steps.sane, self.elements)
            steps.scales.mul_(factors)
            steps.after.mul_(factors)
        rates, left, _ = self._rates
        many.step_tensors(self._pointers, items, memory, rates, left, steps.scales, steps.sane, good)
        after: Tensor = steps.after
        return after

    def directions(
        self, settings: Settings, stacks: list[Stack], states: dict[str, LayerState], good: Tensor,
        may_round: Callable[[Stack], bool],
    ) -> list[Tensor]:  # fmt: skip
        """Update the moments with the gradients in the stacks' buffers, and return the updates."""
        self.factors.clear()
        if settings.adapts_damping:
            return adaptive.adaptive_updates(stacks, states, self._rules, good, None, may_round)
        updates = []
        for stack in stacks:
            limits = None if self._limits is None else self._limits[stack]
            with tf32(may_round(stack), stack.device):
                update, factor = adam_eigen.adam_updates(stack, states, stack.buffer, self._rules, good, None, limits)
            self.factors += [] if factor is None else [factor.amin()]
            updates.append(update)
        return updates

    def take(self, stacks: list[Stack], updates: list[Tensor], scales: Tensor, sane: Tensor, good: Tensor) -> None:
        """Step the parameters inside the graph by the updates times ``scales``. ``sane`` says whether each layer's
        update is finite; if not, only weight decay is applied."""
        begin = 0
        parts = (torch.split(values, [stack.num_layers for stack in stacks]) for values in (scales, sane))
        for i, (stack, update, scale, healthy) in enumerate(zip(stacks, updates, *parts, strict=True)):
            pairs = pairs_of(stack, update)
            rates = self._rates[:, begin : begin + len(pairs)]
            begin += len(pairs)
            if self._items is not None:
                many.step_tensors(self._pointers, self._items[i], update, rates[0], rates[1], scale, healthy, good)
                continue
            for n, (j, _, p, part) in enumerate(pairs):
                p.mul_(torch.where(good, rates[1, n], 1.0))
                p.sub_(torch.where(good & healthy[j], rates[0, n] * scale[j] * part, 0))
