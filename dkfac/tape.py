"""The statistics of one optimizer step: sums of outer products, and what they are to be divided by."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac.engine import accumulator, reaches
from dkfac.layers.layer import Layer
from dkfac.layers.rows import Rows, Sample, rows_of
from dkfac.ops.decompose import Eigen
from dkfac.ops.precision import tf32
from dkfac.settings import Settings
from dkfac.sums import add_products, moment_sum
from dkfac.timing import StageTimer
from dkfac.waiting import Waiting
from dkfac.window import Measured, Sums, Terms, Window

if TYPE_CHECKING:
    from dkfac.overlap import Overlap

TIMED = 8
"""On CUDA one measured step in so many is timed, after as many: events around each call cost the host time."""

NEVER_STEPPED = 500
"""Backward passes without a step after which something must be wrong."""


class Tape:
    """Collects what the hooks hand over in backward passes, until the optimizer steps."""

    def __init__(self, layers: list[Layer], settings: Settings, scaler: Any = None) -> None:
        self.layers = layers
        self.settings = settings
        self.window = Window()
        self.num_abandoned = 0
        self.bases: dict[str, dict[str, Eigen]] = {}
        """EKFAC: the eigenbases in use, of the layers whose moments are measured."""
        self.without_moments: set[str] = set()
        """EKFAC: layers whose moments cannot be measured."""
        self.column: int | None = None
        """Exact or sampled Fisher: which column is being propagated; None in the user's backward."""
        self.rank = 0
        by_example = settings.weight_sharing == "reduce" or settings.curvature == "ekfac"
        self.sample = Sample(settings.measure_every, 0, by_example)
        self.scaler = scaler
        self.pending_terms: Terms | None = None
        self.terms: Terms | None = None
        self.as_rows: set[tuple[str, str]] = set()
        """Factors, as (layer, key), whose rows are kept instead of summed."""
        self.due: frozenset[tuple[str, str]] | None = None
        """Factors that are measured, and with their noise, if each has an interval of its own."""
        self.idle: frozenset[str] = frozenset()
        """Layers of which none is: their calls only count the pass and its terms."""
        self.overlap: Overlap | None = None
        self.defer_errors = False
        """Keep an error of the capture for the step, where other ranks are told of it."""
        self.error: BaseException | None = None
        self.timer = StageTimer()
        self._nodes: dict[int, tuple[Tensor, torch.dtype, torch.device, Any]] = {}
        self.waiting = Waiting(self)
        self.may_wait = self.waits = True
        """Whether calls may be summed later than they are recorded."""
        kinds = settings.weight_sharing, settings.fisher, settings.curvature == "ekfac"
        self._is_plain, self._is_exact = kinds == ("expand", "empirical", False), settings.fisher != "empirical"
        self._lock = threading.RLock()
        self._task = -1
        self._counted = False
        self._num_passes_without_step = self._num_windows = 0

    def set_terms(self, number: Tensor | float, mask: Tensor | None) -> None:
        """Say what the next measured backward pass is a mean over."""
        if isinstance(number, Tensor):
            number = number.detach().to(torch.float64)  # integers would divide to float32
        if mask is not None and self.overlap is not None and self.overlap.has_inputs:
            raise RuntimeError("with overlap=True call set_terms(n, mask) before the forward, which measures inputs")
        self.pending_terms = Terms(number, mask)

    def begin_step(self, step: int, due: frozenset[tuple[str, str]] | None) -> None:
        """Choose which rows the coming step measures, and which factors, if not all."""
        self.sample = replace(self.sample, turn=step)
        self.due = due
        if due is not None:
            self.idle = frozenset(layer.name for layer in self.layers) - {name for name, _ in due}

    @property
    def next_mask(self) -> Tensor | None:
        """Of the next backward pass, as far as it was said."""
        return None if self.pending_terms is None else self.pending_terms.mask

    def forget_terms(self) -> None:
        """What was said of a pass that was not measured does not hold for the next."""
        self.pending_terms = None

    def discard(self) -> None:
        """Forget what was measured since the last step."""
        self.window = Window()
        self.waiting.take()
        if self.overlap is not None:
            self.overlap.reset()

    def enter(self) -> None:
        """Note that a backward pass runs; all that happens before it ends belongs to one pass.

        Reentrant checkpointing, and the exact Fisher, run backward passes inside a backward pass. The outer
        one is seen first: it recomputes a forward, or runs the hook, that starts the inner one.
        """
        task = torch._C._current_graph_task_id()
        if self._task == -1 and task != -1:
            with self._lock:
                self._enter(task)

    def _enter(self, task: int) -> None:
        if self._task != -1:
            return
        self._task, self._counted = task, False
        self.terms = None
        torch.autograd.Variable._execution_engine.queue_callback(self.leave)
        self.drop_void()
        self.window.scaler_epoch = self._epoch()

    def drop_void(self) -> None:
        """Drop statistics of a step that will not be taken: the scaler found an overflow and did not call the
        optimizer, or the gradients were thrown away."""
        if self.window.num_passes and (self._epoch() is not self.window.scaler_epoch or self._gradients_are_gone()):
            self.discard()
            self.num_abandoned += 1

    def _epoch(self) -> object:
        """Return the table that ``scaler.update()`` replaces."""
        return getattr(self.scaler, "_per_optimizer_states", None)

    def leave(self) -> None:
        self._task = -1
        try:
            self.guarded(self.waiting.flush)
        except Exception:
            self.discard()  # a loop that goes on must not find half of this pass
            raise
        self.window.filled = not self._no_gradients()

    def stop_waiting(self, name: str) -> None:
        """Drop this step's sums, and sum each call at once from now on: a tensor that waited was changed in place."""
        self.window.is_spoilt = True
        self.may_wait = False
        what = f"the input or the gradient of layer {name!r} was changed in place after its backward"
        warnings.warn(f"{what}: this step's statistics are dropped, later calls summed at once", stacklevel=2)

    def guarded(self, function: Callable[[], None]) -> None:
        """Run it; keep an error for the step where other ranks are told of it."""
        try:
            function()
        except Exception as error:
            if not self.defer_errors:
                raise
            self.error = self.error or error

    def _gradients_are_gone(self) -> bool:
        """Whether ``zero_grad()`` was called since the last pass: a dropped step, or the other half of a GAN."""
        return self.window.filled and self._no_gradients()

    def _no_gradients(self) -> bool:
        return all(layer.weight.grad is None for layer in self.layers if layer.name in self.window.called)

    def outside(self) -> None:
        """Note a forward outside any backward pass. A pass that has not ended by then died of an exception."""
        if self._task != -1 and torch._C._current_graph_task_id() == -1:
            self._task = -1
            self.discard()

    def begin_pass(self, terms: float) -> None:
        """Count the backward pass that runs now, once, as one that is measured; it uses up ``set_terms``."""
        if self._counted:
            return
        self._counted = True
        self.terms, self.pending_terms = self.pending_terms, None
        self._warn_if_never_stepped()
        self.window.num_passes += 1
        number = terms if self.terms is None else self.terms.number
        self.window.terms = _here(self.window.terms, number) + number

    def terms_of_pass(self, terms: int) -> Tensor | float:
        return float(terms) if self.terms is None else self.terms.number

    @property
    def mask(self) -> Tensor | None:
        return None if self.terms is None else self.terms.mask

    def record(
        self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool, *, at_once: bool = False,
        source: int = -1,
    ) -> None:  # fmt: skip
        """Add one call of a layer, from inside its backward. ``sizes``: examples, and terms of the loss.

        ``x`` may still be part of the graph: to detach it would cost the host more than all the rest.

        ``at_once``: the tensors' memory is used for others afterwards, as compiled code does. ``source``: the number of
        the input.
        """
        self.waits = not at_once
        try:
            self._record(index, x, g, sizes, batch_stats, source)
        except Exception as error:
            if not self.defer_errors:
                raise
            self.error = self.error or error

    def _record(self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool, source: int) -> None:
        layer, exact = self.layers[index], self._is_exact
        if self._task == -1:
            self.enter()
        if (exact and self.column is None) or (not exact and not self._reaches(layer, index)):
            return
        examples, terms = sizes
        device = g.device
        with self._lock:  # layers on other devices have backward threads of their own
            if not self._counted:
                self.begin_pass(float(terms))
            if g.numel() == 0:
                return
            name = layer.spec.name
            self.window.called.add(name)
            if name in self.idle:
                return
            number = _here(self.terms_of_pass(terms), g)
            weight = 1.0 if not exact and self.settings.accumulate == "terms" else number * number
            sums = self.window.layers.get(name)
            if sums is None:
                sums = self.window.layers[name] = Sums()
            call = (self.window.num_passes, self.column)
            sums.called_again |= call == sums.last_call
            sums.last_call = call
            sums.calls += 1
            may_wait = not isinstance(weight, Tensor) and self._may_wait(name)
            if may_wait and self.waiting.add(index, sums, x, g, examples, float(weight), source):
                return
        batch_dim = self.settings.batch_dim
        no_autocast = torch.autocast(device.type, enabled=False)
        early = None if self.overlap is None else self.overlap.take_input(layer.name)
        with torch.no_grad(), no_autocast, self.timer.stage("capture", device), tf32(self.settings.tf32, device):
            if early is not None:
                sums.add("A", early[0])
                sums.rows = sums.rows + early[1]
            for rows in rows_of(
                layer, x, g, examples=examples, batch_dim=batch_dim, batch_stats=batch_stats, sample=self.sample
            ):
                self._add(layer, sums, rows, weight, has_input=early is not None)
        if self.overlap is not None:
            self.overlap.note_recorded(layer, called_again=sums.called_again)

    def _reaches(self, layer: Layer, index: int) -> bool:
        """Whether this pass computes a layer's gradient; finding the node for that is slow, so it is kept."""
        weight, kept = layer.weight, self._nodes.get(index)
        if kept is None or kept[0] is not weight or kept[1] is not weight.dtype or kept[2] != weight.device:
            if not weight.requires_grad:
                return False
            self.waiting.forget(index)
            kept = self._nodes[index] = (weight, weight.dtype, weight.device, accumulator(weight))
        return reaches(weight, kept[3])

    def _may_wait(self, name: str) -> bool:
        """Whether a call is plain enough to be summed later, with others."""
        return (
            self.waits
            and self.may_wait
            and self._is_plain
            and self.due is None
            and (self.terms is None or self.terms.mask is None)
            and (self.overlap is None or not self.overlap.active)
            and (not self.as_rows or all(other != name for other, _ in self.as_rows))
        )

    def gradient_scale(self) -> Tensor | float:
        """What the loss, and so every gradient, is multiplied by for half precision."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        scale: Tensor | float = self.scaler._get_scale_async()
        return 1.0 if scale is None else scale

    def _warn_if_never_stepped(self) -> None:
        self._num_passes_without_step += 1
        if self._num_passes_without_step == NEVER_STEPPED:
            what = f"{NEVER_STEPPED} backward passes were measured, but no step was taken through K-FAC"
            warnings.warn(f"{what}: was the optimizer made anew, or is kfac.step() missing?", stacklevel=2)

    def take(self) -> Measured:
        """Return what was measured since the last call and start anew."""
        self.guarded(self.waiting.flush)
        window, unit = self.window, self.unit()
        self.window, self._task = Window(), -1
        self._num_passes_without_step = 0
        self._num_windows += 1
        timed = self._num_windows % TIMED == 0
        self.timer.weights["capture"] = 1 if self._num_windows < TIMED else TIMED * timed
        if self.overlap is not None:
            self.overlap.end()
        layers, called = ({}, set[str]()) if window.is_spoilt else (window.layers, window.called)
        return Measured(layers, window.terms, window.num_passes, unit, called)

    def unit(self) -> Tensor | float:
        """Return what sums of gradients' products are multiplied by to be sums over terms."""
        passes: float = 1.0
        if self.settings.fisher == "empirical" and self.settings.accumulate in (None, "mean"):
            passes = float(self.window.num_passes)
        loss_scale = _here(self.gradient_scale(), self.window.terms)
        return passes * passes / (loss_scale * loss_scale)

    def _add(self, layer: Layer, sums: Sums, rows: Rows, weight: Tensor | float, *, has_input: bool) -> None:
        weight = weight * rows.ratio
        inputs, keep = not self.column and not has_input, {key for name, key in self.as_rows if name == layer.name}
        add_products(sums, layer, rows, weight, self.mask, self.settings, due=self.due, keep=keep, inputs=inputs)
        basis = self.bases.get(layer.name)
        if basis is not None and sums.called_again:
            # An example's gradient is the sum over the calls, which are seen one at a time.
            sums.moments = None
            if not self.defer_errors:  # several ranks decide together, at the next refresh
                self.give_up_moments({layer.name}, warn=True)
        elif basis is not None:
            moments = moment_sum(layer, rows, basis) * weight
            sums.moments = moments if sums.moments is None else sums.moments.add_(moments)

    def give_up_moments(self, names: set[str], *, warn: bool) -> None:
        """EKFAC: keep K-FAC's eigenvalues for layers that are called several times per example."""
        if self.settings.curvature != "ekfac":
            return
        for name in sorted(names - self.without_moments):
            self.bases.pop(name, None)
            self.without_moments.add(name)
            if warn:
                warnings.warn(
                    f'layer {name!r} is called several times per example: curvature="ekfac" keeps K-FAC\'s eigenvalues '
                    f"for it",
                    stacklevel=2,
                )


def _here(value: Tensor | float, like: Tensor | float) -> Tensor | float:
    """Return the value where the other is, if both are tensors."""
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value
