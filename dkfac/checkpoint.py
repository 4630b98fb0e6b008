"""State by layer name: tensors, numbers and strings only, so that ``weights_only=True`` loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.ops.decompose import from_tensors
from dkfac.state import Average, LayerState

VERSION = 1


@dataclass(slots=True)
class Loaded:
    states: dict[str, LayerState]
    step: int
    counters: dict[str, int]
    device: dict[str, Tensor]


def save(
    states: dict[str, LayerState],
    step: int,
    counters: dict[str, int],
    device: dict[str, Tensor],
    decompositions: bool,
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "step": step,
        "counters": dict(counters),
        "device_counters": {name: t.clone() for name, t in device.items()},
        "layers": {name: _save_layer(state, decompositions) for name, state in states.items()},
    }


def load(saved: dict[str, Any], layers: dict[str, Layer]) -> Loaded:
    """Return the parts of a saved state, checked against the layers and moved to their devices."""
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
    states = {name: _load_layer(found[name], layer) for name, layer in layers.items()}
    home = next(iter(layers.values())).weight.device
    device = {name: t.to(home, copy=True) for name, t in saved["device_counters"].items()}
    return Loaded(states, int(saved["step"]), {k: int(v) for k, v in saved["counters"].items()}, device)


def _save_layer(state: LayerState, decompositions: bool) -> dict[str, Any]:
    saved: dict[str, Any] = {
        "running": {key: {"value": a.value.clone(), "weight": a.weight.clone()} for key, a in state.running.items()}
    }
    if decompositions:
        saved["decompositions"] = {
            key: {name: t.clone() for name, t in d.tensors().items()} for key, d in state.decompositions.items()
        }
        saved["means"] = {key: t.clone() for key, t in state.means.items()}
        saved["decomposed_at"] = state.decomposed_at
        saved["failures"] = dict(state.failures)
        if state.moments is not None:
            saved["moments"] = {"value": state.moments.value.clone(), "weight": state.moments.weight.clone()}
    return saved


def _load_layer(saved: Any, layer: Layer) -> LayerState:
    if not isinstance(saved, dict) or not isinstance(saved.get("running"), dict):
        raise TypeError(f"the state of layer {layer.name!r} is {_what(saved)}, not a dict with running factors")
    state = LayerState(len(layer.spec.factors))
    known = {factor.key: factor for factor in layer.spec.factors}
    unknown = [key for key in (*saved["running"], *saved.get("decompositions", {})) if key not in known]
    if unknown:
        raise ValueError(f"the state of layer {layer.name!r} has a factor {unknown[0]!r}; the layer has {list(known)}")
    for key, average in saved["running"].items():
        state.running[key] = _average(average, layer)
        _same_shape(layer, key, state.running[key].value, known[key].shape)
    if "decompositions" in saved:
        for key, tensors in saved["decompositions"].items():
            factor = known[key]
            for name, tensor in tensors.items():
                _same_shape(layer, key, _place(tensor, layer), factor.shape if name != "values" else factor.row_shape)
            state.decompositions[key] = from_tensors({n: _place(t, layer) for n, t in tensors.items()})
        absent = [part for part in ("means", "decomposed_at", "failures") if part not in saved]
        if absent:
            raise ValueError(f"the state of layer {layer.name!r} has decompositions but no {absent[0]!r}")
        state.means = {key: _place(t, layer) for key, t in saved["means"].items()}
        state.decomposed = set(state.decompositions)
        state.decomposed_at = int(saved["decomposed_at"])
        state.failures = {key: int(n) for key, n in saved["failures"].items()}
        if "moments" in saved:
            state.moments = _average(saved["moments"], layer)
            shape = (known["G"].num_blocks, known["G"].dim, known["A"].dim)
            _same_shape(layer, "moments", state.moments.value, shape)
    return state


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
