"""The default, ``curvature="adaptive"``: the optimizer's step length, in a direction adapted to the curvature.

Input: gradients and eigenbases. Output: updates. Owns: nothing; moments, damping and lengths live in the layers'
states.

In the eigenbasis of a layer's curvature, M is the momentum of the gradient and v its second moment:

    update = length * w / |w|,    w = M / sqrt(v + c^2 mean(v))

A large damping c gives the direction of the momentum, which is best for a short step; c = 0 gives the whitened
direction, which is best for a long step. Whether a step is short depends on the loss, the layer and the learning rate,
so c is learned while training: the next gradient tells whether more of d = dw/dlog(c), at the same length, would have
been better. The score z = <g, d> / sqrt(sum v d^2) has variance one if the gradient is noise, whatever the unit of the
loss, and log(c) changes by ``RATE * (z - MARGIN)``. If the next gradient points against the step and is far larger than
previous gradients, the step was too long, and later steps are shorter than the optimizer's own.

See ``docs/notes/011-never-worse.md``. Does not synchronize with the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.config import optimizer_rules
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import MOST_ELEMENTS, Stack
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops import constants
from dkfac.ops.adaptive_passes import clamp_, sums_of_last_update, update_
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import rotate
from dkfac.ops.torch_private import foreach_copy_
from dkfac.precondition import adam_eigen

RATE = 0.3
"""How fast damping and length follow their scores."""
MARGIN = 1.0
"""The score that leaves c unchanged: one standard deviation of noise. It is above 0 in favor of whitening, which pays
off over many steps, while a score only looks one step ahead."""
LEAST, MOST = math.log(1e-2), math.log(1e2)
"""Bounds on the logarithm of the damping."""
SHORTEST = math.log(1e-3)
"""Lower bound on the logarithm of the ratio between an update's length and that of the optimizer's own update."""
RECOVER = 0.03
"""How fast a shorter update returns to the optimizer's own length: change of the logarithm per step."""
OPPOSED = -2.0
SURPRISE = {"sgd": 2.0, "adam": math.inf, "measured": 4.0}
"""An update was too long if its score is below ``OPPOSED`` and the gradient's energy relative to v is above
``SURPRISE``. SGD's own updates grow with the gradient, so they are shortened soonest; Adam's do not grow."""


def adaptive_updates(
    stacks: Sequence[Stack],
    states: dict[str, LayerState],
    given: dict[int, optimizer_rules.Rule],
    good: Tensor,
    loss_scale: Any,
    may_round: Callable[[Stack], bool],
) -> list[Tensor]:
    """Update the moments of layers with the gradients in their stacks' buffers, if ``good``; return the updates.

    Updates have the length of the optimizer's own update divided by its learning rate, or length one where that length
    is measured later (see ``Grafts``). ``may_round`` tells whether a stack may be multiplied in TF32.
    """
    found: dict[Stack, Tensor] = {}
    for batch in _batches(stacks, given):
        rule = given[id(batch[0].layers[0].weight)]
        found |= zip(batch, _updates(batch, states, given, rule, good, loss_scale, may_round), strict=True)
    return [found[stack] for stack in stacks]


def _batches(stacks: Sequence[Stack], given: dict[int, optimizer_rules.Rule]) -> list[list[Stack]]:
    """Return stacks in batches whose values per layer are computed together. On a CPU, a batch is limited to what fits
    into its cache."""
    batches: list[list[Stack]] = []
    last: dict[Any, list[Stack]] = {}
    for stack in stacks:
        rule, most = given[id(stack.layers[0].weight)], MOST_ELEMENTS.get(stack.device.type, math.inf)
        kind = (rule.betas, rule.eps, rule.nesterov, rule.length, stack.dtype, stack.device)
        batch = last.get(kind)
        if batch is None or sum(s.num_layers * s.elements for s in (*batch, stack)) > most:
            batch = last[kind] = []
            batches.append(batch)
        batch.append(stack)
    return batches


def _updates(
    stacks: list[Stack], states: dict[str, LayerState], given: dict[int, optimizer_rules.Rule],
    rule: optimizer_rules.Rule, good: Tensor, loss_scale: Any, may_round: Callable[[Stack], bool],
) -> list[Tensor]:  # fmt: skip
    """Do the same for stacks whose layers have the same ``rule``, apart from learning rates and weight decay."""
    good = good.to(stacks[0].device)
    works = [_Work(stack, states, rule, may_round(stack)) for stack in stacks]
    for work in works:
        work.rotate_gradients(adam_eigen.descent_gradients(work.stack, work.stack.buffer, given, good, loss_scale))
    kept = [[work.mean_weight, work.square_weight, work.log_damping, work.log_length] for work in works]
    mean_weight, square_weight, log_damping, log_length = (torch.cat(parts) for parts in zip(*kept, strict=True))
    counts = [stack.num_layers for stack in stacks]
    elements = constants.constant(tuple([s.elements for s in stacks for _ in s.layers]), good.device, mean_weight.dtype)

    total = torch.cat([work.square.view(len(work.mean_weight), -1).sum(1) for work in works])
    mean = total / elements
    added = _safe((2 * log_damping).exp_() * mean)
    parts = zip(works, torch.split(mean, counts), torch.split(added, counts), strict=True)
    sums = torch.cat([
        sums_of_last_update(work.rotated, work.momentum, work.square, level, shift) for work, level, shift in parts
    ])  # fmt: skip
    scores = judge(sums, square_weight, total)
    _follow(scores, log_damping, log_length, good & (mean_weight > 0), SURPRISE[rule.length])

    keep, keep_square = (torch.where(good, mean_weight.new_full((), beta), 1.0) for beta in rule.betas)
    mean_weight.mul_(keep).add_(good)
    square_weight.mul_(keep_square).add_(good)
    targets = [tensor for work in kept for tensor in work]
    values = [torch.split(part, counts) for part in (mean_weight, square_weight, log_damping, log_length)]
    foreach_copy_(targets, [part for parts in zip(*values, strict=True) for part in parts])

    most = adam_eigen.largest_update(mean_weight, square_weight, rule.betas)
    bound = most * mean_weight * _safe(square_weight).rsqrt()
    mean = total.mul_(keep_square).add_(sums[:, -1]) / elements
    added = _safe((2 * log_damping).exp_() * mean)
    shifts, bounds, mosts = (torch.split(part, counts) for part in (added, bound, most))
    squares, lengths = [], []
    for work, shift, limit, largest in zip(works, shifts, bounds, mosts, strict=True):
        if rule.length == "adam":
            lengths.append(work.adam_length(keep, keep_square, rule.eps, largest))
        squares.append(
            update_(work.rotated, work.momentum, work.square, keep, keep_square, shift, limit, nesterov=rule.nesterov)
        )
    norms = torch.cat(squares).sqrt_()
    wanted = norms[:, 1] if rule.length == "sgd" else torch.cat(lengths) if lengths else torch.ones_like(log_length)
    scales = log_length.exp() * wanted / _safe(norms[:, 0])
    return [work.finished(scale) for work, scale in zip(works, torch.split(scales, counts), strict=True)]


class _Work:
    """The tensors of a stack while its updates are computed."""

    def __init__(self, stack: Stack, states: dict[str, LayerState], rule: optimizer_rules.Rule, rounds: bool) -> None:
        self.stack, self._rounds = stack, rounds
        self._bases = adam_eigen.bases(stack, states)
        (self._mean, self.mean_weight), (self.square, self.square_weight) = (
            stack.moments(states, name) for name in ("momentum", "moments")
        )
        self.log_damping, self.log_length, self._rows, self._columns = stack.adaptive(states)
        self._keeps_weights_basis = rule.length == "adam"

    def rotate_gradients(self, grads: Tensor) -> None:
        self._grads, self.momentum = grads, self._mean
        with tf32(self._rounds, grads.device):
            self.rotated = rotate(grads, self._bases)
            if self._keeps_weights_basis:  # both will be overwritten
                self.momentum = _apart(rotate(self._mean, self._bases), self._mean)
                self.rotated = _apart(self.rotated, grads)

    def adam_length(self, keep: Tensor, keep_square: Tensor, eps: float, most: Tensor) -> Tensor:
        """Update Adam's own moments, and return the length of its update, ``[n]``."""
        mean, stack = self._mean.mul_(keep).add_(self._grads), self.stack
        squares = self._grads.square_()
        self._rows.mul_(keep_square).add_(squares.sum(-1))
        self._columns.mul_(keep_square).add_(squares.sum(-2))
        weights = self.mean_weight, self.square_weight
        return stack.norms(adam_update(mean, self._rows, self._columns, *weights, eps, most, stack))

    def finished(self, scale: Tensor) -> Tensor:
        """Return the updates in the basis of the weights, scaled."""
        update = self.rotated.mul_(_spread(scale, self.stack))
        with tf32(self._rounds, update.device):
            return rotate(update, self._bases, back=True)


def judge(sums: Tensor, weight: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the last updates' damping and length, and the relative energy of the gradients, all ``[n]``.

    A score above 0 means that more would have been better; the energy is relative to the previous gradients. ``sums``
    are those of ``sums_of_last_update``, and ``total`` is that of the second moments, with total weight ``weight``.
    The derivative of the update by the logarithm of the damping, at the same length, is proportional to ``(y - c) u``,
    c being the mean of y weighted by ``u^2``.
    """
    uu, yuu, vuu, vyuu, vyyuu, gu, gyu, gg = sums.unbind(1)
    c = yuu / _safe(uu)
    noise = vyyuu - 2 * c * vyuu + c.square() * vuu
    noise = torch.maximum(noise, 64 * torch.finfo(noise.dtype).eps * (vyyuu + c.square() * vuu))  # rounding errors
    damping, length = (
        (weight.sqrt() * dot * _safe(variance).rsqrt()).nan_to_num_(0.0, 0.0, 0.0)
        for dot, variance in ((gyu - c * gu, noise), (gu, vuu))
    )
    return damping, length, gg * weight / _safe(total)


def _follow(
    scores: tuple[Tensor, Tensor, Tensor], log_damping: Tensor, log_length: Tensor, is_known: Tensor, surprise: float
) -> None:
    """Adjust the logarithms of damping and length in place by the scores of the last update, where ``is_known``."""
    of_damping, of_length, energy = scores
    log_damping.add_(torch.where(is_known, RATE * (of_damping.clamp_(-3, 3) - MARGIN), 0)).clamp_(LEAST, MOST)
    was_too_long = (of_length < OPPOSED) & (energy > surprise)
    length = torch.where(was_too_long, log_length - RATE * energy.clamp(1, 1e4).log_(), log_length + RECOVER)
    log_length.copy_(torch.where(is_known, length, log_length)).clamp_(SHORTEST, 0)


def adam_update(
    mean: Tensor, rows: Tensor, columns: Tensor, mean_weight: Tensor, weight: Tensor, eps: float, most: Tensor,
    stack: Stack,
) -> Tensor:  # fmt: skip
    """Return Adam's update in the basis of the weights. Its second moment is approximated by the outer product of row
    and column sums, which needs almost no memory and gives the length to within a few percent."""
    total = _safe(rows.sum(-1, keepdim=True)) * _spread(_safe(weight), stack).squeeze(-1)
    second = (rows / total).sqrt_().unsqueeze(-1) * columns.sqrt().unsqueeze(-2)
    eps = eps or torch.finfo(mean.dtype).tiny
    update = torch.div(mean, second.add_(eps).mul_(_spread(_safe(mean_weight), stack)), out=second)
    return clamp_(update, _spread(most, stack))


class Grafts:
    """Updates that are applied after the optimizer's own step, rescaled to the length of that step."""

    def __init__(self, layers: Iterable[tuple[Layer, Tensor]], given: dict[int, optimizer_rules.Rule]) -> None:
        """``layers`` come with updates of length one, ``[B, O, I]``; zero where the optimizer's own step is kept."""
        self._layers: list[list[tuple[Tensor, Tensor, Tensor, optimizer_rules.Rule]]] = []
        for layer, update in layers:
            parts = zip(layer.parameters(), split_grad(layer, update), strict=True)
            known = [(p, part) for p, part in parts if p.grad is not None and id(p) in given]
            self._layers.append([(p, p.detach().clone(), part, given[id(p)]) for p, part in known])

    @torch.no_grad()
    def finish(self) -> None:
        """After the optimizer's step, replace its updates by ours of the same length. Its weight decay is kept."""
        for parameters in filter(None, self._layers):
            decays = [1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0 for *_, rule in parameters]
            befores = [before * decay for (_, before, *_), decay in zip(parameters, decays, strict=True)]
            moves = [(p - before).square().sum() for (p, *_), before in zip(parameters, befores, strict=True)]
            length = torch.stack(moves).sum().sqrt()
            is_ours = torch.stack([part.any() for *_, part, _ in parameters]).any()
            for (p, _, part, _), before in zip(parameters, befores, strict=True):
                p.copy_(torch.where(is_ours, before - length * part.reshape(p.shape), p))


def _apart(result: Tensor, given: Tensor) -> Tensor:
    """Return a result, copied if it is what was given."""
    return result.clone() if result is given else result


def _spread(values: Tensor, stack: Stack) -> Tensor:
    """Return per-layer values ``[n]`` as ``[n * B, 1, 1]``."""
    return (values if stack.blocks == 1 else values.repeat_interleave(stack.blocks))[:, None, None]


def _safe(values: Tensor) -> Tensor:
    """Return values clamped above zero."""
    return values.clamp(min=torch.finfo(values.dtype).tiny)
