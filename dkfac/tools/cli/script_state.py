"""``dkfac run --save``: keep K-FAC's state beside the script's own file of the optimizer's state.

Input: the script's ``torch.save`` and ``torch.load`` of an optimizer's state, and the optimizer's loading of it.
Output: a file of the same name with ``.dkfac`` appended; the state that belongs to an optimizer. Owns: its patches of
``torch.save`` and ``torch.load``, hooks on the optimizers, and what was loaded but not asked for yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dkfac.state.in_optimizer import is_ours
from dkfac.tools.cli.guarded import GuardedKFAC

SUFFIX = ".dkfac"
_DEPTH = 5


class StateFiles:
    """Saves and loads the states of K-FAC with those of its optimizers."""

    def __init__(
        self,
        kfac_of: Callable[[torch.optim.Optimizer], GuardedKFAC | None],
        found: Callable[[torch.optim.Optimizer, dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        """``kfac_of`` returns what is attached to an optimizer; ``found`` gets the state that belongs to one that has
        loaded its own."""
        self._kfac_of, self._found, self._say = kfac_of, found, say
        self._returned: WeakKeyDictionary[torch.optim.Optimizer, tuple[dict[str, Any], int]] = WeakKeyDictionary()
        """The state dict that each optimizer returned last, and K-FAC's step then."""
        self._loaded: list[tuple[Any, dict[str, Any]]] = []
        """Parameter groups of states that were read from a file, with the K-FAC states that belong to them."""
        self._pending: WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = WeakKeyDictionary()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        save, load = torch.save, torch.load

        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            save(obj, f, *args, **kwargs)
            self._save_beside(obj, f, save)

        def loaded(f: Any, *args: Any, **kwargs: Any) -> Any:
            found = load(f, *args, **kwargs)
            self._load_beside(found, f, load)
            return found

        torch.save, torch.load = saved, loaded
        try:
            yield
        finally:
            torch.save, torch.load = save, load

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the states that this optimizer returns and loads."""
        optimizer.register_state_dict_post_hook(self._note_returned)
        optimizer.register_load_state_dict_pre_hook(self._note_loading)
        optimizer.register_load_state_dict_post_hook(self._finish_loading)

    def _note_returned(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        kfac = self._kfac_of(optimizer)
        if kfac is not None:
            self._returned[optimizer] = state, kfac.num_steps

    def _save_beside(self, obj: Any, f: Any, save: Callable[..., None]) -> None:
        inside = list(_states(obj))
        states = {}
        for optimizer, (returned, step) in list(self._returned.items()):
            kfac = self._kfac_of(optimizer)
            places = [place for place, state in inside if state is returned]
            if kfac is None or not places:
                continue
            if not isinstance(f, (str, os.PathLike)):
                self._say("--save: K-FAC's state is not saved, because the optimizer's goes into a file object")
            elif not kfac.holds_all:
                self._say("--save: K-FAC's state is not saved: with this strategy each rank holds a part of it, and "
                          "a script saves on one rank; use kfac.state_dict(gather=True) on all ranks, or "
                          "--strategy replicated")  # fmt: skip
            elif kfac.num_steps != step:
                self._say("--save: K-FAC's state is not saved, because steps were taken after the optimizer's was read")
            else:
                states[places[0]] = kfac.state_dict()
        if states:
            self._write(f"{os.fspath(f)}{SUFFIX}", states, save)

    def _write(self, path: str, states: dict[str, Any], save: Callable[..., None]) -> None:
        part = f"{path}.{os.getpid()}.tmp"
        try:
            save(states, part)
            os.replace(part, path)
        except OSError as error:
            self._say(f"--save: {path} cannot be written ({error})")
            with contextlib.suppress(OSError):
                os.remove(part)

    def _load_beside(self, obj: Any, f: Any, load: Callable[..., Any]) -> None:
        self._loaded.clear()
        inside = dict(_states(obj))
        if not inside or not isinstance(f, (str, os.PathLike)):
            return
        path = f"{os.fspath(f)}{SUFFIX}"
        if not os.path.exists(path):
            if not any(_has_ours(state) for state in inside.values()):
                self._say(f"--save: there is no {path}, so K-FAC's statistics start anew")
            return
        try:
            states = load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            self._say(f"--save: {path} cannot be read ({error}), so K-FAC's statistics start anew")
            return
        self._loaded += [(inside[place]["param_groups"], states[place]) for place in states if place in inside]

    def _note_loading(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for groups, own in self._loaded:
            if state.get("param_groups") is groups:  # the dict itself is a copy
                self._pending[optimizer] = own

    def _finish_loading(self, optimizer: torch.optim.Optimizer) -> None:
        state = self._pending.pop(optimizer, None)
        if state is not None:
            self._found(optimizer, state)


def _has_ours(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state has K-FAC's, which one process adds to it."""
    return any(is_ours(key) for entry in state["state"].values() if isinstance(entry, dict) for key in entry)


def _states(obj: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the states of optimizers inside nested dicts and sequences, each with its place."""
    if isinstance(obj, dict):
        if isinstance(obj.get("param_groups"), list) and "state" in obj:
            yield place, obj
            return
        items: Any = obj.items()
    elif isinstance(obj, (list, tuple)):
        items = enumerate(obj)
    else:
        return
    if depth < _DEPTH:
        for key, value in items:
            yield from _states(value, f"{place}/{key}", depth + 1)
