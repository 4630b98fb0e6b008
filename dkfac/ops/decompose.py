"""Decompose one symmetric positive semi-definite factor.

Input: a factor ``[B, D, D]`` or diagonal ``[B, D]``, B = blocks; not modified. Output: a decomposition. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.ops import cholesky_qr

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

ORTHONORMAL = 1e-3
"""Largest accepted entry of ``|Q^T Q - I|``."""


@dataclass(frozen=True, slots=True)
class Eigen:
    vectors: Tensor | None
    """``[B, D, D]``, in columns; None for a diagonal factor, whose eigenbasis is the identity."""
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
"""In units of eps times the largest eigenvalue: eigenvalues below are zero, and their directions arbitrary."""


def _settle_null_spaces(values: Tensor, vectors: Tensor) -> None:
    """Replace the basis of each null space, in place, by one that depends only on the space, not on rounding.

    Later gradients have components there, and whatever treats each direction by itself would depend on the number of
    ranks. Projections of fixed vectors are orthonormalized. Synchronizes with the device.
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

    Cholesky-QR runs twice, first with a shift (images of directions that rotate fast are nearly parallel), then a
    Newton-Schulz step. If that is not orthonormal, Householder QR is used. Synchronizes with the device.
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
    """Return ``warm_eigen`` without checking the result, which may not be orthonormal; does not synchronize."""
    if factor.ndim == 2:
        return Eigen(None, factor.clamp(min=0))
    return warm_steps([factor], [old])[0][0]


def warm_steps(factors: Sequence[Tensor], olds: Sequence[Eigen]) -> list[tuple[Eigen, Tensor]]:
    """Return ``warm_step`` of several batches of dense factors, and whether each block is orthonormal, ``[B]``."""
    factors = [symmetric(factor) for factor in factors]
    images = [_image(factor, _largest_first(old)) for factor, old in zip(factors, olds, strict=True)]
    bases = _orthonormalized(images)
    found = []
    for factor, basis in zip(factors, bases, strict=True):
        polished, is_orthonormal = _polished(basis)
        found.append((_with_values(factor, polished), is_orthonormal))
    return found


FLOOR = 200.0
"""In units of eps times the largest eigenvalue: smaller products are rounding errors; their directions are kept."""


def _image(factor: Tensor, basis: Tensor) -> Tensor:
    """Return the factor, with a floor under its eigenvalues, times a basis, with columns normalized to length one.

    Lengths do not change the result of QR, but span all orders of magnitude, where Cholesky fails. Without the floor,
    where a factor is rank-deficient, columns would be rounding errors, all along the largest directions.
    """
    image = factor @ basis
    largest = image.norm(dim=-2).amax(-1)[..., None, None]
    image.addcmul_(basis, largest * (FLOOR * torch.finfo(factor.dtype).eps))
    lengths: Tensor = image.norm(dim=-2, keepdim=True)
    return image.div_(lengths.clamp_(min=torch.finfo(factor.dtype).tiny))


def _largest_first(old: Eigen) -> Tensor:
    """Return the basis, largest eigenvalues first: QR then removes large directions from small ones, not vice versa."""
    assert old.vectors is not None
    order, vectors = old.values.argsort(dim=-1, descending=True), old.vectors.to(old.values.dtype)
    return vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))


def _with_values(factor: Tensor, basis: Tensor) -> Eigen:
    values = (factor @ basis).mul_(basis).sum(-2)
    return Eigen(basis, values.clamp(min=0))


def damped_inverse(factor: Tensor, shift: Tensor) -> Inverse:
    """Return ``(factor + shift I)^-1`` by Cholesky; ``shift`` is ``[B]``. Synchronizes with the device."""
    if factor.ndim == 2:
        return Inverse((factor + shift[:, None]).reciprocal())
    damped = symmetric(factor)
    damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    inverse, sound = inverse_by_blocks(damped)
    if not bool(sound.all()):
        raise LinAlgError("Cholesky: the damped factor is not positive definite")
    return Inverse(inverse)


LEAF, SQUARE = 256, 1024
"""Largest blocks that Cholesky decomposes, and roots that are multiplied with themselves; larger ones are halved."""


def inverse_by_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses of positive definite matrices ``[B, D, D]``, and which of them are valid, ``[B]``.

    Recursive Cholesky by halves: matrix products do the work, whereas decomposing a large matrix at once is a long
    chain of small steps. Does not synchronize with the device. (Schur complements of explicit inverses would take two
    thirds of the products, and lose twice the digits.)
    """
    root, inverse = torch.zeros_like(matrix), torch.empty_like(matrix)
    sound = _inverse_root(matrix, root)
    _square(root, inverse)
    return inverse, sound & torch.isfinite(inverse.diagonal(dim1=-2, dim2=-1).sum(-1))


def _inverse_root(matrix: Tensor, root: Tensor) -> Tensor:
    """Set ``root``, which is zero, to ``L^-1`` of ``L L^T = matrix``; return where that exists, ``[B]``."""
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
    """Set ``out`` to ``root^T root`` of a lower triangular matrix."""
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


def stored(found: Decomposition, basis_dtype: str) -> Decomposition:
    """Return a decomposition as it is stored: float32 eigenvectors in ``basis_dtype``, which may halve their memory."""
    if not isinstance(found, Eigen) or found.vectors is None or found.vectors.dtype != torch.float32:
        return found
    return Eigen(found.vectors.to(getattr(torch, basis_dtype)), found.values)


def symmetric(factor: Tensor) -> Tensor:
    return (factor + factor.mT).div_(2)


def is_finite(decomposition: Decomposition) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in decomposition.tensors().values())


def is_orthonormal(vectors: Tensor | None) -> bool:
    """Return whether ``Q^T Q`` is the identity to within ``ORTHONORMAL``, without NaN. Synchronizes with the device."""
    return vectors is None or bool(orthonormal(vectors).all())


def orthonormal(vectors: Tensor) -> Tensor:
    """Return the same per block, ``[B]``, without synchronizing with the device."""
    deviation = vectors.mT @ vectors
    deviation.diagonal(dim1=-2, dim2=-1).sub_(1)
    return deviation.abs().amax((-2, -1)) < ORTHONORMAL


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Return ``trace / dim`` per block, ``[B]``."""
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)
    return diagonal.mean(-1)


def _orthonormalized(images: list[Tensor]) -> list[Tensor]:
    """Return nearly orthonormal columns of several batches, by Cholesky-QR with a shift and once more without."""
    shift = 10 * torch.finfo(images[0].dtype).eps
    which = [i for i, image in enumerate(images) if cholesky_qr.can_orthonormalize([image])]
    found = dict(zip(which, cholesky_qr.orthonormalized([images[i] for i in which], [shift, 0.0]), strict=True))
    for i, image in enumerate(images):
        if i not in found:
            found[i] = _cholesky_qr(_cholesky_qr(image, shift=shift * image.shape[-1]))
    return [found[i] for i in range(len(images))]


def _cholesky_qr(image: Tensor, shift: float = 0.0) -> Tensor:
    """Return columns closer to orthonormal; columns that were almost orthonormal become orthonormal.

    ``shift``: regularizes columns of length one that are far from orthonormal, where Cholesky would fail.
    """
    gram = image.mT @ image
    gram.diagonal(dim1=-2, dim2=-1).add_(shift)
    lower, _ = torch.linalg.cholesky_ex(gram)
    if image.shape[-1] > 2 * LEAF:  # a batched solve handles larger ones one after the other, in small steps
        inverse = torch.zeros_like(lower)
        _invert_lower(lower, inverse)
        return image @ inverse.mT
    solved: Tensor = torch.linalg.solve_triangular(lower.mT, image, upper=True, left=False)
    return solved


def _invert_lower(lower: Tensor, inverse: Tensor) -> None:
    """Set ``inverse``, which is zero, to the inverses of lower triangular matrices, recursively by halves.

    (Inverting halves in the decomposition itself, as in ``_inverse_root``, loses too much precision: the columns of a
    rank-deficient factor are nearly dependent.)
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


def _polished(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns orthonormal to rounding from nearly orthonormal ones, and whether they were near enough, ``[B]``.
    A Newton-Schulz step, which takes only products, doubles the number of correct digits; float64 has twice as many.

    If ``Q^T Q = I + E``, it is about ``I - 3/4 E^2`` afterwards, of which no entry exceeds the largest squared norm of
    a column of E.
    """
    for _ in range(2 if basis.dtype == torch.float64 else 1):
        deviation = basis.mT @ basis
        deviation.diagonal(dim1=-2, dim2=-1).sub_(1)
        basis = torch.baddbmm(basis, basis, deviation, alpha=-0.5)
    return basis, (deviation.square_().sum(-2) < ORTHONORMAL).all(-1)


def from_tensors(tensors: dict[str, Tensor]) -> Decomposition:
    """Return the decomposition that has these ``tensors()``."""
    if "inverse" in tensors:
        return Inverse(tensors["inverse"])
    return Eigen(tensors.get("vectors"), tensors["values"])
