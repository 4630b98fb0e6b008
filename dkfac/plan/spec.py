"""What the rest of the library needs to know about a layer, without importing torch.

Input: dimensions of a layer. Output: shapes and numbers of elements. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class FactorSpec:
    key: str
    """``A`` (inputs), ``G`` (output gradients) or ``F`` (norm layers); ``A_C`` and ``A_S`` (channels and positions of
    the inputs) for a Linear layer on a flattened map, whose A is ``A_C (x) A_S / trace``."""
    dim: int
    num_blocks: int = 1
    form: Literal["dense", "diagonal"] = "dense"
    pieces: int = 1
    """Number of diagonal blocks in which it is decomposed; elements between the blocks are ignored."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Sizes of the pieces, which differ by at most one."""
        each, more = divmod(self.dim, self.pieces)
        return tuple(each + (i < more) for i in range(self.pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds the factor."""
        return (self.num_blocks, self.dim, self.dim) if self.form == "dense" else (self.num_blocks, self.dim)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a tensor with one number per dimension, such as eigenvalues."""
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
        """Elements of a decomposition: eigenvectors and eigenvalues, or the latter if the basis is the identity."""
        return self.num_elements + (self.num_blocks * self.dim if self.form == "dense" else 0)

    def wire_elements(self, solver: str, *, whole: bool = False) -> int:
        """Elements of a decomposition in a transfer: triangles of an inverse's pieces, or eigenvectors and values.

        ``whole``: it is in one piece.
        """
        if self.form == "diagonal":
            return self.num_elements
        widths = (self.dim,) if whole else self.widths
        if solver == "cholesky":
            return self.num_blocks * sum(width * (width + 1) // 2 for width in widths)
        return self.num_blocks * sum(width * (width + 1) for width in widths)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    name: str
    kind: str
    factors: tuple[FactorSpec, ...]
    grad_elements: int
    dtype: str = "float32"
    """Dtype of factors, decompositions and preconditioned gradients."""

    def factor(self, key: str) -> FactorSpec:
        return next(factor for factor in self.factors if factor.key == key)

    @property
    def has_moments(self) -> bool:
        """Whether EKFAC measures second moments of the layer."""
        return self.kind in ("linear", "conv", "conv1d-transposed")

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """Shape of the canonical gradient, ``[blocks, out, in]``."""
        out = self.factors[-1]
        return out.num_blocks, out.dim, self.grad_elements // (out.num_blocks * out.dim)

    @property
    def state_elements(self) -> int:
        """Elements kept between steps: running factors and their decompositions."""
        return sum(f.num_elements + f.eigen_elements for f in self.factors)


def is_input(key: str) -> bool:
    """Whether a factor belongs to a layer's inputs."""
    return key.startswith("A")


def split(layers: Iterable[LayerSpec], dim: int | None) -> list[LayerSpec]:
    """Return layers whose factors are decomposed in pieces of at most this size."""
    return [replace(layer, factors=tuple(_split(f, dim) for f in layer.factors)) for layer in layers]


def _split(factor: FactorSpec, dim: int | None) -> FactorSpec:
    is_cut = dim is not None and factor.form == "dense"
    return replace(factor, pieces=-(-factor.dim // dim) if is_cut and dim is not None else 1)
