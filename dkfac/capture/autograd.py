"""Query the autograd engine during a backward pass.

Input: the weight of a layer. Output: whether the current backward pass computes its gradient, and the node that
accumulates it. Owns: nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


def reaches(weight: Tensor, node: Any = None) -> bool:
    """Return whether the backward pass that is currently running also computes the gradient of ``weight``.

    A pass for the input alone (adversarial examples, saliency maps) goes through the layer but must not be counted.
    ``node``: the node that accumulates the gradient, if already known.
    """
    if not weight.requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulator(weight) if node is None else node))
    except RuntimeError:  # raised in autograd.grad if the weight is one of its inputs
        return True


def accumulator(weight: Tensor) -> Any:
    """Return the node that accumulates the gradient of a leaf tensor."""
    with torch._C._ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS):  # a compiled backward runs this below the autograd keys
        return get_gradient_edge(weight).node
