"""Defer outer products and batch them to amortize launches: a launch costs the host as much for ten calls as for one.

Input: inputs and output gradients of calls. Output: products, added to the layers' sums. Owns: the calls that are not
summed yet.

In a backward pass a call only leaves its input and output gradient here. They are summed when they reach a number of
bytes, and at the end of the pass: by kernels that read calls of all kinds where they are (``grouped_products.py``), or,
where there is no Triton, calls of one kind in one batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dkfac.capture.calls import Blocks, Call, CallKind, Form, Route, form_of, plainly, products
from dkfac.capture.grouped_products import GroupedProducts, rows_of_grouped
from dkfac.capture.statistics import LayerSums
from dkfac.capture.timing import StageTimer
from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.layers.rows import ALL, PATCH_BYTES, Sample, block_of

WAITING_BYTES, GROUPED_BYTES = 512 * 2**20, 1024 * 2**20
"""Limits on inputs and gradients that are kept alive longer than autograd needs them; the second for those that kernels
will sum. A backward pass frees memory faster than it keeps these, so they hardly raise its peak."""

BATCHED_BYTES = 16 * 2**20
"""Calls with an input and gradient of this size or more are not concatenated: the copy would cost more than the
launches it saves. Unless kernels sum them they are not deferred either, because keeping them alive costs more."""


MOST_KINDS = 4096
"""Limit on cached kinds of calls: with inputs of varying length their number is unbounded."""


class DeferredProducts:
    """Calls that have been recorded but not summed yet."""

    def __init__(
        self, layers: list[Layer], settings: Settings, timer: StageTimer, stop_deferring: Callable[[str], None]
    ) -> None:
        """``stop_deferring``: called with a layer whose tensors were modified in place before they were summed."""
        self._layers, self._settings, self._timer, self._stop_deferring = layers, settings, timer, stop_deferring
        self._calls: list[Call] = []
        self._num_bytes = self._turn = 0
        self._grouped = GroupedProducts(tf32=settings.tf32, adapts=settings.statistics_fraction is None)
        self._shared: tuple[Any, list[Tensor]] | None = None
        """Key and values of the last sums for A: other layers may have the same input, as in attention."""
        self._forms: dict[int, Form] = {}
        self._kinds: dict[Any, CallKind] = {}
        self._last: dict[int, tuple[int, torch.Size, torch.Size, torch.dtype, torch.dtype, CallKind]] = {}
        """The last call of each layer: one with the same shapes and dtypes reuses its kind without a lookup."""
        self._numbers = itertools.count()
        self._block = (ALL, -1, 0, 0)
        """Cached ``block_of``: the sample, the number of examples, begin and end of the selected ones."""

    def forget(self, index: int) -> None:
        """Drop a layer's cached kind, because its weight has been replaced or converted."""
        self._last.pop(index, None)

    def add(
        self, index: int, sums: LayerSums, x: Tensor, g: Tensor, examples: int, weight: float, sample: Sample,
        number: int = -1, more: Blocks = (),
    ) -> bool:  # fmt: skip
        """Take over a layer's call and return True; False if its kind is refused. ``number``: identifies the input.
        ``more``: input and gradient of each further block of the layer."""
        kept, self._turn = x.nbytes + g.nbytes, sample.turn
        weights = [weight] * (1 + len(more))
        if sample.adapts or sample.every > 1:
            form = self._form(index)
            if not _fits(form, x, examples):
                return False
            layer, pairs = self._layers[index], ((x, g), *more)
            found = [self._sampled(layer, form, *pair, examples, weight, sample) for pair in pairs]
            (x, g, examples, weight), *_ = found
            more, weights = tuple([(a, b) for a, b, *_ in found[1:]]), [by for *_, by in found]
        last = self._last.get(index)
        if (
            last is None
            or last[0] != examples
            or last[1] != x.shape
            or last[2] != g.shape
            or last[3] is not x.dtype
            or last[4] is not g.dtype
        ):
            kind = self._kind(index, x, g, examples)
            last = self._last[index] = examples, x.shape, g.shape, x.dtype, g.dtype, kind
        kind = last[5]
        if kind.route is Route.REFUSED:
            return False
        if kind.form.is_depthwise and kind.route is Route.GROUPED:
            x = x.contiguous()
        call = Call(kind, self._layers[index].spec.name, sums, x, g, weight, number, more, weights)
        if kind.route is Route.ALONE:
            self._sum([call])
            return True
        most = GROUPED_BYTES if kind.route is Route.GROUPED else WAITING_BYTES
        if self._calls and self._num_bytes + kept > most:
            self.flush()
        self._calls.append(call)
        self._num_bytes += kept
        return True

    def _form(self, index: int) -> Form:
        form = self._forms.get(index)
        if form is None:
            form = self._forms[index] = form_of(self._layers[index])
        return form

    def _kind(self, index: int, x: Tensor, g: Tensor, examples: int) -> CallKind:
        """Return the kind of a call, decided once for all calls like it."""
        form, layer = self._form(index), self._layers[index]
        if not _fits(form, x, examples):
            return CallKind(-1, layer, form, examples, Route.REFUSED, 1, 0.0, None)
        alike = (form.number, x.shape, g.shape, x.dtype, g.dtype, layer.dtype, x.device, examples)
        found = self._kinds.get(alike)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            num_bytes = x.nbytes + g.nbytes
            most = max(1, PATCH_BYTES // max(1, x.nbytes * form.copies)) if num_bytes < BATCHED_BYTES else 1
            rows = x.shape[0] * math.prod(g.shape[2:]) if form.num_dims else x.numel() // max(1, x.shape[-1])
            grouped_rows = None
            if self._settings.batch_dim == 0:
                grouped_rows = rows_of_grouped(layer, x, g, adapts=self._settings.statistics_fraction is None)
            source = (layer.kind, form.inputs, x.shape, x.dtype, layer.dtype) if form.is_pointwise else None
            route = self._route(layer, form, x, g) if grouped_rows is None else Route.GROUPED
            rows = rows if grouped_rows is None else grouped_rows
            kind = CallKind(next(self._numbers), layer, form, examples, route, most, float(rows), source)
            found = self._kinds[alike] = kind
        return found

    def _sampled(
        self, layer: Layer, form: Form, x: Tensor, g: Tensor, examples: int, weight: float, sample: Sample
    ) -> tuple[Tensor, Tensor, int, float]:
        """Return a subset of a call's examples (convolutions) or positions (other layers), and its weight."""
        rows = g.shape[0] * math.prod(g.shape[2:]) if form.num_dims else x.numel() // x.shape[-1]
        sample = sample.of_call(layer, rows, examples)
        if sample.every == 1:
            return x, g, examples, weight
        if form.num_dims:
            if self._block[0] is not sample or self._block[1] != examples:
                self._block = sample, examples, *block_of(examples, sample)
            begin, end = self._block[2:]
            kept = end - begin
            if g.numel() > g.shape[0] * g.shape[1]:
                return x[begin:end], g[begin:end], kept, weight * examples / kept
        elif x.ndim > 2:
            positions = x.numel() // (examples * x.shape[-1])
            x, g = (_some(t, examples, positions, sample.offset % positions, sample.every) for t in (x, g))
            return x, g, examples, weight * positions / x.shape[1]
        return x, g, examples, weight

    def _route(self, layer: Layer, form: Form, x: Tensor, g: Tensor) -> Route:
        """Return how calls like this one are processed."""
        positions = math.prod(g.shape[2:]) * x.shape[0] if form.num_dims else x.numel() // x.shape[-1]
        channels = x.shape[1 if form.num_dims else -1]
        is_large = positions * channels * form.copies * x.element_size() > PATCH_BYTES
        if self._settings.batch_dim != 0 or is_large or layer.block is not None:
            return Route.REFUSED
        return Route.WAITING if x.nbytes + g.nbytes < BATCHED_BYTES else Route.ALONE

    def take(self) -> list[Call]:
        """Remove and return the deferred calls, in the order of the layers if each was called once."""
        calls, self._calls, self._shared = self._calls[::-1], [], None
        self._num_bytes = 0
        return calls

    def flush(self) -> None:
        """Sum the deferred calls."""
        calls = self.take()
        if calls:
            self._sum(calls)

    def _sum(self, calls: list[Call]) -> None:
        """Add calls to their layers' sums."""
        for call in calls:
            if not call.is_intact:
                self._stop_deferring(call.name)
                return
        device = calls[0].x.device
        together = [call for call in calls if call.kind.route is Route.GROUPED]
        if together:
            with self._timer.stage("capture", device), torch.no_grad():
                self._grouped.sum_calls(together, self._turn)
        for group in self._groups([call for call in calls if call.kind.route is not Route.GROUPED]):
            with self._timer.stage("capture", device), plainly(self._settings, device):
                sums = self._products(group)
            self._give(group, sums)

    def _groups(self, calls: list[Call]) -> list[list[Call]]:
        """Partition the calls into groups that are summed in one batch."""
        alike, found = dict[tuple[int, float], list[Call]](), list[list[Call]]()
        for call in calls:
            alike.setdefault((call.kind.number, call.weight), []).append(call)
        for group in alike.values():
            most = group[0].kind.most
            found += [group[start : start + most] for start in range(0, len(group), most)]
        return found

    def _products(self, calls: list[Call]) -> list[Tensor]:
        """Return the sum for each factor of a group, concatenated over its calls."""
        (first, *others), settings = calls, self._settings
        if others:
            x, g = (torch.cat([getattr(call, name) for call in calls]) for name in ("x", "g"))
            return products(first, x, g, len(calls), settings, weight=first.weight)
        source, weight = first.source, first.weight
        if source is not None and self._shared is not None and source == self._shared[0]:
            inputs = [total.clone() for total in self._shared[1]]
            return products(first, first.x, first.g, 1, settings, weight=weight, inputs=inputs)
        sums = products(first, first.x, first.g, 1, settings, weight=weight)
        self._shared = None if source is None else (source, sums[: len(first.kind.form.inputs)])
        return sums

    def _give(self, calls: list[Call], products: list[Tensor]) -> None:
        """Add a group's products to the sums of its calls."""
        kind = calls[0].kind
        factors = kind.layer.spec.factors
        every = [
            [total] if len(calls) == 1 else torch.split(total, factor.num_blocks)
            for factor, total in zip(factors, products, strict=True)
        ]
        for i, call in enumerate(calls):
            if "A" in call.sums.factors:
                self._shared = None  # the addition in place may modify the shared sum
            for factor, totals in zip(factors, every, strict=True):
                call.sums.add(factor.key, totals[i])
            call.sums.rows = call.sums.rows + kind.rows


def _some(t: Tensor, examples: int, positions: int, first: int, every: int) -> Tensor:
    """Return every ``every``-th position of each example, starting at ``first``, ``[examples, kept, features]``."""
    features = t.shape[-1]
    if not t.is_contiguous():
        return t.reshape(examples, positions, features)[:, first::every]
    size = examples, -(-(positions - first) // every), features
    return t.as_strided(size, (positions * features, every * features, 1), t.storage_offset() + first * features)


def _fits(form: Form, x: Tensor, examples: int) -> bool:
    """Return whether the layer and the input of a call are of a kind that can be deferred."""
    return form.number is not None and x.ndim > 1 and x.shape[0] == examples and form.num_dims in (0, x.ndim)
