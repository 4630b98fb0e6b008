"""Temporarily select whether float32 products on a GPU use TF32.

Input: the mode. Output: a context in which it holds. Owns: nothing; the switch is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def rounds_products() -> bool:
    """Return whether the user lets torch multiply float32 matrices on a GPU in reduced precision."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # only the newer switch is set
        return str(torch.backends.cuda.matmul.fp32_precision) != "ieee"


@contextmanager
def tf32(enabled: bool, device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in TF32, or in full precision, inside; restore the user's setting afterwards.

    The switch is torch's and process-wide: K-FAC's work never runs concurrently with the user's.
    """
    if device.type != "cuda":
        yield
        return
    switch = torch.backends.cuda.matmul
    try:
        before = switch.allow_tf32
        switch.allow_tf32 = enabled
    except RuntimeError:  # the user has set only the newer switch, which disables the older
        precision = switch.fp32_precision
        switch.fp32_precision = "tf32" if enabled else "ieee"
        try:
            yield
        finally:
            switch.fp32_precision = precision
        return
    try:
        yield
    finally:
        switch.allow_tf32 = before
