"""Initial bases for ``solver="warm-eigen"`` by batched orthogonal iteration from the identity.

Input: running factors that have no eigenbasis yet. Output: bases close to the eigenvectors. Owns: nothing.

Meant for devices on which decomposing many small matrices one by one is slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_factors
from dkfac.decompose.refresh_sync import Found
from dkfac.factors.layer_state import LayerState
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.batches import in_bytes
from dkfac.ops.decompose import Decomposition, Eigen, from_tensors
from dkfac.ops.precision import tf32
from dkfac.ops.together import renewed

FIRST = {"cuda": (96, 1024)}
"""By device type, the range of dimensions in which batched matrix products are faster than one decomposition after the
other."""
ITERATIONS = 10


def initial_bases(
    ranks: RankPlan,
    states: dict[str, LayerState],
    context: StepContext,
    layers: list[Layer],
    keys: dict[str, list[str]],
) -> Found:
    """Return initial bases for warm-eigen, close to the eigenvectors, for the factors that have no decomposition.

    Subspace iteration starts from the identity and leaves a few hundredths of a factor off the diagonal, more if its
    spectrum is flat. A GPU decomposes small matrices one after the other but iterates on many at once
    (``benchmarks/gpu_eigen.py`` times both). Factors whose basis does not become orthonormal are omitted.

    A factor that several ranks decompose is iterated alone: the ranks must find bitwise the same basis, and the result
    of a batched operation may depend on the rest of the batch.
    """
    found: Found = {}
    if not context.settings.improves_bases:
        return found
    wanted = [(layer, key) for layer in layers for key in keys[layer.name] if _is_meant(states, layer, key)]
    for layer, key in wanted:
        if ranks.is_shared(layer, key):
            _iterate(states, [(layer, key)], found)
    own = [(layer, key) for layer, key in wanted if not ranks.is_shared(layer, key)]
    sizes = [layer.spec.factor(key).num_elements * layer.dtype.itemsize for layer, key in own]
    for chosen in in_bytes(zip(own, sizes, strict=True)):
        _iterate(states, chosen, found)
    return found


def _is_meant(states: dict[str, LayerState], layer: Layer, key: str) -> bool:
    least, most = FIRST.get(layer.weight.device.type, (1, 0))
    factor = layer.spec.factor(key)
    return factor.form == "dense" and least <= factor.dim <= most and key not in states[layer.name].decompositions


def _iterate(states: dict[str, LayerState], chosen: list[tuple[Layer, str]], found: Found) -> None:
    """Iterate on some factors in one batch and add the valid results to ``found``. Synchronizes with the device."""
    factors = [layer_factors.used(layer, states[layer.name], key) for layer, key in chosen]
    jobs = [(f, _weights_own(f), f.new_zeros(len(f))) for f in factors]
    try:
        with tf32(False, factors[0].device):
            made = renewed(jobs, times=ITERATIONS)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an error of the solver library: the fallback ladder of fallback.py is next
        return
    for (layer, key), (new, sound) in zip(chosen, made, strict=True):
        if isinstance(new, Eigen) and bool(sound.all()):
            # Clone: a view would keep the memory of the whole batch alive.
            own = {name: t.clone(memory_format=torch.contiguous_format) for name, t in new.tensors().items()}
            found.setdefault(layer.name, {})[key] = from_tensors(own), "ok"


def _weights_own(factor: Tensor) -> Decomposition:
    basis = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return Eigen(basis.expand_as(factor), factor.diagonal(dim1=-2, dim2=-1))
