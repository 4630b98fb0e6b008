"""Convert a saved state with whole factors to one with factors in pieces.

Input: a state that ``checkpoint.save`` returned, and the layers. Output: the state in the form that the layers have.
Owns: nothing.

Running factors give their diagonal blocks. Decompositions are dropped, so the next measured step decomposes again.
Adam's second moments are rotated back to the basis of the weights by squared rotations. Other changes are refused: what
was between pieces is not known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dkfac.factors.layer_state import change_basis, rotate_moments, rotations
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Eigen
from dkfac.plan.spec import FactorSpec, cut_layer, whole_key
from dkfac.state.checkpoint import EIGEN_FORM

OF_DECOMPOSITIONS = ("decompositions", "means", "decomposed_at", "decomposed", "failures", "begun", "moments")
"""Entries of a saved layer that belong to its decompositions."""


def to_pieces(saved: dict[str, Any], layers: dict[str, Layer], block_dim: int | None) -> dict[str, Any]:
    """Return a state whose factors have the shapes of the layers' factors; itself if they already have.

    What changes follows from both numbers, not from the tensors: a rank's own state may have none of a layer, and all
    ranks must do the same.
    """
    found = saved.get("layers") if isinstance(saved, dict) else None
    if not isinstance(found, dict):
        return saved  # refused when it is read
    number = saved.get("block_dim")  # 0 or, in states of before there were pieces, missing: whole factors
    before = number if isinstance(number, int) and number > 0 else None
    shapes = {name: (_shapes(layer, before), _shapes(layer, block_dim)) for name, layer in layers.items()}
    changed = [name for name, (old, new) in shapes.items() if name in found and old != new]
    if not changed or not all(_has(found[name], shapes[name][0]) for name in changed):
        return saved  # of another model: refused when it is read
    for name in changed:
        if shapes[name][0] != _shapes(layers[name], None):
            raise ValueError(
                f"the K-FAC state was saved with block_dim={before}, and this KFAC has block_dim={block_dim}: the "
                f"pieces of layer {name!r} are different ones. Use block_dim={before}, or load the model alone and let "
                f"K-FAC measure again"
            )
    converted = {name: _cut(found[name], layers[name]) for name in changed}
    return {**saved, "layers": {**found, **converted}, "begun_at": -1, "staleness": None}


def _shapes(layer: Layer, block_dim: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors that a layer has with a ``block_dim``, by key."""
    whole = [
        replace(
            factor, dim=factor.whole_dim, num_blocks=factor.grad_blocks, pieces=1, whole_dim=0,
            folds_bias=factor.key == "A" and layer.has_bias,
        ) if factor.whole_dim else factor
        for factor in layer.spec.factors
        if factor.key == whole_key(factor.key)
    ]  # fmt: skip
    spec = cut_layer(replace(layer.spec, factors=tuple(whole)), block_dim)
    return {factor.key: factor.shape for factor in spec.factors}


def _has(saved: Any, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a saved layer's running factors, of which a rank may have none, have these shapes."""
    running = saved.get("running", {}) if isinstance(saved, dict) else None
    return isinstance(running, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("value"), Tensor)
        and tuple(entry["value"].shape) == shapes.get(key)
        for key, entry in running.items()
    )


def _cut(saved: dict[str, Any], layer: Layer) -> dict[str, Any]:
    running = {}
    for factor in layer.spec.factors:
        entry = saved.get("running", {}).get(whole_key(factor.key))
        if entry is not None:
            running[factor.key] = entry | {"value": _diagonal_blocks(entry["value"], factor, layer)}
    kept: dict[str, Any] = {name: value for name, value in saved.items() if name not in OF_DECOMPOSITIONS}
    if "momentum" in saved:
        basis, moments = _basis(saved), saved["moments"]
        turns = rotations(basis, None, moments["value"].dtype)
        kept["moments"] = moments | {"value": rotate_moments(moments["value"], turns)}
        if saved.get("momentum_is_rotated"):
            value = change_basis(saved["momentum"]["value"], basis, None)
            kept |= {"momentum": saved["momentum"] | {"value": value}, "momentum_is_rotated": 0}
    return kept | {"running": running}


def _diagonal_blocks(whole: Tensor, factor: FactorSpec, layer: Layer) -> Tensor:
    """Return the pieces ``[B * P, w, w]`` of a whole factor ``[B, D, D]``."""
    if tuple(whole.shape) == factor.shape:
        return whole
    begin = layer.spec.first_feature(factor.key)
    places = [slice(begin + i * factor.dim, begin + (i + 1) * factor.dim) for i in range(factor.pieces)]
    return torch.stack([whole[:, here, here] for here in places], 1).flatten(0, 1)


def _basis(saved: dict[str, Any]) -> dict[str, Eigen] | None:
    """Return the eigenbases that moments are kept in; None: the basis of the weights."""
    entries = saved.get("decompositions", {})
    if not entries or any(entry["form"] != EIGEN_FORM for entry in entries.values()):
        return None
    return {key: Eigen(entry.get("matrix"), entry["values"]) for key, entry in entries.items()}
