"""Interface of the collector to the code that reduces factors during forward and backward.

Input: layer inputs in forward, and a notice of each recorded call. Output: sums for A measured in forward. Owns:
nothing.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dkfac.layers.layer import Layer


class EarlyReduction(Protocol):
    """Sums factors and launches their reductions while forward and backward run."""

    active: bool

    @property
    def has_inputs(self) -> bool: ...
    def begin_forward(self) -> None: ...
    def measure_input(self, layer: Layer, x: Tensor, output: Tensor, examples: int) -> None: ...
    def take_input(self, name: str) -> tuple[Tensor, Tensor | float] | None: ...
    def note_recorded(self, layer: Layer, *, called_again: bool) -> None: ...
    def reset(self) -> None: ...
    def end(self) -> None: ...
