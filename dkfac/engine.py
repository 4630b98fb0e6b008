"""Questions to autograd's engine while a backward pass runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


def reaches(weight: Tensor, node: Any = None) -> bool:
    """Whether the backward pass that runs now also computes this weight's gradient.

    One for the input alone (adversarial examples, saliency) passes through the layer and must not count. ``node``: what
    accumulates the gradient, if known.
    """
    if not weight.requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulator(weight) if node is None else node))
    except RuntimeError:  # autograd.grad with the weight among its inputs
        return True


def accumulator(weight: Tensor) -> Any:
    with torch._C._ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS):  # a compiled backward runs us below autograd
        return get_gradient_edge(weight).node
