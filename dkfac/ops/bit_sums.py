"""Sums of the raw bits of tensors, to compare whether ranks hold the same.

Input: tensors. Output: one int64 for each. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dkfac.ops import constants

STACKED_BYTES = 1 << 26
"""Tensors of one shape are stacked, so that launches do not grow with the number of layers, up to this size."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of each tensor's elements, their bits read as integers, in int64 with wraparound.

    Does not depend on the order in which elements are added, nor on strides, nor on how tensors are stacked.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(i)
    order, found, singles = list[int](), list[Tensor](), dict[int, Tensor]()
    for places in alike.values():
        size = max(1, tensors[places[0]].numel() * tensors[places[0]].element_size())
        number = max(1, STACKED_BYTES // size)
        for start in range(0, len(places), number):
            some = places[start : start + number]
            if len(some) == 1:  # not copied
                singles[some[0]] = _words(tensors[some[0]]).sum(dtype=torch.int64).to(device)
                continue
            order += some
            found.append(
                _words(torch.stack([tensors[i] for i in some])).flatten(1).sum(1, dtype=torch.int64).to(device)
            )
    if singles:
        order += singles
        found.append(torch.stack(list(singles.values())))
    if not found:
        return torch.empty(0, dtype=torch.int64, device=device)
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return torch.cat(found)[constants.constant(back, device, torch.int64)]


def _words(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_WORDS[tensor.element_size()])
