"""Autograd nodes that pass a layer's input and output gradient to the collector.

Input: outputs of layers and of the model. Output: calls of the collector in backward. Owns: weak references to the
collectors, by handle.

Only what receives a gradient is counted, so evaluation, ``no_grad``, forwards without a backward and the recomputation
of activation checkpointing need no special case.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dkfac.capture import fisher
from dkfac.capture.collector import Collector
from dkfac.capture.traceless import CaptureHook
from dkfac.config.settings import FisherLoss
from dkfac.layers.tensor_parallel import whole_of
from dkfac.ops.torch_private import current_autograd_node, preserve_version_counter

COLLECTORS: WeakValueDictionary[int, Collector] = WeakValueDictionary()
TOKEN = torch.zeros(1)
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
        collector.record(index, x, g, numbers_of(sizes, examples, terms), batch_stats, at_once=True)


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
        torch.ops.dkfac.record(whole_of(x), whole_of(g), TOKEN, sizes, examples, terms, handle, index, batch_stats)
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
            collector.postpone(self._index)
            return
        node: Any = current_autograd_node()  # not stored here: the node refers to this hook
        x = node._saved_input if shape is None else getattr(node, _KEPT[type(node).__name__])
        if shape is not None and x.ndim != len(shape):  # the node saved the input flattened to rows
            x, g = x.view(shape), g.reshape(*shape[:-1], g.shape[-1])
        collector.record(self._index, x, g, self._sizes, False, source=self._input)


def keep(ctx: Any, call: tuple[Any, ...], *tensors: Tensor | None) -> None:
    """Keep what the backward of a node needs: numbers, and tensors, which checkpointing may drop and compute again."""
    ctx.save_for_backward(*tensors)
    ctx.call = call


class Watch(torch.autograd.Function):
    """Identity, in place: returning a view instead would forbid in-place activations after the layer.

    For layers whose input autograd does not save unmodified.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, call: tuple[int, int, tuple[int, int], bool]) -> Tensor:
        keep(ctx, call, x)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        handle, index, sizes, batch_stats = ctx.call
        collector = COLLECTORS.get(handle)
        if collector is not None and torch.is_grad_enabled():
            collector.postpone(index)
        elif collector is not None:
            collector.record(index, x, g, sizes, batch_stats)
        return g, None, None


class Output(torch.autograd.Function):
    """Identity on the model's output; its backward first runs the passes of the exact or sampled Fisher."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: int, loss: FisherLoss, terms: int, by_token: bool) -> Tensor:
        keep(ctx, (handle, loss, terms, by_token), y.detach().clone())
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


class ForwardSizes(Protocol):
    """The forward whose output is watched."""

    measuring: bool
    handle: int
    terms: int
    loss_terms: str | int


class OutputHook(CaptureHook):
    """Forward hook of the model, exact and sampled Fisher only: runs their passes when the loss's gradient arrives."""

    def __init__(self, forward: ForwardSizes, loss: FisherLoss) -> None:
        self.forward, self.loss = forward, loss

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.forward.measuring:
            return None
        if torch.compiler.is_compiling():
            raise RuntimeError('fisher="exact" and "sampled" run extra backward passes, not with torch.compile')
        if not isinstance(output, Tensor) or not output.requires_grad:
            if isinstance(output, Tensor):
                return None
            what = type(output).__name__
            raise TypeError(f'fisher="exact" and "sampled" need a model that returns one tensor, not {what}')
        by_token = self.forward.loss_terms == "token"
        fisher.check_output(output, self.loss, by_token=by_token)
        with preserve_version_counter(output):  # the value is unchanged: saved tensors stay valid
            return Output.apply(  # type: ignore[no-untyped-call]
                output, self.forward.handle, self.loss, self.forward.terms, by_token
            )


def numbers_of(sizes: Tensor | None, examples: int, terms: int) -> tuple[int, int]:
    """Return the numbers of examples and of loss terms, from ``sizes`` if it is given."""
    if sizes is not None:
        examples, terms = sizes.tolist()  # a CPU tensor: no synchronization
    return examples, terms
