"""Decompose one symmetric positive semi-definite factor. Pure: the factor is never changed.

Shapes: ``[B, D, D]`` dense or ``[B, D]`` diagonal, B = blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

ORTHONORMAL = 1e-3
"""Largest accepted entry of ``|Q^T Q - I|``."""


@dataclass(frozen=True, slots=True)
class Eigen:
    vectors: Tensor | None
    """``[B, D, D]``, columns; None for a diagonal factor, whose basis is the identity."""
    values: Tensor
    """``[B, D]``, not negative."""

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values} if self.vectors is None else {"vectors": self.vectors, "values": self.values}


@dataclass(frozen=True, slots=True)
class Inverse:
    matrix: Tensor
    """``[B, D, D]`` or diagonal ``[B, D]``: the inverse of the factor plus its share of the damping."""

    def tensors(self) -> dict[str, Tensor]:
        return {"inverse": self.matrix}


Decomposition = Eigen | Inverse


def eigen(factor: Tensor) -> Eigen:
    """Return the eigendecomposition with eigenvalues clamped at 0; raises ``LinAlgError`` as ``eigh`` does."""
    if factor.ndim == 2:
        return Eigen(None, factor.clamp(min=0))
    values, vectors = torch.linalg.eigh(symmetric(factor))
    _settle_null_spaces(values, vectors)
    return Eigen(vectors, values.clamp(min=0))


NULL = 10.0
"""Of the largest eigenvalue, in units of rounding: those below are zero, and their directions arbitrary."""


def _settle_null_spaces(values: Tensor, vectors: Tensor) -> None:
    """Replace the basis of each null space by one that depends on the space alone, not on rounding.

    Later gradients have parts there, and what is done with each direction by itself would depend on the number of
    ranks. Projections of fixed vectors are orthonormalised. Waits for the device.
    """
    dim = values.shape[-1]
    limits = values[:, -1:] * (NULL * torch.finfo(values.dtype).eps)
    for block, count in enumerate((values <= limits).sum(-1).tolist()):
        if 1 < count < dim:  # eigenvalues ascend
            null = vectors[block, :, :count]
            fixed = torch.randn(dim, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(null)
            vectors[block, :, :count] = torch.linalg.qr(null @ (null.mT @ fixed)).Q


def warm_eigen(factor: Tensor, old: Eigen) -> Eigen:
    """Return an approximate eigendecomposition: one step of subspace iteration from the last basis.

    Cholesky-QR runs three times, the first with a shift: of directions that turn fast the images nearly coincide. Where
    even then the result is not orthonormal, Householder QR takes over.
    """
    if factor.ndim == 2 or old.vectors is None:
        return eigen(factor)
    found = warm_step(factor, old)
    if is_orthonormal(found.vectors):
        return found
    factor = symmetric(factor)
    basis = torch.linalg.qr(_image(factor, _largest_first(old))).Q
    return _with_values(factor, basis)


def warm_step(factor: Tensor, old: Eigen) -> Eigen:
    """Return ``warm_eigen`` without a look at the result: it may not be orthonormal."""
    if factor.ndim == 2:
        return Eigen(None, factor.clamp(min=0))
    factor = symmetric(factor)
    image = _image(factor, _largest_first(old))
    rough = _cholesky_qr(image, shift=10 * torch.finfo(image.dtype).eps * image.shape[-1])
    return _with_values(factor, _polished(_cholesky_qr(rough)))


FLOOR = 200.0
"""Of the largest eigenvalue, in units of rounding: below it a product is rounding, and directions stay as they were."""


def _image(factor: Tensor, basis: Tensor) -> Tensor:
    """Return the factor, with a floor under its eigenvalues, times a basis, in columns of length one.

    Lengths change nothing in what QR makes of it, but span all orders of magnitude, at which Cholesky fails. Without
    the floor, where a factor has no rank, columns would be rounding, all of it along the largest directions.
    """
    image = factor @ basis
    largest = image.norm(dim=-2).amax(-1)[..., None, None]
    image = image.addcmul(basis, largest * (FLOOR * torch.finfo(factor.dtype).eps))
    lengths: Tensor = image.norm(dim=-2, keepdim=True)
    return image / lengths.clamp(min=torch.finfo(factor.dtype).tiny)


def _largest_first(old: Eigen) -> Tensor:
    """Return a basis in the order in which each direction is freed of the larger ones, not swamped by them."""
    assert old.vectors is not None
    order, vectors = old.values.argsort(dim=-1, descending=True), old.vectors.to(old.values.dtype)
    return vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))


def _with_values(factor: Tensor, basis: Tensor) -> Eigen:
    values = (basis * (factor @ basis)).sum(-2)
    return Eigen(basis, values.clamp(min=0))


def damped_inverse(factor: Tensor, shift: Tensor) -> Inverse:
    """Return ``(factor + shift I)^-1`` by Cholesky; ``shift`` is ``[B]``."""
    if factor.ndim == 2:
        return Inverse((factor + shift[:, None]).reciprocal())
    damped = symmetric(factor)
    damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    inverse, sound = inverse_by_blocks(damped)
    if not bool(sound.all()):
        raise LinAlgError("Cholesky: the damped factor is not positive definite")
    return Inverse(inverse)


LEAF, SQUARE = 256, 1024
"""Blocks up to these sizes are decomposed by Cholesky, and roots multiplied with themselves; larger ones by halves."""


def inverse_by_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses of positive definite matrices ``[B, D, D]``, and which of them are to be trusted, ``[B]``.

    Cholesky by halves: products do the work, where a decomposition of a large matrix at once is a long chain of small
    steps. Nothing waits for the device. (Schur complements of explicit inverses would take two thirds of the products,
    and lose twice the digits.)
    """
    root, inverse = torch.zeros_like(matrix), torch.empty_like(matrix)
    sound = _inverse_root(matrix, root)
    _square(root, inverse)
    return inverse, sound & torch.isfinite(inverse.diagonal(dim1=-2, dim2=-1).sum(-1))


def _inverse_root(matrix: Tensor, root: Tensor) -> Tensor:
    """Set ``root``, which is zero, to ``L^-1`` of ``L L^T = matrix``; returns where there is one, ``[B]``."""
    dim = matrix.shape[-1]
    if dim <= LEAF:
        lower, info = torch.linalg.cholesky_ex(matrix)
        identity = torch.eye(dim, dtype=matrix.dtype, device=matrix.device)
        root.copy_(torch.linalg.solve_triangular(lower, identity.expand_as(matrix), upper=False))
        found: Tensor = info == 0
        return found
    half = (dim // 2 + LEAF - 1) // LEAF * LEAF
    first, second = root[:, :half, :half], root[:, half:, half:]
    first_ok = _inverse_root(matrix[:, :half, :half], first)
    below = matrix[:, half:, :half] @ first.mT
    second_ok = _inverse_root(torch.baddbmm(matrix[:, half:, half:], below, below.mT, alpha=-1), second)
    root[:, half:, :half] = (second @ below @ first).neg_()
    return first_ok & second_ok


def _square(root: Tensor, out: Tensor) -> None:
    """Set ``out`` to ``root^T root`` of a lower triangle."""
    dim = root.shape[-1]
    if dim <= SQUARE:
        out.copy_(root.mT @ root)
        return
    half = dim // 2
    below, second = root[:, half:, :half], root[:, half:, half:]
    _square(root[:, :half, :half], out[:, :half, :half])
    _square(second, out[:, half:, half:])
    out[:, :half, :half] += below.mT @ below
    out[:, half:, :half] = second.mT @ below
    out[:, :half, half:] = out[:, half:, :half].mT


def places(pieces: tuple[int, ...]) -> list[slice]:
    """Return where diagonal blocks of these sizes lie."""
    ends = list(itertools.accumulate(pieces))
    return [slice(end - size, end) for end, size in zip(ends, pieces, strict=True)]


def piece(whole: Decomposition, here: slice) -> Decomposition:
    """Return the decomposition of one diagonal block from that of all."""
    cut = {name: t[(slice(None), *[here] * (t.ndim - 1))] for name, t in whole.tensors().items()}
    return from_tensors(cut)


def join(parts: list[Decomposition]) -> Decomposition:
    """Return decompositions of diagonal blocks, all of one form, as one of the whole, with zeros between them."""
    found: dict[str, Tensor] = {}
    for name in parts[0].tensors():
        tensors = [part.tensors()[name] for part in parts]
        if tensors[0].ndim == 2:
            found[name] = torch.cat(tensors, -1)
            continue
        sizes = tuple(t.shape[-1] for t in tensors)
        found[name] = tensors[0].new_zeros(len(tensors[0]), sum(sizes), sum(sizes))
        for here, tensor in zip(places(sizes), tensors, strict=True):
            found[name][:, here, here] = tensor
    return from_tensors(found)


def is_in_pieces(whole: Decomposition, pieces: tuple[int, ...]) -> bool:
    """Whether there are zeros between the diagonal blocks."""
    matrices = [t for t in whole.tensors().values() if t.ndim == 3]
    inside = torch.stack([m[:, here, here].count_nonzero() for m in matrices for here in places(pieces)]).sum()
    return bool(inside == torch.stack([m.count_nonzero() for m in matrices]).sum())


def stored(found: Decomposition, basis_dtype: str) -> Decomposition:
    """Return a decomposition as it is kept: a basis perhaps in half the memory."""
    if not isinstance(found, Eigen) or found.vectors is None or found.vectors.dtype != torch.float32:
        return found
    return Eigen(found.vectors.to(getattr(torch, basis_dtype)), found.values)


def symmetric(factor: Tensor) -> Tensor:
    return (factor + factor.mT) / 2


def is_finite(decomposition: Decomposition) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in decomposition.tensors().values())


def is_orthonormal(vectors: Tensor | None) -> bool:
    """Whether ``Q^T Q`` is the identity to within ``ORTHONORMAL``; NaN is not."""
    return vectors is None or bool(orthonormal(vectors).all())


def orthonormal(vectors: Tensor) -> Tensor:
    """Return the same per block, ``[B]``, without waiting for the device."""
    deviation = vectors.mT @ vectors
    deviation.diagonal(dim1=-2, dim2=-1).sub_(1)
    return deviation.abs().amax((-2, -1)) < ORTHONORMAL


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Return ``trace / dim`` per block, ``[B]``."""
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)
    return diagonal.mean(-1)


def _cholesky_qr(image: Tensor, shift: float = 0.0) -> Tensor:
    """Return columns that are more nearly orthonormal, and orthonormal where they were nearly so.

    ``shift``: for columns of length one that are far from it, at which Cholesky would fail.
    """
    gram = image.mT @ image
    gram.diagonal(dim1=-2, dim2=-1).add_(shift)
    lower, _ = torch.linalg.cholesky_ex(gram)
    if image.shape[-1] > 2 * LEAF:  # solved for together, larger ones are taken one after the other, in small steps
        inverse = torch.zeros_like(lower)
        _invert_lower(lower, inverse)
        return image @ inverse.mT
    solved: Tensor = torch.linalg.solve_triangular(lower.mT, image, upper=True, left=False)
    return solved


def _invert_lower(lower: Tensor, inverse: Tensor) -> None:
    """Set ``inverse``, which is zero, to the inverses of lower triangles, by halves.

    (Inverses of halves in the decomposition itself, as in ``_inverse_root``, lose too much: the columns of a factor
    without rank are nearly dependent.)
    """
    dim = lower.shape[-1]
    if dim <= LEAF:
        identity = torch.eye(dim, dtype=lower.dtype, device=lower.device)
        inverse.copy_(torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False))
        return
    half = (dim // 2 + LEAF - 1) // LEAF * LEAF
    first, second = inverse[:, :half, :half], inverse[:, half:, half:]
    _invert_lower(lower[:, :half, :half], first)
    _invert_lower(lower[:, half:, half:], second)
    inverse[:, half:, :half] = (second @ lower[:, half:, :half] @ first).neg_()


def _polished(basis: Tensor) -> Tensor:
    """Return columns orthonormal to rounding that were so to a hundredth (Newton and Schulz; products alone)."""
    deviation = basis.mT @ basis
    deviation.diagonal(dim1=-2, dim2=-1).sub_(1)
    return torch.baddbmm(basis, basis, deviation, alpha=-0.5)


def from_tensors(tensors: dict[str, Tensor]) -> Decomposition:
    """Return the decomposition whose ``tensors()`` these are."""
    if "inverse" in tensors:
        return Inverse(tensors["inverse"])
    return Eigen(tensors.get("vectors"), tensors["values"])
