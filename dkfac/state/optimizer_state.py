"""The optimizer's state of layers that one rank steps for all (``share="weights"``), as part of K-FAC's state.

Input: an optimizer and a layer. Output: its state by parameter name, or the optimizer's state restored in place. Owns:
nothing.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.ops.torch_private import value_by_policy


def save_owned(optimizer: torch.optim.Optimizer | None, layers: list[Layer], state: dict[str, Any]) -> None:
    """Add the optimizer's state of the layers that this rank steps to a K-FAC state."""
    for layer in layers:
        state["layers"][layer.name]["optimizer"] = save_optimizer_state(optimizer, layer)


def load_owned(optimizer: torch.optim.Optimizer | None, layers: list[Layer], state: dict[str, Any]) -> None:
    """Restore the optimizer's state of the layers that this rank steps from a K-FAC state; warns if it lacks one."""
    for layer in layers:
        saved = state["layers"][layer.name].get("optimizer")
        if saved:
            load_optimizer_state(optimizer, layer, saved)
        elif state.get("share") == "weights":
            warnings.warn(
                f'this K-FAC state was saved with share="weights" and brings no optimizer state for layer '
                f"{layer.name!r}, whose momentum starts anew; load a distributed checkpoint with the share it was "
                f"saved with",
                stacklevel=4,
            )


def save_optimizer_state(optimizer: torch.optim.Optimizer | None, layer: Layer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of a layer by parameter name; before the first step, zeros of the same structure."""
    names = ("weight", "bias")
    assert optimizer is not None
    return {name: _save(optimizer, p) for name, p in zip(names, layer.parameters(), strict=False)}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer | None, layer: Layer, saved: dict[str, dict[str, Any]]
) -> None:
    """Restore what ``save`` returned to the optimizer, if there is one."""
    if optimizer is None:
        return
    for name, p in zip(("weight", "bias"), layer.parameters(), strict=False):
        found = saved.get(name)
        if found:
            optimizer.state[p] = placed(optimizer, p, found)


def placed(optimizer: torch.optim.Optimizer, parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's entry as ``Optimizer.load_state_dict`` would place it."""
    return {key: _place(optimizer, parameter, key, value) for key, value in entry.items()}


def _save(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    state = optimizer.state.get(parameter)
    if not state:
        return _blank(optimizer, parameter)
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _place(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """Return a copy with the device and dtype that ``Optimizer.load_state_dict`` would give it."""
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return value_by_policy(parameter, value.clone(), 0, [{**_group(optimizer, parameter), "params": [0]}], key)


def _group(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def _blank(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return zeros structured like the state after a first step, found by stepping a copy on a parameter of zeros.

    Distributed checkpoints are read into existing tensors.
    """
    group = _group(optimizer, parameter)
    trial = torch.nn.Parameter(torch.zeros_like(parameter))
    trial.grad = torch.zeros_like(parameter)
    shadow: Any = object.__new__(type(optimizer))  # copy.copy would go through the optimizer's pickling
    shadow.__dict__.update(optimizer.__dict__)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**group, "params": [trial]}]
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    type(optimizer).step(shadow)  # not shadow.step, which LR schedulers wrap for the original
    return {
        key: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for key, value in shadow.state[trial].items()
    }
