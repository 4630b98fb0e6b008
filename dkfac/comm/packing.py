"""Pack factors of equal shape together, so that the number of operations does not grow with the number of layers.

Input: sums by layer and key, or a flat buffer. Output: packed triangles of one shape in one tensor, and flat buffers.
Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dkfac.ops import constants
from dkfac.ops.pack import pack_triangle, packed_diagonal, unpack_triangle
from dkfac.ops.triangles import Entry, Triangles
from dkfac.plan.spec import FactorSpec, is_input
from dkfac.plan.transfer import Part

Name = tuple[str, str]
"""A layer and a key."""
Named = dict[Name, Tensor]
"""Tensors by layer and key."""
Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True, eq=False)
class PackedFactors:
    """Packed factors of one shape and dtype, ``[n, B, elements of a block]``."""

    names: list[Name]
    factor: FactorSpec
    """Of any of them: their shapes are equal."""
    flat: Tensor

    @property
    def is_dense(self) -> bool:
        return self.factor.form == "dense"

    def means(self) -> Tensor:
        """Return the mean eigenvalue of each block, ``[n, B]``."""
        diagonal = packed_diagonal(self.flat, self.factor.dim) if self.is_dense else self.flat
        return diagonal.mean(-1)

    def unpacked(self) -> Tensor:
        """Return the factors, in_one along their blocks."""
        rows = self.flat.flatten(0, 1)
        return unpack_triangle(rows, self.factor.dim) if self.is_dense else rows

    def parts(self) -> dict[Name, Tensor]:
        """Return each factor's part, flat."""
        return dict(zip(self.names, self.flat.view(len(self.names), -1).unbind(), strict=True))


class Layout:
    """Where the parts of a buffer are that a rank has to do with."""

    def __init__(
        self, parts: Sequence[Part], factors: Mapping[Name, FactorSpec], layers: Sequence[str], held: Container[Name]
    ) -> None:
        """``layers``: the names of all layers. ``held``: what is wanted of the parts."""
        self.parts, self.names = parts, [(part.layer, part.key) for part in parts]
        self.sizes = [part.elements for part in parts]
        self.used = sum(self.sizes)
        self.held = [name for name in self.names if name in held]
        self.only_factors = all(name in factors for name in self.held)
        self._factors, self._layers, self._tables = factors, layers, dict[torch.device, Triangles]()

    def table(self, device: torch.device) -> Triangles:
        """Return what kernels need to know of the held parts."""
        if device not in self._tables:
            index, held, begin = {name: i for i, name in enumerate(self._layers)}, set(self.held), 0
            entries = []
            for name, size in zip(self.names, self.sizes, strict=True):
                factor = self._factors.get(name, FactorSpec("", size, form="diagonal"))
                if name in held:
                    is_dense = factor.form == "dense"
                    entries.append(Entry(begin, factor.num_blocks, factor.dim, is_dense, index[name[0]]))
                begin += size
            self._tables[device] = Triangles(entries, device)
        return self._tables[device]


def alike(items: Iterable[Thing], kind: Callable[[Thing], object]) -> list[list[Thing]]:
    """Return items grouped by what ``kind`` returns, in order."""
    found: dict[object, list[Thing]] = {}
    for item in items:
        found.setdefault(kind(item), []).append(item)
    return list(found.values())


def packed_shape(factor: FactorSpec) -> tuple[int, int, str]:
    return factor.num_blocks, factor.dim, factor.form


def in_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors in_one; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def pack(sums: Named, factors: Mapping[Name, FactorSpec], device: torch.device) -> list[PackedFactors]:
    """Return packed sums, those of one shape and dtype together; without what is no factor (moments)."""
    found, names = list[PackedFactors](), [name for name in sums if name in factors]
    for same in alike(names, lambda name: (packed_shape(factors[name]), sums[name].dtype)):
        factor, whole = factors[same[0]], in_one([sums[name].to(device) for name in same])
        flat = pack_triangle(whole) if factor.form == "dense" else whole.contiguous()
        found.append(PackedFactors(same, factor, flat.view(len(same), factor.num_blocks, -1)))
    return found


def unpack(
    layout: Layout, flat: Tensor, factors: Mapping[Name, FactorSpec], kind: Callable[[Name], object]
) -> tuple[list[PackedFactors], Named]:
    """Return the held parts of a buffer: factors of one shape and kind together, and flat what is no factor."""
    pieces = torch.split(flat, [*layout.sizes, len(flat) - layout.used])
    by_name = dict(zip(layout.names, pieces, strict=False))
    found, names = list[PackedFactors](), [name for name in layout.held if name in factors]
    for same in alike(names, lambda name: (packed_shape(factors[name]), kind(name))):
        together = in_one([by_name[name] for name in same])
        found.append(PackedFactors(same, factors[same[0]], together.view(len(same), factors[same[0]].num_blocks, -1)))
    return found, {name: by_name[name] for name in layout.held if name not in factors}


def to_buffer(layout: Layout, given: Named, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new flat buffer of ``elements``, with what is given of its parts, and zeros elsewhere."""
    missing = [size for name, size in zip(layout.names, layout.sizes, strict=True) if name not in given]
    missing.append(elements - layout.used)
    blanks = iter(torch.split(torch.zeros(sum(missing), dtype=dtype, device=device), missing))
    pieces = [given[name] if name in given else next(blanks) for name in layout.names]
    return torch.cat([*pieces, *blanks]).to(dtype)


def pack_at_once(layout: Layout, sums: Named, correction: Tensor | float, flat: Tensor) -> Tensor:
    """Pack contiguous sums into a buffer in one launch, those over gradients times ``correction``; a missing one counts
    as zero. Returns whether they are finite, as a flag on the device."""
    flat[layout.used :].zero_()
    if isinstance(correction, Tensor):
        inputs = constants.constant(tuple([is_input(key) for _, key in layout.names]), flat.device, torch.bool)
        scales = torch.where(inputs, 1.0, correction.to(flat.device, torch.float32))
    else:
        each = tuple([1.0 if is_input(key) else float(correction) for _, key in layout.names])
        scales = constants.constant(each, flat.device, torch.float32)
    return layout.table(flat.device).pack([sums.get(name) for name in layout.names], scales, flat)
