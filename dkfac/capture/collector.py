"""Sum what the hooks record during backward passes, until the optimizer steps.

Input: a layer's input and output gradient, one call at a time. Output: :class:`BatchStatistics`, once per step. Owns:
the window of statistics since the last step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dkfac.capture.calls import Blocks
from dkfac.capture.deferred_products import DeferredProducts
from dkfac.capture.outer_products import add_products, moment_sum
from dkfac.capture.passes import BackwardPasses, EarlyReduction, accumulator, here, reaches
from dkfac.capture.statistics import BatchStatistics, LayerSums, Terms, Window
from dkfac.capture.timing import StageTimer
from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.layers.rows import Rows, Sample, rows_of
from dkfac.ops.decompose import Eigen
from dkfac.ops.precision import tf32

TIMED = 8
"""On CUDA, after this many measured steps only one in this many is timed: events around each call cost host time."""


def _raise(error: BaseException) -> NoReturn:
    raise error


class Collector(BackwardPasses):
    """Sums what the hooks record during backward passes, until the optimizer steps."""

    def __init__(
        self,
        layers: list[Layer],
        settings: Settings,
        scaler: Any = None,
        *,
        rank: int = 0,
        decides_alone: bool = True,
        keep_error: Callable[[BaseException], None] = _raise,
    ) -> None:
        """``decides_alone``: whether this rank alone decides which layers lose their moments, and whether a step is
        measured; several ranks decide that together. ``keep_error``: receives an error of the capture, to be raised in
        the step, where other ranks learn of it."""
        super().__init__(layers, settings, scaler)
        self.bases: dict[str, dict[str, Eigen]] = {}
        """EKFAC: current eigenbases of the layers whose moments are measured."""
        self.without_moments: set[str] = set()
        """EKFAC: layers whose moments cannot be measured."""
        self.rank, self._decides_alone, self._keep_error = rank, decides_alone, keep_error
        by_example = settings.weight_sharing == "reduce" or settings.measures_moments
        self.sample = Sample(settings.measure_every, 0, by_example, settings.statistics_fraction is None)
        self.as_rows: set[tuple[str, str]] = set()
        """Factors, as (layer, key), whose rows are kept instead of summed."""
        self.due: frozenset[tuple[str, str]] | None = None
        """If each factor has its own interval: factors to measure, with their noise. None: all, without noise."""
        self.idle: frozenset[str] = frozenset()
        """Layers with no factor due: their calls only count the pass and its loss terms."""
        self.overlap: EarlyReduction | None = None
        self.timer = StageTimer()
        self._nodes: dict[int, tuple[Tensor, torch.dtype, torch.device, Any]] = {}
        self.deferred = DeferredProducts(layers, settings, self.timer, self._stop_deferring)
        self.may_defer = self.defers = True
        """Whether calls may be summed later than they are recorded: any call, and the current one."""
        kinds = settings.weight_sharing, settings.fisher, settings.measures_moments
        self._is_plain, self._is_exact = kinds == ("expand", "empirical", False), settings.fisher != "empirical"
        self._num_windows = 0
        self._has_postponed = False

    def set_terms(self, number: Tensor | float, mask: Tensor | None) -> None:
        """Set the number of loss terms, and the mask of positions, that the next measured pass averages over."""
        if isinstance(number, Tensor):
            number = number.detach().to(torch.float64)  # dividing integer tensors gives float32
        if mask is not None and self.overlap is not None and self.overlap.has_inputs:
            raise RuntimeError("with overlap=True call set_terms(n, mask) before the forward, which measures inputs")
        self.pending_terms = Terms(number, mask)

    def use_overlap(self, overlap: EarlyReduction) -> None:
        """Reduce factors with ``overlap`` during forward and backward."""
        self.overlap = overlap

    def use_bases(self, bases: dict[str, dict[str, Eigen]]) -> None:
        """EKFAC: measure moments in these eigenbases."""
        self.bases = bases

    def keep_rows(self, factors: set[tuple[str, str]]) -> None:
        """Keep the rows of these factors, given as (layer, key), instead of their sums."""
        self.as_rows = factors

    def begin_step(self, step: int, due: frozenset[tuple[str, str]] | None) -> None:
        """Select the rows that the coming step measures, and the factors (``due``; None: all)."""
        self.sample = replace(self.sample, turn=step)
        self.due = due
        if due is not None:
            self.idle = frozenset(layer.name for layer in self.layers) - {name for name, _ in due}

    def finish_pass(self) -> None:
        self.guarded(self.deferred.flush)

    def discard(self) -> None:
        """Discard the statistics measured since the last step."""
        super().discard()
        self.deferred.take()
        if self.overlap is not None:
            self.overlap.reset()

    def _stop_deferring(self, name: str) -> None:
        """Drop this step's sums and stop deferring, because a deferred tensor was modified in place."""
        self.window.is_spoilt = True
        self.may_defer = False
        what = f"the input or the gradient of layer {name!r} was changed in place after its backward"
        warnings.warn(f"{what}: this step's statistics are dropped, later calls summed at once", stacklevel=2)

    def postpone(self, index: int) -> None:
        """Drop this step's statistics: a layer is differentiated twice, and its gradient's gradient is not the
        loss's."""
        if not self._has_postponed:
            warnings.warn(
                f"layer {self.layers[index].name!r} is differentiated twice (create_graph=True): K-FAC cannot tell the "
                f"gradient's gradient from the loss's, so it measures in the next step instead. If every step is like "
                f"this one (gradient penalties, physics-informed networks), its layers stay with the optimizer",
                stacklevel=2,
            )
        self._has_postponed = self.window.is_postponed = True

    def guarded(self, function: Callable[[], None]) -> None:
        """Call ``function``; keep an exception for the step, where other ranks learn of it."""
        try:
            function()
        except Exception as error:
            self._keep_error(error)

    def record(
        self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool, *, at_once: bool = False,
        source: int = -1, more: Blocks = (),
    ) -> None:  # fmt: skip
        """Record one call of a layer; called from inside its backward. ``sizes``: numbers of examples and loss terms.

        ``x`` may still be part of the autograd graph: detaching it would cost the host more than all the rest.

        ``at_once``: do not defer, because the tensors' memory is reused afterwards, as in compiled code. ``source``:
        the number that identifies the input. ``more``: input and gradient of each further block of the layer, if they
        have an input each.
        """
        self.defers = not at_once
        try:
            self._record(index, x, g, sizes, batch_stats, source, more)
        except Exception as error:
            self._keep_error(error)

    def _record(
        self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool, source: int, more: Blocks
    ) -> None:
        layer, exact = self.layers[index], self._is_exact
        if self.task == -1:
            self.enter()
        if self.window.is_postponed:
            return
        if (exact and self.column is None) or (not exact and not self._reaches(layer, index)):
            return
        examples, terms = sizes
        device = g.device
        with self._lock:  # autograd runs one backward thread per device
            if not self._counted:
                self.begin_pass(float(terms))
            if g.numel() == 0:
                return
            name = layer.spec.name
            self.window.called.add(name)
            if name in self.idle:
                return
            number = here(self.terms_of_pass(terms), g)
            weight = 1.0 if not exact and self.settings.accumulate == "terms" else number * number
            sums = self.window.layers.get(name)
            if sums is None:
                sums = self.window.layers[name] = LayerSums()
            call = (self.window.num_passes, self.column)
            sums.called_again |= call == sums.last_call
            sums.last_call = call
            sums.calls += 1
            may_defer = not isinstance(weight, Tensor) and self._may_defer(name)
            if may_defer and self.deferred.add(index, sums, x, g, examples, float(weight), self.sample, source, more):
                return
        batch_dim = self.settings.batch_dim
        no_autocast = torch.autocast(device.type, enabled=False)
        early = None if self.overlap is None else self.overlap.take_input(layer.name)
        with torch.no_grad(), no_autocast, self.timer.stage("capture", device), tf32(self.settings.tf32, device):
            if early is not None:
                sums.add("A", early[0])
                sums.rows = sums.rows + early[1]
            if layer.block is not None:
                sums.add_blocks(self._blocks(layer.block, ((x, g), *more), examples, weight))
                return
            for rows in rows_of(
                layer, x, g, examples=examples, batch_dim=batch_dim, batch_stats=batch_stats, sample=self.sample
            ):
                self._add(layer, sums, rows, weight, has_input=early is not None)
        if self.overlap is not None:
            self.overlap.note_recorded(layer, called_again=sums.called_again)

    def _blocks(self, block: Layer, calls: Blocks, examples: int, weight: Tensor | float) -> list[LayerSums]:
        """Return the sums of each block of a layer. One that has the input of the block before it has the same A."""
        found: list[LayerSums] = []
        for i, (x, g) in enumerate(calls):
            sums, is_same = LayerSums(), i > 0 and x is calls[i - 1][0]
            for rows in rows_of(
                block, x, g, examples=examples, batch_dim=self.settings.batch_dim, batch_stats=False, sample=self.sample
            ):
                self._add(block, sums, rows, weight, has_input=is_same)
            found.append(sums if not is_same else sums.with_inputs_of(found[-1]))
        return found

    def _reaches(self, layer: Layer, index: int) -> bool:
        """Return whether this pass computes a layer's gradient. Finding the node is slow, so it is cached."""
        weight, kept = layer.module._parameters.get(layer.use.weight, layer.weight), self._nodes.get(index)
        assert weight is not None
        if kept is None or kept[0] is not weight or kept[1] is not weight.dtype or kept[2] != weight.device:
            if not weight.requires_grad:
                return False
            self.deferred.forget(index)
            kept = self._nodes[index] = (weight, weight.dtype, weight.device, accumulator(weight))
        return reaches(weight, kept[3])

    def _may_defer(self, name: str) -> bool:
        """Return whether a call is simple enough to be summed later, together with others."""
        return (
            self.defers
            and self.may_defer
            and self._is_plain
            and self.due is None
            and (self.terms is None or self.terms.mask is None)
            and (self.overlap is None or not self.overlap.active)
            and (not self.as_rows or all(other != name for other, _ in self.as_rows))
        )

    def take(self) -> BatchStatistics:
        """Return the statistics measured since the last call and start a new window."""
        self.guarded(self.deferred.flush)
        window, correction = self.window, self.grad_correction()
        self.window, self.task = Window(), -1
        self._num_passes_without_step = 0
        self._num_windows += 1
        timed = self._num_windows % TIMED == 0
        self.timer.weights["capture"] = 1 if self._num_windows < TIMED else TIMED * timed
        if self.overlap is not None:
            self.overlap.end()
        by_terms = self.settings.accumulate == "terms" and self.settings.fisher == "empirical"
        is_lost = window.is_spoilt or window.is_postponed
        layers, called = ({}, set[str]()) if is_lost else (window.layers, window.called)
        # Several ranks would have to agree: there the next step that measures is the next one that is due.
        moves = window.is_postponed and self._decides_alone
        return BatchStatistics(layers, window.terms, window.num_passes, correction, called, by_terms, moves)

    def _add(self, layer: Layer, sums: LayerSums, rows: Rows, weight: Tensor | float, *, has_input: bool) -> None:
        weight = weight * rows.ratio
        inputs, keep = not self.column and not has_input, {key for name, key in self.as_rows if name == layer.name}
        add_products(sums, layer, rows, weight, self.mask, self.settings, due=self.due, keep=keep, inputs=inputs)
        basis = self.bases.get(layer.name)
        if basis is not None and sums.called_again:
            # The gradient of an example is the sum over its calls, which are recorded one at a time.
            sums.moments = None
            if self._decides_alone:  # several ranks decide together, at the next refresh
                self.give_up_moments({layer.name}, warn=True)
        elif basis is not None:
            moments = moment_sum(layer, rows, basis) * weight
            sums.moments = moments if sums.moments is None else sums.moments.add_(moments)

    def give_up_moments(self, names: set[str], *, warn: bool) -> None:
        """EKFAC: use K-FAC's eigenvalues for layers that are called several times per example."""
        if not self.settings.measures_moments:
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
