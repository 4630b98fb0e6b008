"""Decompose one symmetric positive semi-definite factor. Pure: the factor is never changed.

Shapes: ``[B, D, D]`` dense or ``[B, D]`` diagonal, B = blocks.
"""

from __future__ import annotations

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
    return Eigen(vectors, values.clamp(min=0))


def warm_eigen(factor: Tensor, old: Eigen) -> Eigen:
    """Return an approximate eigendecomposition: one step of subspace iteration from the last basis.

    Cholesky-QR runs twice: once leaves float32 bases wrong by 0.1 without any error. Where even the second
    result is not orthonormal (low-rank factors), Householder QR takes over.
    """
    if factor.ndim == 2 or old.vectors is None:
        return eigen(factor)
    factor = symmetric(factor)
    # Largest first: each direction is freed of the larger ones before it, not swamped by those after it.
    order = old.values.argsort(dim=-1, descending=True)
    image = factor @ old.vectors.gather(-1, order.unsqueeze(-2).expand_as(old.vectors))
    basis = _cholesky_qr(_cholesky_qr(image))
    if not is_orthonormal(basis):
        basis = torch.linalg.qr(image).Q
    values = (basis * (factor @ basis)).sum(-2)
    return Eigen(basis, values.clamp(min=0))


def damped_inverse(factor: Tensor, shift: Tensor) -> Inverse:
    """Return ``(factor + shift I)^-1`` by Cholesky; ``shift`` is ``[B]``."""
    if factor.ndim == 2:
        return Inverse((factor + shift[:, None]).reciprocal())
    damped = symmetric(factor)
    damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    lower, info = torch.linalg.cholesky_ex(damped)
    if bool((info != 0).any()):
        raise LinAlgError("Cholesky: the damped factor is not positive definite")
    return Inverse(torch.cholesky_inverse(lower).contiguous())


def symmetric(factor: Tensor) -> Tensor:
    return (factor + factor.mT) / 2


def is_finite(decomposition: Decomposition) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in decomposition.tensors().values())


def is_orthonormal(vectors: Tensor | None) -> bool:
    """Whether ``Q^T Q`` is the identity to within ``ORTHONORMAL``; NaN is not."""
    if vectors is None:
        return True
    identity = torch.eye(vectors.shape[-1], dtype=vectors.dtype, device=vectors.device)
    return bool((vectors.mT @ vectors - identity).abs().amax() < ORTHONORMAL)


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Return ``trace / dim`` per block, ``[B]``."""
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)
    return diagonal.mean(-1)


def _cholesky_qr(image: Tensor) -> Tensor:
    gram = image.mT @ image
    lower, _ = torch.linalg.cholesky_ex(gram)
    solved: Tensor = torch.linalg.solve_triangular(lower.mT, image, upper=True, left=False)
    return solved


def from_tensors(tensors: dict[str, Tensor]) -> Decomposition:
    """Return the decomposition whose ``tensors()`` these are."""
    if "inverse" in tensors:
        return Inverse(tensors["inverse"])
    return Eigen(tensors.get("vectors"), tensors["values"])
