"""Save and load K-FAC's state by layer name, as tensors, numbers and strings that ``weights_only=True`` loads.

Input: the layers' states, or a state dict. Output: a state dict, or the states that a rank holds. Owns: nothing.

The structure depends only on the model, the settings and the plan, not on what has happened: statistics that were never
measured are zeros with weight 0. So a distributed checkpoint, which is read into existing tensors, can be loaded before
the first step, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dkfac.config.settings import SCHEDULES
from dkfac.factors.layer_state import Adaptive, Average, LayerState, change_basis, rotate_moments, rotations
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, Inverse
from dkfac.plan.plan import Holding
from dkfac.plan.spec import FactorSpec

STATE_VERSION = 2
EIGEN_FORM = "eigen"
ON_ALL_RANKS = ("means", "decomposed_at", "decomposed", "failures")
OF_WORKERS = ("momentum", "moments", "momentum_is_rotated", "adaptive", "optimizer")
"""Entries of a layer that every rank saves, and those of the ranks that precondition it."""
DEVICE_COUNTERS = ("skipped_batches", "clipped_steps", "clip_factor", "grad_norm", "update_norm")


def save(
    states: dict[str, LayerState],
    layers: dict[str, Layer],
    holds: Callable[[str], Holding],
    *,
    step: int,
    counters: dict[str, int],
    device: dict[str, Tensor],
    decompositions: bool,
    lag: bool = False,
    begun: dict[str, LayerState] | None = None,
    begun_at: int = -1,
    begun_schedules: dict[str, float] | None = None,
    staleness: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state dict. ``begun`` are the factors of a refresh in flight since step ``begun_at``, if there is a
    ``lag``."""
    zero = torch.zeros((), device=next(iter(layers.values())).weight.device)
    saved: dict[str, Any] = {
        "version": STATE_VERSION,
        "step": step,
        "counters": dict(counters),
        "device_counters": {name: device.get(name, zero).clone() for name in DEVICE_COUNTERS},
        "layers": {
            name: _save_layer(state, layers[name], holds(name), decompositions) for name, state in states.items()
        },
    }
    if staleness is not None and decompositions:
        saved["staleness"] = staleness
    if lag and decompositions:
        saved["begun_at"] = begun_at
        saved["begun_layers"] = ",".join(begun or ())
        saved["begun_schedules"] = begun_schedules or dict.fromkeys(SCHEDULES, 0.0)
        for name, layer in layers.items():
            saved["layers"][name]["begun"] = _save_begun((begun or {}).get(name), layer, holds(name))
    return saved


def _save_begun(state: LayerState | None, layer: Layer, holding: Holding) -> dict[str, Any]:
    """Return the factors copied for a refresh in flight and their means; zeros with weight 0 if there are none."""
    blank: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.dtype}
    held = [factor for factor in layer.spec.factors if factor.key in holding.running]
    running, means = ({}, {}) if state is None else (state.running, state.means)
    zeros = {f.key: torch.zeros(f.grad_blocks, **blank) for f in layer.spec.factors}
    return {
        "running": {f.key: _save_average(running.get(f.key), f.shape, blank) for f in held},
        "means": {key: t.clone() for key, t in (zeros | means).items()},
    }


def _save_layer(state: LayerState, layer: Layer, holding: Holding, decompositions: bool) -> dict[str, Any]:
    factors = layer.spec.factors
    blank: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.dtype}
    saved: dict[str, Any] = {
        "running": {
            f.key: _save_average(state.running.get(f.key), f.shape, blank) for f in factors if f.key in holding.running
        }
    }
    if holding.adam:
        saved["momentum"] = _save_average(state.momentum, layer.spec.grad_shape, blank)
        saved["moments"] = _save_average(state.moments, layer.spec.grad_shape, blank)
        saved["momentum_is_rotated"] = int(state.momentum_is_rotated and decompositions)
        if not decompositions:  # rotated back to the basis of the weights
            if state.moments is not None:
                saved["moments"]["value"] = rotate_moments(
                    state.moments.value, rotations(state.basis(), None, layer.dtype)
                ).clone()
            if state.momentum is not None and state.momentum_is_rotated:
                saved["momentum"]["value"] = change_basis(state.momentum.value, state.basis(), None).clone()
        adaptive = state.adaptive or Adaptive.empty(layer.spec.grad_shape, **blank)
        saved["adaptive"] = {name: t.clone() for name, t in adaptive.tensors().items()}
    if not decompositions:
        return saved
    saved["decompositions"] = {
        f.key: _save_decomposition(state.decompositions.get(f.key), f, blank)
        for f in factors
        if f.key in holding.decompositions
    }
    zeros = {f.key: torch.zeros(f.grad_blocks, **blank) for f in factors}
    saved["means"] = {key: t.clone() for key, t in (zeros | state.means).items()}
    saved["decomposed_at"] = state.decomposed_at
    saved["decomposed"] = ",".join(f.key for f in factors if f.key in state.decomposed)
    saved["failures"] = {f.key: state.failures.get(f.key, 0) for f in factors}
    if holding.moments:
        saved["moments"] = _save_average(state.moments, layer.spec.grad_shape, blank)
    return saved


def _save_average(average: Average | None, shape: tuple[int, ...], blank: dict[str, Any]) -> dict[str, Tensor]:
    if average is None:
        return {"value": torch.zeros(shape, **blank), "weight": torch.zeros((), **blank)}
    return {"value": average.value.clone(), "weight": average.weight.clone()}


def _save_decomposition(found: Decomposition | None, factor: FactorSpec, blank: dict[str, Any]) -> dict[str, Any]:
    """Return eigenvectors and eigenvalues, or an inverse in place of the eigenvectors; only a row if it is diagonal."""
    matrix: Tensor | None = None
    match found:
        case Eigen(vectors, values):
            form, matrix, row = EIGEN_FORM, vectors, values
        case Inverse(inverse) if factor.form == "diagonal":
            form, row = "inverse", inverse
        case Inverse(inverse):
            form, matrix, row = "inverse", inverse, torch.zeros(factor.row_shape, **blank)
        case _:
            form, row = "none", torch.zeros(factor.row_shape, **blank)
    saved: dict[str, Any] = {"form": form, "values": row.clone()}
    if factor.form == "dense":
        saved["matrix"] = torch.zeros(factor.shape, **blank) if matrix is None else matrix.to(blank["dtype"], copy=True)
    return saved


def merge(parts: Any) -> Any:
    """Merge the states of several ranks, in their order, into one; what is no list of them is returned as it is."""
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        return parts

    def join(first: Any, second: Any) -> Any:
        if not isinstance(first, dict) or not isinstance(second, dict):
            return first
        return {key: join(first.get(key, second.get(key)), second.get(key)) for key in {**first, **second}}

    whole: dict[str, Any] = parts[0]
    for part in parts[1:]:
        whole = join(whole, part)
    return whole
