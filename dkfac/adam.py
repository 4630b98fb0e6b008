"""Adam in the eigenbasis of a layer's curvature (``curvature="adam-eigen"``): moments, update and step.

See ``docs/notes/005-adam-eigen.md``. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.precondition import rotate
from dkfac.state import Average, LayerState


@dataclass(frozen=True, slots=True)
class Rule:
    """What the optimizer says of a parameter."""

    lr: Tensor | float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Whether weight decay acts on the weights, not on the gradient."""
    sign: float


def rules(optimizer: Any) -> dict[int, Rule]:
    """Return the optimizer's settings as they are now, by the parameters' ids."""
    found: dict[int, Rule] = {}
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        rule = Rule(
            group["lr"],
            (float(group["betas"][0]), float(group["betas"][1])),
            group["eps"],
            group["weight_decay"],
            decoupled,
            -1.0 if group.get("maximize") else 1.0,
        )
        found |= {id(p): rule for p in group["params"]}
    return found


def check(optimizer: Any, layers: Iterable[Layer]) -> None:
    """Refuse an optimizer that is not Adam, or that treats the parameters of one layer in different ways."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        what = "no optimizer" if optimizer is None else f"torch.optim.{type(optimizer).__name__}"
        raise TypeError(
            f'curvature="adam-eigen" takes its learning rate, betas, eps and weight decay from torch.optim.AdamW or '
            f"Adam; {what} was given"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError('curvature="adam-eigen" with amsgrad=True: a maximum of moments means nothing across bases')
    found = rules(optimizer)
    for layer in layers:
        given = [found[id(p)] for p in layer.parameters() if id(p) in found]
        for name in ("betas", "eps", "sign"):
            values = [getattr(rule, name) for rule in given]
            if len(set(values)) > 1:
                what = "maximize" if name == "sign" else name
                raise ValueError(
                    f"weight and bias of layer {layer.name!r} have different {what} ({values[0]} and {values[1]}), but "
                    f"one basis: put them into groups with the same, or skip=[{layer.name!r}]"
                )


def direction(
    layer: Layer, state: LayerState, grad: Tensor, given: dict[int, Rule], good: Tensor, loss_scale: Tensor | None
) -> Tensor:
    """Absorb a gradient ``[B, O, I]`` into a layer's moments, if ``good``, and return Adam's update."""
    rule, good = given[id(layer.weight)], good.to(grad.device)
    grad = grad * rule.sign if loss_scale is None else grad * (rule.sign / loss_scale.to(grad))
    for p, part in zip(layer.parameters(), split_grad(layer, grad), strict=True):
        decay = given[id(p)].weight_decay if id(p) in given else 0.0
        if decay and not rule.decoupled and p.grad is not None:
            part += decay * p.to(part.dtype)
    basis = state.basis()
    rotated = grad if basis is None else rotate(grad, basis)
    state.momentum = state.momentum or Average.empty(grad)
    state.moments = state.moments or Average.empty(grad)
    state.momentum.update(grad, rule.betas[0], good)
    state.moments.update(rotated.square(), rule.betas[1], good)
    mean = state.momentum.mean()
    scale = state.moments.mean().sqrt_().add_(rule.eps)
    if basis is None:
        return mean / scale
    return rotate(rotate(mean, basis) / scale, basis, back=True)


def step(layer: Layer, update: Tensor, given: dict[int, Rule], good: Tensor) -> list[Tensor]:
    """Take a layer's step, if ``good``; returns the parameters that were stepped."""
    stepped, good = [], good.to(update.device)
    for p, part in zip(layer.parameters(), split_grad(layer, update), strict=True):
        rule = given.get(id(p))
        if rule is None or p.grad is None:
            continue
        lr = rule.lr.to(part) if isinstance(rule.lr, Tensor) else rule.lr
        if rule.weight_decay and rule.decoupled:
            p.mul_(1 - torch.where(good, 1.0, 0.0).to(part.dtype) * (lr * rule.weight_decay))
        p.sub_(torch.where(good, part * lr, 0.0).to(p.dtype))
        stepped.append(p)
    return stepped
