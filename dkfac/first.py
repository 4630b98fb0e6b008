"""Where warm-eigen begins on a device that has no fast decomposition of small matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dkfac import stages
from dkfac.inplace import in_bytes
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, from_tensors
from dkfac.ops.precision import tf32
from dkfac.ops.together import renewed
from dkfac.shares import Found

if TYPE_CHECKING:
    from dkfac.run import Runner

FIRST = {"cuda": (96, 1024)}
"""By kind of device: sizes for which many products take less time than one decomposition after the other."""
ITERATIONS = 10


def decompositions(runner: Runner, layers: list[Layer], keys: dict[str, list[str]]) -> Found:
    """Return bases for warm-eigen to begin with, near those of the eigenvectors; none of what is to be decomposed.

    Subspace iteration from the basis of the weights: a few hundredths of a factor are left off the diagonal, more where
    its spectrum is flat. A GPU decomposes small matrices one after the other, and iterates with many at once
    (``benchmarks/gpu_eigen.py`` times both). What does not become orthonormal is left out.

    A factor that several ranks decompose is taken alone: they must find the same, to the bit, and what comes of a batch
    may depend on what else is in it.
    """
    found: Found = {}
    if runner.settings.solver != "warm-eigen":
        return found
    wanted = [(layer, key) for layer in layers for key in keys[layer.name] if _is_meant(runner, layer, key)]
    for layer, key in wanted:
        if _is_shared(runner, layer, key):
            _iterate(runner, [(layer, key)], found)
    own = [(layer, key) for layer, key in wanted if not _is_shared(runner, layer, key)]
    sizes = [layer.spec.factor(key).num_elements * layer.dtype.itemsize for layer, key in own]
    for chosen in in_bytes(zip(own, sizes, strict=True)):
        _iterate(runner, chosen, found)
    return found


def _is_meant(runner: Runner, layer: Layer, key: str) -> bool:
    least, most = FIRST.get(layer.weight.device.type, (1, 0))
    width = max(stages.pieces(layer, key, runner.settings, runner.step))
    is_dense = layer.spec.factor(key).form == "dense"
    return is_dense and least <= width <= most and key not in runner.states[layer.name].decompositions


def _is_shared(runner: Runner, layer: Layer, key: str) -> bool:
    by = runner.placements[layer.name].decomposed_by
    return any(f.key == key and len(ranks) > 1 for f, ranks in zip(layer.spec.factors, by, strict=True))


def _iterate(runner: Runner, chosen: list[tuple[Layer, str]], found: Found) -> None:
    """Iterate with some factors together, and keep what is sound."""
    factors = [stages.used(layer, runner.states[layer.name], key) for layer, key in chosen]
    pieces = [stages.pieces(layer, key, runner.settings, runner.step) for layer, key in chosen]
    jobs = [(f, _weights_own(f), f.new_zeros(len(f)), widths) for f, widths in zip(factors, pieces, strict=True)]
    try:
        with tf32(False, factors[0].device):
            made = renewed(jobs, times=ITERATIONS)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a solver library's own: the ladder of refresh.py is next
        return
    for (layer, key), (new, sound) in zip(chosen, made, strict=True):
        if isinstance(new, Eigen) and bool(sound.all()):
            # Not parts of what was decomposed together, all of which they would keep.
            own = {name: t.clone(memory_format=torch.contiguous_format) for name, t in new.tensors().items()}
            found.setdefault(layer.name, {})[key] = from_tensors(own), "ok"


def _weights_own(factor: Tensor) -> Decomposition:
    basis = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return Eigen(basis.expand_as(factor), factor.diagonal(dim1=-2, dim2=-1))
