"""Hooks on the model and its layers: they decide what is measured and how a layer's backward passes it on.

Input: forward calls of the model and its layers. Output: autograd nodes and node hooks that call the collector. Owns:
the context of one attachment. Under ``torch.compile`` recording is an opaque operation whose Python runs at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dkfac.capture import fisher
from dkfac.capture.collector import Collector
from dkfac.capture.nodes import COLLECTORS, Capture, Handover, Output, Watch, keeper
from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.layers.norm import uses_batch_stats

_HANDLES, _INPUTS = itertools.count(), itertools.count()


class CaptureContext:
    """State shared by the hooks of one attachment: the sizes of the current forward, and whether to measure.

    A deep copy or a pickle of a model carries an inert context: the copy trains without K-FAC.
    """

    def __init__(
        self,
        collector: Collector,
        settings: Settings,
        *,
        has_scaler: bool,
        measured: set[str] | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        """``measured``: layers that this rank measures; None: all. ``before_forward``: called before the model's
        forward."""
        self.measuring = True
        self.batch_dim = settings.batch_dim
        self.loss_terms = settings.loss_terms
        self.fisher_loss = settings.fisher_loss if settings.fisher != "empirical" else None
        self.has_scaler = has_scaler
        self.measured = {layer.name for layer in collector.layers} if measured is None else measured
        self.before_forward = before_forward
        self.handle = next(_HANDLES)
        self.collector: Collector | None = collector
        self.collector_ref = ref(collector)
        COLLECTORS[self.handle] = collector
        self._last: tuple[ref[Tensor], int, int] | None = None
        self.examples = -1
        self.terms = -1
        """Numbers of examples and of loss terms in the current forward of the model; -1: unknown."""
        self.sizes: Tensor | None = None
        """The same as a tensor, for a compiled block inside an eager forward: numbers would specialize its graph. A
        compiled forward derives them from shapes instead, where creating a tensor would add CPU work."""

    def number_of(self, x: Tensor) -> int:
        """Return a number that identifies a layer's input: the last one again if it is the same, unmodified tensor."""
        version = -1 if x.is_inference() else x._version
        if self._last is None or self._last[0]() is not x or self._last[1] != version or version < 0:
            self._last = (ref(x), version, next(_INPUTS))
        return self._last[2]

    def begin_step(self, *, measuring: bool) -> None:
        """Reset between steps: the sizes of the last forward do not apply to the next."""
        self.measuring = measuring
        self.sizes, self.examples, self.terms = None, -1, -1

    def attach(self, model: nn.Module) -> list[Any]:
        """Register hooks on the model and its layers; returns the handles that remove them."""
        assert self.collector is not None
        handles: list[Any] = [model.register_forward_pre_hook(ModelHook(self), with_kwargs=True)]
        for index, layer in enumerate(self.collector.layers):
            if layer.name not in self.measured:
                continue
            hook = LayerHook(self, index, layer)
            # Runs before all other hooks: one that changes the output would change what its gradient refers to.
            handles.append(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        if self.fisher_loss is not None:
            handles.append(model.register_forward_hook(OutputHook(self)))
        return handles

    def __deepcopy__(self, memo: dict[int, Any]) -> CaptureContext:
        return inert_context()

    def __reduce__(self) -> tuple[Any, ...]:
        return (inert_context, ())


def inert_context() -> CaptureContext:
    """Return a context that measures nothing."""
    context = CaptureContext.__new__(CaptureContext)
    context.measuring = False
    context.collector = None
    context.before_forward = None
    return context


class ModelHook:
    """Pre-hook of the model's forward: determines the numbers of examples and of loss terms."""

    def __init__(self, context: CaptureContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = self.context
        if not context.measuring or not torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling() and context.collector is not None:
            context.collector.outside()
            if context.before_forward is not None:
                context.before_forward()
            if context.collector.overlap is not None:
                context.collector.overlap.begin_forward()
        first = _first_tensor((args, kwargs))
        if first is None or first.ndim <= context.batch_dim:
            if isinstance(context.loss_terms, int) and not torch.compiler.is_compiling():
                context.examples, context.terms = -1, context.loss_terms
                context.sizes = torch.tensor([-1, context.loss_terms], device="cpu")
            return
        examples = first.shape[context.batch_dim]
        if isinstance(context.loss_terms, int):
            terms = context.loss_terms
        elif context.loss_terms == "batch":
            terms = examples
        elif first.is_floating_point() and first.ndim > 1:
            terms = first.numel() // first.shape[-1]
        else:
            terms = first.numel()
        context.examples, context.terms = examples, terms
        compiling = torch.compiler.is_compiling()
        context.sizes = None if compiling else torch.tensor([examples, terms], device="cpu")


class LayerHook:
    """Forward hook of a layer: attaches the capture to its output if a gradient will arrive."""

    def __init__(self, context: CaptureContext, index: int, layer: Layer) -> None:
        self.context = context
        self.index = index
        self.name = layer.name
        self.casts = not layer.is_norm
        """Whether autocast may run the layer in a lower precision than its input's."""
        module: Any = layer.module
        self.is_conv = layer.kind == "conv"
        self.is_shared = not self.is_conv or set(module.kernel_size) == {1}
        """Whether other layers with the same input may share its sum for A."""
        self.is_plain = layer.kind in ("linear", "linear-map", "conv1d-transposed") or (
            self.is_conv and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        )
        """Whether the layer is a single operation on its unmodified input."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        context = self.context
        if not context.measuring:
            return None
        if not torch.compiler.is_compiling() and context.collector is not None:
            if torch._C._are_functorch_transforms_active():
                return None
            if torch._C._current_graph_task_id() != -1:
                context.collector.enter()
            if self.is_plain and self._hand_over(module, args, kwargs, output):
                return None
        if not output.requires_grad or not _weight(module).requires_grad:
            return None
        if (
            context.sizes is None and context.terms < 0
        ):  # test the tensor first: a compiled block must not guard on the number
            raise RuntimeError(
                f"layer {self.name!r} ran, but the number of examples is unknown: the model that K-FAC was attached to "
                f"was not called itself (attach K-FAC to the module that you call), or it got no tensor with a "
                f"dimension {context.batch_dim} (set batch_dim, or loss_terms to the number of terms of your loss)"
            )
        if output.dtype == torch.float16 and not context.has_scaler and _weight(module).dtype != torch.float16:
            raise RuntimeError(
                f"layer {self.name!r} runs in float16 under autocast: pass KFAC(..., grad_scaler=scaler), so that "
                f"the loss scale does not enter the statistics"
            )
        x = args[0] if args else next(iter(kwargs.values()))
        x, batch_stats = x.detach(), uses_batch_stats(module)
        if self.casts and x.is_floating_point() and x.dtype != output.dtype:
            x = x.to(output.dtype)  # the input under autocast; the original may be modified in place
        if torch.compiler.is_compiling():
            known = context.sizes is None
            examples, terms = (context.examples, context.terms) if known else (-1, -1)
            return Capture.apply(  # type: ignore[no-untyped-call]
                output, x, context.sizes, examples, terms, context.handle, self.index, batch_stats
            )
        if context.collector is not None and context.collector.overlap is not None:
            context.collector.overlap.measure_input(context.collector.layers[self.index], x, output, context.examples)
        with _unsafe_preserve_version_counter(output):  # the value is unchanged: saved tensors stay valid
            call = (context.handle, self.index, (context.examples, context.terms), batch_stats)
            return Watch.apply(output, x, call)  # type: ignore[no-untyped-call]

    def _hand_over(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> bool:
        """Register a pre-hook on the output's own autograd node, which saves the input; return False if it cannot.

        Called for each layer in each measured step, so every line counts where host time is the bottleneck.
        """
        context, weight = self.context, module._parameters.get("weight")
        assert context.collector is not None
        if weight is None or not weight.requires_grad or context.terms < 0 or context.collector.overlap is not None:
            return False
        if output.dtype is torch.float16 and not context.has_scaler and weight.dtype is not torch.float16:
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False  # hooks for saved tensors, as in checkpointing, may unpack them only once
        shape, number = None, -1
        if self.is_shared:
            x = args[0] if args else next(iter(kwargs.values()))
            shape, number = None if self.is_conv else x.shape, context.number_of(x)
        node: Any = output.grad_fn if shape is None else keeper(output, shape)
        if node is None or (shape is None and type(node).__name__ != "ConvolutionBackward0"):
            return False
        node.register_prehook(
            Handover(context.collector_ref, self.index, (context.examples, context.terms), shape, number)
        )
        return True


class OutputHook:
    """Forward hook of the model, exact and sampled Fisher only: runs their passes when the loss's gradient arrives."""

    def __init__(self, context: CaptureContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.context.measuring:
            return None
        loss = self.context.fisher_loss
        assert loss is not None
        if torch.compiler.is_compiling():
            raise RuntimeError('fisher="exact" and "sampled" run extra backward passes, not with torch.compile')
        if not isinstance(output, Tensor) or not output.requires_grad:
            if isinstance(output, Tensor):
                return None
            what = type(output).__name__
            raise TypeError(f'fisher="exact" and "sampled" need a model that returns one tensor, not {what}')
        by_token = self.context.loss_terms == "token"
        fisher.check_output(output, loss, by_token=by_token)
        with _unsafe_preserve_version_counter(output):  # the value is unchanged: saved tensors stay valid
            return Output.apply(  # type: ignore[no-untyped-call]
                output, self.context.handle, loss, self.context.terms, by_token
            )


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor that has a dimension, searching sequences and mappings."""
    if isinstance(value, Tensor):
        return value if value.ndim > 0 else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            found = _first_tensor(item)
            if found is not None:
                return found
    return None


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
