"""Hooks on the model and its layers: what is measured, and how each layer's backward is to hand it over.

Under ``torch.compile`` the hand-over is an opaque operation whose Python runs at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dkfac import exact
from dkfac.layers.layer import Layer
from dkfac.layers.norm import uses_batch_stats
from dkfac.nodes import TAPES, Capture, Handover, Output, Watch, keeper
from dkfac.settings import Settings
from dkfac.tape import Tape

_HANDLES, _INPUTS = itertools.count(), itertools.count()


class Probe:
    """What the hooks of one attachment share: where the model is in its forward, and whether to measure.

    A deep copy or a pickle of a model carries an inert probe: the copy trains without K-FAC.
    """

    def __init__(self, tape: Tape, settings: Settings, *, has_scaler: bool) -> None:
        self.measuring = True
        self.batch_dim = settings.batch_dim
        self.loss_terms = settings.loss_terms
        self.fisher_loss = settings.fisher_loss if settings.fisher != "empirical" else None
        self.has_scaler = has_scaler
        self.watched = {layer.name for layer in tape.layers}
        self.before_forward: Callable[[], None] | None = None
        self.handle = next(_HANDLES)
        self.tape: Tape | None = tape
        self.tape_ref = ref(tape)
        TAPES[self.handle] = tape
        self._last: tuple[ref[Tensor], int, int] | None = None
        self.examples = -1
        self.terms = -1
        """Examples and terms of the model's forward now running; -1: unknown."""
        self.sizes: Tensor | None = None
        """The same for a compiled block inside a forward that is not compiled: it would be specialised on numbers.
        In a compiled forward they come from shapes, and a tensor made of them would be work for the CPU."""

    def number_of(self, x: Tensor) -> int:
        """Return the number of a layer's input: that of the last one if it is the same tensor and has not changed."""
        version = -1 if x.is_inference() else x._version
        if self._last is None or self._last[0]() is not x or self._last[1] != version or version < 0:
            self._last = (ref(x), version, next(_INPUTS))
        return self._last[2]

    def watch(self, names: set[str]) -> None:
        """Measure only these layers."""
        self.watched = names

    def forget_sizes(self) -> None:
        """Between steps: what the last forward had says nothing of the next."""
        self.sizes, self.examples, self.terms = None, -1, -1

    def attach(self, model: nn.Module) -> list[Any]:
        """Hook the model and its layers; returns the handles that remove the hooks."""
        assert self.tape is not None
        handles: list[Any] = [model.register_forward_pre_hook(ModelHook(self), with_kwargs=True)]
        for index, layer in enumerate(self.tape.layers):
            if layer.name not in self.watched:
                continue
            hook = LayerHook(self, index, layer)
            # First of all hooks: one that changes the output would change what its gradient means.
            handles.append(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        if self.fisher_loss is not None:
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
    probe.before_forward = None
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
            if probe.before_forward is not None:
                probe.before_forward()
            if probe.tape.overlap is not None:
                probe.tape.overlap.begin_forward()
        first = _first_tensor((args, kwargs))
        if first is None or first.ndim <= probe.batch_dim:
            if isinstance(probe.loss_terms, int) and not torch.compiler.is_compiling():
                probe.examples, probe.terms = -1, probe.loss_terms
                probe.sizes = torch.tensor([-1, probe.loss_terms], device="cpu")
            return
        examples = first.shape[probe.batch_dim]
        if isinstance(probe.loss_terms, int):
            terms = probe.loss_terms
        elif probe.loss_terms == "batch":
            terms = examples
        elif first.is_floating_point() and first.ndim > 1:
            terms = first.numel() // first.shape[-1]
        else:
            terms = first.numel()
        probe.examples, probe.terms = examples, terms
        compiling = torch.compiler.is_compiling()
        probe.sizes = None if compiling else torch.tensor([examples, terms], device="cpu")


class LayerHook:
    """After a layer's forward: put the capture on its output, if a gradient will come."""

    def __init__(self, probe: Probe, index: int, layer: Layer) -> None:
        self.probe = probe
        self.index = index
        self.name = layer.name
        self.casts = not layer.is_norm
        """Whether autocast may run the layer in a lower precision than its input's."""
        module: Any = layer.module
        self.is_conv = layer.kind == "conv"
        self.is_shared = not self.is_conv or set(module.kernel_size) == {1}
        """Whether others' sums of the same input are of use."""
        self.is_plain = layer.kind in ("linear", "linear-map", "conv1d-transposed") or (
            self.is_conv and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        )
        """Whether the layer is one operation of its input as it is."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        probe = self.probe
        if not probe.measuring:
            return None
        if not torch.compiler.is_compiling() and probe.tape is not None:
            if torch._C._are_functorch_transforms_active():
                return None
            if torch._C._current_graph_task_id() != -1:
                probe.tape.enter()
            if self.is_plain and self._hand_over(module, args, kwargs, output):
                return None
        if not output.requires_grad or not _weight(module).requires_grad:
            return None
        if probe.sizes is None and probe.terms < 0:  # the tensor first: a compiled block must not look at the number
            raise RuntimeError(
                f"layer {self.name!r} ran, but the number of examples is unknown: the model that K-FAC was attached to "
                f"was not called itself (attach K-FAC to the module that you call), or it got no tensor with a "
                f"dimension {probe.batch_dim} (set batch_dim, or loss_terms to the number of terms of your loss)"
            )
        if output.dtype == torch.float16 and not probe.has_scaler and _weight(module).dtype != torch.float16:
            raise RuntimeError(
                f"layer {self.name!r} runs in float16 under autocast: pass KFAC(..., grad_scaler=scaler), so that "
                f"the loss scale does not enter the statistics"
            )
        x = args[0] if args else next(iter(kwargs.values()))
        x, batch_stats = x.detach(), uses_batch_stats(module)
        if self.casts and x.is_floating_point() and x.dtype != output.dtype:
            x = x.to(output.dtype)  # what the layer saw under autocast; the original may change in place
        if torch.compiler.is_compiling():
            known = probe.sizes is None
            examples, terms = (probe.examples, probe.terms) if known else (-1, -1)
            return Capture.apply(  # type: ignore[no-untyped-call]
                output, x, probe.sizes, examples, terms, probe.handle, self.index, batch_stats
            )
        if probe.tape is not None and probe.tape.overlap is not None:
            probe.tape.overlap.measure_input(probe.tape.layers[self.index], x, output, probe.examples)
        with _unsafe_preserve_version_counter(output):  # the value stays: who saved it may use it
            call = (probe.handle, self.index, (probe.examples, probe.terms), batch_stats)
            return Watch.apply(output, x, call)  # type: ignore[no-untyped-call]

    def _hand_over(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> bool:
        """Ask the output's own node for input and gradient; False where it does not have them, or all is not well.

        Called for each layer in each measured step, so that every line counts where launches are what takes time.
        """
        probe, weight = self.probe, module._parameters.get("weight")
        assert probe.tape is not None
        if weight is None or not weight.requires_grad or probe.terms < 0 or probe.tape.overlap is not None:
            return False
        if output.dtype is torch.float16 and not probe.has_scaler and weight.dtype is not torch.float16:
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False  # who keeps tensors elsewhere, as checkpointing does, may give them back only once
        shape, number = None, -1
        if self.is_shared:
            x = args[0] if args else next(iter(kwargs.values()))
            shape, number = None if self.is_conv else x.shape, probe.number_of(x)
        node: Any = output.grad_fn if shape is None else keeper(output, shape)
        if node is None or (shape is None and type(node).__name__ != "ConvolutionBackward0"):
            return False
        node.register_prehook(Handover(probe.tape_ref, self.index, (probe.examples, probe.terms), shape, number))
        return True


class OutputHook:
    """After the model's forward, exact and sampled Fisher only: run their passes when the loss's gradient comes."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.probe.measuring:
            return None
        loss = self.probe.fisher_loss
        assert loss is not None
        if torch.compiler.is_compiling():
            raise RuntimeError('fisher="exact" and "sampled" run extra backward passes, not with torch.compile')
        if not isinstance(output, Tensor) or not output.requires_grad:
            if isinstance(output, Tensor):
                return None
            what = type(output).__name__
            raise TypeError(f'fisher="exact" and "sampled" need a model that returns one tensor, not {what}')
        by_token = self.probe.loss_terms == "token"
        exact.check_output(output, loss, by_token=by_token)
        with _unsafe_preserve_version_counter(output):  # the value stays: who saved it may use it
            return Output.apply(  # type: ignore[no-untyped-call]
                output, self.probe.handle, loss, self.probe.terms, by_token
            )


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor that has a dimension, looking into lists and mappings."""
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
