"""How a setting that may be given in several forms becomes the one that is stored. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any


def dtype_name(value: Any) -> Any:
    """``torch.bfloat16 -> "bfloat16"``."""
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def as_tuple(value: Any) -> Any:
    """Return several names as a tuple."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    found = tuple(value) if is_list else ()
    return found if is_list and are_names(found) else value


def are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def as_rhythm(value: Any) -> Any:
    """Return a number as a float, and a pair as a tuple."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value) if 1.01 <= float(value) < math.inf else value
    return tuple(value) if isinstance(value, list) and is_rhythm(tuple(value)) else value


def is_rhythm(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in value)
    return isinstance(value, float) and 1.01 <= value < math.inf


def are_channels(value: Any) -> bool:
    """Whether a value maps layers to numbers of channels."""
    return isinstance(value, Mapping) and all(isinstance(k, str) and type(n) is int and n > 1 for k, n in value.items())
