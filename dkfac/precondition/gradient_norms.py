"""Norms of the gradients, and zeroing them where a step is skipped.

Input: parameters with gradients. Output: norms on the device; gradients zeroed in place. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.ops.constants import constant
from dkfac.ops.torch_private import foreach_copy_, foreach_norm


class Norms:
    """The norms of the gradients of all parameters that have one."""

    def __init__(self, parameters: list[Tensor], device: torch.device) -> None:
        found = [(id(p), p.grad._values() if p.grad.is_sparse else p.grad) for p in parameters if p.grad is not None]
        self.place = {number: i for i, (number, _) in enumerate(found)}
        self.values = norms([g for _, g in found], device)

    def are_finite(self, found_inf: Tensor | None) -> Tensor:
        """Return whether all norms are finite, as a tensor. ``found_inf`` is what a ``GradScaler`` passes to a fused
        optimizer."""
        good = torch.isfinite(self.values).all()
        return good if found_inf is None else good & (found_inf.to(good.device).reshape(()) == 0)

    def of(self, layers: list[Layer]) -> Tensor:
        """Return the norms of the layers' gradients, ``[layers]``."""
        nothing = len(self.place)
        places = [[self.place.get(id(p), nothing) for p in layer.parameters()] for layer in layers]
        pairs = tuple(place[i] if i < len(place) else nothing for place in places for i in (0, 1))
        index = constant(pairs, self.values.device, torch.int64)
        squares = torch.cat([self.values.square(), self.values.new_zeros(1)])
        return squares[index].view(-1, 2).sum(1).sqrt()


def dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are not None; of sparse ones, the values."""
    found = [p.grad for p in parameters if p.grad is not None]
    return [g._values() if g.is_sparse else g for g in found]


BATCHED = 2**16
"""Gradients with at most this many elements are zeroed in one batch instead of one by one."""


def zero_where(bad: Tensor, gradients: list[Tensor]) -> None:
    """Set gradients to zero in place if ``bad``, even if they are NaN, with few launches: there may be hundreds."""
    small = [g for g in gradients if g.is_cuda and g.numel() <= BATCHED]
    for gradient in gradients:
        if not gradient.is_cuda or gradient.numel() > BATCHED:
            gradient.masked_fill_(bad.to(gradient.device), 0)
    for place in {(g.device, g.dtype) for g in small}:
        alike = [g for g in small if (g.device, g.dtype) == place]
        joined = torch.cat([g.reshape(-1) for g in alike]).masked_fill_(bad.to(place[0]), 0)
        parts = torch.split(joined, [g.numel() for g in alike])
        foreach_copy_(alike, [part.view(g.shape) for part, g in zip(parts, alike, strict=True)])


def norms(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the Euclidean norm of each tensor, ``[len(tensors)]``, in float32 or float64, on one device."""
    if not tensors:
        return torch.zeros(0, device=device)
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in tensors]  # a float16 norm overflows before its entries do
    found = list(foreach_norm(wide))
    if any(n.device != device or n.dtype != found[0].dtype for n in found):
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in found) else torch.float32
        found = [n.to(device, dtype) for n in found]
    return torch.stack(found)
