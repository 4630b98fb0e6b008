"""Warnings about the training loop and about a K-FAC that does not pay off, each given once.

Input: measured layers and backward passes of each step, and its timings, damping and clipping. Output: warnings and
errors. Owns: which warnings were given.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Container

from torch import nn

from dkfac.layers.find import is_frozen
from dkfac.layers.layer import Layer

QUIET_STEPS = 200
"""Number of steps before the first check."""
MOSTLY = 0.95
"""Share of clipped steps above which the clip, not the learning rate, determines the step length."""


class Notices:
    """Checks the steps of the training loop for problems that K-FAC cannot solve by itself."""

    def __init__(self, model: nn.Module, layers: list[Layer], *, accumulation_is_set: bool) -> None:
        self._layers = layers
        self._frozen = [(name, module) for name, module in model.named_modules() if is_frozen(module)]
        self._saw_capture = False
        self._saw_accumulation = accumulation_is_set

    def accumulation(self, num_passes: int) -> None:
        """Warn if a step has several backward passes and ``accumulate`` does not say how their losses were combined."""
        if num_passes < 2 or self._saw_accumulation:
            return
        self._saw_accumulation = True
        warnings.warn(
            f"{num_passes} backward passes were accumulated in one step: K-FAC assumes that each loss was divided "
            f'by their number. Set accumulate="mean" to confirm it, "sum" if losses were not divided, or "terms" if '
            f"they were summed over all terms of the step and divided by their number. To exclude a pass that should "
            f"not count (such as an extra autograd.grad for a weight), call kfac.discard() after it.",
            stacklevel=2,
        )

    def capture(self, measured: Container[str], num_passes: int) -> None:
        """At the first measured step, warn about layers that have a gradient but whose hook did not run; raise if no
        hook ran."""
        if self._saw_capture:
            return
        trained = [layer.name for layer in self._layers if layer.weight.grad is not None]
        unseen = [name for name in trained if name not in measured]
        if num_passes and len(unseen) == len(trained):  # the batch may have been empty
            return
        self._saw_capture = True
        if trained and len(unseen) == len(trained):
            raise RuntimeError(
                f"none of the {len(trained)} layers with gradients was seen by K-FAC's hooks. If the model was "
                f"compiled and had already run, attach K-FAC before its first call, or call torch._dynamo.reset() "
                f"after attaching. K-FAC cannot measure gradients of a backward pass that ran before it was attached, "
                f"or gradients that were written by hand."
            )
        if unseen:
            warnings.warn(
                f"{len(unseen)} layers have gradients but K-FAC saw neither a call of their module nor of the function "
                f"that applies their weight, so it cannot measure them and passes their gradients on unchanged: "
                f"{', '.join(unseen[:8])}",
                stacklevel=2,
            )

    def thawed(self) -> None:
        """Warn about layers that were frozen when K-FAC was attached and now train without it."""
        names = [name for name, module in self._frozen if not is_frozen(module) and _has_gradient(module)]
        if names:
            self._frozen.clear()
            warnings.warn(
                f"{len(names)} layers were frozen when K-FAC was attached and now train without it: "
                f"{', '.join(names[:8])}. To precondition them, close() this KFAC and attach a new one.",
                stacklevel=2,
            )


def _has_gradient(module: nn.Module) -> bool:
    return any(p.grad is not None for p in module.parameters(recurse=False))


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
