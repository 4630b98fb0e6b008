"""Capture the projections of ``F.multi_head_attention_forward``.

Input: calls of that function on measured steps. Output: autograd nodes that call the collector. Owns: nothing.

To a mode it is one function: it tests for modes first, so under a mode it would be seen again and again. Instead its
code runs as a function with other globals, in which the names of its projections are ours. torch is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkfac.capture.nodes import COLLECTORS, TOKEN, keep, numbers_of
from dkfac.layers.layer import Layer
from dkfac.layers.uses import LINEAR

ATTENTION = F.multi_head_attention_forward
_NAMES: dict[str, Any] = dict(vars(F))
PACKED, SEPARATE = "_in_projection_packed", "_in_projection"
HAS_NAMES = {"has_torch_function", PACKED, SEPARATE, LINEAR} <= set(ATTENTION.__code__.co_names)
"""Whether this version of torch has the names that are replaced."""


class Running(Protocol):
    """What is known about the forward that is running."""

    measuring: bool
    handle: int
    batch_dim: int
    examples: int
    terms: int
    sizes: Tensor | None


class Hook(Protocol):
    """The forward hook of a layer."""

    index: int
    taken: Callable[[], Tensor | None] | None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, /
    ) -> Tensor | None: ...
    def watches(self, weight: Tensor, output: Tensor, module: nn.Module, x: Tensor) -> bool: ...


class AttentionForward:
    """``F.multi_head_attention_forward`` with projections that are captured."""

    def __init__(self, forward: Running, layers: Sequence[tuple[Layer, Hook]]) -> None:
        self._forward, self._layers = forward, layers
        self._batch = 1
        names = _NAMES | {"has_torch_function": _no, PACKED: self._packed, SEPARATE: self._separate, LINEAR: self._out}
        names.pop("__name__")  # torch.compile would look the names up in the module of this name
        self._run: Callable[..., Any] = ATTENTION
        if HAS_NAMES:
            self._run = FunctionType(ATTENTION.__code__, names, ATTENTION.__name__, ATTENTION.__defaults__)

    def __call__(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._batch = query.shape[1] if query.ndim == 3 else 1
        return self._run(query, *args, **kwargs)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Sequence[Tensor]:
        return self._watched(w, (q, k, v), _NAMES[PACKED](q, k, v, w, b))

    def _separate(self, q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> Sequence[Tensor]:
        outputs = _NAMES[SEPARATE](q, k, v, *parameters)
        each = zip(parameters[:3], (q, k, v), outputs, strict=True)
        return [self._watched(w, (x,), (y,))[0] for w, x, y in each]

    def _out(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return self._watched(w, (x,), (F.linear(x, w, b),))[0]

    def _watched(self, weight: Tensor, xs: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return outputs of a projection, watched if its weight is one of the layers'."""
        forward, dtype = self._forward, outputs[0].dtype
        for layer, hook in self._layers:
            if layer.module._parameters.get(layer.use.weight) is not weight:
                continue
            if hook.watches(weight, outputs[0], layer.module, _by_example(xs[0], self._batch, forward.batch_dim)):
                sources = [next(j for j, other in enumerate(xs) if other is x) for x in xs]
                inputs = [x.detach() for j, x in enumerate(xs) if j in sources]
                inputs = [x if x.dtype == dtype else x.to(dtype) for x in inputs]
                sources = [sorted(set(sources)).index(j) for j in sources]
                sizes = forward.sizes if torch.compiler.is_compiling() else None
                known = (forward.examples, forward.terms) if sizes is None else (-1, -1)
                call = (forward.handle, hook.index, *known, self._batch, forward.batch_dim, tuple(sources))
                watched: Sequence[Tensor] = WatchProjections.apply(  # type: ignore[no-untyped-call]
                    call, sizes, *outputs, *inputs
                )
                return watched
        return outputs


def _no(*_: Any) -> bool:
    return False


@torch.library.custom_op("dkfac::record_projections", mutates_args=("token",))
def _record(
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sources: Sequence[int],
    token: Tensor,
    sizes: Tensor | None,
    examples: int,
    terms: int,
    handle: int,
    index: int,
) -> None:
    collector = COLLECTORS.get(handle)
    if collector is not None:
        calls = tuple((inputs[i], g) for i, g in zip(sources, gradients, strict=True))
        collector.record(index, *calls[0], numbers_of(sizes, examples, terms), False, at_once=True, more=calls[1:])


@_record.register_fake
def _(
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sources: Sequence[int],
    token: Tensor,
    sizes: Tensor | None,
    examples: int,
    terms: int,
    handle: int,
    index: int,
) -> None:
    return None


class WatchProjections(torch.autograd.Function):
    """Identity on the outputs of an attention's projections; rows are ``[positions * batch, features]`` in any form."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], sizes: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``tensors``: the outputs, then the inputs, each once; ``call`` ends with which input each output has."""
        number, compiling = len(call[-1]), torch.compiler.is_compiling()
        keep(ctx, call, sizes, *tensors[number:])
        return tuple(y.clone() if compiling else y.view_as(y) for y in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        handle, index, examples, terms, batch, batch_dim, sources = ctx.call
        sizes, *inputs = ctx.saved_tensors
        inputs = [_by_example(x, batch, batch_dim) for x in inputs]
        found = [_by_example(g, batch, batch_dim) for g in gradients]
        if torch.compiler.is_compiling():
            torch.ops.dkfac.record_projections(inputs, found, sources, TOKEN, sizes, examples, terms, handle, index)
        elif (collector := COLLECTORS.get(handle)) is not None:
            calls = tuple((inputs[i], g) for i, g in zip(sources, found, strict=True))
            if torch.is_grad_enabled():
                collector.postpone(index)
            else:
                collector.record(index, *calls[0], (examples, terms), False, more=calls[1:])
        return None, None, *gradients, *[None] * len(inputs)


def _by_example(rows: Tensor, batch: int, batch_dim: int) -> Tensor:
    """Return rows that attention keeps as ``[positions, batch, features]`` with the batch where the model has it."""
    rows = rows.reshape(-1, batch, rows.shape[-1])
    return rows if batch_dim == 1 else rows.transpose(0, 1)
