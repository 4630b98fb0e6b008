"""Warn, once per reason, when K-FAC does not pay off.

Input: timings, damping and clipping of the run so far. Output: warnings. Owns: which warnings were given.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

QUIET_STEPS = 200
"""Number of steps before the first check."""
MOSTLY = 0.95
"""Share of clipped steps above which the clip, not the learning rate, determines the step length."""


class Diagnostics:
    """Checks K-FAC's share of the time, the damping and the clipping at each refresh."""

    def __init__(self) -> None:
        self._start: tuple[float, float] | None = None
        self._num_dominated = 0
        self._said: set[str] = set()
        self._has_asked = False

    def look(
        self, step: int, *, kfac_seconds: float, dominated_share: float, clipped_share: Callable[[], float]
    ) -> None:
        """Check the run so far and warn about problems.

        ``kfac_seconds`` is the time spent inside K-FAC. ``dominated_share`` is the share of layers whose damping
        exceeds their largest eigenvalue. ``clipped_share`` returns the share of steps that the KL clip shortened; it is
        called only once, because it synchronizes with the device.
        """
        self._num_dominated = self._num_dominated + 1 if dominated_share > 0.5 else 0
        now = time.perf_counter()
        if self._start is None:
            self._start = (now, kfac_seconds)
            return
        elapsed, ours = now - self._start[0], kfac_seconds - self._start[1]
        if step < QUIET_STEPS:
            return
        if ours > 0.75 * elapsed:
            self._warn(
                "time",
                f"it takes {ours / elapsed:.0%} of the time of a step ({elapsed / max(elapsed - ours, 1e-9):.1f} times "
                f"the step without it). To make it cheaper, use a larger factor_interval and inverse_interval, "
                f'solver="warm-eigen" or a smaller max_dim',
            )
        if self._num_dominated >= 3:
            self._warn(
                "damping",
                f"damping exceeds the largest curvature in {dominated_share:.0%} of the layers, so the update has the "
                f'direction of the raw gradient. Use less damping, or damping_mode="relative"',
            )
        if not self._has_asked:
            self._has_asked = True
            if (share := clipped_share()) > MOSTLY:
                self._warn(
                    "clip",
                    f"the KL clip shortened {share:.0%} of the steps, so the learning rate has no effect. Use a smaller"
                    " lr; if the loss is not a mean over examples, or is in an unusual unit, use a larger kl_clip or "
                    'rescale="norm-global"',
                )

    def _warn(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(f"K-FAC may not pay off: {message}", stacklevel=2)
