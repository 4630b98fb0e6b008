"""What a refresh did, for the engine to count.

Input: the outcomes of a refresh. Output: a report that can be merged with others. Owns: nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dkfac.decompose.fallback import Outcome
from dkfac.plan.plan import Plan


@dataclass(slots=True)
class RefreshReport:
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """The number of decompositions by outcome."""
    tf32_safe: dict[str, bool] = field(default_factory=dict)
    """By layer, whether its gradient may be preconditioned in TF32."""
    refreshed: bool = False
    """Whether this step counts as the refresh of its interval; there is one in each."""
    num_late: int = 0
    num_repaired: int = 0
    dominated_share: float | None = None
    """Share of the refreshed layers whose damping exceeds their largest eigenvalue; None if it was not computed."""
    plan: Plan | None = None
    """A new plan that all ranks have agreed on, if any."""

    def add(self, other: RefreshReport) -> None:
        self.outcomes.update(other.outcomes)
        self.tf32_safe |= other.tf32_safe
        self.refreshed |= other.refreshed
        self.num_late += other.num_late
        self.num_repaired += other.num_repaired
        self.dominated_share = self.dominated_share if other.dominated_share is None else other.dominated_share
        self.plan = other.plan or self.plan
