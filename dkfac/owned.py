"""The optimizer's state of layers that one rank steps for all (``share="weights"``), as part of K-FAC's own state."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from dkfac.layers.layer import Layer


def save(optimizer: torch.optim.Optimizer | None, layer: Layer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of a layer by parameter; before the first step, zeros of its form."""
    names = ("weight", "bias")
    assert optimizer is not None
    return {name: _save(optimizer, p) for name, p in zip(names, layer.parameters(), strict=False)}


def load(optimizer: torch.optim.Optimizer | None, layer: Layer, saved: dict[str, dict[str, Any]]) -> None:
    """Give the optimizer, if there is one, back what ``save`` returned."""
    if optimizer is None:
        return
    for name, p in zip(("weight", "bias"), layer.parameters(), strict=False):
        found = saved.get(name)
        if found:
            optimizer.state[p] = {key: _place(optimizer, p, key, value) for key, value in found.items()}


def _save(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    state = optimizer.state.get(parameter)
    if not state:
        return _blank(optimizer, parameter)
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _place(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """Return a copy where the optimizer wants it: as torch does when it loads its own state."""
    if not isinstance(value, Tensor):
        return copy.copy(value)
    policy: Any = torch.optim.Optimizer._process_value_according_to_param_policy
    return policy(parameter, value.clone(), 0, [{**_group(optimizer, parameter), "params": [0]}], key)


def _group(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def _blank(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return zeros shaped like the state after a first step, found by a step of a copy on a parameter of zeros.

    Distributed checkpoints are read into tensors that are there already.
    """
    group = _group(optimizer, parameter)
    trial = torch.nn.Parameter(torch.zeros_like(parameter))
    trial.grad = torch.zeros_like(parameter)
    shadow: Any = object.__new__(type(optimizer))  # a copy would go through the optimizer's pickling
    shadow.__dict__.update(optimizer.__dict__)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**group, "params": [trial]}]
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    type(optimizer).step(shadow)  # not shadow.step: schedulers wrap that one, for the original
    return {
        key: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for key, value in shadow.state[trial].items()
    }
