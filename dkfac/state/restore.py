"""Read a saved state: check it against the layers and move it to their devices.

Input: a state that ``checkpoint.save`` returned. Output: :class:`Loaded`, the parts that this rank holds. Owns:
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dkfac.factors.layer_state import Adaptive, Average, LayerState
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, Eigen, Inverse
from dkfac.plan.plan import Holding
from dkfac.plan.spec import FactorSpec
from dkfac.state.checkpoint import STATE_VERSION


@dataclass(slots=True)
class Loaded:
    states: dict[str, LayerState]
    step: int
    counters: dict[str, int]
    device: dict[str, Tensor]
    lacking: list[str] = field(default_factory=list)
    """Layers for which the state lacks something that this rank holds under the current plan."""
    begun: dict[str, LayerState] = field(default_factory=dict)
    """With ``inverse_lag``: the factors of a refresh that was in flight."""
    begun_at: int = -1
    begun_schedules: dict[str, Any] = field(default_factory=dict)
    staleness: dict[str, Any] | None = None
    """State of the adaptive intervals."""


def load(saved: dict[str, Any], layers: dict[str, Layer], holds: Callable[[str], Holding]) -> Loaded:
    """Return what this rank holds of a saved state, checked against the layers and copied to their devices."""
    if not isinstance(saved, dict):
        raise TypeError(f"a K-FAC state is a dict as state_dict() returns it, not {_what(saved)}")
    version = saved.get("version")
    if version != STATE_VERSION:
        hint = ": this looks like an optimizer's state" if "param_groups" in saved else ""
        raise ValueError(f"K-FAC state has version {version!r}; this dkfac reads version {STATE_VERSION}{hint}")
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
    """Whether this rank lacks running factors or decompositions that it holds under the current plan."""
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
    is_adams = "momentum" in saved  # Adam's are moments of mean gradients, EKFAC's of per-example gradients
    for name in ("momentum", "moments"):
        if name in saved and (holding.adam if is_adams else holding.moments):
            average = _average(saved[name], layer)
            _same_shape(layer, name, average.value, layer.spec.grad_shape)
            setattr(state, name, average)
    state.momentum_is_rotated = bool(saved.get("momentum_is_rotated", False)) and holding.adam
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
    """Raise if saved intervals cannot be resumed from, before anything is replaced."""
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
    wanted = {"numbers": (4,)} | (shapes if set(shapes) & set(entry) else {})  # only one rank has tensors
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
