"""From the model's forward and backward to the tape.

One autograd function on each layer's output keeps the layer's input and, in its backward, hands input and
output gradient to the tape. What never gets a gradient is never counted, so evaluation, ``no_grad``, forwards
without a backward and the recomputation of activation checkpointing need no rule. Under ``torch.compile`` the
hand-over is an opaque operation whose Python runs at run time.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from dkfac import exact
from dkfac.layers.norm import uses_batch_stats
from dkfac.settings import ExactLoss, Settings
from dkfac.tape import Tape

_TAPES: WeakValueDictionary[int, Tape] = WeakValueDictionary()
_HANDLES = itertools.count()
_TOKEN = torch.zeros(1)
"""The operation below says it changes this, so that compilers keep every call of it."""


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
    tape = _TAPES.get(handle)
    if tape is not None:
        tape.record(index, x, g, _numbers(sizes, examples, terms), batch_stats)


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


class _Capture(torch.autograd.Function):
    """The identity, in place: returning a view instead would forbid in-place activations after the layer.

    While compiling it is a copy, which the compiler fuses away: torch 2.11 takes the marked tensor for a view.
    """

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
        if torch.compiler.is_compiling():
            return y.clone()
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, sizes = ctx.saved_tensors
        examples, terms, handle, index, batch_stats = ctx.call
        if torch.compiler.is_compiling():
            torch.ops.dkfac.record(x, g, _TOKEN, sizes, examples, terms, handle, index, batch_stats)
        else:
            tape = _TAPES.get(handle)
            if tape is not None:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        f"layer {tape.layers[index].name!r} is differentiated twice (create_graph=True): dkfac "
                        f"cannot tell the gradient's gradient from the loss's. Detach K-FAC for such losses "
                        f"(gradient penalties, physics-informed networks)."
                    )
                tape.record(index, x, g, _numbers(sizes, examples, terms), batch_stats)
        return g, None, None, None, None, None, None, None


class _Output(torch.autograd.Function):
    """The identity on the model's output; its backward runs the exact Fisher's passes first."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: int, loss: ExactLoss, by_token: bool) -> Tensor:
        ctx.save_for_backward(y.detach().clone())
        ctx.call = (handle, loss, by_token)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        handle, loss, by_token = ctx.call
        tape = _TAPES.get(handle)
        if tape is not None:
            edge = GradientEdge(*ctx.next_functions[0])
            exact.propagate(tape, y, edge, loss, by_token=by_token)
        return g, None, None, None


class Probe:
    """What the hooks of one attachment share: where the model is in its forward, and whether to measure.

    A deep copy or a pickle of a model carries an inert probe: the copy trains without K-FAC.
    """

    def __init__(self, tape: Tape, settings: Settings, *, has_scaler: bool) -> None:
        self.measuring = True
        self.batch_dim = settings.batch_dim
        self.loss_terms = settings.loss_terms
        self.exact_loss = settings.exact_loss if settings.fisher == "exact" else None
        self.has_scaler = has_scaler
        self.handle = next(_HANDLES)
        self.tape: Tape | None = tape
        _TAPES[self.handle] = tape
        self.sizes: Tensor | None = None
        """Examples and terms of the model's forward now running, where that is not compiled: a tensor, because a
        compiled block inside it would be specialised on numbers."""
        self.examples = -1
        self.terms = -1
        """The same where it is compiled: numbers, because they come from its shapes, and a tensor made of them
        would bring work for the CPU into the graph."""

    def forget_sizes(self) -> None:
        """Between steps: what the last forward had says nothing of the next."""
        self.sizes, self.examples, self.terms = None, -1, -1

    def attach(self, model: nn.Module) -> list[Any]:
        """Hook the model and its layers; returns the handles that remove the hooks."""
        assert self.tape is not None
        handles: list[Any] = [model.register_forward_pre_hook(ModelHook(self), with_kwargs=True)]
        for index, layer in enumerate(self.tape.layers):
            hook = LayerHook(self, index, layer.name)
            handles.append(layer.module.register_forward_hook(hook, with_kwargs=True))
        if self.exact_loss is not None:
            handles.append(model.register_forward_hook(OutputHook(self)))
        return handles

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        return inert_probe()

    def __reduce__(self) -> tuple[Any, ...]:
        return (inert_probe, ())


def inert_probe() -> Probe:
    """Return a probe that measures nothing."""
    probe = Probe.__new__(Probe)
    probe.measuring = False
    probe.tape = None
    return probe


class ModelHook:
    """Before the model's forward: how many examples and how many terms of the loss are there?"""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        probe = self.probe
        if not probe.measuring or not torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling() and probe.tape is not None:
            probe.tape.outside()
        first = _first_tensor(args, kwargs)
        if first is None or first.ndim <= probe.batch_dim:
            return
        examples = first.shape[probe.batch_dim]
        if isinstance(probe.loss_terms, int):
            terms = probe.loss_terms
        elif probe.loss_terms == "batch":
            terms = examples
        elif first.is_floating_point() and first.ndim > 2:
            terms = first.numel() // first.shape[-1]
        else:
            terms = first.numel()
        if torch.compiler.is_compiling():
            probe.sizes, probe.examples, probe.terms = None, examples, terms
        else:
            probe.sizes, probe.examples, probe.terms = torch.tensor([examples, terms], device="cpu"), -1, -1


class LayerHook:
    """After a layer's forward: put the capture on its output, if a gradient will come."""

    def __init__(self, probe: Probe, index: int, name: str) -> None:
        self.probe = probe
        self.index = index
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        probe = self.probe
        if not probe.measuring:
            return None
        if not torch.compiler.is_compiling() and probe.tape is not None:
            probe.tape.enter()
        if not output.requires_grad or not _weight(module).requires_grad:
            return None
        if probe.sizes is None and probe.terms < 0:
            raise RuntimeError(
                f"layer {self.name!r} ran, but the model that K-FAC was attached to did not (or got no tensor with "
                f"a dimension {probe.batch_dim}), so the number of examples is unknown: attach K-FAC to the module "
                f"that you call, or set loss_terms and batch_dim"
            )
        if output.dtype == torch.float16 and not probe.has_scaler and _weight(module).dtype != torch.float16:
            raise RuntimeError(
                f"layer {self.name!r} runs in float16 under autocast: pass KFAC(..., grad_scaler=scaler), so that "
                f"the loss scale does not enter the statistics"
            )
        x = args[0] if args else next(iter(kwargs.values()))
        return _Capture.apply(  # type: ignore[no-untyped-call]
            output,
            x.detach(),
            probe.sizes,
            probe.examples,
            probe.terms,
            probe.handle,
            self.index,
            uses_batch_stats(module),
        )


class OutputHook:
    """After the model's forward, exact Fisher only: propagate the Hessian's root when the loss's gradient comes."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.probe.measuring:
            return None
        loss = self.probe.exact_loss
        assert loss is not None
        if torch.compiler.is_compiling():
            raise RuntimeError('fisher="exact" runs extra backward passes and does not go with torch.compile')
        if not isinstance(output, Tensor) or not output.requires_grad:
            if isinstance(output, Tensor):
                return None
            raise TypeError(f'fisher="exact" needs a model that returns one tensor, not {type(output).__name__}')
        by_token = self.probe.loss_terms == "token"
        exact.check_output(output, loss, by_token=by_token)
        return _Output.apply(output, self.probe.handle, loss, by_token)  # type: ignore[no-untyped-call]


def _numbers(sizes: Tensor | None, examples: int, terms: int) -> tuple[int, int]:
    if sizes is not None:
        examples, terms = sizes.tolist()  # a tensor of the CPU: nothing waits
    return examples, terms


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (tuple, list, dict)):
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    return leaf
    return None


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
