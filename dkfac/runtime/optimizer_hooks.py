"""Hooks on the optimizer: run K-FAC before its step, and clean up after it; what K-FAC reads from it.

Input: a call of ``optimizer.step()``. Output: the gradients that the optimizer is to see. Owns: the gradients that are
hidden from it, and updates that are applied after its step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dkfac.precondition.adaptive import Grafts
from dkfac.precondition.report import UpdateReport


class OptimizerHooks:
    def __init__(self, take_step: Callable[[], None], share_weights: Callable[[], None]) -> None:
        """``take_step`` is K-FAC's part and calls ``begin``; ``share_weights`` is called after the optimizer's own
        step."""
        self._take_step, self._share_weights = take_step, share_weights
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._grafts: Grafts | None = None
        self._stepped, self._steps = False, Steps()

    def attach(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Register the hooks; returns the handles that remove them."""
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        return [before(self._before), after(self._after)]

    def begin(self, done: UpdateReport) -> None:
        """Prepare for the optimizer's step: hide gradients of parameters that K-FAC stepped, so it skips them."""
        self._stepped, self._grafts = True, done.grafts
        for p in done.stepped:
            self._hidden.append((p, p.grad))
            p.grad = None

    def give_back(self) -> None:
        """Restore hidden gradients, unless the parameter has a new one."""
        for p, grad in self._hidden:
            p.grad = grad if p.grad is None else p.grad
        self._hidden.clear()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's pre-hook. A closure computes the gradients later, so it is wrapped."""
        if not self._steps.enter():
            return None
        self.give_back()  # left over from a step that did not finish
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not is_dummy(optimizer, [p for group in optimizer.param_groups for p in group["params"]]):
                self._take_step()
            return None

        def preconditioned() -> Any:
            loss = closure()
            self._take_step()
            return loss

        if len(args) > 1:
            return (args[0], preconditioned, *args[2:]), kwargs
        return args, {**kwargs, "closure": preconditioned}

    def _after(self, *_: Any) -> None:
        """The optimizer's post-hook: restore gradients, finish updates, and share the weights that only their owner
        stepped."""
        if not self._steps.leave():
            return
        self.give_back()
        if self._grafts is not None:
            self._grafts.finish()
            self._grafts = None
        if self._stepped:
            self._stepped = False
            self._share_weights()


class Steps:
    """Detects nested steps: if a subclass calls its parent's ``step``, the hooks run for both."""

    def __init__(self) -> None:
        self._outer: Any = None
        """The frame of PyTorch's wrapper around the step in progress."""

    def enter(self) -> bool:
        """Return whether the calling hook belongs to the outermost step."""
        frame: Any = sys._getframe(2)
        caller = frame
        while frame is not None:
            if frame is self._outer:
                return False
            frame = frame.f_back
        self._outer = caller
        return True

    def leave(self) -> bool:
        """Return whether the step that ends is the outermost one."""
        if sys._getframe(2) is not self._outer:
            return False
        self._outer = None
        return True


def is_dummy(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether a step has no effect, like the one that ``torch.distributed.checkpoint`` takes to initialize an
    optimizer's state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if optimizer.state or any(isinstance(lr, Tensor) or lr != 0 for lr in rates):
        return False
    return not any(bool(p.grad.any()) for p in parameters if p.grad is not None)


def learning_rates(
    optimizer: torch.optim.Optimizer | None, parameters: Iterable[Tensor], lr: float | None
) -> dict[int, Any]:
    """Return learning rates by ``id(parameter)``. ``lr`` is used if there is no optimizer."""
    if optimizer is not None:
        return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    if lr is None:
        raise ValueError('rescale="kl-clip" and "norm-kl" need the learning rate: call kfac.step(lr=...)')
    return {id(p): lr for p in parameters}


def check_scaler(optimizer: torch.optim.Optimizer | None, *, has_scaler: bool) -> None:
    if not has_scaler and getattr(optimizer, "grad_scale", None) is not None:
        raise RuntimeError(
            "a GradScaler steps this optimizer: pass KFAC(..., grad_scaler=scaler), so that the loss scale does "
            "not enter the statistics"
        )
