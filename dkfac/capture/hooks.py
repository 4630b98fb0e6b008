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

from dkfac.capture.collector import Collector
from dkfac.capture.functional import ApplierHook
from dkfac.capture.nodes import COLLECTORS, Capture, Handover, OutputHook, Watch, keeper
from dkfac.capture.traceless import CaptureHook, hide_hooks
from dkfac.config.settings import Settings
from dkfac.layers.layer import Layer
from dkfac.layers.norm import uses_batch_stats
from dkfac.layers.uses import appliers, callable_parts, is_called
from dkfac.ops.torch_private import (
    current_graph_task_id,
    functorch_is_active,
    jit_is_tracing,
    preserve_version_counter,
    top_saved_tensors_hooks,
)

_HANDLES, _INPUTS = itertools.count(), itertools.count()


class CaptureContext:
    """State shared by the hooks of one attachment: the sizes of the current forward, and whether to measure."""

    def __init__(
        self,
        collector: Collector,
        settings: Settings,
        *,
        has_scaler: bool,
        finds_scaler: bool = False,
        measured: set[str] | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        """``finds_scaler``: whether a scaler is looked for at the optimizer's step. ``measured``: layers that this rank
        measures; None: all. ``before_forward``: called before the model's forward."""
        self.measuring = True
        self.batch_dim = settings.batch_dim
        self.loss_terms: str | int = settings.loss_terms
        self.fisher_loss = settings.fisher_loss if settings.fisher != "empirical" else None
        self.has_scaler, self._finds_scaler = has_scaler, finds_scaler
        self.half: str | None = None
        """A layer that ran in float16 under autocast while no scaler was known."""
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
        self.in_model = False
        """Whether the forward of the model itself is running."""
        self.counted_by: object = None
        """The hook whose call was counted last."""
        self.sizes: Tensor | None = None
        """The same as a tensor, for a compiled block inside an eager forward: numbers would specialize its graph. A
        compiled forward derives them from shapes instead, where creating a tensor would add CPU work."""

    def number_of(self, x: Tensor) -> int:
        """Return a number that identifies a layer's input: the last one again if it is the same, unmodified tensor."""
        version = -1 if x.is_inference() else x._version
        if self._last is None or self._last[0]() is not x or self._last[1] != version or version < 0:
            self._last = (ref(x), version, next(_INPUTS))
        return self._last[2]

    def use_scaler(self) -> None:
        """Note that the scaler is known by now."""
        self.has_scaler, self.half = True, None

    def note_half(self, name: str) -> None:
        """Note a layer that ran in float16 although no scaler is known; raise if none will be looked for."""
        self.half = self.half or name
        if not self._finds_scaler:
            raise RuntimeError(half_error(name))

    def begin_step(self, *, measuring: bool) -> None:
        """Reset between steps: the sizes of the last forward do not apply to the next."""
        self.measuring, self.in_model, self.counted_by = measuring, False, None
        self.sizes, self.examples, self.terms = None, -1, -1

    def attach(self, model: nn.Module) -> list[Any]:
        """Register hooks on the model and its layers; returns the handles that remove them."""
        assert self.collector is not None
        counting = EntryHook(self, is_model=True)
        handles: list[Any] = [model.register_forward_pre_hook(counting, with_kwargs=True)]
        handles.append(model.register_forward_hook(counting, with_kwargs=True))
        parts, own = set(callable_parts(model)), {layer.module for layer in self.collector.layers}
        for part in parts - own:
            if not own.isdisjoint(part.modules()):
                handles.append(part.register_forward_pre_hook(EntryHook(self), with_kwargs=True))
        hooks: dict[int, LayerHook] = {}
        for index, layer in enumerate(self.collector.layers):
            if layer.name not in self.measured:
                continue
            hook = hooks[index] = LayerHook(self, index, layer, is_part=layer.module in parts)
            # Runs before all other hooks: one that changes the output would change what its gradient refers to.
            if is_called(layer.module, layer.use):
                handles.append(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        layers = self.collector.layers
        for module, found in appliers(model, [(index, layers[index].module) for index in hooks]):
            applier = ApplierHook(self, [(layers[index], hooks[index]) for index in found])
            handles.append(module.register_forward_pre_hook(applier))
            handles.append(module.register_forward_hook(applier, prepend=True, always_call=True))
        if self.fisher_loss is not None:
            handles.append(model.register_forward_hook(OutputHook(self, self.fisher_loss)))
        return handles + hide_hooks(model.modules())


class EntryHook(CaptureHook):
    """Determines the numbers of examples and of loss terms, before the outermost call that has a hook.

    That is the model's, or that of a part of it (``callable_parts``) if the training loop calls parts: as
    ``agent.get_value(x)`` calls ``agent.critic``, or a Lightning module its encoder and its head.
    """

    def __init__(self, context: CaptureContext, *, is_model: bool = False) -> None:
        self.context, self.is_model = context, is_model

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        """Called before the forward; of the model also after it, with its output."""
        context = self.context
        if not context.measuring or not torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling() and context.collector is not None:
            outside = current_graph_task_id() == -1
            if output or jit_is_tracing() or (not self.is_model and (context.in_model or not outside)):
                context.in_model = context.in_model and not output
                return
            context.in_model, context.counted_by = self.is_model and outside, self
            if context.collector.task != -1:
                context.collector.outside()
            if context.before_forward is not None:
                context.before_forward()
            if context.collector.overlap is not None:
                context.collector.overlap.begin_forward()
        elif output or not self.is_model:
            return
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
        context.sizes = None if torch.compiler.is_compiling() else torch.tensor([examples, terms], device="cpu")


class LayerHook(CaptureHook):
    """Forward hook of a layer: attaches the capture to its output if a gradient will arrive."""

    def __init__(self, context: CaptureContext, index: int, layer: Layer, *, is_part: bool) -> None:
        """``is_part``: whether the training loop may call the layer by itself, instead of the model."""
        self.context = context
        self.is_part, self.entry = is_part, EntryHook(context)
        self.index, self.name = index, layer.name
        self.casts = not layer.is_norm
        """Whether autocast may run the layer in a lower precision than its input's."""
        self.taken: Callable[[], Tensor | None] | None = None
        """The last output that was captured where a function computed it."""
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
        if not context.measuring or (self.taken is not None and self.taken() is output):
            return None
        if not torch.compiler.is_compiling() and context.collector is not None:
            if functorch_is_active() or jit_is_tracing():
                return None
            if current_graph_task_id() != -1:
                context.collector.enter()
            if not context.in_model and (self.is_part or context.counted_by in (None, self.entry)):
                self.entry(module, args, kwargs)
            if self.is_plain and self._hand_over(module, args, kwargs, output):
                return None
        if not self.watches(_weight(module), output):
            return None
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
        with preserve_version_counter(output):  # the value is unchanged: saved tensors stay valid
            call = (context.handle, self.index, (context.examples, context.terms), batch_stats)
            return Watch.apply(output, x, call)  # type: ignore[no-untyped-call]

    def watches(self, weight: Tensor, output: Tensor, module: nn.Module | None = None, x: Tensor | None = None) -> bool:
        """Return whether a call is captured; raises if it cannot be. ``module`` and ``x``: of a call that no hook of a
        module has seen."""
        context = self.context
        if module is not None and context.collector is not None and not torch.compiler.is_compiling():
            if current_graph_task_id() != -1:
                context.collector.enter()
            if not context.in_model and context.counted_by in (None, self.entry):
                self.entry(module, (x,), {})
        if not output.requires_grad or not weight.requires_grad:
            return False
        # Test the tensor first: a compiled block must not guard on the number.
        if context.sizes is None and context.terms < 0:
            raise RuntimeError(
                f"layer {self.name!r} ran, but the number of examples is unknown: the outermost call got no tensor "
                f"with a dimension {context.batch_dim} (set batch_dim, or loss_terms to the number of the loss's terms)"
            )
        if output.dtype == torch.float16 and not context.has_scaler and weight.dtype != torch.float16:
            context.note_half(self.name)
        return True

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
        if top_saved_tensors_hooks(True) is not None:
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


def half_error(name: str) -> str:
    return (
        f"layer {name!r} runs in float16 under autocast: pass KFAC(..., grad_scaler=scaler), so that the loss scale "
        f"does not enter the statistics"
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
