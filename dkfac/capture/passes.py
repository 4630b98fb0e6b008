"""Track backward passes: which one is running, what its loss averages over, and which ones belong to the next step.

Input: the state of the autograd engine, as seen by hooks. Output: the window of statistics that the collector fills.
Owns: that window.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dkfac.capture.statistics import Terms, Window
from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.ops.torch_private import (
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    current_graph_task_id,
    engine_callback,
    will_engine_execute_node,
)

_NO_KEYS = DispatchKeySet(DispatchKey.Undefined)
NEVER_STEPPED = 500
"""Number of backward passes without a step after which a warning is issued."""


class EarlyReduction(Protocol):
    """Sums factors and launches their reductions while forward and backward run."""

    active: bool

    @property
    def has_inputs(self) -> bool: ...
    def begin_forward(self) -> None: ...
    def measure_input(self, layer: Layer, x: Tensor, output: Tensor, examples: int) -> None: ...
    def take_input(self, name: str) -> tuple[Tensor, Tensor | float] | None: ...
    def note_recorded(self, layer: Layer, *, called_again: bool) -> None: ...
    def reset(self) -> None: ...
    def end(self) -> None: ...


class BackwardPasses:
    """The backward passes since the last step. The collector is a subclass that also sums what they record."""

    def __init__(self, layers: list[Layer], settings: Settings, scaler: Any) -> None:
        self.layers, self.settings, self.scaler = layers, settings, scaler
        self.window = Window()
        self.num_abandoned = 0
        self.column: int | None = None
        """Exact or sampled Fisher: index of the column being back-propagated; None in the user's backward."""
        self.pending_terms: Terms | None = None
        self.terms: Terms | None = None
        self._lock = threading.RLock()
        self.task = -1
        """The outermost backward pass that is running, by its number in autograd's engine; -1: none."""
        self._counted = False
        self._num_passes_without_step = 0

    def use_scaler(self, scaler: Any) -> None:
        """Undo the loss scale of this ``GradScaler``, which was found to step the optimizer."""
        self.scaler = scaler
        self.window.scaler_epoch = self._epoch()

    def finish_pass(self) -> None:
        """Sum what is still deferred when a pass ends."""

    def discard(self) -> None:
        """Discard the statistics measured since the last step."""
        self.window = Window()

    def count_abandoned(self, number: int) -> None:
        """Set the number of abandoned steps, from a checkpoint."""
        self.num_abandoned = number

    @contextmanager
    def propagating(self, column: int) -> Iterator[None]:
        """Exact or sampled Fisher: a column is back-propagated inside this context."""
        self.column = column
        try:
            yield
        finally:
            self.column = None

    @property
    def has_terms(self) -> bool:
        """Whether ``set_terms`` was called for this step or for the next pass."""
        return self.terms is not None or self.pending_terms is not None

    @property
    def next_mask(self) -> Tensor | None:
        """The mask that was set for the next backward pass, if any."""
        return None if self.pending_terms is None else self.pending_terms.mask

    def forget_terms(self) -> None:
        """Drop what was set for a pass that was not measured: it does not apply to the next one."""
        self.pending_terms = None

    def enter(self) -> None:
        """Note that a backward pass is running; everything until it ends belongs to one pass.

        Reentrant checkpointing, and the exact Fisher, run backward passes inside a backward pass. The outer one is seen
        first: it recomputes the forward, or runs the hook, that starts the inner one.
        """
        task = current_graph_task_id()
        if self.task == -1 and task != -1:
            with self._lock:
                self._enter(task)

    def _enter(self, task: int) -> None:
        if self.task != -1:
            return
        self.task, self._counted = task, False
        self.terms = None
        engine_callback(self.leave)
        self.drop_void()
        self.window.scaler_epoch = self._epoch()

    def drop_void(self) -> None:
        """Discard the statistics of a step that will not be taken: the scaler found an overflow and skipped the
        optimizer, or the gradients were cleared."""
        if self.window.num_passes and (self._epoch() is not self.window.scaler_epoch or self._gradients_are_gone()):
            self.discard()
            self.num_abandoned += 1

    def _epoch(self) -> object:
        """Return the dict that ``scaler.update()`` replaces."""
        return getattr(self.scaler, "_per_optimizer_states", None)

    def leave(self) -> None:
        self.task = -1
        try:
            self.finish_pass()
        except Exception:
            self.discard()  # if training continues, half of this pass must not count
            raise
        self.window.filled = not self._no_gradients()

    def _gradients_are_gone(self) -> bool:
        """Whether ``zero_grad()`` was called since the last pass: a skipped step, or the other half of a GAN."""
        return self.window.filled and self._no_gradients()

    def _no_gradients(self) -> bool:
        return all(layer.weight.grad is None for layer in self.layers if layer.name in self.window.called)

    def outside(self) -> None:
        """Note a forward outside any backward pass: a pass that has not ended by then was aborted by an exception."""
        if self.task != -1 and current_graph_task_id() == -1:
            self.task = -1
            self.discard()

    def begin_pass(self, terms: float) -> None:
        """Count the current backward pass, once, as measured; consumes what ``set_terms`` has set."""
        if self._counted:
            return
        self._counted = True
        self.terms, self.pending_terms = self.pending_terms, None
        self._warn_if_never_stepped()
        self.window.num_passes += 1
        number = terms if self.terms is None else self.terms.number
        self.window.terms = here(self.window.terms, number) + number

    def terms_of_pass(self, terms: int) -> Tensor | float:
        return float(terms) if self.terms is None else self.terms.number

    @property
    def mask(self) -> Tensor | None:
        return None if self.terms is None else self.terms.mask

    def gradient_scale(self) -> Tensor | float:
        """Return the loss scale, which multiplies every gradient."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        scale: Tensor | float = self.scaler._get_scale_async()
        return 1.0 if scale is None else scale

    def _warn_if_never_stepped(self) -> None:
        self._num_passes_without_step += 1
        if self._num_passes_without_step == NEVER_STEPPED:
            what = f"{NEVER_STEPPED} backward passes were measured, but no step was taken through K-FAC"
            warnings.warn(f"{what}: was the optimizer made anew, or is kfac.step() missing?", stacklevel=2)

    def grad_correction(self) -> Tensor | float:
        """Return the multiplier that undoes loss scale and accumulation in sums of products of gradients."""
        passes: float = 1.0
        if self.settings.fisher == "empirical" and self.settings.accumulate in (None, "mean"):
            passes = float(self.window.num_passes)
        loss_scale = here(self.gradient_scale(), self.window.terms)
        return passes * passes / (loss_scale * loss_scale)


def here(value: Tensor | float, like: Tensor | float) -> Tensor | float:
    """Return ``value`` on the device of ``like`` if both are tensors."""
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


def reaches(weight: Tensor, node: Any = None) -> bool:
    """Return whether the backward pass that is currently running also computes the gradient of ``weight``.

    A pass for the input alone (adversarial examples, saliency maps) goes through the layer but must not be counted.
    ``node``: the node that accumulates the gradient, if already known.
    """
    if not weight.requires_grad:
        return False
    try:
        return bool(will_engine_execute_node(accumulator(weight) if node is None else node))
    except RuntimeError:  # raised in autograd.grad if the weight is one of its inputs
        return True


def accumulator(weight: Tensor) -> Any:
    """Return the node that accumulates the gradient of a leaf tensor."""
    with ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS):  # a compiled backward runs this below the autograd keys
        return get_gradient_edge(weight).node
