"""K-FAC's state as entries of an optimizer's state dict: moments under the optimizer's own keys, the rest as tensors.

Input: the layers' states, or entries by parameter. Output: entries by parameter, or K-FAC's state dict. Owns: nothing.

See ``docs/notes/016-optimizer-state.md``. Sends nothing to other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dkfac.config.optimizer_rules import Rule
from dkfac.factors.layer_state import LayerState, change_basis, rotate_moments, rotations
from dkfac.layers.layer import Layer, split_grad

PREFIX = "dkfac/"
"""First part of K-FAC's own keys, which optimizers ignore. They have no dots, at which torch splits keys."""
LAYER, WHOLE = f"{PREFIX}layer/", f"{PREFIX}whole/"
_DOT = "|"
_ROOM = 64
"""Strings are kept in a multiple of this many bytes, so that shapes do not depend on what has happened."""

Entries = dict[Tensor, dict[str, Any]]
"""Entries of an optimizer's state by parameter."""


def moments(layer: Layer, state: LayerState, rule: Rule, num_steps: int) -> Entries:
    """Return what the optimizer would keep of a layer that K-FAC steps, in the basis of the weights; empty before the
    first step. Second moments are rotated as in ``rotate_moments``, so they are not exact."""
    if state.momentum is None or state.moments is None or not float(state.momentum.weight) > 0:
        return {}
    mean, basis = state.momentum.value, state.basis()
    if state.momentum_is_rotated:
        mean = change_basis(mean, basis, None)
    if rule.length == "sgd":
        parts = {"momentum_buffer": mean} if rule.betas[0] else {}
    else:
        square = rotate_moments(state.moments.value, rotations(basis, None, layer.dtype))
        parts = {"exp_avg": mean * (1 - rule.betas[0]), "exp_avg_sq": square * (1 - rule.betas[1])}
    found: Entries = {p: {} for p in layer.parameters()}
    for key, value in parts.items():
        for p, part in zip(found, split_grad(layer, value), strict=True):
            found[p][key] = part.to(p.dtype, copy=True)
    if rule.length != "sgd":
        steps = _num_steps(float(state.moments.weight), rule.betas[1], num_steps)
        for p in found:
            found[p] = {"step": torch.tensor(steps), **found[p]}
    return found


def _num_steps(weight: float, beta: float, most: int) -> float:
    """Return the number of steps after which Adam's bias correction is that of an average with this weight."""
    left = 1 - weight * (1 - beta)  # beta ** steps
    if not 0 < beta < 1 or left < 1e-4:
        return float(most)
    return float(max(1, round(math.log(left) / math.log(beta))))


def to_entries(layers: list[Layer], saved: dict[str, Any]) -> Entries:
    """Return K-FAC's state dict as tensors: that of each layer with its weight, the rest with the first weight."""
    found = {layer.weight: _flatten(saved["layers"][layer.name], LAYER, layer.weight.device) for layer in layers}
    whole = {name: value for name, value in saved.items() if name != "layers"}
    room = len(",".join(layer.name for layer in layers))
    first = layers[0].weight
    found[first] |= _flatten(whole, WHOLE, first.device, room)
    return found


def from_entries(layers: list[Layer], found: Entries) -> dict[str, Any] | None:
    """Return the state dict that ``to_entries`` was given; None if a layer has no entry."""
    saved = {layer.name: _unflatten(found.get(layer.weight, {}), LAYER) for layer in layers}
    whole = _unflatten(found.get(layers[0].weight, {}), WHOLE)
    return {**whole, "layers": saved} if whole and all(saved.values()) else None


def is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(PREFIX)


def _flatten(tree: dict[str, Any], prefix: str, device: torch.device, room: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, leaf in _leaves(tree):
        key = prefix + "/".join(path).replace(".", _DOT)
        match leaf:
            case Tensor():
                found[f"{key}:t"] = leaf
            case str():
                text = leaf.encode()
                padded = text.ljust(-(-max(len(text), room, 1) // _ROOM) * _ROOM, b"\0")
                found[f"{key}:s"] = torch.tensor(list(padded), dtype=torch.uint8, device=device)
            case int():
                found[f"{key}:i"] = torch.tensor(leaf)
            case float():
                found[f"{key}:f"] = torch.tensor(leaf, dtype=torch.float64)
            case _:
                raise TypeError(f"K-FAC's state has a {type(leaf).__name__} at {'/'.join(path)}")
    return found


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        elif value is not None:
            yield (*path, name), value


def _unflatten(entry: dict[str, Any], prefix: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in entry.items():
        if not isinstance(key, str) or not key.startswith(prefix):
            continue
        path, _, kind = key.removeprefix(prefix).replace(_DOT, ".").rpartition(":")
        *outer, last = path.split("/")
        place = tree
        for name in outer:
            place = place.setdefault(name, {})
        match kind:
            case "s":
                place[last] = bytes(int(byte) for byte in value.tolist()).rstrip(b"\0").decode()
            case "i":
                place[last] = int(value)
            case "f":
                place[last] = float(value)
            case _:
                place[last] = value
    return tree
