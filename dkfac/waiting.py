"""Calls of layers that wait for each other: a launch costs the host as much for one as for ten.

In a backward pass a call only leaves its input and output gradient here. They are summed when there are many bytes of
them, and at the end of the pass: those that are alike together or, with CUDA graphs, all that waited by one graph.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac.calls import Call, Form, Kind, Route, form_of, plainly, products
from dkfac.layers.rows import ALL, PATCH_BYTES, block_of
from dkfac.replay import Staged
from dkfac.window import Sums

if TYPE_CHECKING:
    from dkfac.tape import Tape

WAITING_BYTES = 512 * 2**20
"""Inputs and gradients that are kept beyond their time."""

TOGETHER_BYTES = 16 * 2**20
"""Inputs and gradients from this size on are summed each alone: to lay them side by side would cost more than
launches, and more to keep them where no graph sums them."""

STAGED_BYTES, ALONE_BYTES = 160 * 2**20, 128 * 2**20
"""With CUDA graphs: as ``WAITING_BYTES``, and for the factors too. Calls from the other size on are summed at once: to
copy them for a graph would cost the device more than it spares the host."""


MOST_KINDS = 4096
"""Of calls, that are remembered: with lengths that vary there is no end of them."""


class Waiting:
    """Calls that are not summed yet."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._calls: list[Call] = []
        self._num_bytes = self._factor_bytes = 0
        self.stages = False
        """Whether graphs sum the calls."""
        self.staged = Staged()
        self._shared: tuple[Any, Tensor] | None = None
        """What the last sum for A is of, and the sum: other layers may have the same input, as those of attention."""
        self._forms: dict[int, Form] = {}
        self._kinds: dict[Any, Kind] = {}
        self._last: dict[int, tuple[bool, int, torch.Size, torch.Size, torch.dtype, torch.dtype, Kind]] = {}
        """Each layer's last call, so that another one like it is known at a glance."""
        self._numbers = itertools.count()
        self._block = (ALL, -1, 0, 0)
        """Of which examples a sample is: the sample, of how many, from where to where."""

    def forget(self, index: int) -> None:
        """Look at a layer anew: its weight is another one."""
        self._last.pop(index, None)

    def add(self, index: int, sums: Sums, x: Tensor, g: Tensor, examples: int, weight: float, number: int = -1) -> bool:
        """Take a layer's call in, if it is of a kind that can wait. ``number``: of the input."""
        if self._tape.sample.every > 1:
            form = self._form(index)
            if not _fits(form, x, examples):
                return False
            x, g, examples, weight = self._sampled(form, x, g, examples, weight)
        last = self._last.get(index)
        if (
            last is None
            or last[0] is not self.stages
            or last[1] != examples
            or last[2] != x.shape
            or last[3] != g.shape
            or last[4] is not x.dtype
            or last[5] is not g.dtype
        ):
            kind = self._kind(index, x, g, examples)
            last = self._last[index] = self.stages, examples, x.shape, g.shape, x.dtype, g.dtype, kind
        kind = last[6]
        if kind.route is Route.REFUSED:
            return False
        versions = -1 if x.is_inference() else x._version, -1 if g.is_inference() else g._version
        call = Call(kind, self._tape.layers[index].spec.name, sums, x, g, weight, number, *versions)
        if kind.route is Route.ALONE:
            self._sum([call], at_once=True)
            return True
        most, factor_bytes = (STAGED_BYTES, kind.factor_bytes) if self.stages else (WAITING_BYTES, 0)
        if self._calls and (self._num_bytes + kind.num_bytes > most or self._factor_bytes + factor_bytes > most):
            self.flush()
        self._calls.append(call)
        self._num_bytes += kind.num_bytes
        self._factor_bytes += factor_bytes
        return True

    def _form(self, index: int) -> Form:
        form = self._forms.get(index)
        if form is None:
            form = self._forms[index] = form_of(self._tape.layers[index])
        return form

    def _kind(self, index: int, x: Tensor, g: Tensor, examples: int) -> Kind:
        """Return the kind of a call, decided once for all like it."""
        form, layer = self._form(index), self._tape.layers[index]
        if not _fits(form, x, examples):
            return Kind(-1, layer, form, examples, Route.REFUSED, 1, 0.0, 0, 0, 1, None)
        alike = (self.stages, form.number, x.shape, g.shape, x.dtype, g.dtype, layer.dtype, x.device, examples)
        found = self._kinds.get(alike)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            num_bytes = x.nbytes + g.nbytes
            room = STAGED_BYTES if self.stages else PATCH_BYTES
            most = max(1, room // max(1, x.nbytes * form.copies)) if num_bytes < TOGETHER_BYTES else 1
            rows = x.shape[0] * math.prod(g.shape[2:]) if form.num_dims else x.numel() // max(1, x.shape[-1])
            source = (layer.kind, layer.has_bias, x.shape, x.dtype, layer.dtype) if form.is_pointwise else None
            found = self._kinds[alike] = Kind(
                next(self._numbers), layer, form, examples, self._route(form, x, g), most, float(rows), num_bytes,
                form.num_elements * layer.dtype.itemsize, layer.spec.factor("G").num_blocks, source,
            )  # fmt: skip
        return found

    def _sampled(
        self, form: Form, x: Tensor, g: Tensor, examples: int, weight: float
    ) -> tuple[Tensor, Tensor, int, float]:
        """Return some of the examples of a call of a convolution, some of the positions of others."""
        sample = self._tape.sample
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

    def _route(self, form: Form, x: Tensor, g: Tensor) -> Route:
        """Decide what is done with calls like this one."""
        positions = math.prod(g.shape[2:]) * x.shape[0] if form.num_dims else x.numel() // x.shape[-1]
        channels = x.shape[1 if form.num_dims else -1]
        if self._tape.settings.batch_dim != 0 or positions * channels * form.copies * x.element_size() > PATCH_BYTES:
            return Route.REFUSED
        limit = ALONE_BYTES if self.stages else TOGETHER_BYTES
        return Route.WAITING if x.nbytes + g.nbytes < limit else Route.ALONE

    def take(self) -> list[Call]:
        """Return what waits, in the order of the layers if each was called once, and give it up."""
        calls, self._calls, self._shared = self._calls[::-1], [], None
        self._num_bytes = self._factor_bytes = 0
        return calls

    def flush(self) -> None:
        """Sum what waits."""
        calls = self.take()
        if calls:
            self._sum(calls)

    def _sum(self, calls: list[Call], *, at_once: bool = False) -> None:
        """Add calls to the sums they belong to, where graphs sum them by one unless ``at_once``."""
        for call in calls:
            if not call.is_intact:
                self._tape.stop_waiting(call.name)
                return
        device = calls[0].x.device
        if self.stages and not at_once:
            with self._tape.timer.stage("capture", device):
                self._sum_staged(self._groups(calls), device)
            return
        for group in self._groups(calls):
            with self._tape.timer.stage("capture", device), plainly(self._tape.settings, device):
                sums = self._products(group)
            self._give(group, *sums)

    def _groups(self, calls: list[Call]) -> list[list[Call]]:
        """Return the calls in groups that are summed together."""
        alike, found = dict[tuple[int, float], list[Call]](), list[list[Call]]()
        for call in calls:
            alike.setdefault((call.kind.number, call.weight), []).append(call)
        for group in alike.values():
            most = group[0].kind.most
            found += [group[start : start + most] for start in range(0, len(group), most)]
        return found

    def _products(self, calls: list[Call]) -> tuple[Tensor, Tensor]:
        """Return the sums for A and for G of a group, one call's after the other's."""
        (first, *others), settings = calls, self._tape.settings
        if others:
            x, g = (torch.cat([getattr(call, name) for call in calls]) for name in ("x", "g"))
            return products(first, x, g, len(calls), settings, weight=first.weight)
        source, weight = first.source, first.weight
        if source is not None and self._shared is not None and source == self._shared[0]:
            return products(first, first.x, first.g, 1, settings, weight=weight, inputs=self._shared[1].clone())
        inputs, gradients = products(first, first.x, first.g, 1, settings, weight=weight)
        self._shared = None if source is None else (source, inputs)
        return inputs, gradients

    def _sum_staged(self, groups: list[list[Call]], device: torch.device) -> None:
        """Add groups of calls to the sums they belong to, from a graph that reads copies of them."""
        xs, places, sources = list[list[Tensor]](), list[int](), dict[Any, int]()
        for group in groups:
            source = group[0].source if len(group) == 1 else None
            place = len(xs) if source is None else sources.setdefault(source, len(xs))
            if place == len(xs):
                xs.append([call.x for call in group])
            places.append(place)
        key = tuple([(group[0].kind.number, len(group), place) for group, place in zip(groups, places, strict=True)])
        weights = [weight for group in groups for weight in (1.0, group[0].weight)]
        settings = self._tape.settings

        def sums(*copies: Tensor) -> list[Tensor]:
            known: dict[int, Tensor] = {}
            found: list[Tensor] = []
            with plainly(settings, device):
                for group, place, g in zip(groups, places, copies[len(xs) :], strict=True):
                    options: dict[str, Any] = {"inputs": known.get(place), "patch_bytes": STAGED_BYTES}
                    both = products(group[0], copies[place], g, len(group), settings, weight=1.0, **options)
                    known[place] = both[0]
                    found += both
            return found

        with torch.no_grad():
            found = self.staged.run(key, sums, weights, *xs, *([call.g for call in group] for group in groups))
        for group, inputs, gradients in zip(groups, found[::2], found[1::2], strict=True):
            self._give(group, inputs, gradients)

    def _give(self, calls: list[Call], inputs: Tensor, gradients: Tensor) -> None:
        """Add a group's products to the sums of its calls."""
        blocks, rows = calls[0].kind.blocks, calls[0].kind.rows
        every = (
            ([inputs], [gradients])
            if len(calls) == 1
            else (torch.split(inputs, blocks), torch.split(gradients, blocks))
        )
        for call, a, b in zip(calls, *every, strict=True):
            sums = call.sums
            if "A" in sums.factors:
                self._shared = None  # what is added to may be what would be shared
            sums.add("A", a)
            sums.add("G", b)
            sums.rows = sums.rows + rows


def _some(t: Tensor, examples: int, positions: int, first: int, every: int) -> Tensor:
    """Return some positions of each example, ``[examples, kept, features]``."""
    features = t.shape[-1]
    if not t.is_contiguous():
        return t.reshape(examples, positions, features)[:, first::every]
    size = examples, -(-(positions - first) // every), features
    return t.as_strided(size, (positions * features, every * features, 1), t.storage_offset() + first * features)


def _fits(form: Form, x: Tensor, examples: int) -> bool:
    """Whether a call is of a layer, and on an input, of the kinds that can wait."""
    return form.number is not None and x.ndim > 1 and x.shape[0] == examples and form.num_dims in (0, x.ndim)
