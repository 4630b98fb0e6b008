"""From gradients to preconditioned ones of the right length. The same on all ranks; nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import adam, adaptive, held, shares, stages
from dkfac.exchange import Exchange
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.fused import finish_
from dkfac.ops.precision import tf32
from dkfac.stacks import Stack, write_back

if TYPE_CHECKING:
    from dkfac.run import Runner


@dataclass(slots=True)
class Chunk:
    """The gradients of some layers, before and after."""

    stack: Stack
    raw: Tensor
    update: Tensor
    norms: Tensor
    """Of the updates, ``[layers]``."""


def precondition(
    runner: Runner, optimizer: Any, rates: dict[int, Any], norms: stages.Norms, good: Tensor, device: torch.device
) -> set[int]:
    """Replace the layers' gradients by preconditioned ones of the right length, or by zeros where ``good`` is False.

    ``rates``: of learning, by the parameters' ids. Returns the ids of the parameters whose gradients were written.
    """
    ready = {
        layer.name: layer
        for layer in runner.layers
        if layer.weight.grad is not None and stages.is_ready(layer, runner.states[layer.name])
    }
    rules = adam.rules(optimizer) if runner.is_adam else {}
    if rules:  # a weight that has left its group takes no step
        ready = {name: layer for name, layer in ready.items() if id(layer.weight) in rules}
    mine = {name for name in ready if runner.rank in runner.placements[name].preconditioned_by}
    loss_scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer has yet to divide by it
    chunks = _directions(runner, mine, rules, good, loss_scale)
    order = [layer for chunk in chunks for layer in chunk.stack.layers]
    after = torch.cat([chunk.norms.to(device) for chunk in chunks] or [torch.zeros(0, device=device)])
    sane = torch.isfinite(after)
    others: dict[str, Tensor] = {}
    if runner.exchange is not None and runner.plan.share == "gradients":
        order = list(ready.values())
        others, after, sane = _exchange(runner.exchange, chunks, order, sane, device)
    lengths = _Lengths(runner, order, after, sane, device)
    if runner.settings.rescale in held.HELD and not runner.is_adam:
        lengths.products = _products(runner, chunks, others, order, rates, lengths)
        if loss_scale is not None:
            lengths.products = lengths.products / loss_scale.to(lengths.products).square()
    lengths.scale(norms, loss_scale, ready)
    if runner.is_adam:
        _step(runner, chunks, others, lengths, good, rules)
    else:
        _write(runner, chunks, others, lengths, good)
    if runner.exchange is not None and runner.plan.share == "weights":
        for layer in runner.layers:
            if runner.rank not in runner.placements[layer.name].preconditioned_by:
                for parameter in layer.parameters():
                    parameter.grad = None
    if runner.grafts is not None:  # the optimizer steps on the gradients as they are, or on zeros
        return set()
    return {id(p) for layer in order for p in layer.parameters()}


def _directions(
    runner: Runner, mine: set[str], rules: dict[int, adam.Rule], good: Tensor, loss_scale: Any
) -> list[Chunk]:
    """Return the preconditioned gradients of the layers that are this rank's, those of one shape together.

    ``rules``: of Adam, whose moments absorb the gradients if ``good``; empty if not it but the curvature divides.
    """
    chunks, factors = [], list[Tensor]()

    def several(stack: Stack, raw: Tensor) -> Tensor:
        if not rules:
            return stages.directions(stack, runner, raw)
        if runner.settings.curvature == "adaptive":
            return adaptive.directions(stack, runner.states, raw, rules, good, loss_scale)
        limits = None
        if runner.settings.rescale == "kl-clip":
            each = adam.limits(stack.layers, rules, runner.settings.at("kl_clip", runner.step))
            limits = torch.stack([torch.as_tensor(v, dtype=stack.dtype).to(stack.device) for v in each])
        update, factor = adam.directions(stack, runner.states, raw, rules, good, loss_scale, limits)
        factors.extend([] if factor is None else [factor.amin()])
        return update

    def one(stack: Stack, raw: Tensor) -> Tensor:
        if rules:
            return several(stack, raw)
        grad = stages.direction(stack.layers[0], runner, raw.mT if stack.transposed else raw)
        return grad.mT.contiguous() if stack.transposed else grad

    for stack in runner.stacks:
        layers = [layer for layer in stack.layers if layer.name in mine]
        whole = len(layers) == len(stack) and runner.settings.curvature != "ekfac"
        whole = whole and (not rules or adam.is_alike(layers, rules))
        if not layers:
            continue
        joined = stack.decompositions(runner.states) if whole else None
        if joined is not None and stages.is_uniform(joined, runner.settings):
            chunks.append(_direction(runner, stack, lambda raw, s=stack: several(s, raw)))
            continue
        for layer in layers:
            alone = runner.alone[layer.name]
            chunks.append(_direction(runner, alone, lambda raw, s=alone: one(s, raw)))
    if factors:
        runner.note_clip(torch.stack([factor.to(factors[0].device) for factor in factors]).amin())
    return chunks


def _direction(runner: Runner, stack: Stack, solve: Any) -> Chunk:
    raw = stack.read()
    try:
        with tf32(runner.may_round(stack), stack.device):
            update = solve(raw)
    except Exception as error:
        if runner.exchange is None:
            raise
        runner.tape.error, update = runner.tape.error or error, raw.clone()  # told in the next header
    norms = stack.norms(update)
    if runner.exchange is not None:  # a bad one goes out as the raw gradient, or as no step at all
        sane = torch.isfinite(norms).repeat_interleave(stack.blocks)[:, None, None]
        update = torch.where(sane, update, torch.zeros_like(raw) if runner.is_adam else raw)
    return Chunk(stack, raw, update, norms)


def _exchange(
    exchange: Exchange, chunks: list[Chunk], order: list[Layer], sane: Tensor, device: torch.device
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Send the updates that others lack; returns those that this rank lacked, and of all layers in ``order`` the norms
    and whether they are healthy, to the last bit alike on all ranks.

    What was sent may have been rounded: all ranks use what arrived. A bad one went out as the raw gradient.
    """
    here = {layer.name: part for chunk in chunks for layer, part in chunk.stack.split(chunk.update)}
    place = {name: i for i, name in enumerate(here)}
    received = shares.share_gradients(exchange, here)
    for name in here.keys() & received.keys():
        here[name].copy_(received[name])
    parts = received | here
    after = stages.norms([parts[layer.name].contiguous() for layer in order], device)
    true = torch.ones((), dtype=torch.bool, device=device)
    healthy = [true if layer.name in received else sane[place[layer.name]] for layer in order]
    others = {layer.name: received[layer.name] for layer in order if layer.name not in here}
    return others, after, torch.stack(healthy) if healthy else sane


def _products(
    runner: Runner, chunks: list[Chunk], others: dict[str, Tensor], order: list[Layer], rates: dict[int, Any],
    lengths: _Lengths,
) -> Tensor:  # fmt: skip
    """Return the change that each layer's update predicts. Bitwise alike on all ranks."""
    lrs, plan = held.rates_of(order, rates), runner.plan
    is_here = plan.share == "weights" or all(len(p.preconditioned_by) == plan.world_size for p in plan.placements)
    if lrs is None or not is_here:
        parts = {layer.name: part for chunk in chunks for layer, part in chunk.stack.split(chunk.update)} | others
        every = [parts[layer.name] for layer in order]
        return held.by_parameter(order, every, rates, lengths.after, runner.settings, runner.step)
    here = [layer for chunk in chunks for layer in chunk.stack.layers]
    dots = [held.dots(chunk.stack, chunk.raw, chunk.update, runner.settings, runner.step) for chunk in chunks]
    products = torch.cat([d.to(lengths.after) for d in dots]) if dots else torch.zeros_like(lengths.after)
    place = {layer.name: i for i, layer in enumerate(here)}
    places = [place[layer.name] for layer in order]
    if places != list(range(len(here))):
        products = products[stages.constant(tuple(places), lengths.device, torch.int64)]
    return products * held.squares(lrs, products)


class _Lengths:
    """The norms of the updates before and after, over the layers of this rank or, at the ends, of all."""

    def __init__(self, runner: Runner, order: list[Layer], after: Tensor, sane: Tensor, device: torch.device) -> None:
        self.runner, self.order, self.device = runner, order, device
        self.dtype = torch.float64 if any(la.dtype == torch.float64 for la in runner.layers) else torch.float32
        self.after, self.sane = after.to(self.dtype), sane
        self.place = {layer.name: i for i, layer in enumerate(order)}
        self.products = torch.zeros_like(self.after)
        self.scales = torch.ones_like(self.after)

    def scale(self, norms: stages.Norms, loss_scale: Any, ready: dict[str, Layer]) -> None:
        """Find what each update is multiplied by."""
        runner = self.runner
        after, sane, layers, products = self.after, self.sane, self.order, self.products
        if runner.exchange is not None and runner.plan.share == "weights":  # others step what this rank does not
            layers = list(ready.values())
            after, sane, products = self._of_all(products, layers)
        if not layers:
            return
        before = norms.of(layers).to(self.dtype)
        after = torch.where(sane, after, before)
        scales = stages.scales(runner.settings.rescale, before, after, sane)
        if runner.settings.rescale in held.HELD and not runner.is_adam:
            most = held.longest(torch.where(sane, products, 0.0), runner.settings.at("kl_clip", runner.step))
            scales, factor = held.hold(scales, sane, most)
            runner.note_clip(factor)
        divisor = 1.0 if loss_scale is None else loss_scale.to(self.device)
        runner.device["grad_norm"] = before.square().sum().sqrt() / divisor
        length = (after * scales).square().sum().sqrt()
        runner.device["update_norm"] = length if runner.is_adam else length / divisor
        if layers is not self.order:
            place = {layer.name: i for i, layer in enumerate(layers)}
            scales = torch.stack([scales[place[layer.name]] for layer in self.order]) if self.order else self.scales
        self.scales = scales

    def _of_all(self, products: Tensor, layers: list[Layer]) -> tuple[Tensor, Tensor, Tensor]:
        """Return norms, health and terms of the KL clip of the layers, wherever they were preconditioned."""
        assert self.runner.exchange is not None
        index = self.runner.index
        table = torch.zeros(3, len(index), dtype=torch.float64, device=self.device)
        for i, layer in enumerate(self.order):
            bad = ~self.sane[i]
            row = torch.stack([self.after[i].masked_fill(bad, 0), bad.to(self.dtype), products[i].masked_fill(bad, 0)])
            table[:, index[layer.name]] = row
        told = self.runner.exchange.sum_vector("norms", table.reshape(-1)).view(3, -1).to(self.dtype)
        after, flags, terms = torch.stack([told[:, index[layer.name]] for layer in layers], dim=1)
        return after, flags == 0, terms


def _step(
    runner: Runner, chunks: list[Chunk], others: dict[str, Tensor], lengths: _Lengths, good: Tensor,
    rules: dict[int, adam.Rule],
) -> None:  # fmt: skip
    """Take Adam's steps; the gradients stay as they are."""
    every = [(layer, part) for chunk in chunks for layer, part in chunk.stack.split(chunk.update)]
    every += [(runner.by_name[name], update) for name, update in others.items()]
    flags = lengths.sane & good.to(lengths.sane.device)
    chosen = [(la, torch.where(flags[lengths.place[la.name]].to(part.device), part, 0)) for la, part in every]
    if any(rule.length == "measured" for rule in rules.values()) and runner.settings.curvature == "adaptive":
        runner.grafts = adaptive.Grafts(chosen, rules)
    else:
        runner.stepped += adam.step(chosen, rules, good)


def _write(runner: Runner, chunks: list[Chunk], others: dict[str, Tensor], lengths: _Lengths, good: Tensor) -> None:
    """Write the updates, times their scales, to the gradients."""
    bad = ~good
    for chunk in chunks:
        stack, places = chunk.stack, [lengths.place[layer.name] for layer in chunk.stack.layers]
        here: Any = slice(places[0], places[0] + len(places))
        if places != list(range(places[0], places[0] + len(places))):
            here = stages.constant(tuple(places), lengths.device, torch.int64)
        scale = lengths.scales[here].to(stack.device, stack.dtype)
        sane, flat = lengths.sane[here].to(stack.device), (len(stack), -1)
        finish_(chunk.raw.view(flat), chunk.update.view(flat), scale, sane, good.to(stack.device))
    write_back([chunk.stack for chunk in chunks])
    for name, value in others.items():
        scale = lengths.scales[lengths.place[name]].to(value)
        layer = runner.by_name[name]
        for parameter, part in zip(layer.parameters(), split_grad(layer, value), strict=True):
            if parameter.grad is None:
                continue
            parameter.grad.copy_((part * scale).masked_fill_(bad.to(part.device), 0))
