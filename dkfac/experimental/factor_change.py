"""How far a factor has changed between refreshes, and the interval that follows from it.

Input: batch factors, or running factors and bases. Output: relative changes and intervals. Owns: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """What a refresh saw of a statistic: a batch factor, or the eigenbasis of the running factor."""

    value: Tensor
    noise: Tensor
    """Expected squared distance between this batch factor and that of infinitely many rows."""


@dataclass(slots=True)
class Statistic:
    interval: int = 1
    previous: int = 1
    due: int = 0
    """It is measured from this step on."""
    rows: float = 0.0
    """Rows measured since the last refresh; the next refresh may need more."""
    pool: Tensor | None = None
    """Sum of batch factors times their rows since the last refresh; only on the judging rank."""
    noise: Tensor | None = None
    """Sum of their noise times their squared rows; NaN if a batch factor was corrupted in transfer."""
    seen: list[Seen] = field(default_factory=list)
    """What the last two refreshes saw, newest first; only on the judging rank."""

    def look(self) -> Seen | None:
        """Return the batch factor over all rows since the last refresh, or None."""
        if self.pool is None or self.noise is None:
            return None
        return Seen(self.pool / self.rows, self.noise / self.rows**2)

    def is_due(self, step: int, most: int) -> bool:
        """Whether it is measured at a step. From ``due`` on at every step, but if its layer has not been called for
        long, only after about another eighth of that time, at most about ``most`` steps: measuring synchronizes the
        ranks.
        """
        missing = step - self.due
        every = 1 << max(0, min(missing.bit_length() - 4, most.bit_length() - 1))
        return missing >= 0 and missing % every == 0

    def empty(self) -> None:
        """Discard what was accumulated."""
        self.rows, self.pool, self.noise = 0.0, None, None

    def follow(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to the model's device and dtype, as the layer's state does."""
        if self.pool is not None and self.noise is not None:
            self.pool, self.noise = self.pool.to(device, dtype), self.noise.to(device)
        self.seen = [Seen(seen.value.to(device, dtype), seen.noise.to(device)) for seen in self.seen]


def next_interval(interval: int, previous: int, *, like_last: bool, like_both: bool, most: int) -> int:
    """Return the steps until a statistic's next refresh, from whether it is unchanged since the last two."""
    if not like_last:
        return max(1, min(most, interval // 2))
    return min(most, interval + previous if like_both else interval)


def change(new: Seen, old: Seen) -> Tensor:
    """Return the relative change of a batch factor since an earlier one, minus what is expected from finite rows."""
    square = _square(new.value - old.value) - new.noise - old.noise
    return (square.clamp(min=0) / _square(old.value).clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def off_diagonal(factor: Tensor, vectors: Tensor) -> Tensor:
    """Return the norm of a factor's off-diagonal part in a basis, relative to the norm of the factor."""
    vectors = vectors.to(factor.dtype)
    turned = vectors.mT @ factor @ vectors
    rest = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return (_square(rest) / _square(turned).clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _square(value: Tensor) -> Tensor:
    return value.to(torch.float64).square().sum()
