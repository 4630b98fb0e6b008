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

    @property
    def packed_elements(self) -> int:
        """Elements of one triangle per block."""
        return self.num_blocks * (self.dim * (self.dim + 1) // 2 if self.form == "dense" else self.dim)

    @property
    def eigen_elements(self) -> int:
        """Elements of a decomposition: vectors and values, values alone where the basis is the identity."""
        return self.num_elements + (self.num_blocks * self.dim if self.form == "dense" else 0)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    name: str
    kind: str
    factors: tuple[FactorSpec, ...]
    grad_elements: int
    dtype: str = "float32"
    """Of factors, decompositions and preconditioned gradients."""

    def factor(self, key: str) -> FactorSpec:
        return next(factor for factor in self.factors if factor.key == key)

    @property
    def has_moments(self) -> bool:
        """Whether EKFAC measures second moments of the layer."""
        return self.kind in ("linear", "conv", "conv1d-transposed")

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """Of the canonical gradient, ``[blocks, out, in]``."""
        out = self.factors[-1]
        return out.num_blocks, out.dim, self.grad_elements // (out.num_blocks * out.dim)

    @property
    def state_elements(self) -> int:
        """Elements kept between steps: running factors and their decompositions."""
        return sum(f.num_elements + f.eigen_elements for f in self.factors)
