"""The guarded refresh of one factor's decomposition: a ladder that never ends in an exception or a NaN.

float32 → float64 → Cholesky with more damping → the previous decomposition → none (the raw gradient passes).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition, Eigen
from dkfac.settings import Solver

Rung = Literal["ok", "float64", "cholesky", "kept", "raw"]
RUNGS: tuple[Rung, ...] = ("ok", "float64", "cholesky", "kept", "raw")
MORE_DAMPING = (10.0, 1e3, 1e5)


def refresh(
    factor: Tensor, old: Decomposition | None, solver: Solver, shift: Tensor, pieces: tuple[int, ...] = ()
) -> tuple[Decomposition | None, Rung]:
    """Return the decomposition to use from now on and the rung that produced it.

    ``shift``: this factor's share of the damping, ``[B]``; used where the factor is inverted directly. ``pieces``:
    sizes of the diagonal blocks to decompose instead of the whole.
    """
    last: Rung = "raw" if old is None else "kept"
    if not bool(torch.isfinite(factor).all()):
        return old, last
    for dtype, rung in ((factor.dtype, "ok"), (torch.float64, "float64")):
        start = old if dtype == factor.dtype else None
        found = _attempt_pieces(factor.to(dtype), start, solver, shift.to(dtype), pieces)
        if found is not None:
            found = _cast(found, factor.dtype)
            if decompose.is_finite(found):
                return found, rung  # type: ignore[return-value]
    scale = decompose.mean_eigenvalue(factor).to(torch.float64)
    floor = scale * torch.finfo(torch.float32).eps + torch.finfo(torch.float32).tiny
    for more in MORE_DAMPING:
        damped = torch.maximum(shift.to(torch.float64), floor) * more
        found = _attempt_pieces(factor.to(torch.float64), None, "cholesky", damped, pieces)
        if found is not None:
            found = _cast(found, factor.dtype)
            if decompose.is_finite(found):
                return found, "cholesky"
    return old, last


def _attempt_pieces(
    factor: Tensor, old: Decomposition | None, solver: Solver, shift: Tensor, pieces: tuple[int, ...]
) -> Decomposition | None:
    """Return the decomposition of a factor's diagonal blocks as one of the whole."""
    if len(pieces) < 2 or factor.ndim == 2:
        return _attempt(factor, old, solver, shift)
    if solver == "warm-eigen" and old is not None and not decompose.is_in_pieces(old, pieces):
        old = None
    parts = []
    for here in decompose.places(pieces):
        start = None if old is None else decompose.piece(old, here)
        part = _attempt(factor[:, here, here], start, solver, shift)
        if part is None:
            return None
        parts.append(part)
    return decompose.join(parts)


def _attempt(factor: Tensor, old: Decomposition | None, solver: Solver, shift: Tensor) -> Decomposition | None:
    """Return a checked decomposition, or None where the solver failed or lied."""
    try:
        if solver == "cholesky":
            found: Decomposition = decompose.damped_inverse(factor, shift)
        elif solver == "warm-eigen" and isinstance(old, Eigen):
            found = decompose.warm_eigen(factor, old)
        else:
            found = decompose.eigen(factor)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # LinAlgError, or a solver library's own error
        return None
    if not decompose.is_finite(found):
        return None
    if isinstance(found, Eigen) and not decompose.is_orthonormal(found.vectors):
        return None
    return found


def _cast(found: Decomposition, dtype: torch.dtype) -> Decomposition:
    """Return the decomposition in the factor's dtype, contiguous: LAPACK's results are column-major."""
    tensors = {name: t.to(dtype).contiguous() for name, t in found.tensors().items()}
    return decompose.from_tensors(tensors)
