"""Precondition gradients whose parameters are split over ranks (FSDP2, tensor parallelism): shards, owners, shards.

Input: each rank's shards of the gradients, and the decompositions in use. Output: its shards of the preconditioned
gradients, or of the parameters, stepped in place, and a report. Owns: nothing.

The owner of a layer receives its gradient, preconditions it, multiplies it by its length and sends each rank its shard.
Numbers that all ranks need, norms and flags, are summed over ranks. A rank holds the layers that it owns, and its
shards, never the whole model. See ``docs/notes/021-sharded.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dkfac.comm import shards
from dkfac.comm.packing import Name
from dkfac.comm.transport import Transport
from dkfac.config import optimizer_rules
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_factors
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer, split_grad
from dkfac.layers.rank_plan import RankPlan
from dkfac.layers.sharded import check_attached, cuts_of, shard_of
from dkfac.layers.tensor_parallel import check_gradients
from dkfac.ops.constants import constant
from dkfac.ops.fused import finish_
from dkfac.plan.shards import copies, region
from dkfac.precondition import adam_eigen, gradient_norms
from dkfac.precondition.apply import Directions, Preconditioner
from dkfac.precondition.report import UpdateReport
from dkfac.precondition.step_length import Chunk, StepLength

KEYS = ("weight", "bias")


class ShardNorms(gradient_norms.Norms):
    """The norms of the gradients of a sharded model, from the squares of all ranks' shards."""

    def __init__(self, parameters: list[Tensor], device: torch.device, ranks: RankPlan, transport: Transport) -> None:
        check_attached(ranks.layers)
        self.parameters = [p for p in parameters if p.grad is not None]
        check_gradients(self.parameters)
        self.values = gradient_norms.norms([shard_of(p.grad) for p in self.parameters if p.grad is not None], device)
        self._ranks, self._transport = ranks, transport
        self._squares = torch.zeros(0, device=device)

    def are_finite(self, found_inf: Tensor | None) -> Tensor:
        """Return whether the gradients of all ranks are finite, as a tensor. Collective, once for each step."""
        assert self._ranks.plan.sharding is not None
        index, last = self._ranks.index, len(self._ranks.layers)
        layer_of = {id(p): index[layer.name] for layer in self._ranks.layers for p in layer.parameters()}
        squares = torch.zeros(last + 1, dtype=torch.float64, device=self.values.device)
        places = tuple(layer_of.get(id(p), last) for p in self.parameters)
        shares = tuple(copies(cuts_of(p, self._ranks.plan.sharding.grid)) for p in self.parameters)
        own = self.values.double().square() / constant(shares, squares.device, torch.float64)
        squares.index_add_(0, constant(places, squares.device, torch.int64), own)
        if found_inf is not None:  # each rank has looked at its own shards
            squares[last] += torch.where(shard_of(found_inf).to(squares.device).reshape(()) != 0, torch.inf, 0.0)
        squares = self._transport.sum_vector("squares", squares) / len(self._ranks.plan.sharding.mesh)
        self._squares = squares[:last]
        return torch.isfinite(squares).all()

    def of(self, layers: list[Layer]) -> Tensor:
        places = tuple(self._ranks.index[layer.name] for layer in layers)
        return self._squares[constant(places, self._squares.device, torch.int64)].sqrt()


def precondition_shards(
    given: Preconditioner,
    states: dict[str, LayerState],
    context: StepContext,
    optimizer: Any,
    rates: dict[int, Any],
    norms: ShardNorms,
    good: Tensor,
    may_round: Callable[[Stack], bool],
) -> UpdateReport:
    """Do for sharded parameters what ``apply.precondition`` does. Collective."""
    ranks, transport, settings, device = given.ranks, given.transport, context.settings, norms.values.device
    rules = optimizer_rules.rules(optimizer) if settings.takes_steps else {}
    ready = {
        layer.name: layer
        for layer in ranks.layers
        if layer.weight.grad is not None
        and layer_factors.is_ready(layer, states[layer.name])
        and (not settings.takes_steps or id(layer.weight) in rules)
    }
    loss_scale = getattr(optimizer, "grad_scale", None)
    whole = _gather(ranks, transport, rules, loss_scale)
    report = UpdateReport()
    undecayed = {key: replace(rule, weight_decay=0.0) for key, rule in rules.items()}  # shards have it added
    work = Directions(given, states, context, undecayed, good, loss_scale, may_round, report, whole)
    chunks = work.of({name for name in ready if ranks.preconditions(name)})
    order = [layer for chunk in chunks for layer in chunk.stack.layers]
    after = torch.cat([chunk.norms.to(device) for chunk in chunks] or [torch.zeros(0, device=device)])
    lengths = StepLength(ranks, transport, context, order, after, torch.isfinite(after), device, rules)
    lengths.predict(chunks, {}, rates, loss_scale, whole)
    whole.clear()
    lengths.scale(norms, loss_scale, ready, report)
    updates = _finished(chunks, lengths, good, takes_steps=settings.takes_steps)
    received = shards.to_shards(transport, lambda name: _cut(ranks, name, updates))
    pairs = [
        (p, received[name, key].view_as(shard_of(p)))
        for name, layer in ready.items()
        for key, p in zip(KEYS, layer.parameters(), strict=False)
        if p.grad is not None
    ]
    if settings.takes_steps:
        report.stepped += adam_eigen.take_steps([(p, shard_of(p), part) for p, part in pairs], rules, good)
    else:
        for p, part in pairs:
            assert p.grad is not None
            shard_of(p.grad).copy_(part)
    report.written = {id(p) for layer in ready.values() for p in layer.parameters()}
    others = [p for p in norms.parameters if id(p) not in report.written]
    gradient_norms.zero_where(~good, [shard_of(p.grad) for p in others if p.grad is not None])
    report.written |= {id(p) for p in others}
    return report


def _gather(
    ranks: RankPlan, transport: Transport, rules: dict[int, optimizer_rules.Rule], loss_scale: Any
) -> dict[int, Tensor]:
    """Return the gradients of the layers that this rank preconditions, by ``id(parameter)``. Weight decay that acts on
    gradients is added: an owner does not have the weights."""

    def shard(name: Name) -> Tensor:
        p = _parameter(ranks, name)
        if p.grad is None:
            return torch.zeros_like(shard_of(p))
        grad, rule = shard_of(p.grad), rules.get(id(p))
        if rule is None or rule.decoupled or not rule.weight_decay:
            return grad
        decay = shard_of(p) * (rule.weight_decay * rule.sign)
        return grad + (decay if loss_scale is None else decay * loss_scale.to(decay))

    whole: dict[int, Tensor] = {}
    assert ranks.plan.sharding is not None
    for name, found in shards.to_owners(transport, shard).items():
        p, given = _parameter(ranks, name), ranks.plan.sharding.by_name[name]
        whole[id(p)] = value = found[0].new_empty(given.shape)
        for index, flat in enumerate(found):
            if flat.numel():
                part = value[region(given, index)]
                part.copy_(flat.view(part.shape))
    return whole


def _parameter(ranks: RankPlan, name: Name) -> Tensor:
    layer = ranks.by_name[name[0]]
    return next(p for key, p in zip(KEYS, layer.parameters(), strict=False) if key == name[1])


def _finished(chunks: list[Chunk], lengths: StepLength, good: Tensor, *, takes_steps: bool) -> dict[Name, Tensor]:
    """Return the updates of this rank's layers in the shapes of their parameters: of the right length, and zeros, or
    the gradients, where they are not finite."""
    found: dict[Name, Tensor] = {}
    for chunk in chunks:
        stack, places = chunk.stack, [lengths.place[layer.name] for layer in chunk.stack.layers]
        sane, here = lengths.sane[places].to(stack.device), good.to(stack.device)
        if takes_steps:
            flags = (sane & here).repeat_interleave(stack.blocks)[:, None, None]
            result = chunk.update.masked_fill_(~flags, 0)
            if lengths.is_spread:
                result *= lengths.scales[places].to(result).repeat_interleave(stack.blocks)[:, None, None]
        else:
            scale, flat = lengths.scales[places].to(stack.device, stack.dtype), (stack.num_layers, -1)
            finish_(chunk.raw.view(flat), chunk.update.view(flat), scale, sane, here)
            result = chunk.raw
        for layer, part in stack.split(result):
            for key, value in zip(KEYS, split_grad(layer, part), strict=False):
                found[layer.name, key] = value
    return found


def _cut(ranks: RankPlan, name: Name, updates: dict[Name, Tensor]) -> Sequence[Tensor] | None:
    """Return the shards of an update; None if there is none."""
    sharding, value = ranks.plan.sharding, updates.get(name)
    if value is None or sharding is None:
        return None
    given = sharding.by_name[name]
    return [value[region(given, index)] for index in range(len(sharding.mesh[0]))]
