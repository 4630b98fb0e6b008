"""Whether float32 products on a GPU run as TF32, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def rounds_products() -> bool:
    """Whether the user has torch multiply float32 matrices on a GPU with fewer digits."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the newer switch alone
        return str(torch.backends.cuda.matmul.fp32_precision) != "ieee"


@contextmanager
def tf32(enabled: bool, device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices as TF32, or in full, inside; what the user had set holds again after.

    The switch is torch's, for the whole process: K-FAC's work never runs beside the user's own.
    """
    if device.type != "cuda":
        yield
        return
    switch = torch.backends.cuda.matmul
    try:
        before = switch.allow_tf32
        switch.allow_tf32 = enabled
    except RuntimeError:  # the user has set the newer switch alone, which forbids the older
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
