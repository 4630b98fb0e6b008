"""The state of a layer: tensors that live longer than a step.

Input: batch factors, decompositions, moments. Output: running averages, and moments in a new basis. Owns: what a rank
holds of each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, from_tensors, mean_eigenvalue
from dkfac.ops.precondition import multiply
from dkfac.plan.spec import FactorSpec, whole_key


@dataclass(slots=True)
class Average:
    """A decaying average that carries its weight, so that it is unbiased from the first value on."""

    value: Tensor
    weight: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Average:
        return cls(torch.zeros_like(like), torch.zeros((), dtype=like.dtype, device=like.device))

    def update(self, batch: Tensor, decay: float, good: Tensor) -> None:
        """Absorb a batch unless ``good`` (on the device) is False."""
        self.value = torch.where(good, torch.add(batch, self.value, alpha=decay), self.value)
        self.weight = torch.where(good, self.weight * decay + 1, self.weight)

    def mean(self) -> Tensor:
        """Return the average; zero before the first value."""
        return self.value / self.guarded_weight()

    def guarded_weight(self) -> Tensor:
        """Return the weight, clamped to be positive."""
        return self.weight.clamp(min=torch.finfo(self.weight.dtype).tiny)


FIRST_DAMPING = 10.0
"""Damping of ``curvature="adaptive"`` in a layer's first step, which is then nearly the optimizer's own."""


@dataclass(slots=True)
class Adaptive:
    """What ``curvature="adaptive"`` keeps in addition to its moments."""

    log_damping: Tensor
    log_length: Tensor
    """Logarithm of the length of an update relative to the optimizer's own."""
    outputs: Tensor
    """Sums of second moments of gradients over inputs, ``[B, O]``, with the weight of the second moments."""
    inputs: Tensor
    """The same over outputs, ``[B, I]``."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], **like: Any) -> Adaptive:
        blocks, down, across = shape
        first = torch.full((), math.log(FIRST_DAMPING), **like)
        return cls(
            first, torch.zeros((), **like), torch.zeros(blocks, down, **like), torch.zeros(blocks, across, **like)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(slots=True)
class LayerState:
    """What this rank holds of a layer, and what every rank knows of it."""

    num_factors: int
    running: dict[str, Average] = field(default_factory=dict)
    decompositions: dict[str, Decomposition] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)
    """Mean eigenvalue of the whole factor that each factor is a part of when it was decomposed, ``[B]``."""
    moments: Average | None = None
    """In the eigenbasis: EKFAC's moments, or Adam's second moment."""
    momentum: Average | None = None
    """Sum of gradients of ``"adaptive"`` and ``"adam-eigen"``."""
    momentum_is_rotated: bool = False
    """Whether the momentum is in the eigenbasis, or else in the basis of the weights. If there is no eigenbasis, both
    are the same."""
    adaptive: Adaptive | None = None
    decomposed_at: int = -1
    decomposed: set[str] = field(default_factory=set)
    """Factors that have a decomposition, on this rank or another."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of consecutive failed decompositions, by factor."""

    def basis(self) -> dict[str, Eigen] | None:
        """Return the current eigenbases if every factor has one, otherwise None."""
        bases = {k: d for k, d in self.decompositions.items() if isinstance(d, Eigen)}
        return bases if len(bases) == self.num_factors else None

    def factors(self) -> dict[str, Tensor]:
        """Return the running factors held here; the dimension of a single block is squeezed."""
        return {key: _squeezed(average.mean()) for key, average in self.running.items()}

    def tensors(self) -> list[Tensor]:
        averages = [*self.running.values(), *filter(None, (self.moments, self.momentum))]
        held = [t for average in averages for t in (average.value, average.weight)]
        held += [t for d in self.decompositions.values() for t in d.tensors().values()]
        held += [] if self.adaptive is None else list(self.adaptive.tensors().values())
        return held + list(self.means.values())

    def follow(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Move to the weight's device and the factors' dtype if they have changed; return whether they have."""
        first = self.first_tensor()
        if first is None or (first.device == weight.device and first.dtype == dtype):
            return False
        for average in [*self.running.values(), *filter(None, (self.moments, self.momentum))]:
            average.value, average.weight = (
                average.value.to(weight.device, dtype),
                average.weight.to(weight.device, dtype),
            )
        for key, decomposition in self.decompositions.items():
            moved = {name: t.to(weight.device, dtype) for name, t in decomposition.tensors().items()}
            self.decompositions[key] = from_tensors(moved)
        self.means = {key: t.to(weight.device, dtype) for key, t in self.means.items()}
        if self.adaptive is not None:
            self.adaptive = Adaptive(**{k: t.to(weight.device, dtype) for k, t in self.adaptive.tensors().items()})
        return True

    def first_tensor(self) -> Tensor | None:
        """Return one of the tensors, which are all on the same device; None if there is none."""
        for average in self.running.values():
            return average.value
        return next(iter(self.tensors()), None)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


def silence_bias(layer: Layer, key: str, factor: Tensor) -> Tensor:
    """Return the factor without the bias's row and column, for a bias frozen after attach.

    They become zero, not absent: the block of the weight is then exactly what it would be without a bias.
    """
    if not bias_is_silent(layer, key):
        return factor
    keep = torch.ones(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    keep[-1 if layer.kind != "norm-joint" else slice(factor.shape[-1] // 2, None)] = 0
    return factor * keep if layer.spec.factor(key).form == "diagonal" else factor * keep[:, None] * keep


def mean_of_live(layer: Layer, key: str, factor: Tensor) -> Tensor:
    """Return the factor's mean eigenvalue per block, ``[B]``, without the rows that ``silence_bias`` sets to zero."""
    mean = mean_eigenvalue(factor)
    if not bias_is_silent(layer, key):
        return mean
    dim = factor.shape[-1]
    return mean * (dim / (dim // 2 if layer.kind == "norm-joint" else dim - 1))


def share_of_mean(layer: Layer, factor: FactorSpec, mean: Tensor) -> Tensor:
    """Return what a factor contributes to the mean eigenvalue of the whole factor that it is a part of, ``[B]``.

    ``mean`` is that of each piece, ``[B * P]``. A bias that A leaves out counts as an eigenvalue 1 of A.
    """
    if not factor.whole_dim:
        return mean
    leaves_bias = whole_key(factor.key) == "A" and layer.has_bias
    dim = factor.whole_dim - (leaves_bias and not layer.bias_is_live)
    share = (mean * factor.dim).view(-1, factor.pieces).sum(1) / dim
    return share + 1 / dim if leaves_bias and layer.bias_is_live and factor.key == "A" else share


def whole_means(shares: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return, for each factor, the mean eigenvalue of the whole factor that it is a part of, from all its shares."""
    if not any(key.endswith("_rest") for key in shares):
        return shares
    whole: dict[str, Tensor] = {}
    for key, share in shares.items():
        side = whole_key(key)
        whole[side] = whole[side] + share if side in whole else share
    return {key: whole[whole_key(key)] for key in shares}


def bias_is_silent(layer: Layer, key: str) -> bool:
    """Whether a folded bias was frozen after attach and is to be left out of a factor."""
    if key not in ("A", "F") or not layer.has_bias or layer.bias_is_live:
        return False
    return layer.is_norm or layer.spec.factor(key).folds_bias


Bases = dict[str, Eigen] | None
"""Eigenbases by factor; None stands for the basis of the weights, which is also that of diagonal factors."""


def rotations(old: Bases, new: Bases, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return, by factor, the matrix that takes coordinates in an old basis to those in a new one."""
    found: dict[str, Tensor] = {}
    for key in {**(old or {}), **(new or {})}:
        vectors = (None if bases is None else bases[key].vectors for bases in (old, new))
        before, after = (None if basis is None else basis.to(dtype) for basis in vectors)
        rotation = before if after is None else after.mT if before is None else after.mT @ before
        if rotation is not None:
            found[key] = rotation
    return found


def change_basis(values: Tensor, old: Bases, new: Bases) -> Tensor:
    return multiply(values, rotations(old, new, values.dtype))


def rotate_moments(moments: Tensor, turns: dict[str, Tensor]) -> Tensor:
    """Return second moments in a new basis, given the rotations to it.

    Squared rotations assume that components along different directions of the old basis are independent.
    """
    return multiply(moments, {key: rotation.square() for key, rotation in turns.items()})


def carried(moments: Tensor, mean: Tensor, turns: dict[str, Tensor]) -> Tensor:
    """Return Adam's second moments in a new basis; ``mean``: its squared momentum there; ``turns``: the rotations.

    Second moments differ by orders of magnitude: rotating by one degree would add a thousandth of a large one to a
    small one, many times its value, and its direction would hardly move for long. So the mean of their fourth roots is
    taken, which a little of another one hardly changes. Where momentum has gathered what the old basis had spread over
    many directions, the result is at least the smaller of its square and the plain mean.
    """
    squares = {key: rotation.square() for key, rotation in turns.items()}
    small = multiply(moments.sqrt().sqrt(), squares).square().square()
    return torch.maximum(small, torch.minimum(multiply(moments, squares), mean))


def named_factors(layers: list[Layer], states: dict[str, LayerState]) -> dict[str, dict[str, Tensor]]:
    """Return the running factors held here, by layer, or by block where blocks have names."""
    found: dict[str, dict[str, Tensor]] = {}
    for layer in layers:
        running, names = states[layer.name].running, layer.use.blocks
        if not names:
            found[layer.name] = states[layer.name].factors()
            continue
        split = {key: average.mean().chunk(len(names)) for key, average in running.items()}
        for i, name in enumerate(names):
            found[f"{layer.name}.{name}"] = {key: _squeezed(parts[i]) for key, parts in split.items()}
    return found


def _squeezed(factor: Tensor) -> Tensor:
    return factor.squeeze(0) if factor.shape[0] == 1 else factor
