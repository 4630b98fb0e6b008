"""Adam in the eigenbasis of a layer's curvature (``curvature="adam-eigen"``): moments, update and step.

Input: gradients, eigenbases and the optimizer's hyperparameters. Output: updates, or parameters stepped in place. Owns:
nothing; the moments live in the layers' states.

``curvature="adaptive"`` (``adaptive.py``) shares the code that takes a step. See ``docs/notes/005-adam-eigen.md``. Does
not synchronize with the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dkfac.config.optimizer_rules import Rule, length_of
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.decompose import Eigen
from dkfac.ops.precondition import rotate, spectrum, swapped
from dkfac.ops.torch_private import foreach_add_, foreach_mul_


def check_optimizer(optimizer: Any, curvature: str, *, is_sharded: bool = False) -> None:
    """Raise if the optimizer is not supported. ``is_sharded``: whether parameters are split over ranks."""
    if curvature == "adaptive" and is_sharded and length_of(optimizer) == "measured":
        raise TypeError(
            f'curvature="adaptive" with parameters that are split over ranks knows the length of a step of SGD, Adam '
            f"and AdamW (of torch.optim, without dampening and amsgrad), not of {type(optimizer).__name__}: use one of "
            f'these, or curvature="kfac"'
        )
    if curvature == "adaptive" and optimizer is None:
        raise TypeError(
            'curvature="adaptive" takes the step of an optimizer: use KFAC(model, optimizer), or curvature="kfac" for '
            "a loop that steps by itself"
        )
    if curvature == "adam-eigen":
        _check_adam(optimizer)


def _check_adam(optimizer: Any) -> None:
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        what = "no optimizer" if optimizer is None else f"torch.optim.{type(optimizer).__name__}"
        raise TypeError(
            f'curvature="adam-eigen" takes its learning rate, betas, eps and weight decay from torch.optim.AdamW or '
            f"Adam; {what} was given"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError('curvature="adam-eigen" with amsgrad=True: a maximum of moments means nothing across bases')


def is_alike(layers: list[Layer], given: dict[int, Rule]) -> bool:
    """Whether layers can be stepped in one batch: same hyperparameters, apart from learning rates and weight decay."""
    kinds = {(r.betas, r.eps, r.sign, r.decoupled, r.nesterov) for r in (given[id(layer.weight)] for layer in layers)}
    return len(kinds) == 1


def rotate_momentum(
    layers: Iterable[Layer], states: dict[str, LayerState], given: dict[int, Rule], *, is_adaptive: bool
) -> None:
    """Bring the momentum of layers to the basis in which it is kept.

    It is kept in the eigenbasis, which saves two of six products in each step. Only the length of Adam's own update, in
    ``curvature="adaptive"``, needs it in the basis of the weights.
    """
    for layer in layers:
        state, wanted = states[layer.name], not (is_adaptive and given[id(layer.weight)].length == "adam")
        if state.momentum_is_rotated != wanted:
            basis = state.basis()
            if state.momentum is not None and basis is not None:
                state.momentum.value.copy_(rotate(state.momentum.value, basis, back=not wanted))
            state.momentum_is_rotated = wanted


def adam_updates(
    stack: Stack, states: dict[str, LayerState], raw: Tensor, given: dict[int, Rule], good: Tensor, loss_scale: Any,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Update the moments of a stack's layers with their gradients, if ``good``, and return Adam's updates.

    ``limits`` ``[layers]`` bound ``u^T (A x G) u``. The second result is the factor by which they shortened each
    layer's updates, ``[layers]``; None without ``limits`` or an eigenbasis.
    """
    rule, good = given[id(stack.layers[0].weight)], good.to(raw.device)
    grads = descent_gradients(stack, raw, given, good, loss_scale)
    in_use = bases(stack, states)
    (mean, mean_weight), (square, square_weight) = (stack.moments(states, n) for n in ("momentum", "moments"))
    rotated = rotate(grads, in_use) if in_use else grads
    keep, keep_square = (torch.where(good, raw.new_full((), beta), 1.0) for beta in rule.betas)
    mean.mul_(keep).add_(rotated)
    square.mul_(keep_square).addcmul_(rotated, rotated)
    mean_weight.mul_(keep).add_(good)
    square_weight.mul_(keep_square).add_(good)
    first = mean / _over(mean_weight, stack)
    second = (square / _over(square_weight, stack)).sqrt_().add_(rule.eps or torch.finfo(raw.dtype).tiny)
    most = _over(largest_update(mean_weight, square_weight, rule.betas), stack)
    update, factor = first.div_(second).clamp_(-most, most), None
    if not in_use:
        return update, factor
    if limits is not None:
        factor = held_back(update, in_use, limits)
        update *= factor.repeat_interleave(stack.blocks)[:, None, None]
    return rotate(update, in_use, back=True), factor


def descent_gradients(stack: Stack, raw: Tensor, given: dict[int, Rule], good: Tensor, loss_scale: Any) -> Tensor:
    """Return the gradients that enter the moments: in descent direction, unscaled, with coupled weight decay added;
    zero if not ``good``."""
    rule = given[id(stack.layers[0].weight)]
    grads = torch.where(good, raw, 0)
    if rule.sign != 1:
        grads *= rule.sign
    if loss_scale is not None:
        grads /= loss_scale.to(grads)
    if not rule.decoupled:
        _add_decay(stack, grads, given, good)
    return grads


def bases(stack: Stack, states: dict[str, LayerState]) -> dict[str, Eigen]:
    """Return the eigenbases of a stack as those of one layer; empty if a factor has no eigenbasis."""
    joined = stack.decompositions(states) or {}
    found = {key: d for key, d in joined.items() if isinstance(d, Eigen)}
    if len(found) < len(joined):
        return {}  # use the basis of the weights
    return swapped(found) if stack.transposed else found


def held_back(update: Tensor, bases: dict[str, Eigen], limits: Tensor) -> Tensor:
    """Return the factors ``[n]`` by which to multiply updates ``[n * B, O, I]`` in the eigenbasis so that the curvature
    along each layer's update, ``u^T (A x G) u``, is at most its limit ``[n]``."""
    change = (update.square() * spectrum(bases, update.shape)).sum((-2, -1)).view(len(limits), -1).sum(1)
    factor = (limits / change.clamp(min=torch.finfo(change.dtype).tiny)).sqrt().clamp(max=1.0)
    return factor.nan_to_num(1.0)  # a non-finite update is not applied, whatever its factor


def limits(layers: Iterable[Layer], given: dict[int, Rule], kl_clip: float) -> list[Any]:
    """Return the bound on ``u^T (A x G) u`` of each layer, so that ``lr^2`` times it is at most ``kl_clip``."""
    rates = [given[id(layer.weight)].lr for layer in layers]
    return [kl_clip / lr**2 if isinstance(lr, Tensor) or lr else torch.inf for lr in rates]


def largest_update(mean_weight: Tensor, square_weight: Tensor, betas: tuple[float, float]) -> Tensor:
    """Return an upper bound on the elements of Adam's update in a fixed basis, plus 1%, ``[n]``.

    By Cauchy-Schwarz, the squared mean of n gradients over the mean of their squares is at most the sum of ``w1^2 /
    w2`` over their weights. After a change of basis the second moments may be too small for the mean, and an update can
    exceed the bound, so it is clamped.
    """
    one, two = betas
    ratio = one * one / max(two, 1e-12)
    if ratio >= 1:
        return torch.full_like(mean_weight, torch.inf)
    gone, gone_square = (1 - mean_weight * (1 - one)).clamp(0, 1), (1 - square_weight * (1 - two)).clamp(1e-6, 1)
    total = (1 - gone.square() / gone_square).clamp(min=1e-3) / (1 - ratio)
    return 1.01 * (total * square_weight).sqrt() / mean_weight.clamp(min=torch.finfo(mean_weight.dtype).tiny)


def _over(weight: Tensor, stack: Stack) -> Tensor:
    """Return weights ``[n]``, clamped above zero, as ``[n * B, 1, 1]``."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny).repeat_interleave(stack.blocks)[:, None, None]


def _add_decay(stack: Stack, grads: Tensor, given: dict[int, Rule], good: Tensor) -> None:
    """Add coupled weight decay to the gradients in place, as ``torch.optim.Adam`` does."""
    for layer, part in stack.split(grads):
        for p, target in zip(layer.parameters(), split_grad(layer, part), strict=True):
            decay = given[id(p)].weight_decay if id(p) in given else 0.0
            if decay and p.grad is not None:
                target += torch.where(good, p.to(target.dtype) * decay, 0)


def take_steps(targets: Iterable[tuple[Tensor, Tensor, Tensor]], given: dict[int, Rule], good: Tensor) -> list[Tensor]:
    """Step parameters, each given with the tensor that is stepped in place (itself, or this rank's shard of it) and its
    update; return those that were stepped. If not ``good``, updates must be zero, and there is no weight decay."""
    groups: dict[tuple[Rule, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    stepped = list[Tensor]()
    for p, target, part in targets:
        if id(p) in given and p.grad is not None:
            parameters, parts = groups.setdefault((given[id(p)], p.device), ([], []))
            stepped.append(p)
            parameters.append(target)
            parts.append(part)
    for (rule, device), (parameters, parts) in groups.items():
        lr = rule.lr
        if isinstance(lr, Tensor):
            lr, parts = 1.0, [part * rule.lr for part in parts]
        if rule.weight_decay and rule.decoupled:
            less = torch.full((), rule.weight_decay, device=device, dtype=torch.float64) * rule.lr
            foreach_mul_(parameters, 1 - torch.where(good.to(device), less, 0.0).to(parts[0].dtype))
        foreach_add_(parameters, parts, alpha=-lr)
    return stepped
