"""Keep K-FAC's state in the state dict of its optimizer, where trainers and ``torch.distributed.checkpoint`` look.

Input: calls of the optimizer's ``state_dict`` and ``load_state_dict``. Output: entries that are added to what the first
returns, and taken from what the second gets. Owns: hooks on the optimizer, and a state that it is about to load.

See ``docs/notes/016-optimizer-state.md``. Sends nothing to other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dkfac.config import optimizer_rules
from dkfac.config.settings import Settings
from dkfac.factors.layer_state import LayerState
from dkfac.layers.layer import Layer
from dkfac.layers.sharded import ShardedLayer
from dkfac.state import in_optimizer, optimizer_state
from dkfac.state.in_optimizer import Entries, is_ours


class OptimizerCheckpoint:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layers: list[Layer],
        settings: Settings,
        states: Callable[[], tuple[dict[str, LayerState], int]],
        save: Callable[[], dict[str, Any]] | None,
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """``states`` returns the layers' states and the number of steps; ``save`` K-FAC's complete state, or is None
        where ranks hold parts of it."""
        self._optimizer, self._layers, self._states, self._load = optimizer, layers, states, load
        self._hides = optimizer_rules.hides(settings, optimizer)
        self._is_sharded = any(isinstance(layer, ShardedLayer) for layer in layers)
        self._save = None if self._is_sharded else save
        self._loading: dict[str, Any] | None = None
        self._waiting: Any = None
        """Handle of a hook on the next step, after a state was loaded that lacks K-FAC's."""
        self._said = False

    def attach(self) -> list[Any]:
        """Register the hooks, and load a state that the optimizer has loaded before; returns the handles."""
        optimizer = self._optimizer
        kept = {p: optimizer.state[p] for p in _parameters(optimizer) if p in optimizer.state}
        if any(is_ours(key) for entry in kept.values() for key in entry):
            exact = all(layer.weight.dtype == layer.dtype for layer in self._layers)  # a narrower one has rounded it
            found = in_optimizer.from_entries(self._layers, kept) if exact else None
            for entry in kept.values():
                for key in [key for key in entry if is_ours(key)]:
                    del entry[key]
            self._resume(found, "the state that the optimizer loaded before is in a lower precision, or incomplete")
        return [
            optimizer.register_state_dict_post_hook(self._add),
            optimizer.register_load_state_dict_pre_hook(self._take),
            optimizer.register_load_state_dict_post_hook(self._finish),
            self,
        ]

    def remove(self) -> None:
        """Remove the hook that waits for the next step, if there is one."""
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    def note_saved(self) -> None:
        """Note that K-FAC's state is saved by itself, so that nothing need be said."""
        self._said = True

    def hand_over(self) -> None:
        """Give the optimizer the moments of the layers that K-FAC has stepped, so that it goes on with them."""
        for p, entry in self._moments().items():
            self._optimizer.state[p] = optimizer_state.placed(self._optimizer, p, entry)

    def _after_step(self, *_: Any) -> None:
        """Warn if K-FAC has loaded no state of its own either."""
        num_steps = self._states()[1]
        if num_steps > 0:  # otherwise the step was none of K-FAC's
            self.remove()
        if num_steps == 1:
            warnings.warn(
                "the optimizer has loaded a state without K-FAC's, so K-FAC's statistics and moments start anew: was "
                "it saved without K-FAC, or by several ranks? Load K-FAC's own with kfac.load_state_dict(state)",
                stacklevel=4,
            )

    def _moments(self) -> Entries:
        states, num_steps = self._states()
        rules, found = optimizer_rules.rules(self._optimizer), {}
        for layer in self._layers if self._hides and not self._is_sharded else ():
            if id(layer.weight) in rules:
                parts = in_optimizer.moments(layer, states[layer.name], rules[id(layer.weight)], num_steps)
                found.update({p: entry for p, entry in parts.items() if id(p) in rules})
        return found

    @torch.no_grad()
    def _add(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Post-hook of ``state_dict``."""
        place = {p: i for i, p in enumerate(_parameters(optimizer))}
        state, found = state_dict["state"], self._moments()
        if self._save is not None:
            for p, entry in in_optimizer.to_entries(self._layers, self._save()).items():
                if p in place:
                    found[p] = (found[p] if p in found else state.get(place[p], {})) | entry
        elif self._hides and self._states()[1] > 0 and not self._said:
            self._said = True
            what = "no moments" if self._is_sharded else "the moments"
            warnings.warn(
                f"optimizer.state_dict() has {what} of the layers that this rank steps, and nothing else of "
                "K-FAC's state, which ranks share: save kfac.state_dict() as well, with torch.distributed.checkpoint, "
                "or with gather=True on all ranks",
                stacklevel=3,
            )
        state.update({place[p]: entry for p, entry in found.items()})
        if self._is_sharded and self._hides:  # the same keys in every run: one that resumes has taken no step
            hidden = {p for layer in self._layers for p in layer.parameters()}
            state.update({i: {} for p, i in place.items() if p in hidden})
        if found or self._is_sharded:  # torch.distributed.checkpoint wants an entry for every parameter that is trained
            state.update({i: {} for p, i in place.items() if p.requires_grad and i not in state})

    def _take(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Pre-hook of ``load_state_dict``: take out K-FAC's entries before they are cast to the parameters' dtypes."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        state = state_dict["state"]
        found = {p: state[key] for key, p in zip(keys, _parameters(optimizer), strict=False) if key in state}
        self._loading = in_optimizer.from_entries(self._layers, found)
        self.remove()
        if self._loading is None and self._states()[1] == 0 and found:
            self._waiting = optimizer.register_step_post_hook(self._after_step)
        rest = {
            key: {name: value for name, value in entry.items() if not is_ours(name)}
            if isinstance(entry, dict)
            else entry
            for key, entry in state.items()
        }
        return {**state_dict, "state": rest}

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Post-hook of ``load_state_dict``."""
        found, self._loading = self._loading, None
        if found is not None:
            self._resume(found, "")

    def _resume(self, found: dict[str, Any] | None, reason: str) -> None:
        if found is not None and self._save is None:
            found, reason = None, "ranks share it: use kfac.load_state_dict(state) on all ranks"
        if found is not None:
            try:
                self._load(found)
                return
            except (ValueError, TypeError, KeyError) as error:
                reason = str(error)
        warnings.warn(
            f"K-FAC's state in the optimizer's checkpoint is not used, and its statistics start anew: {reason}",
            stacklevel=5,
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
