"""Data classes for what is measured between two steps.

Input: sums of the calls in backward passes. Output: :class:`BatchStatistics`. Owns: nothing; the collector owns the
window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dkfac.plan.spec import is_input


@dataclass(slots=True)
class LayerSums:
    """Sums over one layer's calls in a step."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    spreads: dict[str, Tensor] = field(default_factory=dict)
    """Differences between two halves of the examples (``outer_products.spread``), where noise is measured."""
    moments: Tensor | None = None
    rows: Tensor | float = 0.0
    """Divisor of A: number of rows, or of examples with ``weight_sharing="reduce"``."""
    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    """Rows ``[R, D]`` of the factors that are sent as rows instead of sums."""
    calls: int = 0
    last_call: tuple[int, int | None] = (0, None)
    """Backward pass, and column of the exact Fisher, of the last call."""
    called_again: bool = False

    def add(self, key: str, value: Tensor, *, as_rows: bool = False) -> None:
        if as_rows:
            self.pieces.setdefault(key, []).append(value)
        else:
            _add(self.factors, key, value)

    def with_inputs_of(self, other: LayerSums) -> LayerSums:
        """Return these sums with the sums over inputs of another block, which had the same input."""
        self.rows = other.rows
        for mine, theirs in ((self.factors, other.factors), (self.spreads, other.spreads)):
            mine.update({key: value for key, value in theirs.items() if is_input(key)})
        return self

    def add_blocks(self, blocks: list[LayerSums]) -> None:
        """Add sums over calls of each block of a layer. Blocks may have different numbers of rows: their sums over
        inputs are scaled to the number of the first, which divides them all."""
        for mine, name in ((self.factors, "factors"), (self.spreads, "spreads")):
            for key in getattr(blocks[0], name):
                parts = [getattr(block, name)[key] for block in blocks]
                if is_input(key):
                    parts = [
                        part if block.rows is blocks[0].rows else part * (blocks[0].rows / block.rows)
                        for part, block in zip(parts, blocks, strict=True)
                    ]
                _add(mine, key, torch.cat(parts))
        self.rows = self.rows + blocks[0].rows

    def add_spread(self, key: str, value: Tensor) -> None:
        _add(self.spreads, key, value)


def _add(sums: dict[str, Tensor], key: str, value: Tensor) -> None:
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What one rank measured in a step: sums and their divisors."""

    layers: dict[str, LayerSums]
    terms: Tensor | float
    num_passes: int
    grad_correction: Tensor | float
    """Undoes loss scale and accumulation in sums of products of gradients, which are then sums over terms."""
    called: set[str]
    """Layers that ran, including those with no factor due."""
    by_terms: bool
    """Whether the loss was summed over the step's terms and divided by their number."""
    is_postponed: bool = False
    """Whether nothing was measured because the step differentiates twice."""


@dataclass(slots=True)
class Terms:
    """Number of loss terms that a backward pass averages over, and which positions count."""

    number: Tensor | float
    mask: Tensor | None = None


@dataclass(slots=True)
class Window:
    """Everything measured since the last step."""

    layers: dict[str, LayerSums] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    num_passes: int = 0
    terms: Tensor | float = 0.0
    scaler_epoch: object = None
    is_spoilt: bool = False
    """Whether part of it was lost, so that none of it may be used."""
    is_postponed: bool = False
    """Whether a pass was part of a graph that is differentiated again (``create_graph=True``)."""
    filled: bool = False
    """Whether the last pass left gradients on the weights, as ``backward()`` does and ``autograd.grad`` does not."""
