"""Decompositions as they are sent between ranks: flat tensors.

Input: decompositions, or what was received. Output: the other. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from dkfac.comm.buffers import unpack_factor
from dkfac.comm.packing import Name, alike, in_one, packed_shape
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, from_tensors
from dkfac.ops.pack import pack_triangle, unpack_triangle
from dkfac.plan.spec import FactorSpec


def pack_all(sent: dict[Name, Decomposition], layers: dict[str, Layer], *, packs: bool) -> dict[Name, list[Tensor]]:
    """Return decompositions as flat tensors to be sent one after the other, those of one shape packed at once.

    ``packs``: whether inverses are sent as triangles."""
    found: dict[Name, list[Tensor]] = {}

    def kind(name: Name) -> object:
        return type(sent[name]), packed_shape(layers[name[0]].spec.factor(name[1])), layers[name[0]].spec.dtype

    for names in alike(sorted(sent), kind):
        tensors = [list(sent[name].tensors().values()) for name in names]
        if packs and tensors[0][0].ndim == 3:
            triangles = pack_triangle(in_one([inverse for (inverse,) in tensors]))
            found |= zip(names, [[t] for t in triangles.view(len(names), -1).unbind()], strict=True)
            continue
        for column in zip(*tensors, strict=True):
            flat = [t.view(-1) for t in column] if all(t.is_contiguous() for t in column) else _flat(column)
            for name, t in zip(names, flat, strict=True):
                found.setdefault(name, []).append(t)
        if isinstance(sent[names[0]], Inverse) and tensors[0][0].ndim == 3:  # in place of eigenvectors, without values
            blocks, dim, _ = tensors[0][0].shape
            for name in names:
                found[name].append(tensors[0][0].new_zeros(blocks * dim))
    return found


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.stack(list(tensors)).view(len(tensors), -1).unbind())


def unpack_all(
    given: dict[Name, Tensor], layers: dict[str, Layer], inverses: Container[Name], *, packs: bool
) -> dict[Name, Decomposition]:
    """Return the decompositions that were received, those of one shape unpacked at once, in memory of their own.

    ``inverses``: those that are inverses; the others are eigendecompositions.
    """
    found: dict[Name, Decomposition] = {}

    def kind(name: Name) -> object:
        layer = layers[name[0]]
        return name in inverses, packed_shape(layer.spec.factor(name[1])), layer.spec.dtype, layer.weight.device

    for names in alike(given, kind):
        layer = layers[names[0][0]]
        factor, flats = layer.spec.factor(names[0][1]), [given[name].to(layer.weight.device) for name in names]
        is_inverse, size = names[0] in inverses, factor.num_elements
        if factor.form == "diagonal":
            tensors = {"inverse" if is_inverse else "values": torch.stack(flats).view(-1, factor.dim)}
        elif packs:
            rows = torch.stack(flats).view(len(flats) * factor.num_blocks, -1)
            tensors = {"inverse": unpack_triangle(rows, factor.dim)}
        else:
            matrices = torch.stack([flat[:size] for flat in flats]).view(-1, factor.dim, factor.dim)
            tensors = {"inverse" if is_inverse else "vectors": matrices}
            if not is_inverse:
                tensors["values"] = torch.stack([flat[size:] for flat in flats]).view(-1, factor.dim)
        parts = [torch.split(t, factor.num_blocks) for t in tensors.values()]
        for name, *each in zip(names, *parts, strict=True):
            found[name] = from_tensors(dict(zip(tensors, each, strict=True)))
    return found


def pack_decomposition(decomposition: Decomposition, *, packs: bool) -> Tensor:
    """Return a decomposition as one flat tensor: the triangle of an inverse, or eigenvectors and eigenvalues.

    ``packs``: whether inverses are sent as triangles. Otherwise one (a fallback) is sent in place of the eigenvectors.
    """
    match decomposition:
        case Inverse(matrix):
            if matrix.ndim == 2:
                return matrix.reshape(-1)
            if packs:
                return pack_triangle(matrix).reshape(-1)
            return torch.cat([matrix.reshape(-1), matrix.new_zeros(matrix.shape[0] * matrix.shape[1])])
        case Eigen(vectors, values):
            return values.reshape(-1) if vectors is None else torch.cat([vectors.reshape(-1), values.reshape(-1)])


def unpack_decomposition(flat: Tensor, factor: FactorSpec, *, is_inverse: bool, packed: bool) -> Decomposition:
    if is_inverse and (packed or factor.form == "diagonal"):
        return Inverse(unpack_factor(flat, factor))
    if factor.form == "diagonal":
        return Eigen(None, flat.view(factor.shape))
    matrix = flat[: factor.num_elements].view(factor.shape).clone()
    if is_inverse:
        return Inverse(matrix)
    return Eigen(matrix, flat[factor.num_elements :].view(factor.row_shape).clone())
