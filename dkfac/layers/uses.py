"""Which parameters of a module are the weight and bias of a layer, and what applies them: a call, or a function.

Input: modules. Output: :class:`Use`, and the modules whose forward applies weights by functions. Owns: nothing.

See ``docs/notes/014-functional-weights.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

APPLIED_BY: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: F.linear,
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    nn.Embedding: F.embedding,
}
"""The function that a module's forward applies its weight with. A subclass with a forward of its own may do so too."""


LINEAR = F.linear.__name__


@dataclass(frozen=True, slots=True)
class Use:
    """Parameters of a module, by name, that are one layer."""

    suffix: str = ""
    """Added to the module's name."""
    weight: str = "weight"
    bias: str | None = "bias"
    blocks: tuple[str, ...] = ()
    """Names of row blocks of the weight that have an input each: queries, keys and values."""


PLAIN = Use()


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written: ``fully_shard`` gives it a subclass."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


def uses_of(module: nn.Module) -> tuple[Use, ...]:
    """Return the layers that a module's own parameters make up."""
    if not isinstance(module, nn.MultiheadAttention):
        return (PLAIN,)
    if module.in_proj_weight is not None:
        return (Use(".in_proj", "in_proj_weight", "in_proj_bias", blocks=("q", "k", "v")),)
    # The bias is one parameter for three weights of different widths: it stays with the optimizer.
    return tuple(Use(f".in_proj.{key}", f"{key}_proj_weight", None) for key in "qkv")


def applies_its_weight(module: nn.Module) -> bool:
    """Return whether a subclass that overrides ``forward`` still applies its weight by the function of its base class,
    as far as its code tells. What it really does is seen when it runs."""
    for base, function in APPLIED_BY.items():
        if isinstance(module, base):
            names = _names(module)
            return function.__name__ in names or "_conv_forward" in names or {"super", "forward"} <= names
    return False


def is_own_linear(module: nn.Module) -> bool:
    """Return whether a module that is no subclass of torch's layers applies a matrix ``weight`` of its own, and perhaps
    a ``bias``, by ``F.linear``, as far as its code tells."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.ndim != 2 or isinstance(module, tuple(APPLIED_BY)):
        return False
    is_torchs = own_class(module).__module__.startswith("torch.nn.")
    return not is_torchs and (bias is None or bias.shape == weight.shape[:1]) and {LINEAR, "weight"} <= _names(module)


def is_called(module: nn.Module, use: Use) -> bool:
    """Return whether a hook on a module sees the input and output of a layer: its forward is that of its base class."""
    if use is not PLAIN:
        return False
    bases = [base for base in APPLIED_BY if isinstance(module, base)]
    own = "forward" in vars(module) or is_own_linear(module)
    return not own and all(type(module).forward is base.forward for base in bases)


def appliers(model: nn.Module, layers: Iterable[tuple[int, nn.Module]]) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yield modules that may apply the weights of layers by functions in their forward, with the layers' indices.

    ``layers``: index and module of each. A module applies its own parameters; or those of its children, if the code of
    its forward mentions a child and ``weight``.
    """
    owned: dict[nn.Module, list[int]] = {}
    for index, module in layers:
        owned.setdefault(module, []).append(index)
    for module in dict.fromkeys(model.modules()):
        is_attention, names, found = isinstance(module, nn.MultiheadAttention), set[str](), list[int]()
        if module in owned and (is_attention or not is_called(module, PLAIN)):
            found += owned[module]
        is_torchs = own_class(module).__module__.startswith("torch.nn.")  # TransformerEncoderLayer: only in inference
        for name, child in module.named_children():
            if child not in owned or not isinstance(child, tuple(APPLIED_BY)) or (is_torchs and not is_attention):
                continue
            names = names or _names(module)
            if is_attention or {name, "weight"} <= names:
                found += owned[child]
        if found:
            yield module, found


def callable_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that a training loop may call instead of it: its children, looking through lists and
    dicts of modules, which cannot be called."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from callable_parts(child)
        else:
            yield child


def _names(module: nn.Module) -> set[str]:
    """Return the names that a module's forward mentions, and the methods that it calls."""
    found: set[str] = set()
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        function: Any = inspect.unwrap(getattr(type(module), waiting.pop()))
        if not isinstance(function, FunctionType) or function.__module__ == nn.Module.__module__:
            continue
        found |= _code_names(function.__code__)
        new = {name for name in found - seen if isinstance(getattr(type(module), name, None), FunctionType)}
        seen |= new
        waiting += sorted(new)
    return found


def _code_names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_code_names, inner)) if inner else set(code.co_names)
