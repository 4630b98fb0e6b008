"""Compile and launch Triton kernels, where Triton is available.

Input: kernels, which are plain functions until they are first launched. Output: launches. Owns: the compiled kernels.

A kernel finds ``tl`` in the globals of its module, where it is set here. Only constants are annotated: Triton resolves
the names in annotations, and allows only its own. The first launch on a device compiles: make it before capturing a
CUDA graph.
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

COMPILE_OPTIONS = {"enable_fp_fusion": False}
"""Round as torch does. Triton 3.9 warns where this is left to its default, and 3.10 will change the default."""


def usable(dtypes: Sequence[torch.dtype], *tensors: Tensor) -> bool:
    """Return whether kernels support these tensors: of these dtypes, all on one GPU that Triton can run on.

    With TRITON_INTERPRET=1, on the CPU too.
    """
    device = tensors[0].device
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False  # avoids importing Triton for nothing
    if not all(t.device == device and t.dtype in dtypes for t in tensors):
        return False
    return found() is not None and works(device)


@functools.cache
def found() -> tuple[Any, Any] | None:
    """Return Triton and its language; None if it is not installed."""
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None


@functools.cache
def compiled(kernel: Callable[..., None]) -> Any:
    """Return the compiled form of a kernel."""
    modules = found()
    assert modules is not None
    triton, kernel.__globals__["tl"] = modules
    return triton.jit(kernel)


@functools.cache
def works(device: torch.device) -> bool:
    """Return whether a kernel runs there: even if Triton imports, a C compiler or Python's headers may be missing, or
    this GPU may not be supported."""
    if device.type != "cuda":  # Triton reads the variable when it creates a kernel, not now
        return type(compiled(_trial_kernel)).__name__ == "InterpretedFunction"
    try:
        launch_kernel(_trial_kernel, 1, torch.ones(1, device=device))
    except Exception as error:
        warnings.warn(
            f"Triton cannot run kernels on {device}, so dkfac uses slower torch operations there. "
            f"It said: {type(error).__name__}: {error}",
            stacklevel=4,
        )
        return False
    return True


def launch_kernel(kernel: Callable[..., None], programs: int, first: Tensor, *arguments: Any, **constants: int) -> None:
    """Launch ``programs`` programs of a kernel on the device of its first argument."""
    if programs == 0:
        return
    with torch.cuda.device(first.get_device()):  # Triton launches on the current device, not the tensors'
        compiled(kernel)[(programs,)](first, *arguments, **constants, **COMPILE_OPTIONS)


def _trial_kernel(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1)
