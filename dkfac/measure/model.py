"""A user's model as layers and rows, without data: built and run on the meta device."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dkfac.layers.find import find_layers, unwrap
from dkfac.plan.models import Shape
from dkfac.settings import Settings


def build(where: str) -> nn.Module:
    """Return what ``package.module:function`` makes, on the meta device."""
    module, _, name = where.partition(":")
    try:
        function: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{where!r}: {module!r} cannot be imported ({error}); it is looked for on PYTHONPATH"
        ) from None
    for part in name.split("."):
        if not hasattr(function, part):
            raise ValueError(f"{where!r}: {module!r} has no {name!r}")
        function = getattr(function, part)
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        what = f"{where!r} cannot be called without arguments on the meta device"
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def shapes_of(model: nn.Module, shape: Sequence[int], settings: Settings, *, tokens: bool = False) -> list[Shape]:
    """Return the layers that K-FAC would precondition and the rows of one example, from a forward of such an input.

    ``tokens``: whether the input is numbers of tokens.
    """
    layers, _ = find_layers(unwrap(model), settings, None, meta=True)
    rows: dict[str, int] = {}
    handles = []
    for layer in layers:

        def note(_: nn.Module, args: Any, output: Any, *, name: str = layer.name, kind: str = layer.kind) -> None:
            spatial = output.shape[2:] if kind == "conv" else output.shape[1:-1]
            rows[name] = rows.get(name, 0) + (output.shape[0] * math.prod(spatial)) // shape[0]

        handles.append(layer.module.register_forward_hook(note))
    x = torch.zeros(tuple(shape), dtype=torch.int64 if tokens else torch.float32, device="meta")
    try:
        with torch.no_grad():
            model.to("meta")(x)
    except Exception as error:
        what = f"the model cannot be run on an input of shape {tuple(shape)} without data"
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    unseen = [layer.name for layer in layers if layer.name not in rows]
    if unseen:
        raise ValueError(f"layers were not called in a forward: {', '.join(unseen[:5])}")
    return [Shape(layer.spec, max(1, rows[layer.name])) for layer in layers]
