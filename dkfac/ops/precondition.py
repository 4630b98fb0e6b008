"""Apply a decomposed Kronecker-factored curvature to a gradient.

Input: canonical gradients and decompositions by factor. Output: preconditioned gradients. Owns: nothing.

Shapes: B = blocks, O = out features, I = in features (+1 where the bias is folded in). The curvature is ``A (x) G``
with A acting on I and G on O; norm layers have one factor F that acts on O.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.ops.decompose import Decomposition, Eigen, Inverse
from dkfac.ops.fused import divide_


def spectrum(decompositions: dict[str, Eigen], width: int | None = None) -> Tensor:
    """Return the eigenvalues of the curvature in its eigenbasis, ``[B, O, I]``; ``width``: truncates I."""
    if "F" in decompositions:
        return decompositions["F"].values.unsqueeze(-1)
    out = decompositions["G"].values
    return out.unsqueeze(-1) * input_values(decompositions)[:, :width].unsqueeze(-2)


def input_values(decompositions: dict[str, Eigen]) -> Tensor:
    """Return the eigenvalues of A, ``[B, I]``; of a doubly factored A the products, and 1 for the bias."""
    if "A" in decompositions:
        return decompositions["A"].values
    channels, positions = (decompositions[key].values for key in ("A_C", "A_S"))
    both = (channels.unsqueeze(-1) * positions.unsqueeze(-2)).flatten(1)
    return torch.cat([both, torch.ones_like(both[:, :1])], 1)


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
    left = decompositions["F"] if "F" in decompositions else decompositions["G"]
    right = decompositions.get("A")
    if left.vectors is not None:
        vectors = left.vectors.to(grad_BOI.dtype)
        grad_BOI = (vectors if back else vectors.mT) @ grad_BOI
    if right is not None and right.vectors is not None:
        vectors = right.vectors.to(grad_BOI.dtype)
        grad_BOI = grad_BOI @ (vectors.mT if back else vectors)
    if "A_C" in decompositions:
        bases = [decompositions[key].vectors for key in ("A_C", "A_S")]
        c, s = (basis.to(grad_BOI.dtype) for basis in bases if basis is not None)
        grad_BOI = on_map(grad_BOI, c.mT if back else c, s.mT if back else s)
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
        width = rotated.shape[-1]
        g, a = (v.unsqueeze(1) for v in (decompositions["G"].values, input_values(decompositions)[:, :width]))
        divide_(rotated.unsqueeze(1), g, a, each)
        return rotate(rotated, decompositions, back=True)
    eigenvalues = spectrum(decompositions, rotated.shape[-1]) if moments is None else moments
    if undamped:
        largest = eigenvalues.amax((-2, -1), keepdim=True)
        floor = largest * torch.finfo(eigenvalues.dtype).eps * max(eigenvalues.shape[-2:])
        rotated = torch.where(eigenvalues > floor, rotated / eigenvalues, 0)
    else:
        rotated = rotated / (eigenvalues + damping)
    return rotate(rotated, decompositions, back=True)


def precondition_inverse(grad_BOI: Tensor, inverses: dict[str, Inverse]) -> Tensor:
    """Return ``G^-1 grad A^-1`` with the damped inverses."""
    left = (inverses["F"] if "F" in inverses else inverses["G"]).matrix
    grad_BOI = left.unsqueeze(-1) * grad_BOI if left.ndim == 2 else left @ grad_BOI
    if "A" in inverses:
        right = inverses["A"].matrix
        grad_BOI = grad_BOI * right.unsqueeze(-2) if right.ndim == 2 else grad_BOI @ right
    if "A_C" in inverses:
        grad_BOI = on_map(grad_BOI, inverses["A_C"].matrix, inverses["A_S"].matrix)
    return grad_BOI


def factored_damping(means: dict[str, Tensor], damping: Tensor | float) -> dict[str, Tensor]:
    """Split damping over the factors (factored Tikhonov); return what is added to each factor, ``[B]``.

    ``means`` are the factors' mean eigenvalues, ``[B]``; their ratio decides the split.
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
    return {"A": root * pi, "G": root / pi}


TF32_ROUNDING, TF32_TOLERANCE = 2.0**-11 / 3**0.5, 3e-3
"""Approximate relative rounding error of TF32, and the largest one accepted in a preconditioned gradient."""


def tf32_error(decompositions: dict[str, Decomposition], means: dict[str, Tensor], damping: Tensor | float) -> Tensor:
    """Return the expected relative error of a gradient preconditioned in TF32, ``[B]``.

    Rounding errors are about equal in all directions, and are amplified where there is little curvature. The gradient
    is assumed to be as large in each direction as the square root of the curvature.
    """
    bases = {key: d for key, d in decompositions.items() if isinstance(d, Eigen)}
    if len(bases) == len(decompositions):
        values = spectrum(bases)
        damped = values + (damping.reshape(-1, 1, 1) if isinstance(damping, Tensor) else damping)
        noise, signal = damped.reciprocal().square().sum((1, 2)), (values / damped.square()).sum((1, 2))
        return TF32_ROUNDING * (values.mean((1, 2)) * noise / signal).sqrt()
    shifts = factored_damping(means, damping)
    error = torch.full_like(next(iter(means.values())), TF32_ROUNDING)
    for key, decomposition in as_inverses(decompositions, means, damping).items():
        matrix = decomposition.matrix
        if matrix.ndim == 2:
            continue  # no product
        noise, trace = matrix.square().sum((1, 2)), matrix.diagonal(dim1=1, dim2=2).sum(1)
        error = error * (means[key] * noise / (trace - shifts[key] * noise).clamp(min=0)).sqrt()
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
        scale = (decomposition.values + shifts[key][:, None]).reciprocal()
        vectors = decomposition.vectors
        inverses[key] = Inverse(scale if vectors is None else (vectors * scale.unsqueeze(-2)) @ vectors.mT)
    return inverses
