"""Nodes of the backward graph that hand a layer's input and output gradient to the tape.

What never gets a gradient is never counted, so evaluation, ``no_grad``, forwards without a backward and the
recomputation of activation checkpointing need no rule.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dkfac import exact
from dkfac.settings import FisherLoss
from dkfac.tape import Tape

TAPES: WeakValueDictionary[int, Tape] = WeakValueDictionary()
_TOKEN = torch.zeros(1)
"""The operation below says it changes this, so that compilers keep every call of it. It lives on the CPU, which also
keeps the operation, whose Python must run each time, out of CUDA graphs."""


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
    tape = TAPES.get(handle)
    if tape is not None:
        tape.record(index, x, g, _numbers(sizes, examples, terms), batch_stats, at_once=True)


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
    """The identity, for compiled models. It is a copy, which the compiler fuses away: torch 2.11 takes a tensor that is
    marked as changed for a view."""

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
"""Where autograd's own nodes keep their input."""
_VIEWS = {"ViewBackward0", "UnsafeViewBackward0"}


def keeper(output: Tensor, shape: torch.Size) -> Any:
    """Return the node that made a linear layer's output, if it keeps the input for its own backward, or None."""
    node: Any = output.grad_fn
    name = type(node).__name__
    if name in _VIEWS:  # which is another one once the output is changed in place
        node = node.next_functions[0][0]
        name = type(node).__name__
    if name not in ("AddmmBackward0", "MmBackward0"):
        return None
    rows, features = getattr(node, f"{_KEPT[name]}_sym_sizes")
    return node if features == shape[-1] and rows * features == shape.numel() else None


class Handover:
    """Before the node that made a layer's output: what it keeps and its gradient go to the tape.

    Far less work for the host than a node of one's own, and no second copy of an input that autocast converted.
    """

    __slots__ = ("_index", "_input", "_shape", "_sizes", "_tape")

    def __init__(
        self, tape: ref[Tape], index: int, sizes: tuple[int, int], shape: torch.Size | None, number: int
    ) -> None:
        """``shape``: of a linear layer's input. ``number``: the same for calls on the same input."""
        self._tape, self._index, self._sizes, self._shape, self._input = tape, index, sizes, shape, number

    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        tape, g, shape = self._tape(), gradients[0], self._shape
        if tape is None or g is None:  # g of a function behind the layer that returns none
            return
        if torch.is_grad_enabled():
            _refuse_second_order(tape, self._index)
        node: Any = torch._C._current_autograd_node()  # not kept by us: it keeps us
        x = node._saved_input if shape is None else getattr(node, _KEPT[type(node).__name__])
        if shape is not None and x.ndim != len(shape):  # the rows are the node's own
            x, g = x.view(shape), g.reshape(*shape[:-1], g.shape[-1])
        tape.record(self._index, x, g, self._sizes, False, source=self._input)


def _refuse_second_order(tape: Tape, index: int) -> None:
    raise RuntimeError(
        f"layer {tape.layers[index].name!r} is differentiated twice (create_graph=True): dkfac cannot tell the "
        f"gradient's gradient from the loss's. Detach K-FAC for such losses (gradient penalties, physics-informed "
        f"networks)."
    )


class Watch(torch.autograd.Function):
    """The identity, in place: returning a view instead would forbid in-place activations after the layer.

    For layers whose input autograd does not keep as it is.
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
        tape = TAPES.get(handle)
        if tape is not None:
            if torch.is_grad_enabled():
                _refuse_second_order(tape, index)
            tape.record(index, x, g, sizes, batch_stats)
        return g, None, None


class Output(torch.autograd.Function):
    """The identity on the model's output; its backward runs the exact or sampled Fisher's passes first."""

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
        tape = TAPES.get(handle)
        if tape is not None:
            edge = GradientEdge(*ctx.next_functions[0])
            exact.propagate(tape, y, edge, loss, terms=terms, by_token=by_token)
        return g, None, None, None, None


def _numbers(sizes: Tensor | None, examples: int, terms: int) -> tuple[int, int]:
    if sizes is not None:
        examples, terms = sizes.tolist()  # a tensor of the CPU: nothing waits
    return examples, terms
