"""State by layer name: tensors, numbers and strings only, so that ``weights_only=True`` loads it.

Its form depends on the model, the settings and the plan alone, not on what has happened: what was never measured is
zeros of weight 0. So a distributed checkpoint, which is read into tensors that are there already, can be read by a
K-FAC that has not taken a step, on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, Inverse
from dkfac.plan.plan import Holding
from dkfac.plan.spec import FactorSpec
from dkfac.settings import SCHEDULES
from dkfac.state import Adaptive, Average, LayerState, rotate_moments

VERSION = 2
DEVICE_COUNTERS = ("skipped_batches", "clipped_steps", "clip_factor", "grad_norm", "update_norm")


@dataclass(slots=True)
class Loaded:
    states: dict[str, LayerState]
    step: int
    counters: dict[str, int]
    device: dict[str, Tensor]
    lacking: list[str] = field(default_factory=list)
    """Layers of which the state lacks something that this rank is to hold."""
    begun: dict[str, LayerState] = field(default_factory=dict)
    """With ``inverse_lag``: the factors of a refresh whose results were not in use yet."""
    begun_at: int = -1
    begun_schedules: dict[str, Any] = field(default_factory=dict)
    staleness: dict[str, Any] | None = None
    """Of intervals that follow how statistics change."""


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
    """Return the state. ``begun``: what a refresh that began at a step works on, if settings have a ``lag``."""
    zero = torch.zeros((), device=next(iter(layers.values())).weight.device)
    saved: dict[str, Any] = {
        "version": VERSION,
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
    """Factors that were copied for a refresh under way, and their means; zeros of weight 0 where there are none."""
    blank: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.dtype}
    held = [factor for factor in layer.spec.factors if factor.key in holding.running]
    running, means = ({}, {}) if state is None else (state.running, state.means)
    zeros = {f.key: torch.zeros(f.num_blocks, **blank) for f in layer.spec.factors}
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
        if state.moments is not None and not decompositions:  # without its basis, in that of the weights
            saved["moments"]["value"] = rotate_moments(state.moments.value, state.basis(), None).clone()
        adaptive = state.adaptive or Adaptive.empty(layer.spec.grad_shape, **blank)
        saved["adaptive"] = {name: t.clone() for name, t in adaptive.tensors().items()}
    if not decompositions:
        return saved
    saved["decompositions"] = {
        f.key: _save_decomposition(state.decompositions.get(f.key), f, blank)
        for f in factors
        if f.key in holding.decompositions
    }
    zeros = {f.key: torch.zeros(f.num_blocks, **blank) for f in factors}
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
    """Vectors and values, or an inverse in the place of the vectors; a diagonal one has a row of values alone."""
    matrix: Tensor | None = None
    match found:
        case Eigen(vectors, values):
            form, matrix, row = "eigen", vectors, values
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


def load(saved: dict[str, Any], layers: dict[str, Layer], holds: Callable[[str], Holding]) -> Loaded:
    """Return what a rank is to hold of a saved state, checked against the layers and moved to their devices."""
    if not isinstance(saved, dict):
        raise TypeError(f"a K-FAC state is a dict as state_dict() returns it, not {_what(saved)}")
    version = saved.get("version")
    if version != VERSION:
        hint = ": this looks like an optimizer's state" if "param_groups" in saved else ""
        raise ValueError(f"K-FAC state has version {version!r}; this dkfac reads version {VERSION}{hint}")
    for part, kind in {"step": int, "counters": dict, "device_counters": dict, "layers": dict}.items():
        if not isinstance(saved.get(part), kind):
            raise ValueError(f"the K-FAC state's {part!r} is {_what(saved.get(part))}, not {kind.__name__}")
    found = saved["layers"]
    missing, extra = [n for n in layers if n not in found], [n for n in found if n not in layers]
    if missing or extra:
        raise ValueError(
            f"K-FAC state does not fit the model: {len(missing)} layers are missing from it ({missing[:4]}), "
            f"{len(extra)} are not in the model ({extra[:4]}). Is it the same model with the same skip, max_dim and "
            f"norm_form?"
        )
    states = {name: _load_layer(found[name], layer, holds(name)) for name, layer in layers.items()}
    home = next(iter(layers.values())).weight.device
    device = {name: t.to(home, copy=True) for name, t in saved["device_counters"].items()}
    counters = {k: int(v) for k, v in saved["counters"].items()}
    lacking = [name for name in layers if lacks(states[name], holds(name))]
    begun_at = int(saved.get("begun_at", -1))
    names = [name for name in saved["begun_layers"].split(",") if name in layers] if begun_at >= 0 else []
    begun = {name: _load_begun(found[name]["begun"], layers[name], states[name]) for name in names}
    schedules = {name: float(value) for name, value in saved.get("begun_schedules", {}).items()}
    staleness = saved.get("staleness")
    if staleness is not None:
        _check_staleness(staleness, layers)
    return Loaded(states, int(saved["step"]), counters, device, lacking, begun, begun_at, schedules, staleness)


def _load_begun(saved: dict[str, Any], layer: Layer, state: LayerState) -> LayerState:
    running = {key: _average(average, layer) for key, average in saved["running"].items() if key in state.running}
    means = {key: _place(t, layer) for key, t in saved["means"].items()}
    return LayerState(state.num_factors, running, dict(state.decompositions), means)


def lacks(state: LayerState, holding: Holding) -> bool:
    """Whether a rank does not have what it is to hold of a layer that has been measured, or decomposed."""
    return not holding.running <= set(state.running) or not (holding.decompositions & state.decomposed) <= set(
        state.decompositions
    )


def _load_layer(saved: Any, layer: Layer, holding: Holding) -> LayerState:
    if not isinstance(saved, dict):
        raise TypeError(f"the state of layer {layer.name!r} is {_what(saved)}, not a dict with running factors")
    state = LayerState(len(layer.spec.factors))
    known = {factor.key: factor for factor in layer.spec.factors}
    running, decompositions = saved.get("running", {}), saved.get("decompositions", {})
    unknown = [key for key in (*running, *decompositions) if key not in known]
    if unknown:
        raise ValueError(f"the state of layer {layer.name!r} has a factor {unknown[0]!r}; the layer has {list(known)}")
    for key, average in running.items():
        value = _average(average, layer)
        _same_shape(layer, key, value.value, known[key].shape)
        if key in holding.running:
            state.running[key] = value
    is_adams = "momentum" in saved  # whose moments are of mean gradients, EKFAC's of each example's
    for name in ("momentum", "moments"):
        if name in saved and (holding.adam if is_adams else holding.moments):
            average = _average(saved[name], layer)
            _same_shape(layer, name, average.value, layer.spec.grad_shape)
            setattr(state, name, average)
    if "adaptive" in saved and holding.adam:
        blank = Adaptive.empty(layer.spec.grad_shape).tensors()
        for name, like in blank.items():
            _same_shape(layer, name, saved["adaptive"][name], tuple(like.shape))
        state.adaptive = Adaptive(**{name: _place(saved["adaptive"][name], layer) for name in blank})
    if "decomposed_at" not in saved:
        return state
    for key, entry in decompositions.items():
        found = _load_decomposition(entry, layer, known[key])
        if found is not None and key in holding.decompositions:
            state.decompositions[key] = found
    absent = [part for part in ("means", "decomposed", "failures") if part not in saved]
    if absent:
        raise ValueError(f"the state of layer {layer.name!r} has decompositions but no {absent[0]!r}")
    state.means = {key: _place(t, layer) for key, t in saved["means"].items()}
    state.decomposed_at = int(saved["decomposed_at"])
    state.decomposed = set(filter(None, saved["decomposed"].split(",")))
    state.failures = {key: int(n) for key, n in saved["failures"].items()}
    return state


def _load_decomposition(saved: Any, layer: Layer, factor: FactorSpec) -> Decomposition | None:
    wanted = {"form", "values", *(["matrix"] if factor.form == "dense" else [])}
    if not isinstance(saved, dict) or not wanted <= set(saved):
        raise ValueError(f"the decomposition of factor {factor.key} of layer {layer.name!r} lacks {sorted(wanted)}")
    row = _place(saved["values"], layer)
    _same_shape(layer, factor.key, row, factor.row_shape)
    matrix = None
    if factor.form == "dense":
        matrix = _place(saved["matrix"], layer)
        _same_shape(layer, factor.key, matrix, factor.shape)
    match saved["form"]:
        case "eigen":
            return Eigen(matrix, row)
        case "inverse":
            return Inverse(row if matrix is None else matrix)
        case "none":
            return None
        case other:
            raise ValueError(f"factor {factor.key} of layer {layer.name!r} has a decomposition of form {other!r}")


def _check_staleness(saved: Any, layers: dict[str, Layer]) -> None:
    """Refuse intervals that cannot be gone on from, before anything is replaced."""
    for part, kind in {"layers": dict, "num_refreshes": int}.items():
        value = saved.get(part) if isinstance(saved, dict) else saved
        if not isinstance(value, kind):
            raise ValueError(f"{part!r} of the K-FAC state's 'staleness' is {_what(value)}, not {kind.__name__}")
    for name, layer in layers.items():
        entries = saved["layers"].get(name, {})
        for factor in layer.spec.factors:
            entry = entries.get(factor.key, {}) if isinstance(entries, dict) else entries
            if not isinstance(entry, dict):
                raise TypeError(f"the 'staleness' of layer {name!r} holds {_what(entry)} where a dict belongs")
            if entry:
                _check_statistic(entry, layer, factor)


def _check_statistic(entry: dict[str, Any], layer: Layer, factor: FactorSpec) -> None:
    where = f"the 'staleness' of factor {factor.key} of layer {layer.name!r}"
    shapes = dict.fromkeys(("pool", "last", "before"), factor.shape)
    shapes |= {f"{key}_noise": () for key in shapes}
    wanted = {"numbers": (4,)} | (shapes if set(shapes) & set(entry) else {})  # tensors only where it is judged
    for key, shape in wanted.items():
        if key not in entry:
            raise ValueError(f"{where} has no {key!r}")
        if not isinstance(entry[key], Tensor):
            raise TypeError(f"{where} has {_what(entry[key])} where the tensor {key!r} belongs")
        if tuple(entry[key].shape) != shape:
            raise ValueError(f"{where} has {key!r} of shape {list(entry[key].shape)}, not {list(shape)}")
    interval, previous, due, rows = numbers = entry["numbers"].tolist()
    if not all(map(math.isfinite, numbers)) or min(interval, previous) < 1 or min(due, rows) < 0:
        raise ValueError(f"{where} has the numbers {numbers}: intervals are at least 1, step and rows at least 0")


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one state from those of several ranks."""

    def join(first: Any, second: Any) -> Any:
        if not isinstance(first, dict) or not isinstance(second, dict):
            return first
        return {key: join(first.get(key, second.get(key)), second.get(key)) for key in {**first, **second}}

    whole = parts[0]
    for part in parts[1:]:
        whole = join(whole, part)
    return whole


def _average(saved: dict[str, Tensor], layer: Layer) -> Average:
    return Average(_place(saved["value"], layer), _place(saved["weight"], layer))


def _place(tensor: Any, layer: Layer) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"the state of layer {layer.name!r} holds {_what(tensor)} where a tensor belongs")
    return tensor.to(layer.weight.device, layer.dtype, copy=True)


def _same_shape(layer: Layer, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"factor {key} of layer {layer.name!r} has shape {list(tensor.shape)} in the state and {list(shape)} in "
            f"the model"
        )


def _what(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
