"""Calls of layers that are alike, summed together: a launch costs the host as much for one as for ten.

In a backward pass a call only leaves its input and output gradient here. They are summed when there are many bytes of
them, and at the end of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac.layers.conv import strip_taps
from dkfac.layers.layer import Layer
from dkfac.layers.rows import PATCH_BYTES, block_of, rows_of
from dkfac.ops.factors import gram_of_rows
from dkfac.ops.precision import tf32
from dkfac.replay import Arena, Staged
from dkfac.sums import gradient_sum, input_sum
from dkfac.window import Sums

if TYPE_CHECKING:
    from dkfac.tape import Tape

WAITING_BYTES = 512 * 2**20
"""Inputs and gradients that are kept beyond their time."""


TOGETHER_BYTES = 16 * 2**20
"""Inputs and gradients from this size on are summed at once, each alone: to keep them and to lay them side by side
would cost more than launches."""

SMALL, SMALL_BYTES = 2**20, 24 * 2**20
"""Elements of a layer's factors, and bytes of a call, up to which it waits for the step's graph."""

STAGED_BYTES, STAGED_PATCHES = 128 * 2**20, 96 * 2**20
"""Bytes of a larger call up to which it is copied for a graph of its own, and of the patches that are formed there at a
time."""


class Route(Enum):
    """What is done with a call."""

    REFUSED = auto()
    """It cannot wait, and is summed by others."""
    ALONE = auto()
    """Summed at once."""
    STAGED = auto()
    """Summed at once by a graph, which reads a copy."""
    WAITING = auto()
    """Summed with others that are alike, or by the step's graph."""


@dataclass(slots=True)
class Call:
    layer: Layer
    sums: Sums
    x: Tensor
    g: Tensor
    alike: tuple[Any, ...]
    """What must be equal to sum calls together; examples and weight are the last."""
    versions: tuple[int, int] = (-1, -1)
    """How often input and gradient had been changed in place."""
    number: int = -1
    """The same for calls on the same input; -1: not known."""

    @property
    def is_intact(self) -> bool:
        return self.versions in ((-1, -1), (_version(self.x), _version(self.g)))


@dataclass(frozen=True, slots=True)
class _Form:
    number: int | None
    """The same for layers that differ in nothing but their name and weights; None for kinds that cannot wait."""
    copies: int
    """Of the input, that are made to sum the products of its patches."""
    is_small: bool
    """Whether its factors are, so that a graph may keep room for them."""
    is_pointwise: bool
    """Whether its rows are its input's as they are."""
    num_dims: int = 0
    """Of the input of a convolution."""


def _form(layer: Layer) -> _Form:
    module: Any = layer.module
    traits: tuple[Any, ...] = (layer.kind, layer.spec.factors, layer.has_bias)
    is_small = sum(factor.num_elements for factor in layer.spec.factors) <= SMALL
    if layer.kind != "conv":
        is_known = layer.kind in ("linear", "conv1d-transposed")
        return _Form(hash(traits) if is_known else None, 1, is_small, is_known)
    geometry = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    is_pointwise = set(module.kernel_size) == set(module.stride) == {1} and module.groups == 1
    is_pointwise &= not isinstance(module.padding, str) and set(module.padding) == {0}
    return _Form(hash((traits, geometry)), strip_taps(module), is_small, is_pointwise, 2 + len(module.kernel_size))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def rows_per_call(layer: Layer, x: Tensor, g: Tensor) -> float:
    """Return how many rows a call has: positions of the output of a convolution, of the input of others."""
    return float(x.shape[0] * math.prod(g.shape[2:]) if layer.kind == "conv" else x.numel() // x.shape[-1])


class Waiting:
    """Calls that are not summed yet."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.calls: list[Call] = []
        self.hold = False
        """Whether calls may wait for the step, where a graph sums them."""
        self._num_bytes = 0
        self._arena, self._staged = Arena(), Staged()
        self._source: Any = None
        self._inputs = torch.zeros(0)
        """The last sum for A, and what it is of: other layers may have the same input, as those of attention do."""
        self._forms: dict[str, _Form] = {}
        self._routes: dict[Any, Route] = {}

    def take(self) -> list[Call]:
        """Return what waits, in the order of the layers if each was called once; to be summed before the next call."""
        calls, self.calls, self._num_bytes = self.calls[::-1], [], 0
        self._arena.clear()
        self._source, self._inputs = None, self._inputs.new_zeros(0)
        return calls

    def add(
        self, layer: Layer, sums: Sums, x: Tensor, g: Tensor, examples: int, weight: float, number: int = -1
    ) -> bool:
        """Take a call in, if it is of a kind that can wait. ``number``: of the input."""
        form = self._forms.get(layer.name)
        if form is None:
            form = self._forms[layer.name] = _form(layer)
        is_image = form.num_dims > 0
        if form.number is None or x.ndim < 2 or x.shape[0] != examples or (is_image and x.ndim != form.num_dims):
            return False
        if self._tape.sample.every > 1:
            x, g, examples, weight = self._sampled(x, g, examples, weight, is_image=is_image)
        alike = (form.number, x.shape, g.shape, x.dtype, g.dtype, layer.dtype, x.device, examples, weight)
        route = self._routes.get((self.hold, alike))
        if route is None:
            route = self._routes[self.hold, alike] = self._route(layer, form, x, g)
        call = Call(layer, sums, x, g, alike, (_version(x), _version(g)), number)
        match route:
            case Route.REFUSED:
                return False
            case Route.ALONE:
                self.sum([call])
            case Route.STAGED if not self._is_shared(call):
                self._sum_staged(call)
            case Route.STAGED:
                self.sum([call])
            case Route.WAITING:
                self.calls.append(call)
                self._num_bytes += x.nbytes + g.nbytes
                if self._num_bytes > WAITING_BYTES:
                    self.flush()
        return True

    def _sampled(
        self, x: Tensor, g: Tensor, examples: int, weight: float, *, is_image: bool
    ) -> tuple[Tensor, Tensor, int, float]:
        """Return some of the examples of a call of a convolution, some of the positions of others."""
        sample = self._tape.sample
        if is_image:
            if math.prod(g.shape[2:]) > 1:
                begin, end = block_of(examples, sample)
                return x[begin:end], g[begin:end], end - begin, weight * examples / (end - begin)
        elif x.ndim > 2:
            x, g = (t.reshape(examples, -1, t.shape[-1]) for t in (x, g))
            positions = x.shape[1]
            if positions > 1:
                x, g = (t[:, sample.offset % positions :: sample.every] for t in (x, g))
                return x, g, examples, weight * positions / x.shape[1]
        return x, g, examples, weight

    def _route(self, layer: Layer, form: _Form, x: Tensor, g: Tensor) -> Route:
        """Decide what is done with calls like this one."""
        positions = math.prod(g.shape[2:]) * x.shape[0] if form.num_dims else x.numel() // x.shape[-1]
        channels = x.shape[1 if form.num_dims else -1]
        if self._tape.settings.batch_dim != 0 or positions * channels * form.copies * x.element_size() > PATCH_BYTES:
            return Route.REFUSED
        num_bytes = x.nbytes + g.nbytes
        if not self.hold:
            return Route.WAITING if num_bytes < TOGETHER_BYTES else Route.ALONE
        if form.is_small and num_bytes < SMALL_BYTES:
            return Route.WAITING
        return Route.STAGED if num_bytes < STAGED_BYTES else Route.ALONE

    def _sum_staged(self, call: Call) -> None:
        """Add a call to the sums it belongs to, from a graph that reads a copy of it."""
        device, source = call.x.device, self._source_of(call)

        def sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            with self._plainly(device):
                return self._products([replace(call, x=x, g=g, number=-1)], STAGED_PATCHES)

        with self._tape.timer.stage("capture", device):
            inputs, gradients = self._staged.run(call.alike, sums, call.x, call.g)
        self._source, self._inputs = source, inputs
        self.give([call], inputs, gradients)

    def stage(self, calls: list[Call]) -> None:
        """Copy what waited to where it lay at the last step, for a graph."""
        kept = self._arena.keep(*(t for call in calls for t in (call.x, call.g)))
        for call, x, g in zip(calls, kept[::2], kept[1::2], strict=True):
            call.x, call.g, call.versions, call.number = x, g, (-1, -1), -1

    def end_pass(self) -> None:
        """Sum what waits, unless it may wait for the step."""
        if not self.hold:
            self.flush()

    def flush(self) -> None:
        """Sum what waits."""
        self.sum(self.take())

    def sum(self, calls: list[Call]) -> None:
        """Add calls to the sums they belong to, those alike together."""
        spoilt = next((call.layer.name for call in calls if not call.is_intact), None)
        if spoilt is not None:
            self._tape.stop_waiting(spoilt)
            return
        for group in self.groups(calls):
            self.give(group, *self.products(group))

    def groups(self, calls: list[Call]) -> list[list[Call]]:
        """Return the calls in groups that are summed together."""
        alike, found = dict[tuple[Any, ...], list[Call]](), list[list[Call]]()
        for call in calls:
            alike.setdefault(call.alike, []).append(call)
        for group in alike.values():
            x, copies = group[0].x, self._forms[group[0].layer.name].copies
            most = max(1, PATCH_BYTES // max(1, x.numel() * x.element_size() * copies))
            found += [group[start : start + most] for start in range(0, len(group), most)]
        return found

    def give(self, calls: list[Call], inputs: Tensor, gradients: Tensor) -> None:
        """Add a group's products to the sums of its calls."""
        layer, blocks = calls[0].layer, calls[0].layer.spec.factor("G").num_blocks
        rows = rows_per_call(layer, calls[0].x, calls[0].g)
        each = zip(torch.split(inputs, blocks), torch.split(gradients, blocks), strict=True)
        for call, (a, b) in zip(calls, each, strict=True):
            if "A" in call.sums.factors:
                self._source = None  # what is added to may be what would be shared
            call.sums.add("A", a)
            call.sums.add("G", b)
            call.sums.rows = call.sums.rows + rows

    @contextmanager
    def _plainly(self, device: torch.device) -> Iterator[None]:
        """Multiply as K-FAC does, whatever the pass around it has set."""
        with torch.no_grad(), torch.autocast(device.type, enabled=False), tf32(self._tape.settings.tf32, device):
            yield

    def products(self, calls: list[Call]) -> tuple[Tensor, Tensor]:
        """Return the sums for A and for G of a group, one call's after the other's."""
        device = calls[0].x.device
        with self._tape.timer.stage("capture", device), self._plainly(device):
            return self._products(calls)

    def _products(self, calls: list[Call], patch_bytes: int = 2**62) -> tuple[Tensor, Tensor]:
        layer, settings, parts = calls[0].layer, self._tape.settings, len(calls)
        *_, examples, weight = calls[0].alike
        x, g = calls[0].x, calls[0].g
        if parts == 1 and self._forms[layer.name].is_pointwise:
            return self._pointwise(calls[0])
        if parts > 1:
            x, g = torch.cat([call.x for call in calls]), torch.cat([call.g for call in calls])
        found: list[Tensor] = []
        for rows in rows_of(
            layer, x, g, examples=examples * parts, batch_dim=0, batch_stats=False, patch_bytes=patch_bytes
        ):
            gradients = gradient_sum(layer, layer.spec.factor("G"), rows, weight, settings, parts=parts)
            both = [input_sum(layer, rows, None, settings, parts=parts)[0], gradients]
            found = both if not found else [total.add_(more) for total, more in zip(found, both, strict=True)]
        return found[0], found[1]

    def _is_shared(self, call: Call) -> bool:
        """Whether the last call was on the same input."""
        source = self._source_of(call)
        return source is not None and source == self._source

    def _source_of(self, call: Call) -> tuple[Any, ...] | None:
        """Return what A is a sum over; None if that is not known."""
        layer, x = call.layer, call.x
        is_known = call.number >= 0 and self._forms[layer.name].is_pointwise
        return (call.number, layer.kind, layer.has_bias, x.shape, x.dtype, layer.dtype) if is_known else None

    def _pointwise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the sums for A and for G of a layer whose rows are its input's as they are."""
        layer, x, g = call.layer, call.x, call.g
        if layer.kind == "conv":
            x, g = x.movedim(1, -1), g.movedim(1, -1)
        gradients = gram_of_rows(g.reshape(-1, g.shape[-1]), ones=False, dtype=layer.dtype, scale=call.alike[-1])
        if self._is_shared(call):
            return self._inputs.clone(), gradients
        inputs = gram_of_rows(x.reshape(-1, x.shape[-1]), ones=layer.has_bias, dtype=layer.dtype)
        if call.number >= 0:
            self._source, self._inputs = self._source_of(call), inputs
        return inputs, gradients
