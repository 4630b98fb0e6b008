"""Apply a decomposed Kronecker-factored curvature to a gradient.

Input: canonical gradients and decompositions by factor. Output: preconditioned gradients. Owns: nothing.

Shapes: B = blocks, O = out features, I = in features (+1 with a bias). The curvature is ``A (x) G`` with A acting on I
and G on O; norm layers have one factor F that acts on O.

A and G may be block-diagonal. Their pieces are tensors ``[B * P, w, w]`` of P diagonal blocks each, in order; a whole
matrix is one tensor ``[B, O, O]`` or ``[B, I, I]``. Rows or columns after the last piece (a bias, or padding) are
multiplied by 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dkfac.ops.decompose import Decomposition, Eigen, Inverse
from dkfac.ops.fused import divide_

Value = TypeVar("Value")
OUTPUT_KEYS, INPUT_KEYS = ("F", "G", "G_rest"), ("A", "A_rest")


FEW_PRODUCTS = 3
"""Up to this many products are launched one by one: more would cost more than copying their operands together."""


def of_side(by_key: Mapping[str, Value], keys: Sequence[str]) -> list[Value]:
    """Return what belongs to the factors of a layer's outputs or inputs, in order."""
    return [by_key[key] for key in keys if key in by_key]


def swapped(by_key: Mapping[str, Value]) -> dict[str, Value]:
    """Return the same with the keys of inputs and outputs exchanged, for gradients that are kept transposed."""
    other = {"A": "G", "A_rest": "G_rest", "G": "A", "G_rest": "A_rest"}
    return {other[key]: value for key, value in by_key.items()}


def from_left(pieces: Sequence[Tensor], x_BOI: Tensor) -> Tensor:
    """Return ``matrix @ x``."""
    blocks, size, columns = x_BOI.shape
    if len(pieces) == 1 and pieces[0].shape[:2] == (blocks, size):
        return pieces[0] @ x_BOI
    done, begin = list[Tensor](), 0
    for piece in pieces:
        rows = len(piece) // blocks * piece.shape[-1]
        tiles = x_BOI[:, begin : begin + rows].reshape(len(piece), -1, columns)
        done.append((piece @ tiles).view(blocks, rows, columns))
        begin += rows
    return done[0] if begin == size and len(done) == 1 else torch.cat([*done, x_BOI[:, begin:]], 1)


def from_right(x_BOI: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Return ``x @ matrix``."""
    blocks, rows, size = x_BOI.shape
    if len(pieces) == 1 and pieces[0].shape[:2] == (blocks, size):
        return x_BOI @ pieces[0]
    result, begin = torch.empty_like(x_BOI, memory_format=torch.contiguous_format), 0
    for piece in pieces:
        number, width = len(piece) // blocks, piece.shape[-1]
        here = slice(begin, begin + number * width)
        tiles, target = (torch.unflatten(x[..., here], 2, (number, width)).transpose(1, 2) for x in (x_BOI, result))
        matrices = piece.view(blocks, number, width, width)
        if min(blocks, number) > FEW_PRODUCTS:
            target.copy_((tiles.reshape(len(piece), rows, width) @ piece).view(blocks, number, rows, width))
        else:  # without copies: the tiles of a product have the stride of whole rows
            along = 0 if blocks <= number else 1
            for x, matrix, y in zip(tiles.unbind(along), matrices.unbind(along), target.unbind(along), strict=True):
                torch.bmm(x, matrix, out=y)
        begin = here.stop
    result[..., begin:] = x_BOI[..., begin:]
    return result


def diagonal(pieces: Sequence[Tensor], blocks: int, size: int) -> Tensor:
    """Return the diagonals ``[B * P, w]`` of a matrix's pieces as one, ``[B, size]``, truncated or followed by 1."""
    if len(pieces) == 1 and pieces[0].shape == (blocks, size):
        return pieces[0]
    parts = [piece.reshape(blocks, -1) for piece in pieces]
    missing = size - sum(part.shape[1] for part in parts)
    if missing > 0:
        parts.append(parts[0].new_ones(blocks, missing))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1))[:, :size]


def side_of(key: str) -> str:
    """Return the key of the whole factor that a factor is a part of."""
    return key.removesuffix("_rest")


def per_piece(values: Tensor, number: int) -> Tensor:
    """Return values of blocks, ``[B, ...]``, repeated for the pieces of each block, ``[number, ...]``."""
    return values if len(values) == number else values.repeat_interleave(number // len(values), 0)


def spectrum(decompositions: dict[str, Eigen], shape: tuple[int, ...]) -> Tensor:
    """Return the eigenvalues of the curvature in its eigenbasis, in the ``shape`` of the gradient, ``[B, O, I]``."""
    outputs, inputs = both_values(decompositions, shape)
    return outputs.unsqueeze(-1) if inputs is None else outputs.unsqueeze(-1) * inputs.unsqueeze(-2)


def both_values(decompositions: dict[str, Eigen], shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues of G, or F, ``[B, O]``, and of A, ``[B, I]``, where a bias that A leaves out has 1."""
    blocks, out, across = shape
    outputs = diagonal([d.values for d in of_side(decompositions, OUTPUT_KEYS)], blocks, out)
    inputs = [d.values for d in of_side(decompositions, INPUT_KEYS)]
    if "A_C" in decompositions:
        channels, positions = (decompositions[key].values for key in ("A_C", "A_S"))
        inputs = [(channels.unsqueeze(-1) * positions.unsqueeze(-2)).flatten(1)]
    return outputs, diagonal(inputs, blocks, across) if inputs else None


def on_map(grad_BOI: Tensor, channels: Tensor, positions: Tensor) -> Tensor:
    """Multiply inputs that are a flattened map from the right by ``channels (x) positions``; a bias column after them
    is left unchanged."""
    c, s = channels.shape[-2], positions.shape[-2]
    b, o, _ = grad_BOI.shape
    maps = grad_BOI[..., : c * s].reshape(b, o * c, s) @ positions  # folded: broadcasting the basis would copy it
    maps = maps.view(b, o, c, s).mT.reshape(b, o * s, c) @ channels
    maps = maps.view(b, o, s, c).mT.reshape(b, o, c * s)
    return torch.cat([maps, grad_BOI[..., c * s :]], -1)


def rotate(grad_BOI: Tensor, decompositions: dict[str, Eigen], *, back: bool = False) -> Tensor:
    """Return the gradient in the eigenbasis, or with ``back`` in the basis of the weights again."""
    bases = {key: d.vectors.to(grad_BOI.dtype) for key, d in decompositions.items() if d.vectors is not None}
    return multiply(grad_BOI, bases, transposed=not back)


def multiply(grad_BOI: Tensor, matrices: dict[str, Tensor], *, transposed: bool = False) -> Tensor:
    """Return a gradient multiplied by the matrix of each factor, or its pieces: ``G grad A^T``; ``transposed``: by the
    transposed matrices, ``G^T grad A``."""
    if left := of_side(matrices, OUTPUT_KEYS):
        grad_BOI = from_left([matrix.mT for matrix in left] if transposed else left, grad_BOI)
    if right := of_side(matrices, INPUT_KEYS):
        grad_BOI = from_right(grad_BOI, right if transposed else [matrix.mT for matrix in right])
    if "A_C" in matrices:
        c, s = matrices["A_C"], matrices["A_S"]
        grad_BOI = on_map(grad_BOI, *((c, s) if transposed else (c.mT, s.mT)))
    return grad_BOI


def precondition_eigen(
    grad_BOI: Tensor, decompositions: dict[str, Eigen], *, damping: Tensor | float, moments: Tensor | None = None
) -> Tensor:
    """Return ``(curvature + damping I)^-1 grad``, exact for the Kronecker approximation.

    ``moments`` (EKFAC) replace the products of eigenvalues. With damping 0, directions without curvature are dropped:
    the pseudo-inverse.
    """
    rotated = rotate(grad_BOI, decompositions)
    undamped = isinstance(damping, float) and damping == 0.0
    if moments is None and "F" not in decompositions and not undamped:
        each = damping.to(rotated.dtype) if isinstance(damping, Tensor) else rotated.new_full((), damping)
        each = each.reshape(-1).expand(len(rotated)).contiguous()
        rotated = rotated.clone() if rotated is grad_BOI else rotated.contiguous()
        g, a = both_values(decompositions, rotated.shape)
        assert a is not None
        divide_(rotated.unsqueeze(1), g.unsqueeze(1), a.unsqueeze(1), each)
        return rotate(rotated, decompositions, back=True)
    eigenvalues = spectrum(decompositions, rotated.shape) if moments is None else moments
    if undamped:
        largest = eigenvalues.amax((-2, -1), keepdim=True)
        floor = largest * torch.finfo(eigenvalues.dtype).eps * max(eigenvalues.shape[-2:])
        rotated = torch.where(eigenvalues > floor, rotated / eigenvalues, 0)
    else:
        rotated = rotated / (eigenvalues + damping)
    return rotate(rotated, decompositions, back=True)


def precondition_inverse(grad_BOI: Tensor, inverses: dict[str, Inverse]) -> Tensor:
    """Return ``G^-1 grad A^-1`` with the damped inverses."""
    left, right = ([inverse.matrix for inverse in of_side(inverses, keys)] for keys in (OUTPUT_KEYS, INPUT_KEYS))
    grad_BOI = left[0].unsqueeze(-1) * grad_BOI if left[0].ndim == 2 else from_left(left, grad_BOI)
    if right:
        grad_BOI = grad_BOI * right[0].unsqueeze(-2) if right[0].ndim == 2 else from_right(grad_BOI, right)
    if "A_C" in inverses:
        grad_BOI = on_map(grad_BOI, inverses["A_C"].matrix, inverses["A_S"].matrix)
    return grad_BOI


def factored_damping(means: dict[str, Tensor], damping: Tensor | float) -> dict[str, Tensor]:
    """Split damping over the factors (factored Tikhonov); return what is added to each factor, ``[B]``.

    ``means`` are the mean eigenvalues of whole factors, ``[B]``; their ratio decides the split.
    """
    if "F" in means:
        return {"F": damping + torch.zeros_like(means["F"])}
    if "A_C" in means:
        shares = {key: torch.where(m > 0, m, 1.0).log() for key, m in means.items()}
        middle = torch.stack(list(shares.values())).mean(0)
        third = torch.as_tensor(damping, dtype=torch.float64) ** (1 / 3)
        return {key: third.to(share) * (share - middle).exp() for key, share in shares.items()}
    a, g = means["A"], means["G"]
    pi = torch.where((a > 0) & (g > 0), a.sqrt() / g.sqrt(), 1.0)  # a / g may overflow
    root = damping.to(pi).sqrt() if isinstance(damping, Tensor) else damping**0.5
    shifts = {"A": root * pi, "G": root / pi}
    return {key: shifts[key[0]] for key in means}


TF32_ROUNDING, TF32_TOLERANCE = 2.0**-11 / 3**0.5, 3e-3
"""Approximate relative rounding error of TF32, and the largest one accepted in a preconditioned gradient."""


def tf32_error(
    decompositions: dict[str, Decomposition],
    means: dict[str, Tensor],
    damping: Tensor | float,
    shape: tuple[int, ...],
) -> Tensor:
    """Return the expected relative error of a gradient of this shape preconditioned in TF32, ``[B]``.

    Rounding errors are about equal in all directions, and are amplified where there is little curvature. The gradient
    is assumed to be as large in each direction as the square root of the curvature.
    """
    bases = {key: d for key, d in decompositions.items() if isinstance(d, Eigen)}
    if len(bases) == len(decompositions):
        values = spectrum(bases, shape)
        damped = values + (damping.reshape(-1, 1, 1) if isinstance(damping, Tensor) else damping)
        noise, signal = damped.reciprocal().square().sum((1, 2)), (values / damped.square()).sum((1, 2))
        return TF32_ROUNDING * (values.mean((1, 2)) * noise / signal).sqrt()
    shifts, inverses = factored_damping(means, damping), as_inverses(decompositions, means, damping)
    error = torch.full_like(next(iter(means.values())), TF32_ROUNDING)
    for side in dict.fromkeys(map(side_of, inverses)):
        pieces = [inverse.matrix for key, inverse in inverses.items() if side_of(key) == side]
        if pieces[0].ndim == 2:
            continue  # no product
        noise, trace = torch.zeros_like(error), torch.zeros_like(error)
        for matrix in pieces:
            noise = noise + matrix.square().sum((1, 2)).view(len(error), -1).sum(1)
            trace = trace + matrix.diagonal(dim1=1, dim2=2).sum(1).view(len(error), -1).sum(1)
        error = error * (means[side] * noise / (trace - shifts[side] * noise).clamp(min=0)).sqrt()
    return error


def as_inverses(
    decompositions: dict[str, Decomposition], means: dict[str, Tensor], damping: Tensor | float
) -> dict[str, Inverse]:
    """Return damped inverses for all factors, computed from the eigendecomposition where a factor has one."""
    shifts = factored_damping(means, damping)
    inverses: dict[str, Inverse] = {}
    for key, decomposition in decompositions.items():
        if isinstance(decomposition, Inverse):
            inverses[key] = decomposition
            continue
        shift = per_piece(shifts[key], len(decomposition.values))
        scale = (decomposition.values + shift[:, None]).reciprocal()
        vectors = decomposition.vectors
        inverses[key] = Inverse(scale if vectors is None else (vectors * scale.unsqueeze(-2)) @ vectors.mT)
    return inverses
