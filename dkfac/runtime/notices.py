"""Warnings about the training loop, each given once.

Input: measured layers and backward passes of each step. Output: warnings and errors. Owns: which warnings were given.
"""

from __future__ import annotations

import warnings
from collections.abc import Container

from torch import nn

from dkfac.layers.find import is_frozen
from dkfac.layers.layer import Layer


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
                f"{len(unseen)} layers have gradients but were not called as modules, so K-FAC cannot measure them "
                f"and passes their gradients on unchanged: {', '.join(unseen[:8])}",
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
