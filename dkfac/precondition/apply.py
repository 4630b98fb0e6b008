"""Precondition the gradients of a step and write the updates. Does not synchronize with the device.

Input: the gradients of a step and the decompositions in use. Output: preconditioned gradients, or parameters stepped in
place, and a report; identical on all ranks. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dkfac.comm.errors import ErrorChannel
from dkfac.comm.transport import Transport
from dkfac.config import optimizer_rules
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_factors
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack, write_back
from dkfac.layers.layer import Layer, split_grad
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants
from dkfac.ops.fused import finish_
from dkfac.ops.precision import tf32
from dkfac.precondition import adam_eigen, adaptive, gradient_norms, kronecker, share_updates
from dkfac.precondition.report import UpdateReport
from dkfac.precondition.step_length import Chunk, StepLength

Rules = dict[int, optimizer_rules.Rule]
"""The optimizer's hyperparameters by ``id(parameter)``."""


@dataclass(frozen=True, slots=True)
class Preconditioner:
    """What preconditioning needs as long as the plan and the stacks do not change."""

    ranks: RankPlan
    transport: Transport
    errors: ErrorChannel
    stacks: list[Stack]
    alone: dict[str, Stack]
    """Each layer as a stack of its own, for layers that cannot be processed together with others."""


def precondition(
    given: Preconditioner,
    states: dict[str, LayerState],
    context: StepContext,
    optimizer: Any,
    rates: dict[int, Any],
    norms: gradient_norms.Norms,
    good: Tensor,
    may_round: Callable[[Stack], bool],
) -> UpdateReport:
    """Replace the layers' gradients by preconditioned ones of the right length, or by zeros where ``good`` is False.

    With a curvature that takes steps, steps the parameters in place instead. ``rates`` are learning rates by
    ``id(parameter)``; ``may_round`` tells whether a stack may be preconditioned in TF32.
    """
    ranks, transport, settings, device = given.ranks, given.transport, context.settings, norms.values.device
    ready = {
        layer.name: layer
        for layer in ranks.layers
        if layer.weight.grad is not None and layer_factors.is_ready(layer, states[layer.name])
    }
    rules = optimizer_rules.rules(optimizer) if settings.takes_steps else {}
    if rules:  # a weight that was removed from its param group is not stepped
        ready = {name: layer for name, layer in ready.items() if id(layer.weight) in rules}
    mine = {name for name in ready if ranks.preconditions(name)}
    loss_scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it later
    report = UpdateReport()
    work = Directions(given, states, context, rules, good, loss_scale, may_round, report, {})
    chunks = work.of(mine)
    order = [layer for chunk in chunks for layer in chunk.stack.layers]
    after = torch.cat([chunk.norms.to(device) for chunk in chunks] or [torch.zeros(0, device=device)])
    sane = torch.isfinite(after)
    others: dict[str, Tensor] = {}
    if transport.world_size > 1 and ranks.plan.share == "gradients":
        order = list(ready.values())
        others, after, sane = _exchange(transport, chunks, order, after, sane, device, is_step=bool(rules))
    lengths = StepLength(ranks, transport, context, order, after, sane, device, rules)
    lengths.predict(chunks, others, rates, loss_scale)
    lengths.scale(norms, loss_scale, ready, report)
    if settings.takes_steps:
        _step(chunks, others, ranks.by_name, lengths, good, rules, context, report)
    else:
        _write(chunks, others, ranks.by_name, lengths, good)
    for layer in ranks.layers:
        if not ranks.steps(layer.name):  # its owner sends the updated weights
            for parameter in layer.parameters():
                parameter.grad = None
    if report.grafts is None:  # otherwise the optimizer steps on the gradients as they are, or on zeros
        report.written = {id(p) for layer in order for p in layer.parameters()}
    return report


class Directions:
    """Preconditions the gradients of this rank's layers; layers of one shape are processed in one batch."""

    def __init__(
        self, given: Preconditioner, states: dict[str, LayerState], context: StepContext, rules: Rules, good: Tensor,
        loss_scale: Any, may_round: Callable[[Stack], bool], report: UpdateReport, whole: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        """``rules`` are the hyperparameters of a curvature that keeps moments, which are updated if ``good``; empty if
        the gradient is divided by the curvature. ``whole``: gradients by ``id(parameter)`` where parameters have only
        shards of them."""
        self._given, self._states, self._context, self._rules, self._good = given, states, context, rules, good
        self._loss_scale, self._may_round, self._report, self._whole = loss_scale, may_round, report, whole
        self._factors: list[Tensor] = []

    def of(self, mine: set[str]) -> list[Chunk]:
        chunks, settings = [], self._context.settings
        one_by_one = settings.measures_moments
        if self._rules:
            layers = [layer for layer in self._given.ranks.layers if layer.name in mine]
            adam_eigen.rotate_momentum(layers, self._states, self._rules, is_adaptive=settings.adapts_damping)
        together = list[Stack]()
        for stack in self._given.stacks:
            layers = [layer for layer in stack.layers if layer.name in mine]
            if not layers:
                continue
            whole = len(layers) == stack.num_layers and not one_by_one
            whole = whole and (not self._rules or adam_eigen.is_alike(layers, self._rules))
            joined = stack.decompositions(self._states) if whole else None
            is_one = joined is not None and layer_factors.is_uniform(joined, settings)
            found = [stack] if is_one else [self._given.alone[layer.name] for layer in layers]
            if self._rules and settings.adapts_damping:
                together += found
            else:
                chunks += [self._chunk(part, self._several if is_one else self._one) for part in found]
        chunks += self._adaptive_chunks(together)
        if self._factors:
            device = self._factors[0].device
            self._report.clip_factor = torch.stack([factor.to(device) for factor in self._factors]).amin()
        return chunks

    def _several(self, stack: Stack, raw: Tensor) -> Tensor:
        settings, rules = self._context.settings, self._rules
        if not rules:
            return kronecker.kronecker_updates(stack, self._states, raw, self._context)
        limits = None
        if settings.rescale == "kl-clip":
            each = adam_eigen.limits(stack.layers, rules, self._context.at("kl_clip"))
            limits = torch.stack([torch.as_tensor(v, dtype=stack.dtype).to(stack.device) for v in each])
        update, factor = adam_eigen.adam_updates(stack, self._states, raw, rules, self._good, self._loss_scale, limits)
        self._factors.extend([] if factor is None else [factor.amin()])
        return update

    def _one(self, stack: Stack, raw: Tensor) -> Tensor:
        if self._rules:
            return self._several(stack, raw)
        (layer,) = stack.layers
        grad = raw.mT if stack.transposed else raw
        update = kronecker.kronecker_update(layer, self._states[layer.name], grad, self._context)
        return update.mT.contiguous() if stack.transposed else update

    def _adaptive_chunks(self, stacks: list[Stack]) -> list[Chunk]:
        raws = [stack.read(self._whole) for stack in stacks]
        given = (self._states, self._rules, self._good, self._loss_scale, self._may_round)
        try:
            updates = adaptive.adaptive_updates(stacks, *given)
        except Exception as error:
            self._given.errors.keep(error)  # raised on all ranks with the next header
            updates = [raw.clone() for raw in raws]
        return [Chunk(*each, each[0].norms(each[2])) for each in zip(stacks, raws, updates, strict=True)]

    def _chunk(self, stack: Stack, solve: Callable[[Stack, Tensor], Tensor]) -> Chunk:
        raw = stack.read(self._whole)
        try:
            with tf32(self._may_round(stack), stack.device):
                update = solve(stack, raw)
        except Exception as error:
            self._given.errors.keep(error)  # raised on all ranks with the next header
            update = raw.clone()
        return Chunk(stack, raw, update, stack.norms(update))


def _exchange(
    transport: Transport, chunks: list[Chunk], order: list[Layer], after: Tensor, sane: Tensor, device: torch.device,
    *, is_step: bool,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    """Share updates with the ranks that do not compute them.

    Returns the updates that this rank did not compute, and for all layers in ``order`` the norms and whether each
    update is finite, bitwise identical on all ranks. What is sent may be rounded, so all ranks, the sender included,
    use the received values. A non-finite update is sent as the raw gradient, or as zeros if ``is_step``.
    """
    for chunk in chunks:
        is_sane = torch.isfinite(chunk.norms).repeat_interleave(chunk.stack.blocks)[:, None, None]
        chunk.update = torch.where(is_sane, chunk.update, torch.zeros_like(chunk.raw) if is_step else chunk.raw)
    here = {layer.name: part for chunk in chunks for layer, part in chunk.stack.split(chunk.update)}
    place = {name: i for i, name in enumerate(here)}
    received = share_updates.share_gradients(transport, here)
    for name in here.keys() & received.keys():
        here[name].copy_(received[name])
    parts = received | here
    after = gradient_norms.norms([parts[layer.name].contiguous() for layer in order], device)
    true = torch.ones((), dtype=torch.bool, device=device)
    healthy = [true if layer.name in received else sane[place[layer.name]] for layer in order]
    others = {layer.name: received[layer.name] for layer in order if layer.name not in here}
    return others, after, torch.stack(healthy) if healthy else sane


def _step(
    chunks: list[Chunk], others: dict[str, Tensor], layers: dict[str, Layer], lengths: StepLength, good: Tensor,
    rules: Rules, context: StepContext, report: UpdateReport,
) -> None:  # fmt: skip
    """Step the parameters of all layers, or defer that until after the optimizer's step. Leaves the gradients
    unchanged."""
    every = [(layer, part) for chunk in chunks for layer, part in chunk.stack.split(chunk.update)]
    every += [(layers[name], update) for name, update in others.items()]
    flags = lengths.sane & good.to(lengths.sane.device)
    if lengths.is_spread:
        every = [(la, part * lengths.scales[lengths.place[la.name]].to(part)) for la, part in every]
    chosen = [(la, torch.where(flags[lengths.place[la.name]].to(part.device), part, 0)) for la, part in every]
    if any(rule.length == "measured" for rule in rules.values()) and context.settings.adapts_damping:
        report.grafts = adaptive.Grafts(chosen, rules)
    else:
        pairs = ((p, part) for la, u in chosen for p, part in zip(la.parameters(), split_grad(la, u), strict=True))
        report.stepped += adam_eigen.take_steps([(p, p, part) for p, part in pairs], rules, good)


def _write(
    chunks: list[Chunk], others: dict[str, Tensor], layers: dict[str, Layer], lengths: StepLength, good: Tensor
) -> None:
    """Write the updates, multiplied by their scales, to the gradients in place."""
    bad = ~good
    for chunk in chunks:
        stack, places = chunk.stack, [lengths.place[layer.name] for layer in chunk.stack.layers]
        here: Any = slice(places[0], places[0] + len(places))
        if places != list(range(places[0], places[0] + len(places))):
            here = constants.constant(tuple(places), lengths.device, torch.int64)
        scale = lengths.scales[here].to(stack.device, stack.dtype)
        sane, flat = lengths.sane[here].to(stack.device), (stack.num_layers, -1)
        finish_(chunk.raw.view(flat), chunk.update.view(flat), scale, sane, good.to(stack.device))
    write_back([chunk.stack for chunk in chunks])
    for name, value in others.items():
        scale = lengths.scales[lengths.place[name]].to(value)
        layer = layers[name]
        for parameter, part in zip(layer.parameters(), split_grad(layer, value), strict=True):
            if parameter.grad is None:
                continue
            parameter.grad.copy_((part * scale).masked_fill_(bad.to(part.device), 0))
