"""The hyperparameters of an optimizer, by parameter, as K-FAC's own steps use them.

In: a ``torch.optim.Optimizer``. Out: a :class:`Rule` for each parameter. Owns nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dkfac.config.settings import Settings


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What the optimizer says of a parameter."""

    lr: Tensor | float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Whether weight decay acts on the weights, not on the gradient."""
    sign: float
    length: Length = "adam"
    """Whose length an update has with ``curvature="adaptive"``."""
    nesterov: bool = False


Length = Literal["adam", "sgd", "measured"]
SECOND_BETA = 0.99
"""Decay of second moments where the optimizer has none."""
MOMENTUM = 0.9
"""Decay of the gradient's average where the optimizer does not say."""
COUPLED = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
           torch.optim.ASGD, torch.optim.Rprop)  # fmt: skip
"""Optimizers that add weight decay to the gradient."""


def length_of(optimizer: Any) -> Length:
    """Return how the length of an optimizer's own update is known: by Adam's rule, by SGD's, or by letting it step.

    A subclass that does not change ``step`` keeps the rule of its class.
    """
    step, groups = inspect.unwrap(type(optimizer).step), optimizer.param_groups
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not any(g.get("amsgrad") for g in groups):
        own = {inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}
        return "adam" if step in own else "measured"
    if isinstance(optimizer, torch.optim.SGD) and not any(g.get("dampening") for g in groups):
        return "sgd" if step is inspect.unwrap(torch.optim.SGD.step) else "measured"
    return "measured"


def hides(settings: Settings, optimizer: Any) -> bool:
    """Whether an optimizer does not see the gradients of K-FAC's layers, nor keeps state for them."""
    is_plain = settings.curvature == "adam-eigen"
    return is_plain or (settings.curvature == "adaptive" and length_of(optimizer) != "measured")


def check_zero(optimizer: Any, share: str) -> None:
    """Raise for what does not work with torch's ``ZeroRedundancyOptimizer``, which decides itself which rank steps a
    parameter."""
    if not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return
    if share == "weights":
        raise ValueError(
            'share="weights" with ZeroRedundancyOptimizer: both decide which rank steps a layer, and the weights that '
            'K-FAC sends may not be those that were stepped; use share="gradients", or the plain optimizer'
        )
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ValueError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps during the backward pass, before K-FAC has "
            "preconditioned the gradients: use overlap_with_ddp=False"
        )


def rules(optimizer: Any) -> dict[int, Rule]:
    """Return the optimizer's settings as they are now, by the parameters' ids."""
    found: dict[int, Rule] = {}
    length = length_of(optimizer)
    is_decoupled = isinstance(optimizer, torch.optim.AdamW) or not isinstance(optimizer, (torch.optim.Adam, *COUPLED))
    for group in optimizer.param_groups:
        first, second = group.get("betas", (group.get("momentum", MOMENTUM), SECOND_BETA))[:2]
        rule = Rule(
            0.0 if group.get("lr") is None else group["lr"],  # some find their own
            (float(first or 0.0), float(second)),
            group["eps"] if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else 0.0,
            group.get("weight_decay") or 0.0,
            group.get("decoupled_weight_decay", is_decoupled),
            -1.0 if group.get("maximize") else 1.0,
            length,
            bool(group.get("nesterov")),
        )
        found |= {id(p): rule for p in group["params"]}
    return found


def rules_of_steps(settings: Settings, optimizer: Any) -> dict[int, Rule]:
    """Return the rules if K-FAC takes the steps itself, with one state for each layer; otherwise none."""
    return rules(optimizer) if settings.takes_steps and optimizer is not None else {}


def share_state(one: Rule, other: Rule) -> bool:
    """Whether two parameters can have one state: all is equal but learning rates and weight decay."""
    return (one.betas, one.eps, one.sign, one.nesterov) == (other.betas, other.eps, other.sign, other.nesterov)
