"""What the rest of the library needs to know of a layer, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FactorSpec:
    key: str
    """``A`` (inputs), ``G`` (output gradients) or ``F`` (norm layers)."""
    dim: int
    num_blocks: int = 1
    form: Literal["dense", "diagonal"] = "dense"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds the factor."""
        return (self.num_blocks, self.dim, self.dim) if self.form == "dense" else (self.num_blocks, self.dim)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of what has one number per dimension: eigenvalues."""
        return (self.num_blocks, self.dim)

    @property
    def num_elements(self) -> int:
        return self.num_blocks * self.dim * (self.dim if self.form == "dense" else 1)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    name: str
    kind: str
    factors: tuple[FactorSpec, ...]
    grad_elements: int

    def factor(self, key: str) -> FactorSpec:
        return next(factor for factor in self.factors if factor.key == key)

    @property
    def state_elements(self) -> int:
        """Elements kept between steps: running factors and their decompositions."""
        return sum(2 * f.num_elements + (f.num_blocks * f.dim if f.form == "dense" else 0) for f in self.factors)
