"""Convert a saved state with whole factors to one with factors in pieces.

Input: a state that ``checkpoint.save`` returned, and the layers. Output: the state in the form that the layers have.
Owns: nothing.

Running factors give their diagonal blocks. Decompositions are dropped, so the next measured step decomposes again.
Adam's second moments are rotated back to the basis of the weights by squared rotations. Other changes are refused: what
was between pieces is not known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dkfac.factors.layer_state import rotate_moments
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Eigen
from dkfac.plan.spec import FactorSpec, whole_key
from dkfac.state.checkpoint import EIGEN_FORM

OF_DECOMPOSITIONS = ("decompositions", "means", "decomposed_at", "decomposed", "failures", "begun", "moments")
"""Entries of a saved layer that belong to its decompositions."""


def to_pieces(saved: dict[str, Any], layers: dict[str, Layer], block_dim: int | None) -> dict[str, Any]:
    """Return a state whose factors have the shapes of the layers' factors; itself if they already have."""
    found = saved.get("layers") if isinstance(saved, dict) else None
    if not isinstance(found, dict):
        return saved  # refused when it is read
    changed = [name for name, layer in layers.items() if name in found and not _fits(found[name], layer)]
    if not changed:
        return saved
    before = saved.get("block_dim") or None
    for name in changed:
        if not _is_whole(found[name], layers[name]):
            raise ValueError(
                f"the K-FAC state was saved with block_dim={before}, and this KFAC has block_dim={block_dim}: the "
                f"pieces of layer {name!r} are different ones. Use block_dim={before}, or load the model alone and let "
                f"K-FAC measure again"
            )
    converted = {name: _cut(found[name], layers[name]) for name in changed}
    return {**saved, "layers": {**found, **converted}, "begun_at": -1, "staleness": None}


def _tensors(saved: Any) -> dict[str, Tensor]:
    """Return a saved layer's running factors, by key."""
    running = saved.get("running", {}) if isinstance(saved, dict) else {}
    return {key: entry["value"] for key, entry in running.items() if isinstance(entry, dict) and "value" in entry}


def _fits(saved: Any, layer: Layer) -> bool:
    """Whether the factors that a layer cuts, or may have cut, have the shapes of the layer's own."""
    shapes = {factor.key: factor.shape for factor in layer.spec.factors if whole_key(factor.key) in ("A", "G")}
    found = {key: tuple(t.shape) for key, t in _tensors(saved).items() if whole_key(key) in ("A", "G")}
    return all(shapes.get(key) == shape for key, shape in found.items())


def _is_whole(saved: Any, layer: Layer) -> bool:
    """Whether a layer's saved factors are whole ones."""
    shapes = {factor.key: (factor.grad_blocks, factor.whole_dim or factor.dim) for factor in layer.spec.factors}
    return all(tuple(t.shape[:2]) == shapes.get(key) for key, t in _tensors(saved).items())


def _cut(saved: dict[str, Any], layer: Layer) -> dict[str, Any]:
    running = {}
    for factor in layer.spec.factors:
        entry = saved["running"].get(whole_key(factor.key))
        if entry is not None:
            running[factor.key] = entry | {"value": _diagonal_blocks(entry["value"], factor, layer)}
    kept: dict[str, Any] = {name: value for name, value in saved.items() if name not in OF_DECOMPOSITIONS}
    if "momentum" in saved:
        basis, moments = _basis(saved), saved["moments"]
        kept["moments"] = moments | {"value": rotate_moments(moments["value"], basis, None)}
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
