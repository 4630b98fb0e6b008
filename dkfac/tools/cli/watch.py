"""Attach K-FAC to the models and optimizers of an unmodified script.

Input: a running script. Output: K-FAC attached to each optimizer before the first forward pass that it trains, or a
line that says why not. Owns: patches of ``Optimizer`` and, while an optimizer waits for its model, of
``nn.Module.__call__``; hooks on the steps of all optimizers; what is known of each optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from dkfac.comm import vote
from dkfac.layers.find import unwrap
from dkfac.runtime.attach import choose_group, prepare_attachment
from dkfac.runtime.optimizer_hooks import is_dummy
from dkfac.tools.cli.children import watched_children
from dkfac.tools.cli.guarded import GuardedKFAC
from dkfac.tools.cli.owner import find_model, owns_any, trained_parameters
from dkfac.tools.cli.patches import scripting, watched_calls, watched_optimizers
from dkfac.tools.cli.script_state import StateFiles
from dkfac.tools.cli.watched import Watched, label, question

MOST_CHANGES = 3
"""How often K-FAC follows a script that steps the same parameters with one optimizer and then another."""


class Refused(SystemExit):
    """K-FAC cannot be attached, and the user wants an error; ``code`` is the reason. A ``SystemExit``, so that scripts
    do not catch it."""


class Replaced(RuntimeError):
    """Another optimizer steps the parameters of this one."""


class ScriptWatcher:
    """Attaches K-FAC to the optimizers that a script builds. ``strict``: end the script where that is not possible.
    ``tries``: only find out whether it is possible."""

    def __init__(
        self, options: dict[str, Any], target: str | None = None, *, command: str = "dkfac run", strict: bool = False,
        tries: bool = False, save: bool = False,
    ) -> None:  # fmt: skip
        self._how = {"options": options, "target": target, "command": command, "strict": strict, "save": save}
        self.options, self.target, self.command, self.strict, self.tries = options, target, command, strict, tries
        self.optimizer: str | None = None
        """Class name of the first optimizer that K-FAC was attached to."""
        self._first: ReferenceType[Any] | None = None
        self._known: WeakKeyDictionary[torch.optim.Optimizer, Watched] = WeakKeyDictionary()
        self._numbers, self._changes, self._has_said = itertools.count(1), 0, False
        self.has_children = False
        self._files = StateFiles(self._kfac_of, self._load_state, self._say_once) if save else None
        self._said: set[str] = set()
        self._closing: list[ReferenceType[Any]] = []
        self._stack, self._call = contextlib.ExitStack(), contextlib.ExitStack()

    # --- begin and end ---------------------------------------------------------------------------------------

    def __enter__(self) -> ScriptWatcher:
        self._stack.enter_context(watched_optimizers(self._add, self._note_more))
        self._stack.enter_context(scripting())
        for register, hook in (
            (torch_optimizer.register_optimizer_step_pre_hook, self._before_step),
            (torch_optimizer.register_optimizer_step_post_hook, self._after_step),
        ):
            self._stack.callback(register(hook).remove)
        if not self.tries:
            self._stack.enter_context(watched_children(_watch_here, self._how, self._note_child))
        if self._files is not None:
            self._stack.enter_context(self._files.patched())
        return self

    def __exit__(self, *_: object) -> None:
        self._call.close()
        self._stack.close()

    @property
    def attached(self) -> Any:
        """The first ``KFAC`` that was attached, if it is still there."""
        return None if self._first is None else self._first()

    def last_word(self) -> str | None:
        """Return why K-FAC was not attached to anything, if the user was not told; None otherwise."""
        if self.optimizer is not None or self._has_said or self.has_children:  # a child says it itself
            return None
        if next(self._numbers) == 1:
            return "the script built no torch.optim optimizer, so there was nothing to attach K-FAC to"
        if self.target is not None:
            return f"no trained module or optimizer matches --target {self.target}"
        return "no optimizer took a step"

    def say(self, text: str) -> None:
        if vote.this_rank() == 0:
            sys.stderr.write(f"{self.command}: {text}\n")  # at once: other ranks write to it too
            sys.stderr.flush()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    # --- what the script does --------------------------------------------------------------------------------

    def _add(self, optimizer: torch.optim.Optimizer) -> Watched:
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = Watched(next(self._numbers))
            if self._files is not None:
                self._files.watch(optimizer)
            self._watch_calls()
        return known

    def _note_child(self) -> None:
        self.has_children = True

    def _watch_calls(self) -> None:
        self._call.close()
        self._call.enter_context(watched_calls(self._called))

    def _called(self, module: nn.Module) -> None:
        """Attach K-FAC to the waiting optimizers that train this module."""
        for closing in self._closing:
            if (kfac := closing()) is not None:
                kfac.close()
        self._closing.clear()
        waiting = [(o, known) for o, known in list(self._known.items()) if known.is_waiting]
        for optimizer, known in sorted(waiting, key=lambda item: item[1].number):
            if module in known.foreign:
                continue
            own = trained_parameters(optimizer)
            if not owns_any(module, own):
                known.foreign.add(module)
            elif any(p.requires_grad for p in own.values()):  # frozen while another optimizer's loss passes through
                self._attach_to(optimizer, known, module)
        if not any(known.is_waiting for known in self._known.values()):
            self._call.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = self._add(optimizer)
        if known.frozen and any(p is not None and p.requires_grad for p in (frozen() for frozen in known.frozen)):
            known.frozen.clear()
            self._changes += 1
            if self._changes <= MOST_CHANGES:
                self._note_more(optimizer)
        is_kfacs = known.attached() is not None and not known.is_waiting
        if is_kfacs or is_dummy(optimizer, trained_parameters(optimizer).values()):
            return
        rival = self._rival(optimizer)
        known.steps_of_other = -1 if rival is None else rival.num_steps
        if len(args) < 2 and kwargs.get("closure") is None:
            if rival is None:
                self._note_no_model(optimizer, known)
        elif known.is_waiting and not self._shares(optimizer) and find_model(optimizer, None) is not None:
            self._attach_to(optimizer, known, None)  # the closure calls the model inside this step

    def _note_no_model(self, optimizer: torch.optim.Optimizer, known: Watched) -> None:
        if known.is_waiting and known.attached() is None and not known.has_said:
            vote.decline(question(known), "no model was found before the first step")
            self._refuse(optimizer, known, "no module that owns its parameters was called before its step")
            known.is_waiting = vote.number_of_ranks() == 1  # other ranks will not ask again

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Follow the script to another optimizer of the same parameters, at the next forward pass."""
        known, rival = self._known.get(optimizer), self._rival(optimizer)
        if known is not None and rival is None:
            self._note_no_model(optimizer, known)
        if known is None or rival is None or known.attached() is rival or known.steps_of_other != rival.num_steps:
            return  # the other one has stepped too: one of them calls the other
        rival.expect(optimizer)
        if self._changes >= MOST_CHANGES:
            if not known.has_said:
                self._refuse(optimizer, known, "another optimizer that K-FAC is attached to steps the same parameters")
            return
        self._changes += 1
        self.say(f"{label(optimizer, known)} steps what an earlier optimizer trained: K-FAC follows it")
        rival.fail(Replaced("another optimizer steps its parameters"))
        known.is_waiting = True
        self._watch_calls()

    def _note_more(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach K-FAC anew at the next forward pass, because the optimizer trains more than before."""
        known = self._known.get(optimizer)
        if known is not None and known.attached() is not None and not known.attached().failed:
            self.say(f"{label(optimizer, known)} trains more parameters than before: K-FAC is attached to them too")
            self.attach_anew(optimizer)

    def attach_anew(self, optimizer: torch.optim.Optimizer, state: dict[str, Any] | None = None) -> None:
        """Attach K-FAC at the next forward pass as if the optimizer were new, with a state of K-FAC's."""
        known = self._add(optimizer)
        known.is_waiting, known.state = True, state
        self._watch_calls()

    # --- attaching -------------------------------------------------------------------------------------------

    def _attach_to(self, optimizer: torch.optim.Optimizer, known: Watched, called: nn.Module | None) -> None:
        known.is_waiting = False
        known.frozen = [ref(p) for p in trained_parameters(optimizer).values() if not p.requires_grad]
        if (before := known.attached()) is not None:
            before.close()
        if self._rival(optimizer) is None:  # otherwise K-FAC follows the one that steps
            self._attach(optimizer, known, called)

    def _shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another optimizer has some of the same parameters: one of them may call the other."""
        own = trained_parameters(optimizer).keys()
        others = [other for other in self._known if other is not optimizer]
        return any(not own.isdisjoint(trained_parameters(other)) for other in others)

    def _rival(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return a K-FAC that is attached to another optimizer of the same parameters."""
        own = trained_parameters(optimizer)
        for other, known in list(self._known.items()):
            kfac = known.attached()
            shares = other is not optimizer and kfac is not None and not kfac.failed
            if shares and not own.keys().isdisjoint(trained_parameters(other)):
                return kfac
        return None

    def _attach(self, optimizer: torch.optim.Optimizer, known: Watched, called: nn.Module | None) -> None:
        model = find_model(optimizer, called)
        if model is None or not self._is_wanted(optimizer, known, model):
            return
        reason, layers = None, 0
        try:
            layers = len(prepare_attachment(model, optimizer, None, None, None, None, self.options).layers)
        except Exception as error:
            reason = str(error)
        if not self.tries:
            what = f"{type(optimizer).__name__} with {layers} layers"
            reason = vote.common_reason(question(known), what, reason, choose_group(model, None, None))
            known.attempts += 1
        if reason is None:
            reason = self._make(optimizer, known, model)
        if reason is not None:
            self._refuse(optimizer, known, reason)

    def _make(self, optimizer: torch.optim.Optimizer, known: Watched, model: nn.Module) -> str | None:
        """Attach K-FAC; return why it could not be done."""
        kfac: Any = None
        if not self.tries:
            try:
                kfac = GuardedKFAC(model, optimizer, self._failed, **self.options)
            except Exception as error:  # on all ranks: they agreed on what comes before the first collective
                return str(error)
            known.kfac = ref(kfac)
        if self.optimizer is None:
            self.optimizer, self._first = type(optimizer).__name__, known.kfac
        if known.state is not None:
            self._load_state(optimizer, known.state)
        return None

    def _is_wanted(self, optimizer: torch.optim.Optimizer, known: Watched, model: nn.Module) -> bool:
        inner = type(model) if isinstance(model, nn.DataParallel) else type(unwrap(model))
        return self.target in (None, str(known.number), type(optimizer).__name__, inner.__name__)

    def _refuse(self, optimizer: torch.optim.Optimizer, known: Watched, reason: str) -> None:
        known.has_said = self._has_said = True
        text = f"K-FAC cannot be attached to {label(optimizer, known)}: {reason}"
        if self.strict and (self.optimizer is None or not known.is_waiting):
            raise Refused(f"{self.command}: {text}")
        self.say(f"{text}. It goes on without K-FAC")

    def _failed(self, kfac: GuardedKFAC, error: BaseException) -> None:
        """Say why K-FAC takes no part in the steps any more, and close it when no hook is running."""
        self._closing.append(ref(kfac))
        self._watch_calls()
        if not isinstance(error, Replaced):
            if self.strict:
                raise error
            self.say(f"K-FAC is switched off after {kfac.num_steps} steps: {error}. The optimizer goes on without it")
        error.__traceback__ = None  # its frames would keep process groups alive until the interpreter exits

    # --- state -----------------------------------------------------------------------------------------------

    def _kfac_of(self, optimizer: torch.optim.Optimizer) -> Any:
        known = self._known.get(optimizer)
        kfac = None if known is None else known.attached()
        return None if kfac is None or kfac.failed else kfac

    def _load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        kfac, known = self._kfac_of(optimizer), self._add(optimizer)
        known.state = state if kfac is None else None
        if kfac is not None:
            try:
                kfac.load_state_dict(state)
            except Exception as error:
                self.say(f"--save: K-FAC's state does not fit, so its statistics start anew ({error})")


def _watch_here(options: dict[str, Any]) -> None:
    """Watch this process, a child, until it ends."""
    ScriptWatcher(**options).__enter__()
