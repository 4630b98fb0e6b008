"""Triton, where it runs: kernels are plain functions of their modules until they are first launched.

A kernel finds ``tl`` among the globals of its module, which are given it here. Only constants are annotated: Triton
looks the names in annotations up, and allows only its own. The first launch on a device compiles: make it before a CUDA
graph is captured.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

tl: Any = None
"""``triton.language``, for the kernel below."""

ROUNDING = {"enable_fp_fusion": False}
"""As torch rounds. Triton 3.9 warns where the choice is left to it, and 3.10 will choose otherwise."""


def usable(dtypes: Sequence[torch.dtype], *tensors: Tensor) -> bool:
    """Whether kernels take these tensors: of these types, on one GPU that Triton can run on.

    Under TRITON_INTERPRET=1, on the CPU too.
    """
    device = tensors[0].device
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False  # before Triton is imported in vain
    if not all(t.device == device and t.dtype in dtypes for t in tensors):
        return False
    return found() is not None and works(device)


@functools.cache
def found() -> tuple[Any, Any] | None:
    """Return Triton and its language, None where it is not installed."""
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None


@functools.cache
def compiled(kernel: Callable[..., None]) -> Any:
    """Return a kernel's compiled form."""
    modules = found()
    assert modules is not None
    triton, kernel.__globals__["tl"] = modules
    return triton.jit(kernel)


@functools.cache
def works(device: torch.device) -> bool:
    """Whether a kernel runs there. Triton that imports may still lack a C compiler, Python's headers or this GPU."""
    if device.type != "cuda":  # the variable counts when Triton makes a kernel, not when we are called
        return type(compiled(_trial_kernel)).__name__ == "InterpretedFunction"
    try:
        launch(_trial_kernel, 1, torch.ones(1, device=device))
    except Exception as error:
        warnings.warn(
            f"Triton cannot run kernels on {device}, so dkfac uses slower torch operations there. "
            f"It said: {type(error).__name__}: {error}",
            stacklevel=4,
        )
        return False
    return True


def launch(kernel: Callable[..., None], programs: int, first: Tensor, *arguments: Any, **constants: int) -> None:
    """Run programs of a kernel where its first argument is."""
    if programs == 0:
        return
    with torch.cuda.device(first.get_device()):  # Triton launches on the current one, wherever the tensors are
        compiled(kernel)[(programs,)](first, *arguments, **constants, **ROUNDING)


def _trial_kernel(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1)
