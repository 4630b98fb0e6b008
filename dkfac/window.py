"""What is measured between two steps, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Sums:
    """One layer's sums over its calls in a step."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    spreads: dict[str, Tensor] = field(default_factory=dict)
    """Sums over one half of the examples less those over the other, where a look is taken at the noise."""
    moments: Tensor | None = None
    rows: Tensor | float = 0.0
    """What A is divided by: rows, or examples under ``reduce``."""
    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    """Rows ``[R, D]`` of the factors that travel as rows, instead of their sums."""
    calls: int = 0
    last_call: tuple[int, int | None] = (0, None)
    """The backward pass, and column of the exact Fisher, that the last call belonged to."""
    called_again: bool = False

    def add(self, key: str, value: Tensor, *, as_rows: bool = False) -> None:
        if as_rows:
            self.pieces.setdefault(key, []).append(value)
        else:
            _add(self.factors, key, value)

    def add_spread(self, key: str, value: Tensor) -> None:
        _add(self.spreads, key, value)


def _add(sums: dict[str, Tensor], key: str, value: Tensor) -> None:
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value


@dataclass(slots=True)
class Measured:
    """What one rank measured in a step: sums, and what they are to be divided by."""

    layers: dict[str, Sums]
    terms: Tensor | float
    num_passes: int
    unit: Tensor | float
    """What sums of gradients are multiplied by to be sums over terms."""
    called: set[str]
    """Layers that ran, also those of which nothing was due."""


@dataclass(slots=True)
class Terms:
    """How many terms of the loss a backward pass was a mean of, and which positions count."""

    number: Tensor | float
    mask: Tensor | None = None


@dataclass(slots=True)
class Window:
    """Everything measured since the last step."""

    layers: dict[str, Sums] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    num_passes: int = 0
    terms: Tensor | float = 0.0
    scaler_epoch: object = None
    is_spoilt: bool = False
    """Whether something in it was lost, so that none of it counts."""
    filled: bool = False
    """Whether the last pass left gradients on the weights, as ``backward()`` does and ``autograd.grad`` does not."""
