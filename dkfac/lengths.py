"""The length of the updates, and writing them to the gradients. The same on all ranks; nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import stages
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.rescale import kl_factor

if TYPE_CHECKING:
    from dkfac.run import Runner


@dataclass(slots=True)
class Updates:
    """Preconditioned gradients, as far as this rank has them."""

    layers: list[Layer]
    """That have a gradient and decompositions, on every rank."""
    values: dict[str, Tensor]
    sane: dict[str, Tensor]
    """False where the update was not finite and the raw gradient took its place; absent: True."""


def rescale(
    runner: Runner,
    updates: Updates,
    norms: dict[int, Tensor],
    rates: dict[int, Any],
    loss_scale: Any,
    device: torch.device,
) -> None:
    """Give the updates their length and write them to the gradients.

    ``norms`` and ``rates``: of gradients and of learning, by the parameters' ids; ``loss_scale``: what a fused
    optimizer has yet to divide by.
    """
    every, healthy, products = _of_all_layers(runner, updates, rates, loss_scale, device)
    if not updates.layers:
        return
    index = [runner.index[layer.name] for layer in updates.layers]
    before = torch.stack([stages.layer_norm(layer, norms) for layer in updates.layers])
    after, sane = (torch.stack([values[i] for i in index]) for values in (every, healthy))
    after = torch.where(sane, after.to(before.dtype), before)
    if runner.settings.rescale == "kl-clip":
        factor = kl_factor(products, runner.settings.at("kl_clip", runner.step))
        runner.device["clip_factor"] = factor
        runner.count("clipped_steps", factor < 1)
        scales = torch.where(sane, factor, 1.0)
    else:
        scales = stages.scales(runner.settings.rescale, before, after, sane)
    divisor = 1.0 if loss_scale is None else loss_scale.to(device)
    runner.device["grad_norm"] = before.square().sum().sqrt() / divisor
    runner.device["update_norm"] = (after * scales).square().sum().sqrt() / divisor
    for i, layer in enumerate(updates.layers):
        if layer.name in updates.values:
            _write(layer, updates.values[layer.name], scales[i])


def _write(layer: Layer, update: Tensor, scale: Tensor) -> None:
    scale = scale.to(update)
    for parameter, part in split_grad(layer, update):
        assert parameter.grad is not None
        if parameter.grad.dtype == part.dtype:
            torch.mul(part, scale, out=parameter.grad)
        else:
            parameter.grad.copy_(part * scale)


def _of_all_layers(
    runner: Runner, updates: Updates, rates: dict[int, Any], loss_scale: Any, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return every layer's norm of the update, whether it is healthy, and its term of the KL clip, on all ranks."""
    is_double = any(layer.dtype == torch.float64 for layer in runner.layers)
    dtype = torch.float64 if is_double else torch.float32
    zero = torch.zeros((), dtype=dtype, device=device)
    norms, terms, bad = (dict.fromkeys(runner.index, zero) for _ in range(3))
    if updates.values:
        found = list(updates.values.values())
        norms |= dict(zip(updates.values, stages.norms(found, device).to(dtype).unbind(), strict=True))
        bad |= {name: (~flag).to(device, dtype) for name, flag in updates.sane.items()}
        if runner.settings.rescale == "kl-clip":
            layers = [runner.by_name[name] for name in updates.values]
            products = stages.kl_products(layers, found, rates, loss_scale, device)
            terms |= {name: term.to(dtype) for name, term in zip(updates.values, products, strict=True)}
    together = torch.stack([*norms.values(), *bad.values(), *terms.values()])
    if runner.exchange is not None and runner.plan.share == "weights":
        together = runner.exchange.sum_vector("norms", together.to(torch.float64)).to(dtype)
    after, flags, clip = together.view(3, -1)
    healthy = flags == 0
    return after, healthy, torch.where(healthy, clip, 0.0)
