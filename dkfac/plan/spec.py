"""What the rest of the library needs to know about a layer, without importing torch.

Input: dimensions of a layer. Output: shapes and numbers of elements. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Ranks = tuple[int, ...]
"""Sorted ranks of the plan's group."""


@dataclass(frozen=True, slots=True)
class FactorSpec:
    key: str
    """``A`` (inputs), ``G`` (output gradients) or ``F`` (norm layers); ``A_C`` and ``A_S`` (channels and positions of
    the inputs) for a Linear layer on a flattened map, whose A is ``A_C (x) A_S / trace``; ``A_rest`` and ``G_rest`` for
    the last piece of a factor that is cut, if it is narrower than the others."""
    dim: int
    num_blocks: int = 1
    form: Literal["dense", "diagonal"] = "dense"
    pieces: int = 1
    """Number of diagonal blocks in which each block of a whole factor is kept. They are counted in ``num_blocks``."""
    unit: int = 1
    """Number of features that stay in one piece if they fit: the taps of a convolution's kernel."""
    folds_bias: bool = False
    """Whether the last feature is the constant 1 of the bias."""
    whole_dim: int = 0
    """Dimension of the whole factor that this is a part of, with the bias; 0: it is not cut."""

    @property
    def grad_blocks(self) -> int:
        """Number of blocks of the layer's gradient."""
        return self.num_blocks // self.pieces

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

    def wire_elements(self, solver: str) -> int:
        """Elements of a decomposition in a transfer: one triangle of an inverse, or eigenvectors and eigenvalues."""
        return self.packed_elements if solver == "cholesky" else self.eigen_elements


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

    def side(self, key: str) -> tuple[FactorSpec, ...]:
        """Return the factors that together are the whole factor ``key``: itself, and its rest if there is one."""
        return tuple(factor for factor in self.factors if whole_key(factor.key) == key)

    def first_feature(self, key: str) -> int:
        """Return where the features of a factor begin among those of the whole factor that it is a part of."""
        first = self.side(whole_key(key))[0]
        return 0 if first.key == key else first.pieces * first.dim

    @property
    def widest(self) -> int:
        """Return the largest dimension of a dense factor; 1 if there is none."""
        return max([1, *[factor.dim for factor in self.factors if factor.form == "dense"]])

    @property
    def has_moments(self) -> bool:
        """Whether EKFAC measures second moments of the layer."""
        return self.kind in ("linear", "conv", "conv1d-transposed")

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """Shape of the canonical gradient, ``[blocks, out, in]``."""
        blocks, out = self.factors[-1].grad_blocks, 0
        for factor in self.factors:
            out += 0 if is_input(factor.key) else factor.pieces * factor.dim
        return blocks, out, self.grad_elements // (blocks * out)

    @property
    def state_elements(self) -> int:
        """Elements kept between steps: running factors and their decompositions."""
        return sum(f.num_elements + f.eigen_elements for f in self.factors)


def is_input(key: str) -> bool:
    """Whether a factor belongs to a layer's inputs."""
    return key.startswith("A")


def whole_key(key: str) -> str:
    """Return the key of the whole factor that a factor is a part of."""
    return key.removesuffix("_rest")


CUT = ("A", "G")
"""Factors that are kept in pieces if they are wide. ``F`` has small blocks; ``A_C`` and ``A_S`` already replace A."""


def cut_layer(layer: LayerSpec, block_dim: int | None) -> LayerSpec:
    """Return a layer of whole factors with pieces of at most ``block_dim`` features instead; None: unchanged."""
    if block_dim is None:
        return layer
    return replace(layer, factors=tuple(part for factor in layer.factors for part in _cut(factor, block_dim)))


def _cut(factor: FactorSpec, block_dim: int) -> tuple[FactorSpec, ...]:
    if factor.key not in CUT or factor.form != "dense" or factor.dim <= block_dim:
        return (factor,)
    dim = factor.dim - factor.folds_bias  # the bias is a piece of its own, whose A is the number 1
    unit = factor.unit if factor.unit <= block_dim else 1
    width, pieces, rest = equal_pieces(dim // unit, block_dim // unit)
    last = replace(factor, key=f"{factor.key}_rest", dim=rest * unit, folds_bias=False, whole_dim=factor.dim)
    equal = replace(last, key=factor.key, dim=width * unit, num_blocks=pieces * factor.num_blocks, pieces=pieces)
    return (equal, last) if rest else (equal,)


def equal_pieces(number: int, most: int) -> tuple[int, int, int]:
    """Return the width and the number of equal pieces of at most ``most``, and the width of a narrower rest, or 0.

    The pieces are a divisor of ``number`` where one exists between the smallest possible number of pieces and twice it.
    """
    fewest = -(-number // most)
    for pieces in range(fewest, 2 * fewest):
        if number % pieces == 0:
            return number // pieces, pieces, 0
    width = -(-number // fewest)
    return width, number // width, number % width
