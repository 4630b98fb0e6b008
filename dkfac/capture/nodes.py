"""Autograd nodes that pass a layer's input and output gradient to the collector.

Input: outputs of layers and of the model. Output: calls of the collector in backward. Owns: weak references to the
collectors, by handle.

Only what receives a gradient is counted, so evaluation, ``no_grad``, forwards without a backward and the recomputation
of activation checkpointing need no special case.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dkfac.capture import fisher
from dkfac.capture.collector import Collector
from dkfac.config.settings import FisherLoss

COLLECTORS: WeakValueDictionary[int, Collector] = WeakValueDictionary()
_TOKEN = torch.zeros(1)
"""The operation below declares that it mutates this tensor, so that compilers keep every call of it. It is on the CPU,
which also keeps the operation, whose Python must run each time, out of CUDA graphs."""


@torch.library.custom_op("dkfac::record", mutates_args=("token",))
def _record(
    x: Tensor,
    g: Tensor,
    token: Tensor,
    sizes: Tensor | None,
    examples: int,
    terms: int,
    handle: int,
    index: int,
    batch_stats: bool,
) -> None:
    collector = COLLECTORS.get(handle)
    if collector is not None:
        collector.record(index, x, g, _numbers(sizes, examples, terms), batch_stats, at_once=True)


@_record.register_fake
def _(
    x: Tensor,
    g: Tensor,
    token: Tensor,
    sizes: Tensor | None,
    examples: int,
    terms: int,
    handle: int,
    index: int,
    batch_stats: bool,
) -> None:
    return None


class Capture(torch.autograd.Function):
    """Identity, for compiled models. It returns a copy, which the compiler fuses away: torch 2.11 treats a tensor that
    is marked dirty as a view."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        sizes: Tensor | None,
        examples: int,
        terms: int,
        handle: int,
        index: int,
        batch_stats: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, sizes)
        ctx.call = (examples, terms, handle, index, batch_stats)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, sizes = ctx.saved_tensors
        examples, terms, handle, index, batch_stats = ctx.call
        torch.ops.dkfac.record(x, g, _TOKEN, sizes, examples, terms, handle, index, batch_stats)
        return g, None, None, None, None, None, None, None


_KEPT = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
"""Attributes in which autograd's own nodes save their input."""
_VIEWS = {"ViewBackward0", "UnsafeViewBackward0"}


def keeper(output: Tensor, shape: torch.Size) -> Any:
    """Return the node that computed a linear layer's output if it saves the input for its own backward; otherwise
    None."""
    node: Any = output.grad_fn
    name = type(node).__name__
    if name in _VIEWS:  # replaced by another node once the output is modified in place
        node = node.next_functions[0][0]
        name = type(node).__name__
    if name not in ("AddmmBackward0", "MmBackward0"):
        return None
    rows, features = getattr(node, f"{_KEPT[name]}_sym_sizes")
    return node if features == shape[-1] and rows * features == shape.numel() else None


class Handover:
    """Pre-hook of the node that computed a layer's output: passes the saved input and the gradient to the collector.

    Costs the host far less than a custom autograd node, and needs no second copy of an input that autocast converted.
    """

    __slots__ = ("_collector", "_index", "_input", "_shape", "_sizes")

    def __init__(
        self, collector: ref[Collector], index: int, sizes: tuple[int, int], shape: torch.Size | None, number: int
    ) -> None:
        """``shape``: shape of a linear layer's input. ``number``: equal for calls with the same input."""
        self._collector, self._index, self._sizes, self._shape, self._input = collector, index, sizes, shape, number

    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        collector, g, shape = self._collector(), gradients[0], self._shape
        if collector is None or g is None:  # g is None if a later autograd.Function returns None
            return
        if torch.is_grad_enabled():
            _refuse_second_order(collector, self._index)
        node: Any = torch._C._current_autograd_node()  # not stored here: the node refers to this hook
        x = node._saved_input if shape is None else getattr(node, _KEPT[type(node).__name__])
        if shape is not None and x.ndim != len(shape):  # the node saved the input flattened to rows
            x, g = x.view(shape), g.reshape(*shape[:-1], g.shape[-1])
        collector.record(self._index, x, g, self._sizes, False, source=self._input)


def _refuse_second_order(collector: Collector, index: int) -> None:
    raise RuntimeError(
        f"layer {collector.layers[index].name!r} is differentiated twice (create_graph=True): dkfac cannot tell the "
        f"gradient's gradient from the loss's. Detach K-FAC for such losses (gradient penalties, physics-informed "
        f"networks)."
    )


class Watch(torch.autograd.Function):
    """Identity, in place: returning a view instead would forbid in-place activations after the layer.

    For layers whose input autograd does not save unmodified.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, call: tuple[int, int, tuple[int, int], bool]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call = call
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        handle, index, sizes, batch_stats = ctx.call
        collector = COLLECTORS.get(handle)
        if collector is not None:
            if torch.is_grad_enabled():
                _refuse_second_order(collector, index)
            collector.record(index, x, g, sizes, batch_stats)
        return g, None, None


class Output(torch.autograd.Function):
    """Identity on the model's output; its backward first runs the passes of the exact or sampled Fisher."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: int, loss: FisherLoss, terms: int, by_token: bool) -> Tensor:
        ctx.save_for_backward(y.detach().clone())
        ctx.call = (handle, loss, terms, by_token)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        handle, loss, terms, by_token = ctx.call
        collector = COLLECTORS.get(handle)
        if collector is not None:
            edge = GradientEdge(*ctx.next_functions[0])
            fisher.propagate(collector, y, edge, loss, terms=terms, by_token=by_token)
        return g, None, None, None, None


def _numbers(sizes: Tensor | None, examples: int, terms: int) -> tuple[int, int]:
    if sizes is not None:
        examples, terms = sizes.tolist()  # a CPU tensor: no synchronization
    return examples, terms
