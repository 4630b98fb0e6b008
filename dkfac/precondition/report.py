"""What preconditioning did in a step, for the engine to count and to hide from the optimizer.

Input: the results of a step. Output: a report. Owns: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dkfac.precondition.adaptive import Grafts


@dataclass(slots=True)
class UpdateReport:
    written: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradients were written."""
    stepped: list[Tensor] = field(default_factory=list)
    """Parameters that K-FAC stepped itself."""
    grafts: Grafts | None = None
    """Updates that are applied after the optimizer's own step."""
    grad_norm: Tensor | None = None
    update_norm: Tensor | None = None
    clip_factor: Tensor | None = None
    """The factor by which updates were shortened to stay in the trust region, if there is one."""
