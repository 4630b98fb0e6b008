"""Capture layers whose weight is applied by a function, such as ``F.linear``, instead of a call of their module.

Input: forwards of the modules that apply them, on measured steps. Output: autograd nodes that call the collector, as
for layers that are called. Owns: the modes that are active inside these forwards.

See ``docs/notes/014-functional-weights.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dkfac.capture.attention import ATTENTION, AttentionForward, Hook, Running
from dkfac.capture.traceless import CaptureHook
from dkfac.layers.layer import Layer
from dkfac.layers.uses import APPLIED_BY
from dkfac.ops.torch_private import functorch_is_active, jit_is_tracing, top_saved_tensors_hooks

FUNCTIONS = frozenset(APPLIED_BY.values())


class ApplierHook(CaptureHook):
    """Pre-hook and forward hook of a module that applies weights by functions: between them a mode looks for these
    functions. Nothing else is slowed down, and nothing at all in a step that is not measured."""

    def __init__(self, forward: Running, layers: Sequence[tuple[Layer, Hook]]) -> None:
        self.forward, self.layers = forward, layers
        self.attention = AttentionForward(forward, layers)
        self._modes: list[tuple[int, _Watching]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *output: Any) -> None:
        """Called before the forward, and after it with its output, or None if it raised."""
        compiling = torch.compiler.is_compiling()
        thread = 0 if compiling else threading.get_ident()  # another one may evaluate the model meanwhile
        if output:
            if self._modes and self._modes[-1][0] == thread:
                self._modes.pop()[1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for _, hook in self.layers if compiling else ():
                hook.taken = None
        elif not self.forward.measuring or not torch.is_grad_enabled():
            return
        elif compiling or not (functorch_is_active() or jit_is_tracing()):
            self._modes.append((thread, _Watching(self)))
            self._modes[-1][1].__enter__()  # type: ignore[no-untyped-call]


class _Kept:
    """Stands for a weak reference in code that is compiled, where it is dropped when the module's forward ends."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor | None:
        return self.tensor


def _saved_tensor_hooks() -> Any:
    return None if torch.compiler.is_compiling() else top_saved_tensors_hooks(True)


class _Watching(TorchFunctionMode):
    """Active inside one forward of a module."""

    def __init__(self, applier: ApplierHook) -> None:
        super().__init__()
        self._applier = applier
        self._saving = _saved_tensor_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            return self._applier.attention(*args, **kwargs)
        output = func(*args, **kwargs)
        if func not in FUNCTIONS or _saved_tensor_hooks() != self._saving:
            return output  # inside a checkpoint of its own, which would run again without this mode
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        for layer, hook in self._applier.layers:
            if layer.module._parameters.get(layer.use.weight) is given["weight"] and _is_plain(
                layer, func, args, given
            ):
                watched = hook(layer.module, (given["input"],), {}, output)
                output = output if watched is None else watched
                # A module that was called after all has a hook of its own.
                hook.taken = _Kept(output) if torch.compiler.is_compiling() else ref(output)
                break
        return output


def _is_plain(layer: Layer, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether a function applies a layer's parameters as its module would."""
    module: Any = layer.module
    if function is F.embedding:
        return True
    if layer.has_bias != (given.get("bias") is not None and given["bias"] is module._parameters.get(layer.use.bias)):
        return False
    if function is F.linear:
        return True
    names = ("stride", "padding", "dilation", "groups")
    given = given | dict(zip(names, args[3:], strict=False))
    return module.padding_mode == "zeros" and all(given.get(name) == getattr(module, name) for name in names)
