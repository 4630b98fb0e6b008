"""Calls of layers that wait for each other: a launch costs the host as much for one as for ten.

In a backward pass a call only leaves its input and output gradient here. They are summed when there are many bytes of
them, and at the end of the pass: those that are alike together or, with CUDA graphs, all that waited by one graph.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac.calls import Call, Form, form_of, plainly, products, version
from dkfac.layers.layer import Layer
from dkfac.layers.rows import PATCH_BYTES, block_of
from dkfac.replay import Staged
from dkfac.window import Sums

if TYPE_CHECKING:
    from dkfac.tape import Tape

WAITING_BYTES = 512 * 2**20
"""Inputs and gradients that are kept beyond their time."""

TOGETHER_BYTES = 16 * 2**20
"""Inputs and gradients from this size on are summed each alone: to lay them side by side would cost more than
launches, and more to keep them where no graph sums them."""

STAGED_BYTES, ALONE_BYTES = 96 * 2**20, 128 * 2**20
"""With CUDA graphs: as ``WAITING_BYTES``, and for the factors too. Calls from the other size on are summed at once: to
copy them for a graph would cost the device more than it spares the host."""


MOST_ROUTES = 4096
"""Kinds of calls that are remembered: with lengths that vary there is no end of them."""


class Route(Enum):
    """What is done with a call."""

    REFUSED = auto()
    """It cannot wait, and is summed by others."""
    ALONE = auto()
    """Summed at once."""
    WAITING = auto()
    """Summed with others."""


class Waiting:
    """Calls that are not summed yet."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._calls: list[Call] = []
        self._num_bytes = self._factor_bytes = 0
        self.stages = False
        """Whether graphs sum the calls."""
        self._staged = Staged()
        self._shared: tuple[Any, Tensor] | None = None
        """What the last sum for A is of, and the sum: other layers may have the same input, as those of attention."""
        self._forms: dict[str, Form] = {}
        self._routes: dict[Any, Route] = {}

    def add(
        self, layer: Layer, sums: Sums, x: Tensor, g: Tensor, examples: int, weight: float, number: int = -1
    ) -> bool:
        """Take a call in, if it is of a kind that can wait. ``number``: of the input."""
        form = self._forms.get(layer.name)
        if form is None:
            form = self._forms[layer.name] = form_of(layer)
        if form.number is None or x.ndim < 2 or x.shape[0] != examples or form.num_dims not in (0, x.ndim):
            return False
        if self._tape.sample.every > 1:
            x, g, examples, weight = self._sampled(form, x, g, examples, weight)
        alike = (form.number, x.shape, g.shape, x.dtype, g.dtype, layer.dtype, x.device, examples, weight)
        route = self._routes.get((self.stages, alike[:-2]))
        if route is None:
            if len(self._routes) == MOST_ROUTES:
                self._routes.clear()
            route = self._routes[self.stages, alike[:-2]] = self._route(form, x, g)
        if route is Route.REFUSED:
            return False
        call = Call(layer, form, sums, x, g, alike, number, (version(x), version(g)))
        if route is Route.ALONE:
            self._sum([call], at_once=True)
        else:
            self._wait(call)
        return True

    def _sampled(
        self, form: Form, x: Tensor, g: Tensor, examples: int, weight: float
    ) -> tuple[Tensor, Tensor, int, float]:
        """Return some of the examples of a call of a convolution, some of the positions of others."""
        sample = self._tape.sample
        if form.num_dims:
            if math.prod(g.shape[2:]) > 1:
                begin, end = block_of(examples, sample)
                kept = end - begin
                return x.narrow(0, begin, kept), g.narrow(0, begin, kept), kept, weight * examples / kept
        elif x.ndim > 2:
            x, g = (t.reshape(examples, -1, t.shape[-1]) for t in (x, g))
            positions = x.shape[1]
            if positions > 1:
                x, g = (t[:, sample.offset % positions :: sample.every] for t in (x, g))
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

    def _wait(self, call: Call) -> None:
        num_bytes, factor_bytes = call.x.nbytes + call.g.nbytes, call.form.num_elements * call.layer.dtype.itemsize
        most = STAGED_BYTES if self.stages else WAITING_BYTES
        is_full = self._num_bytes + num_bytes > most or (self.stages and self._factor_bytes + factor_bytes > most)
        if self._calls and is_full:
            self.flush()
        self._calls.append(call)
        self._num_bytes += num_bytes
        self._factor_bytes += factor_bytes

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
        spoilt = next((call.layer.name for call in calls if not call.is_intact), None)
        if spoilt is not None:
            self._tape.stop_waiting(spoilt)
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
        alike, found = dict[tuple[Any, ...], list[Call]](), list[list[Call]]()
        for call in calls:
            alike.setdefault(call.alike, []).append(call)
        for group in alike.values():
            x, g, copies = group[0].x, group[0].g, group[0].form.copies
            room = STAGED_BYTES if self.stages else PATCH_BYTES
            most = max(1, room // max(1, x.nbytes * copies)) if x.nbytes + g.nbytes < TOGETHER_BYTES else 1
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
        key = tuple([(group[0].alike[:-1], len(group), place) for group, place in zip(groups, places, strict=True)])
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

        found = self._staged.run(key, sums, weights, *xs, *([call.g for call in group] for group in groups))
        for group, inputs, gradients in zip(groups, found[::2], found[1::2], strict=True):
            self._give(group, inputs, gradients)

    def _give(self, calls: list[Call], inputs: Tensor, gradients: Tensor) -> None:
        """Add a group's products to the sums of its calls."""
        blocks, rows = calls[0].layer.spec.factor("G").num_blocks, calls[0].rows
        is_one = len(calls) == 1
        each = (
            [(inputs, gradients)]
            if is_one
            else zip(torch.split(inputs, blocks), torch.split(gradients, blocks), strict=True)
        )
        for call, (a, b) in zip(calls, each, strict=True):
            if "A" in call.sums.factors:
                self._shared = None  # what is added to may be what would be shared
            call.sums.add("A", a)
            call.sums.add("G", b)
            call.sums.rows = call.sums.rows + rows
