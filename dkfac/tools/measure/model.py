"""Layers and rows of a user's model, found on the meta device without data or memory.

Input: ``package.module:function`` and the shape of a batch. Output: shapes for the planner. Owns: nothing.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dkfac.config.settings import Settings
from dkfac.layers.find import find_layers, unwrap
from dkfac.plan.models import Shape

NOT_A_USERS = ("<", __file__, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Prefixes of files that are not the user's, and so are not named in an error message."""


def build_on_meta(where: str) -> nn.Module:
    """Return the model that ``package.module:function`` builds, on the meta device."""
    module, _, name = where.partition(":")
    if not all([*module.split("."), name]) or "/" in module or module.endswith(".py"):
        raise ValueError(f"{where!r} is not package.module:function, for example my_train:build_model")
    function = _imported(where, module)
    for part in name.split("."):
        if not hasattr(function, part):
            raise ValueError(f"{where!r}: {module!r} has no {name!r}")
        function = getattr(function, part)
    try:
        with torch.device("meta"):
            model = function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where!r} cannot be called without arguments on the meta device: {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _imported(where: str, module: str) -> Any:
    here = os.getcwd()
    if not sys.flags.safe_path and sys.path[:1] != [here]:
        sys.path.insert(0, here)  # as python -m does; the installed command does not
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{where!r}: {module!r} cannot be imported ({error}); it is searched for in this folder and on "
                f"PYTHONPATH"
            ) from None
        raise ValueError(f"{where!r}: {module!r} cannot be imported: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Return an error of the user's code in one line, with the last line of their code in the traceback."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
    own = [f"{file}:{line}" for file, line in places if not file.startswith(NOT_A_USERS)]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text}, at {own[-1]}" if own else text


def shapes_of(model: nn.Module, shape: Sequence[int], settings: Settings, *, tokens: bool = False) -> list[Shape]:
    """Return the layers that K-FAC would precondition and their rows per example, from one forward pass.

    Layers that are not called are left out. ``shape``: of the input. ``tokens``: whether the input is token indices.
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
    except (Exception, SystemExit) as error:
        what = f"the model cannot be run on an input of shape {tuple(shape)} without data"
        raise ValueError(f"{what}: {_told(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not rows:
        names = ", ".join(layer.name for layer in layers[:5])
        raise ValueError(f"none of the layers that K-FAC can precondition was called in the forward pass: {names}")
    return [Shape(layer.spec, max(1, rows[layer.name])) for layer in layers if layer.name in rows]
