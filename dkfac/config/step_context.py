"""What one step does, and with which numbers.

In: settings and the step. Out: a frozen value that every stage of the step reads. Owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from dkfac.config.settings import Settings

FactorName = tuple[str, str]
"""A factor: layer and key."""


@dataclass(frozen=True, slots=True)
class StepContext:
    step: int
    measures: bool
    """Whether this step measures factors."""
    refreshes: bool
    """Whether it decomposes them."""
    settings: Settings
    due: frozenset[FactorName] | None = None
    """Factors that are measured, if each has an interval of its own; None: all."""

    def at(self, name: str) -> float:
        """Return a scheduled setting's value at this step."""
        return self.settings.at(name, self.step)
