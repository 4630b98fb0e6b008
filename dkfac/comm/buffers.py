"""Flat buffers: where the parts of a transfer are, and small vectors of numbers on any device.

Input: parts of a transfer, tensors, numbers. Output: views of a buffer, factors, vectors. Owns: nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import constants
from dkfac.ops.pack import unpack_triangle
from dkfac.plan.spec import FactorSpec
from dkfac.plan.transfer import Part


def on_cpu(value: Any) -> Any:
    """Return a nested dict with its tensors on the CPU: another rank may not be able to access this rank's GPU."""
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


def unpack_factor(flat: Tensor, factor: FactorSpec) -> Tensor:
    """Return a factor, or an inverse, from its packed triangle."""
    rows = flat.view(factor.num_blocks, -1)
    return rows if factor.form == "diagonal" else unpack_triangle(rows, factor.dim)


def vector(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers, some of them already on the device, as one float64 tensor, without synchronizing with it."""
    numbers = [0.0 if isinstance(v, Tensor) else float(v) for v in values]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a graph cannot copy from the host
        runs = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
        flat = torch.cat([torch.full((size,), number, dtype=torch.float64, device=device) for number, size in runs])
    else:
        host = torch.tensor(numbers, dtype=torch.float64)
        flat = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    kinds: dict[object, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            kinds.setdefault((value.dtype, value.device), []).append(i)
    for places in kinds.values():
        given = torch.stack([v.reshape(()) if v.ndim else v for v in [values[i] for i in places]])  # type: ignore
        where = constants.constant(tuple(places), device, torch.int64)
        flat.index_copy_(0, where, given.to(device, torch.float64))
    return flat


def places_of(parts: Iterable[Part], flat: Tensor) -> Iterable[tuple[Part, Tensor]]:
    """Yield each part with its view of a flat buffer, in order."""
    position = 0
    for part in parts:
        yield part, flat[position : position + part.elements]
        position += part.elements


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
