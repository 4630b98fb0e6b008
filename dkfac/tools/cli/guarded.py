"""A ``KFAC`` whose errors do not end the script that it was attached to.

Input: errors of its hooks and steps. Output: a callback with the error; from then on the optimizer steps on raw
gradients. Owns: wrappers around its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn

from dkfac.capture.traceless import CaptureHook
from dkfac.kfac import KFAC
from dkfac.runtime.optimizer_hooks import OtherOptimizers

Report = Callable[["GuardedKFAC", BaseException], None]


class GuardedKFAC(KFAC):
    """After an error it takes no part in training. It is not closed at once: hooks are being iterated over then."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, report: Report, **options: Any) -> None:
        self.num_steps, self.failed, self._report = 0, False, report
        super().__init__(model, optimizer, **options)
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref() if hasattr(handle, "hooks_dict_ref") else {}
            if hooks and isinstance(hooks.get(handle.id), CaptureHook):
                hooks[handle.id] = GuardedHook(self, hooks[handle.id])

    @property
    def holds_all(self) -> bool:
        """Whether this rank's state is that of all layers."""
        rank = self._engine.transport.rank
        return all(rank in ranks for p in self.plan.placements for ranks in (*p.factors, *p.decomposed_by))

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """Do not warn of this other optimizer of the same parameters."""
        for handle in self._handles:
            if isinstance(handle, OtherOptimizers):
                handle.known.add(optimizer)

    def fail(self, error: BaseException) -> None:
        """Take no part any more: nothing is measured, and the optimizer steps on raw gradients."""
        self._capture.begin_step(measuring=False)
        if not self.failed:
            self.failed = True
            self._report(self, error)

    def fail_together(self, error: BaseException) -> None:
        """Fail after an error of a forward pass; with several ranks all of them, in this step."""

        def again() -> None:
            raise error

        try:
            self._collector.guarded(again)  # raises unless other ranks must learn of it first
            self._capture.begin_step(measuring=False)
        except Exception as raised:
            self.fail(raised)

    def _run(self, lr: float | None = None) -> None:
        if self.failed:
            return
        self.num_steps += 1
        try:
            super()._run(lr)
        except Exception as error:
            self.fail(error)


class GuardedHook(CaptureHook):
    def __init__(self, kfac: GuardedKFAC, hook: Any) -> None:
        self._kfac, self._hook = ref(kfac), hook

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._hook(*args)
        try:
            return self._hook(*args)
        except Exception as error:
            kfac = self._kfac()
            if kfac is not None:
                kfac.fail_together(error)
            return None
