"""Attach K-FAC to the model of an unmodified script.

Input: a running script. Output: K-FAC attached before the first training forward pass, or an error. Owns: its patches
of ``nn.Module.__call__``, ``Optimizer.__init__`` and ``GradScaler.__init__``, which it removes when it has attached.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn

from dkfac.kfac import KFAC

OWNED = 0.5
"""Fraction of an optimizer's parameters that a module must own to count as its model."""


class Refused(SystemExit):
    """K-FAC cannot be attached to this script; ``code`` is the reason. A ``SystemExit``, so that scripts do not catch
    it."""


class ScriptWatcher:
    """Records the optimizers and gradient scalers that a script builds. At the first training forward pass of a module
    that owns an optimizer's parameters, attaches K-FAC to both. ``tries``: close it again at once, only to find out
    whether it can be attached."""

    def __init__(
        self, options: dict[str, Any], target: str | None, *, command: str = "dkfac run", tries: bool = False
    ) -> None:
        self.options, self.target, self.command, self.tries = options, target, command, tries
        self.attached: KFAC | None = None
        self.optimizer: str | None = None
        """Class name of the optimizer that K-FAC was attached to."""
        self._optimizers: list[ref[torch.optim.Optimizer]] = []
        self._scalers: list[ref[Any]] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> ScriptWatcher:
        self._note(torch.optim.Optimizer, self._optimizers)
        self._note(torch.amp.GradScaler, self._scalers)
        call: Any = nn.Module.__call__

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._attach_if_model(module)  # before the call: hooks added during a call do not see it
            return call(module, *args, **kwargs)

        nn.Module.__call__ = watched  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(nn.Module, "__call__", call))
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _note(self, kind: Any, found: list[ref[Any]]) -> None:
        """Record every new instance of a class, whoever builds it."""
        build = kind.__init__

        def built(instance: Any, *args: Any, **kwargs: Any) -> None:
            build(instance, *args, **kwargs)
            found.append(ref(instance))

        kind.__init__ = built
        self._undo.append(lambda: setattr(kind, "__init__", build))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are alive, in the order of their creation."""
        alive = [found() for found in self._optimizers]
        return [o for o in alive if o is not None]

    def _attach_if_model(self, module: nn.Module) -> None:
        """Attach K-FAC if the module is in training mode and owns an optimizer's parameters."""
        if self.optimizer is not None or not module.training or not torch.is_grad_enabled():
            return
        owned = [o for o in self.optimizers() if _share(o, module) >= OWNED]
        if not owned:
            return
        chosen = self._choose(owned, module)
        if chosen is None:
            return
        self.__exit__()
        self.optimizer = type(chosen).__name__
        self._attach(module, chosen)

    def _attach(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        alive = [scaler for found in self._scalers if (scaler := found()) is not None and scaler.is_enabled()]
        scaler = alive[-1] if alive else None
        try:
            if self.tries:
                with warnings.catch_warnings(action="ignore"):  # they are shown in the run with K-FAC
                    KFAC(module, optimizer, grad_scaler=scaler, **{**self.options, "announce": False}).close()
            else:
                self.attached = KFAC(module, optimizer, grad_scaler=scaler, **self.options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refused(f"{self.command}: K-FAC cannot be attached: {error}") from None

    def _choose(self, owned: list[torch.optim.Optimizer], module: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer to attach to; None if it is not an optimizer of this module."""
        every = self.optimizers()
        if self.target is None:
            if len(every) > 1:
                raise Refused(self._explain(every))
            return every[0]
        wanted = [o for i, o in enumerate(every, 1) if self.target in (str(i), type(o).__name__)]
        if len(wanted) > 1:
            raise Refused(self._explain(every))
        if wanted:
            return wanted[0] if wanted[0] in owned else None
        return owned[0] if self.target == type(_inner(module)).__name__ else None

    def _explain(self, every: list[torch.optim.Optimizer]) -> str:
        lines = [f"{self.command}: the script has {len(every)} optimizers; choose the one to use with K-FAC:"]
        for number, optimizer in enumerate(every, 1):
            count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            lines.append(f"  --target {number}  {type(optimizer).__name__} with {count:,} parameters")
        return "\n".join([*lines, "or --target with the class name of the model"])

    def last_word(self) -> str | None:
        """Return why K-FAC was not attached; None if it was."""
        if self.optimizer is not None:
            return None
        if not self._optimizers:
            return "the script built no torch.optim optimizer, so there was nothing to attach K-FAC to"
        if self.target is not None:
            return f"no trained module or optimizer matches --target {self.target}"
        return "no module that owns the optimizer's parameters was called while it was training"


def _share(optimizer: torch.optim.Optimizer, module: nn.Module) -> float:
    """Return the fraction of an optimizer's parameters that a module owns."""
    own = {id(p) for p in module.parameters()}
    stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return sum(number in own for number in stepped) / max(1, len(stepped))


def _inner(module: nn.Module) -> nn.Module:
    """Return the model inside a wrapper."""
    for name in ("module", "_orig_mod"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return _inner(inner)
    return module


def say(text: str) -> None:
    print(f"dkfac run: {text}", file=sys.stderr)
