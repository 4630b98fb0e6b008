"""Keep K-FAC's hooks out of what is copied or saved while it is attached: pickles, deep copies, ``torch.save(model)``.

Input: a model with hooks. Output: copies and pickles without them, which load where dkfac is not installed. Owns: the
attribute ``__getstate__`` that it sets on instances of hooked modules, and removes.

A module's hooks are part of its ``__dict__``, which is what pickle and deepcopy take. So each hooked module gets a
``__getstate__`` of its own that leaves out our entries. Where a class brings its own ``__reduce_ex__`` or
``__deepcopy__``, a copied hook is ``contextlib.nullcontext.__exit__``, which takes any arguments and does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OWN_COPY = ("__reduce__", "__reduce_ex__", "__deepcopy__")


class CaptureHook:
    """Base of the hooks on the model and its layers: a copy or a pickle of one does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext, "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext.__exit__

    @property
    def __name__(self) -> str:  # torch.jit.script asks for it first
        raise AttributeError(
            "K-FAC is attached to this model, and torch.jit.script cannot compile its hooks: call kfac.close() or "
            "dkfac.detach(model) first, or script a copy.deepcopy(model), which has none"
        )


class WithoutHooks:
    """``__getstate__`` of one module: its state without K-FAC's hooks. Also the handle that removes itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self) -> Any:
        module = self._module()
        assert module is not None
        kind: Any = type(module)
        state = kind.__getstate__(module)
        if not isinstance(state, dict):
            return state
        state = {name: value for name, value in state.items() if name != "__getstate__"}
        for name in _HOOKS:
            ours = {key for key, hook in state.get(name, {}).items() if isinstance(hook, CaptureHook)}
            for registry in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                if registry in state:
                    kept = [(key, value) for key, value in state[registry].items() if key not in ours]
                    state[registry] = type(state[registry])(kept)
        return state

    def remove(self) -> None:
        """Restore the module's own ``__getstate__``, once no hook of ours is left."""
        module = self._module()
        if module is not None and not _has_hooks(module):
            vars(module).pop("__getstate__", None)


def hide_hooks(modules: Iterable[nn.Module]) -> list[WithoutHooks]:
    """Keep the hooks of these modules out of copies and pickles; returns the handles that end it."""
    handles = []
    for module in modules:
        brings_its_own = any(getattr(type(module), name, None) is not getattr(object, name, None) for name in _OWN_COPY)
        if _has_hooks(module) and not brings_its_own:
            handles.append(WithoutHooks(module))
            vars(module)["__getstate__"] = handles[-1]
    return handles


def _has_hooks(module: nn.Module) -> bool:
    return any(isinstance(hook, CaptureHook) for name in _HOOKS for hook in vars(module)[name].values())
