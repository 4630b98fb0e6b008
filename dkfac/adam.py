"""Adam in the eigenbasis of a layer's curvature (``curvature="adam-eigen"``): moments, update and step.

What it reads off an optimizer and how it takes a step also serve ``curvature="adaptive"`` (``adaptive.py``). See
``docs/notes/005-adam-eigen.md``. Nothing waits for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.decompose import Eigen
from dkfac.ops.precondition import rotate, spectrum
from dkfac.settings import Settings
from dkfac.stacks import Stack
from dkfac.state import LayerState


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What the optimizer says of a parameter."""

    lr: Tensor | float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Whether weight decay acts on the weights, not on the gradient."""
    sign: float
    length: Length = "adam"
    """Whose length an update has with ``curvature="adaptive"``."""
    nesterov: bool = False


Length = Literal["adam", "sgd", "measured"]
SECOND_BETA = 0.99
"""Decay of second moments where the optimizer has none."""
MOMENTUM = 0.9
"""Decay of the gradient's average where the optimizer does not say."""
COUPLED = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
           torch.optim.ASGD, torch.optim.Rprop)  # fmt: skip
"""Optimizers that add weight decay to the gradient."""


def length_of(optimizer: Any) -> Length:
    """Return how the length of an optimizer's own update is known: by Adam's rule, by SGD's, or by letting it step.

    A subclass that does not change ``step`` keeps the rule of its class.
    """
    step, groups = inspect.unwrap(type(optimizer).step), optimizer.param_groups
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not any(g.get("amsgrad") for g in groups):
        own = {inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}
        return "adam" if step in own else "measured"
    if isinstance(optimizer, torch.optim.SGD) and not any(g.get("dampening") for g in groups):
        return "sgd" if step is inspect.unwrap(torch.optim.SGD.step) else "measured"
    return "measured"


def hides(settings: Settings, optimizer: Any) -> bool:
    """Whether an optimizer does not see the gradients of K-FAC's layers, nor keeps state for them."""
    is_plain = settings.curvature == "adam-eigen"
    return is_plain or (settings.curvature == "adaptive" and length_of(optimizer) != "measured")


def rules(optimizer: Any) -> dict[int, Rule]:
    """Return the optimizer's settings as they are now, by the parameters' ids."""
    found: dict[int, Rule] = {}
    length = length_of(optimizer)
    is_decoupled = isinstance(optimizer, torch.optim.AdamW) or not isinstance(optimizer, (torch.optim.Adam, *COUPLED))
    for group in optimizer.param_groups:
        first, second = group.get("betas", (group.get("momentum", MOMENTUM), SECOND_BETA))[:2]
        rule = Rule(
            0.0 if group.get("lr") is None else group["lr"],  # some find their own
            (float(first or 0.0), float(second)),
            group["eps"] if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else 0.0,
            group.get("weight_decay") or 0.0,
            group.get("decoupled_weight_decay", is_decoupled),
            -1.0 if group.get("maximize") else 1.0,
            length,
            bool(group.get("nesterov")),
        )
        found |= {id(p): rule for p in group["params"]}
    return found


def check(optimizer: Any, layers: Iterable[Layer], curvature: str) -> None:
    """Refuse an optimizer that does not fit, or that treats the parameters of one layer in different ways."""
    if curvature == "adaptive" and optimizer is None:
        raise TypeError(
            'curvature="adaptive" takes the step of an optimizer: use KFAC(model, optimizer), or curvature="kfac" for '
            "a loop that steps by itself"
        )
    if curvature == "adam-eigen":
        _check_adam(optimizer)
    found = rules(optimizer)
    for layer in layers:
        given = [found[id(p)] for p in layer.parameters() if id(p) in found]
        for name in ("betas", "eps", "sign", "nesterov"):
            values = [getattr(rule, name) for rule in given]
            if len(set(values)) > 1:
                what = {"sign": "maximize"}.get(name, name)
                raise ValueError(
                    f"weight and bias of layer {layer.name!r} have different {what} ({values[0]} and {values[1]}), but "
                    f"one basis: put them into groups with the same, skip=[{layer.name!r}], or use "
                    f'curvature="kfac"'
                )


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
    """Whether layers can take their steps together: one rule but for learning rates and weight decay."""
    kinds = {(r.betas, r.eps, r.sign, r.decoupled, r.nesterov) for r in (given[id(layer.weight)] for layer in layers)}
    return len(kinds) == 1


def directions(
    stack: Stack, states: dict[str, LayerState], raw: Tensor, given: dict[int, Rule], good: Tensor, loss_scale: Any,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Absorb the gradients of layers that are alike into their moments, if ``good``, and return Adam's updates.

    ``limits``: of ``u^T (A x G) u``, ``[layers]``. Returns also by what they shortened the updates.
    """
    rule, good = given[id(stack.layers[0].weight)], good.to(raw.device)
    grads = gradients(stack, raw, given, good, loss_scale)
    in_use = bases(stack, states)
    (mean, mean_weight), (square, square_weight) = (stack.moments(states, n) for n in ("momentum", "moments"))
    rotated = rotate(grads, in_use) if in_use else grads
    keep, keep_square = (torch.where(good, raw.new_full((), beta), 1.0) for beta in rule.betas)
    mean.mul_(keep).add_(grads)
    square.mul_(keep_square).addcmul_(rotated, rotated)
    mean_weight.mul_(keep).add_(good)
    square_weight.mul_(keep_square).add_(good)
    first = mean / _over(mean_weight, stack)
    second = (square / _over(square_weight, stack)).sqrt_().add_(rule.eps or torch.finfo(raw.dtype).tiny)
    most = _over(longest(mean_weight, square_weight, rule.betas), stack)
    if not in_use:
        return first.div_(second).clamp_(-most, most), None
    update, factor = (rotate(first, in_use) / second).clamp_(-most, most), None
    if limits is not None:
        factor = held_back(update, in_use, limits)
        update *= factor.repeat_interleave(stack.blocks)[:, None, None]
    return rotate(update, in_use, back=True), factor


def gradients(stack: Stack, raw: Tensor, given: dict[int, Rule], good: Tensor, loss_scale: Any) -> Tensor:
    """Return the gradients as the moments absorb them: zero if not ``good``, unscaled, to be descended along."""
    rule = given[id(stack.layers[0].weight)]
    grads = torch.where(good, raw, 0).mul_(rule.sign)
    if loss_scale is not None:
        grads /= loss_scale.to(grads)
    if not rule.decoupled:
        _add_decay(stack, grads, given, good)
    return grads


def bases(stack: Stack, states: dict[str, LayerState]) -> dict[str, Eigen]:
    """Return the eigenbases of layers that are alike as one layer's; none where a factor has no eigenbasis."""
    joined = stack.decompositions(states) or {}
    found = {key: d for key, d in joined.items() if isinstance(d, Eigen)}
    if len(found) < len(joined):
        return {}  # that of the weights
    return {"A": found["G"], "G": found["A"]} if found and stack.transposed else found


def held_back(update: Tensor, bases: dict[str, Eigen], limits: Tensor) -> Tensor:
    """Return by what to multiply updates ``[n * B, O, I]`` in the eigenbasis to bring the curvature along those of a
    layer, ``u^T (A x G) u``, down to its limit ``[n]``."""
    change = (update.square() * spectrum(bases, update.shape[-1])).sum((-2, -1)).view(len(limits), -1).sum(1)
    factor = (limits / change.clamp(min=torch.finfo(change.dtype).tiny)).sqrt().clamp(max=1.0)
    return factor.nan_to_num(1.0)  # an update that is not finite takes no step, whatever holds it back


def limits(layers: Iterable[Layer], given: dict[int, Rule], kl_clip: float) -> list[Any]:
    """Return what ``u^T (A x G) u`` of each layer may be, ``lr^2`` of which is ``kl_clip``."""
    rates = [given[id(layer.weight)].lr for layer in layers]
    return [kl_clip / lr**2 if isinstance(lr, Tensor) or lr else torch.inf for lr in rates]


def longest(mean_weight: Tensor, square_weight: Tensor, betas: tuple[float, float]) -> Tensor:
    """Return the most that an element of Adam's update can be in a basis that stays, and a hundredth more, ``[n]``.

    By Cauchy and Schwarz: the square of a mean of n gradients over the mean of their squares is at most the sum of
    w1^2 / w2 of their weights. After a change of the basis the squares may be too small for the mean, and it is more.
    """
    one, two = betas
    ratio = one * one / max(two, 1e-12)
    if ratio >= 1:
        return torch.full_like(mean_weight, torch.inf)
    gone, gone_square = (1 - mean_weight * (1 - one)).clamp(0, 1), (1 - square_weight * (1 - two)).clamp(1e-6, 1)
    total = (1 - gone.square() / gone_square).clamp(min=1e-3) / (1 - ratio)
    return 1.01 * (total * square_weight).sqrt() / mean_weight.clamp(min=torch.finfo(mean_weight.dtype).tiny)


def _over(weight: Tensor, stack: Stack) -> Tensor:
    """Return weights ``[n]``, never zero, as ``[n * B, 1, 1]``."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny).repeat_interleave(stack.blocks)[:, None, None]


def _add_decay(stack: Stack, grads: Tensor, given: dict[int, Rule], good: Tensor) -> None:
    """Add weight decay to gradients, as Adam has it."""
    for layer, part in stack.split(grads):
        for p, target in zip(layer.parameters(), split_grad(layer, part), strict=True):
            decay = given[id(p)].weight_decay if id(p) in given else 0.0
            if decay and p.grad is not None:
                target += torch.where(good, p.to(target.dtype) * decay, 0)


def step(layers: Iterable[tuple[Layer, Tensor]], given: dict[int, Rule], good: Tensor) -> list[Tensor]:
    """Take layers' steps by their updates ``[B, O, I]``, if ``good``; returns the parameters that were stepped."""
    groups: dict[tuple[Rule, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for layer, update in layers:
        for p, part in zip(layer.parameters(), split_grad(layer, update), strict=True):
            if id(p) in given and p.grad is not None:
                parameters, parts = groups.setdefault((given[id(p)], p.device), ([], []))
                parameters.append(p)
                parts.append(part)
    for (rule, device), (parameters, parts) in groups.items():
        lr = rule.lr
        if isinstance(lr, Tensor):
            lr, parts = 1.0, [part * rule.lr for part in parts]
        if rule.weight_decay and rule.decoupled:
            less = torch.full((), rule.weight_decay, device=device, dtype=torch.float64) * rule.lr
            torch._foreach_mul_(parameters, 1 - torch.where(good.to(device), less, 0.0).to(parts[0].dtype))
        torch._foreach_add_(parameters, parts, alpha=-lr)
    return [p for parameters, _ in groups.values() for p in parameters]
