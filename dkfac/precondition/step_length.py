"""Compute the length of a step, except where the curvature has; with SGD, spread that over the layers.

Input: gradients, and updates with their norms. Output: the factor by which each layer's update is multiplied, bitwise
identical on all ranks. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dkfac.comm.transport import Transport
from dkfac.config.optimizer_rules import Rule
from dkfac.config.step_context import StepContext
from dkfac.factors.stacks import NOTHING, Stack
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants
from dkfac.ops.rescale import match_norm
from dkfac.precondition import gradient_norms, trust_region
from dkfac.precondition.report import UpdateReport


@dataclass(slots=True)
class Chunk:
    """The gradients of a stack's layers before and after preconditioning."""

    stack: Stack
    raw: Tensor
    update: Tensor
    norms: Tensor
    """Norms of the updates, ``[layers]``."""


class StepLength:
    """Computes the factor for each layer's update from the norms before and after preconditioning.

    It covers the layers of this rank or, where owners step the weights, of all ranks.
    """

    def __init__(
        self, ranks: RankPlan, transport: Transport, context: StepContext, order: list[Layer], after: Tensor,
        sane: Tensor, device: torch.device, rules: Mapping[int, Rule],
    ) -> None:  # fmt: skip
        self._ranks, self._transport, self._context = ranks, transport, context
        self.order, self.device = order, device
        self.is_spread = any(rule.length == "sgd" for rule in rules.values())
        """Whether updates have the length of SGD's own, which is to be spread over the layers."""
        self.dtype = torch.float64 if any(la.dtype == torch.float64 for la in ranks.layers) else torch.float32
        self.after, self.sane = after.to(self.dtype), sane
        self.place = {layer.name: i for i, layer in enumerate(order)}
        self.products = torch.zeros_like(self.after)
        self.scales = torch.ones_like(self.after)

    def predict(
        self, chunks: list[Chunk], others: dict[str, Tensor], rates: dict[int, Any], loss_scale: Tensor | None,
        whole: Mapping[int, Tensor] = NOTHING,
    ) -> None:  # fmt: skip
        """Compute the change of the loss that the updates predict, if ``rescale`` bounds it. ``whole``: gradients by
        ``id(parameter)`` where parameters have only shards of them."""
        settings = self._context.settings
        if settings.rescale in trust_region.HELD and not settings.takes_steps:
            self.products = self._products(chunks, others, rates, whole)
            if loss_scale is not None:
                self.products = self.products / loss_scale.to(self.products).square()

    def _products(
        self, chunks: list[Chunk], others: dict[str, Tensor], rates: dict[int, Any], whole: Mapping[int, Tensor]
    ) -> Tensor:
        """Return the change that each layer's update predicts, bitwise identical on all ranks."""
        order, plan, settings, step = self.order, self._ranks.plan, self._context.settings, self._context.step
        lrs = trust_region.rates_of(order, rates)
        is_here = plan.share != "gradients" or all(len(p.preconditioned_by) == plan.world_size for p in plan.placements)
        if lrs is None or not is_here:
            parts = {layer.name: part for chunk in chunks for layer, part in chunk.stack.split(chunk.update)} | others
            every = [parts[layer.name] for layer in order]
            return trust_region.by_parameter(order, every, rates, self.after, settings, step, whole)
        here = [layer for chunk in chunks for layer in chunk.stack.layers]
        dots = [trust_region.dots(chunk.stack, chunk.raw, chunk.update, settings, step) for chunk in chunks]
        products = torch.cat([d.to(self.after) for d in dots]) if dots else torch.zeros_like(self.after)
        place = {layer.name: i for i, layer in enumerate(here)}
        places = [place[layer.name] for layer in order]
        if places != list(range(len(here))):
            products = products[constants.constant(tuple(places), self.device, torch.int64)]
        return products * trust_region.squares(lrs, products)

    def scale(
        self, norms: gradient_norms.Norms, loss_scale: Any, ready: dict[str, Layer], report: UpdateReport
    ) -> None:
        """Compute the factor for each update, and record norms and clip factor in ``report``."""
        settings = self._context.settings
        after, sane, layers, products = self.after, self.sane, self.order, self.products
        if self._transport.program.stage("norms"):  # other ranks step the remaining layers
            layers = list(ready.values())
            after, sane, products = self._of_all(products, layers)
        if not layers:
            return
        before = norms.of(layers).to(self.dtype)
        after = torch.where(sane, after, before)
        sizes = tuple([float(layer.spec.grad_elements) for layer in layers]) if self.is_spread else ()
        elements = constants.constant(sizes, after.device, after.dtype) if sizes else None
        scales = scales_of(settings.rescale, before, after, sane, elements)
        if settings.rescale in trust_region.HELD and not settings.takes_steps:
            most = trust_region.largest_scale(torch.where(sane, products, 0.0), self._context.at("kl_clip"))
            scales, factor = trust_region.hold(scales, sane, most)
            report.clip_factor = factor
        divisor = 1.0 if loss_scale is None else loss_scale.to(self.device)
        report.grad_norm = before.square().sum().sqrt() / divisor
        length = (after * scales).square().sum().sqrt()
        report.update_norm = length if settings.takes_steps else length / divisor
        if layers is not self.order:
            place = {layer.name: i for i, layer in enumerate(layers)}
            scales = torch.stack([scales[place[layer.name]] for layer in self.order]) if self.order else self.scales
        self.scales = scales

    def _of_all(self, products: Tensor, layers: list[Layer]) -> tuple[Tensor, Tensor, Tensor]:
        """Return norms, whether updates are finite, and predicted changes of all layers, wherever they were
        preconditioned."""
        index = self._ranks.index
        table = torch.zeros(3, len(index), dtype=torch.float64, device=self.device)
        for i, layer in enumerate(self.order):
            bad = ~self.sane[i]
            row = torch.stack([self.after[i].masked_fill(bad, 0), bad.to(self.dtype), products[i].masked_fill(bad, 0)])
            if self._ranks.speaks_for(layer.name):
                table[:, index[layer.name]] = row
        told = self._transport.sum_vector("norms", table.reshape(-1)).view(3, -1).to(self.dtype)
        after, flags, terms = torch.stack([told[:, index[layer.name]] for layer in layers], dim=1)
        return after, flags == 0, terms


def scales_of(rescale: str, before: Tensor, after: Tensor, sane: Tensor, elements: Tensor | None = None) -> Tensor:
    """Return the factor for each layer's update, ``[layers]``, from the norms before and after preconditioning.
    ``elements``: of each layer, if a length is to be spread over the layers.

    Layers that are not ``sane`` (a non-finite update, replaced by the raw gradient) do not count and keep factor 1.
    """
    if elements is not None:
        return spread_length(after, sane, elements)
    match rescale:
        case "norm":
            factors = match_norm(before, after)
        case "norm-global" | "norm-kl":
            factors = match_norm(_total(before, sane), _total(after, sane))
        case _:
            factors = torch.ones_like(before)
    return torch.where(sane, factors, 1.0)


def spread_length(lengths: Tensor, sane: Tensor, elements: Tensor) -> Tensor:
    """Return the factor for each layer's update, ``[layers]``, that spreads a step of SGD's length over the layers.

    Half of the logarithm of a layer's length is SGD's own, half is that of the root of its number of ``elements``. The
    length over all layers is not changed. Layers that are not ``sane`` do not count and keep factor 1.
    """
    own = torch.where(sane, lengths, 0.0)
    wanted = (own * elements.sqrt()).sqrt()
    wanted *= torch.linalg.vector_norm(own) / torch.linalg.vector_norm(wanted).clamp(min=torch.finfo(own.dtype).tiny)
    return torch.where(own > 0, wanted / own, 1.0)


def _total(norms_of_layers: Tensor, sane: Tensor) -> Tensor:
    return torch.where(sane, norms_of_layers, 0.0).square().sum().sqrt()
