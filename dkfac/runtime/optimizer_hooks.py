"""Hooks on the optimizer: run K-FAC before its step, and clean up after it; what K-FAC reads from it.

Input: a call of ``optimizer.step()``. Output: the gradients that the optimizer is to see; a warning if another one
steps its parameters. Owns: the gradients that are hidden from it, and updates that are applied after its step; a hook
that torch calls after each step of any optimizer, while a K-FAC is attached.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from dkfac.precondition.adaptive import Grafts
from dkfac.precondition.report import UpdateReport
from dkfac.runtime.scaler_search import SCALED_STEP, SCALED_STEP_IF_FINITE, ScalerSearch


class OptimizerHooks:
    def __init__(
        self,
        take_step: Callable[[], None],
        share_weights: Callable[[], None],
        search: ScalerSearch | None = None,
    ) -> None:
        """``take_step`` is K-FAC's part and calls ``begin``; ``share_weights`` is called after the optimizer's own
        step. ``search``: finds the ``GradScaler``; None if K-FAC was given one."""
        self._take_step, self._share_weights, self._search = take_step, share_weights, search
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._grafts: Grafts | None = None
        self._stepped, self._steps = False, Steps()
        self._others: OtherOptimizers | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Register the hooks; returns the handles that remove them."""
        self._others = OtherOptimizers(optimizer, self._steps)
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        return [before(self._before), after(self._after), self._others]

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
        search, scaler = self._search, self._steps.scaler
        if search is not None and (scaler is not search.found or search.context.half is not None):
            search.use(optimizer, scaler)
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
        if self._others is not None:  # an outer optimizer that called this one still sees the same gradients
            for p in chain.from_iterable(map(itemgetter("params"), self._others.optimizer.param_groups)):
                if (grad := p.grad) is not None:
                    self._others.stepped_on = p, ref(grad), grad._version
                    break


class OtherOptimizers:
    """Notices optimizers that step the parameters of K-FAC's own optimizer. Also the handle that ends it."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Steps) -> None:
        self.optimizer, self._steps = optimizer, steps
        self.known: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers that were checked already."""
        self.stepped_on: tuple[Tensor, ref[Tensor], int] | None = None
        """One of the gradients that the own optimizer stepped on: its parameter, and its version."""
        _WATCHED[:] = [*(watched for watched in _WATCHED if watched() is not None), ref(self)]
        if not _HANDLES:
            _HANDLES.append(register_optimizer_step_post_hook(_after_any_step))

    def remove(self) -> None:
        _WATCHED[:] = [watched for watched in _WATCHED if watched() not in (self, None)]
        while not _WATCHED and _HANDLES:
            _HANDLES.pop().remove()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if another optimizer has stepped the own one's parameters without calling it."""
        own = {id(p) for p in _parameters_of(self.optimizer)}
        if any(id(p) in own for p in _parameters_of(optimizer)):
            if self._steps.outer is not None or self._has_just_stepped():
                return
            warnings.warn(
                f"{type(optimizer).__name__} stepped parameters that K-FAC preconditions for another optimizer "
                f"({type(self.optimizer).__name__}), so K-FAC had no part in that step. If the optimizer was made "
                f"anew, close() this KFAC, or call dkfac.detach(model), and attach a new one: KFAC(model, optimizer)",
                stacklevel=4,
            )
        self.known.add(optimizer)

    def _has_just_stepped(self) -> bool:
        """Whether the own optimizer was called by the other one: no gradient has changed since its step."""
        if self.stepped_on is None:
            return False
        p, grad, version = self.stepped_on
        return p.grad is None or (p.grad is grad() and p.grad._version == version)


_WATCHED: list[ref[OtherOptimizers]] = []
_HANDLES: list[Any] = []


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for entry in tuple(_WATCHED):
        if (watched := entry()) is not None and watched.optimizer is not optimizer and optimizer not in watched.known:
            watched.check(optimizer)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Steps:
    """Detects nested steps: if a subclass calls its parent's ``step``, the hooks run for both."""

    def __init__(self) -> None:
        self.outer: Any = None
        """The frame of PyTorch's wrapper around the step in progress."""
        self.scaler: Any = None
        """The ``GradScaler`` that called this step."""

    def enter(self) -> bool:
        """Return whether the calling hook belongs to the outermost step."""
        frame: Any = sys._getframe(2)
        caller, scaler = frame, None
        while frame is not None:
            if frame is self.outer:
                return False
            if scaler is None and (frame.f_code is SCALED_STEP or frame.f_code is SCALED_STEP_IF_FINITE):
                scaler = frame.f_locals["self"]
            frame = frame.f_back
        self.outer, self.scaler = caller, scaler
        return True

    def leave(self) -> bool:
        """Return whether the step that ends is the outermost one."""
        if sys._getframe(2) is not self.outer:
            return False
        self.outer = None
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
