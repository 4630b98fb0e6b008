"""Decompose the running factors of one layer and install the results in its state.

Input: a layer's running factors and previous decompositions. Output: new decompositions with their outcomes. Owns:
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dkfac.config.settings import Settings
from dkfac.decompose.fallback import Outcome, refresh
from dkfac.decompose.layer_damping import damping_of
from dkfac.factors.layer_state import (
    Average,
    LayerState,
    bias_is_silent,
    carried,
    change_basis,
    mean_of_live,
    rotate_moments,
    rotations,
    share_of_mean,
    silence_bias,
)
from dkfac.layers.layer import Layer
from dkfac.ops import precondition as ops
from dkfac.ops import traces
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, stored
from dkfac.ops.traces import Trace
from dkfac.plan.spec import FactorSpec, whole_key


def live_means(layer: Layer, state: LayerState) -> dict[str, Tensor]:
    """Return what the running factors that this rank holds contribute to the mean eigenvalues of whole factors,
    ``[B]``."""
    found = {key: mean_of_live(layer, key, silence_bias(layer, key, r.value)) / r.guarded_weight()
             for key, r in state.running.items()}  # fmt: skip
    for factor in layer.spec.factors:
        if factor.whole_dim and factor.key in found:
            found[factor.key] = share_of_mean(layer, factor, found[factor.key])
    if "A_S" in found:
        found["A_S"] = torch.full_like(found["A_S"], 1 / layer.spec.factor("A_S").dim)
    return found


def traces_are_launched(state: LayerState) -> bool:
    """Whether a kernel computes the means of a layer's running factors."""
    return all(traces.can_trace(average.value, average.weight) for average in state.running.values())


def all_live_means(layers: Iterable[Layer], states: dict[str, LayerState]) -> dict[str, dict[str, Tensor]]:
    """Return ``live_means`` of layers by name, in one launch where a kernel runs."""
    found, given, names = dict[str, dict[str, Tensor]](), list[Trace](), list[tuple[str, str, int]]()
    for layer in layers:
        running = states[layer.name].running
        is_plain = "A_S" not in running and not any(bias_is_silent(layer, key) for key in running)
        if not is_plain or not traces_are_launched(states[layer.name]):
            found[layer.name] = live_means(layer, states[layer.name])
            continue
        found[layer.name] = {}
        for key, average in running.items():
            factor = layer.spec.factor(key)
            given.append(Trace(average.value, average.weight, factor.pieces, *_share_of_trace(layer, factor)))
            names.append((layer.name, key, factor.num_blocks // factor.pieces))
    told = torch.split(traces.traces(given), [blocks for *_, blocks in names]) if given else ()
    for (name, key, _), mean in zip(names, told, strict=True):
        found[name][key] = mean
    return found


def _share_of_trace(layer: Layer, factor: FactorSpec) -> tuple[float, float]:
    """Return by what a factor's trace is multiplied, and what is added, to become what ``live_means`` returns."""
    if not factor.whole_dim:
        return 1 / factor.dim, 0.0
    leaves_bias = whole_key(factor.key) == "A" and layer.has_bias
    dim = factor.whole_dim - (leaves_bias and not layer.bias_is_live)
    return 1 / dim, 1 / dim if leaves_bias and layer.bias_is_live and factor.key == "A" else 0.0


def used(layer: Layer, state: LayerState, key: str) -> Tensor:
    """Return a running factor as it is decomposed. The positions factor ``A_S`` of a flattened map is divided by its
    trace, because the channels factor ``A_C`` already contains that scale."""
    factor = silence_bias(layer, key, state.running[key].mean())
    if key != "A_S":
        return factor
    trace = factor.diagonal(dim1=-2, dim2=-1).sum(-1)
    return factor / torch.where(trace > 0, trace, 1.0)[:, None, None]


def decompose(
    layer: Layer, state: LayerState, keys: Iterable[str], settings: Settings, step: int
) -> dict[str, tuple[Decomposition | None, Outcome]]:
    """Decompose factors that this rank holds, with fallbacks. ``state.means`` must be those of this step. May
    synchronize with the device."""
    shifts = ops.factored_damping(state.means, damping_of(layer, state, settings, step))
    found = {}
    for key in keys:
        factor = used(layer, state, key)
        shift = shifts[key] if len(shifts[key]) == len(factor) else ops.per_piece(shifts[key], len(factor))
        found[key] = refresh(factor, state.decompositions.get(key), settings.solver, shift)
    return found


def adopt(
    layer: Layer,
    state: LayerState,
    outcomes: dict[str, Outcome],
    found: dict[str, Decomposition],
    settings: Settings,
    step: int,
) -> None:
    """Record the outcomes of a layer's decompositions, identically on every rank, and use the new ones held here.

    Rotates the moments to the new eigenbasis, or drops them where EKFAC has no basis to rotate from or to. Raises a
    ``RuntimeError`` after ``max_failures`` failures of one factor in a row.
    """
    max_failures, basis_dtype = settings.max_failures, settings.experimental.basis_dtype
    old_basis = state.basis()
    for key, outcome in outcomes.items():
        failed = outcome in ("kept", "raw")
        state.failures[key] = state.failures.get(key, 0) + 1 if failed else 0
        if state.failures[key] >= max_failures:
            raise RuntimeError(
                f"factor {key} of layer {layer.name!r} could not be decomposed {state.failures[key]} times in a row "
                f"(max_failures={max_failures}); its running value has a mean eigenvalue of "
                f"{float(state.means[key].mean()):.3g}. More damping, a smaller lr, or skip=[{layer.name!r}] helps."
            )
        if not failed:
            state.decomposed.add(key)
        if not failed and key in found:
            state.decompositions[key] = stored(found[key], basis_dtype)
    state.decomposed_at = step
    if state.moments is not None and any(outcomes[key] not in ("kept", "raw") for key in found):
        new_basis = state.basis()
        turns, value = rotations(old_basis, new_basis, layer.dtype), None
        if state.momentum is not None:  # steps are taken in the basis of the weights if there is no other
            if state.momentum_is_rotated:
                state.momentum.value = ops.multiply(state.momentum.value, turns)
            mean = state.momentum.mean()
            mean = mean if state.momentum_is_rotated else change_basis(mean, None, new_basis)
            value = carried(state.moments.value, mean.square() * state.moments.weight, turns)
        elif old_basis is not None and new_basis is not None:
            value = rotate_moments(state.moments.value, turns)
        state.moments = None if value is None else Average(value, state.moments.weight)


def is_ready(layer: Layer, state: LayerState) -> bool:
    """Whether all factors have been decomposed at least once; until then the layer's raw gradient is used."""
    return len(state.decomposed) == len(layer.spec.factors)


def is_uniform(joined: dict[str, Decomposition], settings: Settings) -> bool:
    """Whether all factors have an inverse, or all have an eigenbasis and the solver uses eigenbases."""
    return {type(d) for d in joined.values()} in ({Inverse}, {Inverse} if settings.uses_inverses else {Eigen})
