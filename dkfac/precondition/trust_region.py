"""The trust region: bound the change that an update v predicts, ``lr^2 <v, gradient - damping v>`` over all layers.

Input: gradients, updates and learning rates. Output: predicted changes, and factors that bound them. Owns: nothing.

The predicted change is ``lr^2 v^T (A x G) v`` by the decompositions in use (more with ``solver="cholesky"``, whose
damping has mixed terms too). The KL clip of the papers does not subtract the damping. Does not synchronize with the
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.config.settings import Settings
from dkfac.factors.stacks import NOTHING, Stack
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops import many

HELD = ("norm-kl", "kl-clip")
"""Values of ``rescale`` whose step length depends on learning rates."""


def rates_of(layers: Iterable[Layer], rates: dict[int, Any]) -> list[Any] | None:
    """Return each layer's learning rate, or None if a weight and its bias have different ones.

    ``rates`` are learning rates by ``id(parameter)``.
    """
    found = []
    for layer in layers:
        own = [rates.get(id(p), 0.0) for p in layer.parameters() if p.grad is not None] or [0.0]
        if any(lr is not own[0] and (isinstance(lr, Tensor) or lr != own[0]) for lr in own[1:]):
            return None
        found.append(own[0])
    return found


def squares(lrs: Sequence[Any], like: Tensor) -> Tensor | float:
    """Return squared learning rates, as one number if they are all equal."""
    if any(isinstance(lr, Tensor) for lr in lrs):
        return torch.stack([torch.as_tensor(lr).to(like).reshape(()) for lr in lrs]).square()
    if len(set(lrs)) <= 1:
        return float(lrs[0]) ** 2 if lrs else 0.0
    return many.on_its_way([float(lr) ** 2 for lr in lrs], like.device, like.dtype).to(like.device, non_blocking=True)


def excluded_damping(layer: Layer, settings: Settings, step: int) -> float:
    """Return the damping that is subtracted from a prediction.

    Zero for ``"kl-clip"``, for relative damping, which is small anyway, and if inverses may have been computed with
    another damping.
    """
    is_other = settings.uses_inverses and (callable(settings.damping) or callable(settings.norm_damping))
    if settings.rescale == "kl-clip" or settings.damping_mode == "relative" or is_other:
        return 0.0
    return settings.at("norm_damping" if layer.is_norm else "damping", step)


def dots(stack: Stack, raw: Tensor, update: Tensor, settings: Settings, step: int) -> Tensor:
    """Return ``<update, gradient - damping update>`` of a stack's layers, ``[n]``."""
    damping = excluded_damping(stack.layers[0], settings, step)
    left = raw.sub(update, alpha=damping) if damping else raw
    return (left * update).view(stack.num_layers, -1).sum(1)


def by_parameter(
    layers: list[Layer], updates: list[Tensor], rates: dict[int, Any], like: Tensor, settings: Settings, step: int,
    whole: Mapping[int, Tensor] = NOTHING,
) -> Tensor:  # fmt: skip
    """Return ``lr^2 <update, gradient - damping update>`` of each layer, ``[layers]``, bitwise independent of the rank
    that preconditioned it. ``whole``: gradients by ``id(parameter)`` where parameters have only shards of them."""
    device, dtype = like.device, like.dtype
    result = [torch.zeros((), dtype=dtype, device=device) for _ in layers]
    for i, (layer, update) in enumerate(zip(layers, updates, strict=True)):
        damping = excluded_damping(layer, settings, step)
        parts = split_grad(layer, update.contiguous())  # sums depend on the memory layout, which the owner chooses
        for p, part in zip(layer.parameters(), parts, strict=True):
            if p.grad is not None:
                lr = rates.get(id(p), 0.0)
                lr = lr.to(device, dtype).reshape(()) if isinstance(lr, Tensor) else float(lr)
                grad = whole.get(id(p), p.grad)
                left = grad - damping * part if damping else grad
                result[i] = result[i] + (part * left).sum().to(device, dtype) * lr * lr
    return torch.stack(result) if result else torch.zeros(0, dtype=dtype, device=device)


def largest_scale(products: Tensor, kl_clip: float | Tensor) -> Tensor:
    """Return the factor at which an update predicts a change of ``kl_clip``: infinite if it predicts none, 0 if its
    prediction is not finite."""
    total = products.sum().abs()
    return torch.where(total == 0, torch.inf, (kl_clip / total).sqrt().nan_to_num(0.0, 0.0))


def hold(scales: Tensor, sane: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales ``[layers]`` reduced so that none is above ``most``, and the factor by which they were reduced."""
    largest = torch.where(sane, scales, 0.0).amax()
    factor = torch.where(largest > most, most / largest, 1.0)
    return torch.where(sane, scales * factor, scales), factor
