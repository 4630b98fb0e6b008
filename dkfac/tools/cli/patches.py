"""What ``dkfac run`` replaces in torch while a script runs.

Input: functions to tell of what the script does. Output: contexts in which they are told. Owns: the replacements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dkfac.capture.traceless import CaptureHook
from dkfac.ops.torch_private import functorch_is_active, jit_is_tracing

Note = Callable[[torch.optim.Optimizer], object]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def watched_optimizers(built: Note, extended: Note) -> Iterator[None]:
    """Within this context ``built`` is told of each new optimizer, ``extended`` of one that gets a parameter group."""
    base: Any = torch.optim.Optimizer
    build, extend = base.__init__, base.add_param_group

    def watched_build(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        build(optimizer, *args, **kwargs)
        built(optimizer)

    def watched_extend(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        extend(optimizer, *args, **kwargs)
        extended(optimizer)

    with replaced(base, "__init__", watched_build), replaced(base, "add_param_group", watched_extend):
        yield


@contextlib.contextmanager
def watched_calls(called: Callable[[nn.Module], None]) -> Iterator[None]:
    """Within this context ``called`` is told of each call of a module that may train it, before it happens: hooks that
    are added during a call do not see it."""
    call: Any = nn.Module.__call__

    def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if may_train():
            called(module)
        return call(module, *args, **kwargs)

    with replaced(nn.Module, "__call__", watched_call):
        yield


@contextlib.contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take K-FAC's hooks out of these modules within this context."""
    registries = [vars(module)[name] for module in modules for name in ("_forward_pre_hooks", "_forward_hooks")]
    before = [(registry, list(registry.items())) for registry in registries]
    for registry, items in before:
        for key in [key for key, hook in items if isinstance(hook, CaptureHook)]:
            del registry[key]
    try:
        yield
    finally:
        for registry, items in before:  # in their order
            registry.clear()
            registry.update(items)


@contextlib.contextmanager
def scripting() -> Iterator[None]:
    """Within this context ``torch.jit.script`` does not see K-FAC's hooks, which it cannot compile."""
    script: Any = torch.jit.script

    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        with without_hooks(obj.modules() if isinstance(obj, nn.Module) else ()):
            return script(obj, *args, **kwargs)

    with replaced(torch.jit, "script", scripted):
        yield


def may_train() -> bool:
    """Whether a call of a module may be one of training: with gradients, and not traced, compiled, exported,
    transformed, or only for shapes, where tensors that K-FAC would make now are not ordinary ones."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if jit_is_tracing() or functorch_is_active():
        return False
    made = torch.empty(0)
    return type(made) is torch.Tensor and not made.is_meta
