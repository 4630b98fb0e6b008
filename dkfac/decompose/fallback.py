"""The fallback ladder: refresh one factor's decomposition without ever ending in an exception or a NaN.

Input: a running factor and its previous decomposition. Output: the decomposition to use and its outcome. Owns: nothing.

The rungs are float32, float64, Cholesky with more damping, the previous decomposition, and none, in which case the
layer's raw gradient is used.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dkfac.config.settings import Solver
from dkfac.ops import decompose
from dkfac.ops.decompose import Decomposition, Eigen

Outcome = Literal["ok", "float64", "cholesky", "kept", "raw"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "float64", "cholesky", "kept", "raw")
MORE_DAMPING = (10.0, 1e3, 1e5)


def refresh(
    factor: Tensor, old: Decomposition | None, solver: Solver, shift: Tensor
) -> tuple[Decomposition | None, Outcome]:
    """Return the decomposition to use from now on and the outcome that produced it. Synchronizes with the device.

    ``shift`` is this factor's share of the damping, ``[B]``; it is used where the factor is inverted directly. An
    out-of-memory error is raised.
    """
    last: Outcome = "raw" if old is None else "kept"
    if not bool(torch.isfinite(factor).all()):
        return old, last
    for dtype, outcome in ((factor.dtype, "ok"), (torch.float64, "float64")):
        start = old if dtype == factor.dtype else None
        found = _attempt(factor.to(dtype), start, solver, shift.to(dtype))
        if found is not None:
            found = _cast(found, factor.dtype)
            if decompose.is_finite(found):
                return found, outcome  # type: ignore[return-value]
    scale = decompose.mean_eigenvalue(factor).to(torch.float64)
    floor = scale * torch.finfo(torch.float32).eps + torch.finfo(torch.float32).tiny
    for more in MORE_DAMPING:
        damped = torch.maximum(shift.to(torch.float64), floor) * more
        found = _attempt(factor.to(torch.float64), None, "cholesky", damped)
        if found is not None:
            found = _cast(found, factor.dtype)
            if decompose.is_finite(found):
                return found, "cholesky"
    return old, last


def _attempt(factor: Tensor, old: Decomposition | None, solver: Solver, shift: Tensor) -> Decomposition | None:
    """Return a validated decomposition, or None if the solver failed or returned an invalid result."""
    try:
        if solver == "cholesky":
            found: Decomposition = decompose.damped_inverse(factor, shift)
        elif solver == "warm-eigen" and isinstance(old, Eigen):
            found = decompose.warm_eigen(factor, old)
        else:
            found = decompose.eigen(factor)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # LinAlgError, or an error of the solver library
        return None
    if not decompose.is_finite(found):
        return None
    if isinstance(found, Eigen) and not decompose.is_orthonormal(found.vectors):
        return None
    return found


def _cast(found: Decomposition, dtype: torch.dtype) -> Decomposition:
    """Return the decomposition in the factor's dtype, contiguous: LAPACK returns column-major results."""
    tensors = {name: t.to(dtype).contiguous() for name, t in found.tensors().items()}
    return decompose.from_tensors(tensors)
