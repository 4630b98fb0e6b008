"""The default, ``curvature="adaptive"``: the optimizer's step length, in a direction adapted to the curvature.

Input: gradients and eigenbases. Output: updates. Owns: nothing; moments, damping and lengths live in the layers'
states.

In the eigenbasis of a layer's curvature, M is the momentum of the gradient and v its second moment:

    update = length * w / |w|,    w = M / sqrt(v + c^2 mean(v))

A large damping c gives the direction of the momentum, which is best for a short step; c = 0 gives the whitened
direction, which is best for a long step. Whether a step is short depends on the loss, the layer and the learning rate,
so c is learned while training: the next gradient tells whether more of d = dw/dlog(c), at the same length, would have
been better. The score z = <g, d> / sqrt(sum v d^2) has variance one if the gradient is noise, whatever the unit of the
loss, and log(c) changes by ``RATE * (z - MARGIN)``. The score of w itself tells whether the step could have been
longer, up to twice the optimizer's own length. If the next gradient points against the step and is far larger than
previous gradients, the step was too long, and later steps are shortened.

See ``docs/notes/011-never-worse.md``. Does not synchronize with the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dkfac.config import optimizer_rules
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.precondition import rotate
from dkfac.precondition import adam_eigen

RATE = 0.3
"""How fast damping and length follow their scores."""
MARGIN = 0.2
"""The score that leaves c unchanged. It is above 0 in favor of whitening, which pays off over many steps, while a score
only looks one step ahead."""
LEAST, MOST = math.log(1e-2), math.log(1e2)
"""Bounds on the logarithm of the damping."""
AGREEMENT = 1.0
"""The score of an update above which the next one may be longer."""
SHORTEST, LONGEST = math.log(1e-3), math.log(2.0)
"""Bounds on the logarithm of the ratio between an update's length and that of the optimizer's own update."""
SETTLE, RECOVER = 0.1, 0.03
"""How fast a longer and a shorter update return to the optimizer's own length: change of the logarithm per step."""
OPPOSED = -2.0
SURPRISE = {"sgd": 2.0, "adam": 4.0, "measured": 4.0}
"""An update was too long if its score is below ``OPPOSED`` and the gradient's energy relative to v is above
``SURPRISE``. SGD's own updates grow with the gradient, so they are shortened sooner."""


def adaptive_updates(
    stack: Stack,
    states: dict[str, LayerState],
    raw: Tensor,
    given: dict[int, optimizer_rules.Rule],
    good: Tensor,
    loss_scale: Any,
) -> Tensor:
    """Update the moments of a stack's layers with their gradients, if ``good``, and return the updates.

    Updates have the length of the optimizer's own update divided by its learning rate, or length one where that length
    is measured later (see ``Grafts``).
    """
    rule, good = given[id(stack.layers[0].weight)], good.to(raw.device)
    grads = adam_eigen.descent_gradients(stack, raw, given, good, loss_scale)
    bases = adam_eigen.bases(stack, states)
    (mean, mean_weight), (square, square_weight) = (stack.moments(states, n) for n in ("momentum", "moments"))
    log_damping, log_length, rows, columns = stack.adaptive(states)
    rotated = rotate(grads, bases) if bases else grads
    momentum = rotate(mean, bases) if bases and rule.length == "adam" else mean
    scores = judge(rotated, momentum, square, square_weight, log_damping, stack)
    _follow(scores, log_damping, log_length, good & (mean_weight > 0), SURPRISE[rule.length])

    keep, keep_square = (torch.where(good, raw.new_full((), beta), 1.0) for beta in rule.betas)
    if rule.length == "adam":
        mean.mul_(keep).add_(grads)
        momentum = torch.addcmul(rotated, momentum, keep)
    else:
        momentum = mean.mul_(keep).add_(rotated)
    square.mul_(keep_square).addcmul_(rotated, rotated)
    mean_weight.mul_(keep).add_(good)
    square_weight.mul_(keep_square).add_(good)
    if rule.nesterov:
        momentum = torch.addcmul(rotated, momentum, keep)
    most = adam_eigen.largest_update(mean_weight, square_weight, rule.betas)
    update = _root(square, log_damping, stack)[0].mul_(momentum)
    bound = _spread(most * mean_weight * _safe(square_weight).rsqrt(), stack)
    _clamp_(update, bound)
    match rule.length:
        case "adam":
            squares = grads.square()
            rows.mul_(keep_square).add_(squares.sum(-1))
            columns.mul_(keep_square).add_(squares.sum(-2))
            wanted = _norms(adam_update(mean, mean_weight, rows, columns, square_weight, rule.eps, most, stack), stack)
        case "sgd":
            wanted = _norms(momentum, stack)
        case "measured":
            wanted = torch.ones_like(log_damping)
    update *= _spread(log_length.exp() * wanted / _safe(_norms(update, stack)), stack)
    return rotate(update, bases, back=True) if bases else update


def judge(
    gradient: Tensor, momentum: Tensor, square: Tensor, weight: Tensor, log_damping: Tensor, stack: Stack
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the last updates' damping and length, and the relative energy of the gradients, all ``[n]``.

    A score above 0 means that more would have been better; the energy is relative to the previous gradients.
    ``momentum`` and ``square`` (a sum with total weight ``weight``) are those of the last update, in the current basis.
    """
    root, added, total = _root(square, log_damping, stack)
    update = momentum * root
    change = root.square_().mul_(_spread(added, stack)).mul_(update)  # w times the share of the damping
    share = _dot(update, change, stack) / _safe(_dot(update, update, stack))  # its mean, weighted by w^2
    change.neg_().addcmul_(update, _spread(share, stack))  # d, at the same length
    scaled = square * update
    noise_of_update = _dot(scaled, update, stack)
    noise_of_change = _dot(torch.mul(square, change, out=scaled), change, stack)
    damping, length = (
        (weight.sqrt() * _dot(gradient, x, stack) * _safe(noise).rsqrt()).nan_to_num_(0.0, 0.0, 0.0)
        for x, noise in ((change, noise_of_change), (update, noise_of_update))
    )
    return damping, length, _dot(gradient, gradient, stack) * weight / _safe(total)


def _follow(
    scores: tuple[Tensor, Tensor, Tensor], log_damping: Tensor, log_length: Tensor, is_known: Tensor, surprise: float
) -> None:
    """Adjust the logarithms of damping and length in place by the scores of the last update, where ``is_known``."""
    of_damping, of_length, energy = scores
    log_damping.add_(torch.where(is_known, RATE * (of_damping.clamp_(-3, 3) - MARGIN), 0)).clamp_(LEAST, MOST)
    longer = torch.where(of_length > AGREEMENT, RATE * (of_length - AGREEMENT).clamp_(max=1), -SETTLE)
    settled = torch.where(log_length < 0, (log_length + RECOVER).clamp_(max=0), (log_length + longer).clamp_(min=0))
    was_too_long = (of_length < OPPOSED) & (energy > surprise)
    length = torch.where(was_too_long, log_length - RATE * energy.clamp(1, 1e4).log_(), settled)
    log_length.copy_(torch.where(is_known, length, log_length)).clamp_(SHORTEST, LONGEST)


def adam_update(
    mean: Tensor, mean_weight: Tensor, rows: Tensor, columns: Tensor, weight: Tensor, eps: float, most: Tensor,
    stack: Stack,
) -> Tensor:  # fmt: skip
    """Return Adam's update in the basis of the weights. Its second moment is approximated by the outer product of row
    and column sums, which needs almost no memory and gives the length to within a few percent."""
    total = _safe(rows.sum(-1, keepdim=True)) * _spread(_safe(weight), stack).squeeze(-1)
    second = (rows / total).sqrt_().unsqueeze(-1) * columns.sqrt().unsqueeze(-2)
    eps = eps or torch.finfo(mean.dtype).tiny
    update = torch.div(mean, second.add_(eps).mul_(_spread(_safe(mean_weight), stack)), out=second)
    return _clamp_(update, _spread(most, stack))


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


def _root(square: Tensor, log_damping: Tensor, stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``1 / sqrt(square + added)``, and both ``[n]``: ``added = c^2 mean(square)`` and the sum of ``square``."""
    total = square.view(stack.num_layers, -1).sum(1)
    added = _safe((2 * log_damping).exp_() * total / stack.elements)
    return (square + _spread(added, stack)).rsqrt_(), added, total


def _clamp_(values: Tensor, most: Tensor) -> Tensor:
    """Clamp values to ``[-most, most]`` in place. On a CPU, ``clamp_`` is several times slower with bounds that are
    broadcast."""
    return torch.maximum(torch.minimum(values, most, out=values), -most, out=values)


def _dot(x: Tensor, y: Tensor, stack: Stack) -> Tensor:
    """Return the dot products ``[n]`` of two tensors laid out like the stack's buffer."""
    if stack.num_layers == 1:
        return torch.dot(x.reshape(-1), y.reshape(-1)).unsqueeze(0)  # needs no memory
    return (x * y).view(stack.num_layers, -1).sum(1)


def _norms(x: Tensor, stack: Stack) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x.view(stack.num_layers, -1), dim=1)
    return found


def _spread(values: Tensor, stack: Stack) -> Tensor:
    """Return per-layer values ``[n]`` as ``[n * B, 1, 1]``."""
    return (values if stack.blocks == 1 else values.repeat_interleave(stack.blocks))[:, None, None]


def _safe(values: Tensor) -> Tensor:
    """Return values clamped above zero."""
    return values.clamp(min=torch.finfo(values.dtype).tiny)
