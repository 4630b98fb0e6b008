"""Find the module that an optimizer trains.

Input: an optimizer, and a module that was called. Output: the smallest module that owns all of the optimizer's
parameters, or a ``ModuleList`` of several. Owns: nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from dkfac.layers.find import unwrap


def trained_parameters(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return the optimizer's parameters by ``id``."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def owns_any(module: nn.Module, parameters: Collection[int]) -> bool:
    return any(id(p) in parameters for p in module.parameters())


def find_model(optimizer: torch.optim.Optimizer, called: nn.Module | None) -> nn.Module | None:
    """Return the smallest module that owns all parameters of the optimizer that any module owns.

    Among modules with the same parameters it is ``called`` (of a model and its wrapper, a script calls the wrapper;
    None, before any call: DDP's wrapper), else the innermost one. If parameters are spread over modules without a
    common owner, they are put into a list.
    """
    wanted = set(trained_parameters(optimizer))
    owners = [(module, own) for module, own in _modules() if not own.isdisjoint(wanted)]
    chosen: list[nn.Module] = []
    missing = wanted & {number for _, own in owners for number in own}
    while missing:
        lacking = missing
        module, own = max(owners, key=lambda owner: _suitability(owner[0], owner[1], lacking, called))
        chosen.append(module)
        missing = missing - own
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    return nn.ModuleList(unwrap(module) for module in chosen)


def _suitability(module: nn.Module, own: set[int], missing: set[int], called: nn.Module | None) -> tuple[Any, ...]:
    is_chosen = isinstance(module, nn.parallel.DistributedDataParallel) if called is None else module is called
    return len(own & missing), -len(own), is_chosen, -sum(1 for _ in module.modules())


def _modules() -> list[tuple[nn.Module, set[int]]]:
    """Return all modules that are alive, each with the ids of its parameters."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):
            try:
                found.append((thing, {id(p) for p in thing.parameters()}))
            except Exception:  # a module whose construction has not ended, or failed
                continue
    return found
