"""The statistics of one optimizer step: sums of outer products, and what they are to be divided by."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dkfac.layers.layer import Layer
from dkfac.layers.rows import Rows, regroup, rows_of
from dkfac.ops import factors as ops
from dkfac.ops.decompose import Eigen
from dkfac.plan.spec import FactorSpec
from dkfac.settings import Settings
from dkfac.timing import StageTimer

NEVER_STEPPED = 500
"""Backward passes without a step after which something must be wrong."""

_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


@dataclass(slots=True)
class Sums:
    """One layer's sums over its calls in a step."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    moments: Tensor | None = None
    rows: Tensor | float = 0.0
    """What A is divided by: rows, or examples under ``reduce``."""
    calls: int = 0
    last_call: tuple[int, int | None] = (0, None)
    """The backward pass, and column of the exact Fisher, that the last call belonged to."""
    called_again: bool = False


@dataclass(slots=True)
class Measured:
    """What one rank measured in a step: sums, and what they are to be divided by."""

    layers: dict[str, Sums]
    terms: Tensor | float
    num_passes: int
    unit: Tensor | float
    """What sums of gradients are multiplied by to be sums over terms."""


@dataclass(slots=True)
class Terms:
    """How many terms of the loss a backward pass was a mean of, and which positions count."""

    number: Tensor | float
    mask: Tensor | None = None


@dataclass(slots=True)
class Window:
    """Everything measured since the last step."""

    layers: dict[str, Sums] = field(default_factory=dict)
    num_passes: int = 0
    terms: Tensor | float = 0.0
    scaler_epoch: object = None
    filled: bool = False
    """Whether the last pass left gradients on the weights, as ``backward()`` does and ``autograd.grad`` does not."""


class Tape:
    """Collects what the hooks hand over in backward passes, until the optimizer steps."""

    def __init__(self, layers: list[Layer], settings: Settings, scaler: Any = None) -> None:
        self.layers = layers
        self.settings = settings
        self.window = Window()
        self.num_abandoned = 0
        self.bases: dict[str, dict[str, Eigen]] = {}
        """EKFAC: the eigenbases in use, of the layers whose moments are measured."""
        self.without_moments: set[str] = set()
        """EKFAC: layers whose moments cannot be measured."""
        self.column: int | None = None
        """Exact Fisher: which column of the Hessian's root is being propagated; None in the user's backward."""
        self._scaler = scaler
        self._pending_terms: Terms | None = None
        self._terms: Terms | None = None
        self.defer_errors = False
        """Keep an error of the capture for the step, where other ranks are told of it."""
        self.error: BaseException | None = None
        self.timer = StageTimer()
        self._lock = threading.RLock()
        self._task = -1
        self._counted = False
        self._num_passes_without_step = 0

    def set_terms(self, number: Tensor | float, mask: Tensor | None) -> None:
        """Say what the next measured backward pass is a mean over."""
        if isinstance(number, Tensor):
            number = number.detach().to(torch.float64)  # integers would divide to float32
        self._pending_terms = Terms(number, mask)

    def forget_terms(self) -> None:
        """What was said of a pass that was not measured does not hold for the next."""
        self._pending_terms = None

    def discard(self) -> None:
        """Forget what was measured since the last step."""
        self.window = Window()

    def enter(self) -> None:
        """Note that a backward pass runs; all that happens before it ends belongs to one pass.

        Reentrant checkpointing, and the exact Fisher, run backward passes inside a backward pass. The outer
        one is seen first: it recomputes a forward, or runs the hook, that starts the inner one.
        """
        task = torch._C._current_graph_task_id()
        with self._lock:
            self._enter(task)

    def _enter(self, task: int) -> None:
        if self._task != -1 or task == -1:
            return
        self._task, self._counted = task, False
        self._terms = None
        torch.autograd.Variable._execution_engine.queue_callback(self.leave)
        # ``scaler.update()`` replaces this table. If it ran and no step was taken, the scaler found an overflow and
        # did not call the optimizer. That step's statistics are void, and so are those of gradients thrown away.
        epoch = getattr(self._scaler, "_per_optimizer_states", None)
        if self.window.num_passes and (epoch is not self.window.scaler_epoch or self._gradients_are_gone()):
            self.discard()
            self.num_abandoned += 1
        self.window.scaler_epoch = epoch

    def leave(self) -> None:
        self._task = -1
        self.window.filled = not self._no_gradients()

    def _gradients_are_gone(self) -> bool:
        """Whether ``zero_grad()`` was called since the last pass: a dropped step, or the other half of a GAN."""
        return self.window.filled and self._no_gradients()

    def _no_gradients(self) -> bool:
        return all(layer.weight.grad is None for layer in self.layers if layer.name in self.window.layers)

    def outside(self) -> None:
        """Note a forward outside any backward pass. A pass that has not ended by then died of an exception."""
        if self._task != -1 and torch._C._current_graph_task_id() == -1:
            self._task = -1
            self.discard()

    def begin_pass(self, terms: float) -> None:
        """Count the backward pass that runs now, once, as one that is measured; it uses up ``set_terms``."""
        if self._counted:
            return
        self._counted = True
        self._terms, self._pending_terms = self._pending_terms, None
        self._warn_if_never_stepped()
        self.window.num_passes += 1
        number = terms if self._terms is None else self._terms.number
        self.window.terms = _here(self.window.terms, number) + number

    @property
    def mask(self) -> Tensor | None:
        return None if self._terms is None else self._terms.mask

    def record(self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool) -> None:
        """Add one call of a layer, from inside its backward. ``sizes``: examples, and terms of the loss."""
        try:
            self._record(index, x, g, sizes, batch_stats)
        except Exception as error:
            if not self.defer_errors:
                raise
            self.error = self.error or error

    def _record(self, index: int, x: Tensor, g: Tensor, sizes: tuple[int, int], batch_stats: bool) -> None:
        layer = self.layers[index]
        self.enter()
        exact = self.settings.fisher == "exact"
        if (exact and self.column is None) or (not exact and not reaches(layer.weight)):
            return
        examples, terms = sizes
        device = g.device
        with self._lock:  # layers on other devices have backward threads of their own
            self.begin_pass(float(terms))
            if g.numel() == 0:
                return
            number = float(terms) if self._terms is None else _here(self._terms.number, g)
            weight = 1.0 if exact or self.settings.accumulate == "terms" else number * number
            sums = self.window.layers.setdefault(layer.name, Sums())
            call = (self.window.num_passes, self.column)
            sums.called_again |= call == sums.last_call
            sums.last_call = call
            sums.calls += 1
        batch_dim = self.settings.batch_dim
        no_autocast = torch.autocast(device.type, enabled=False)
        with torch.no_grad(), no_autocast, self.timer.stage("capture", device):
            for rows in rows_of(layer, x, g, examples=examples, batch_dim=batch_dim, batch_stats=batch_stats):
                self._add(layer, sums, rows, weight)

    def gradient_scale(self) -> Tensor | float:
        """What the loss, and so every gradient, is multiplied by for half precision."""
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        scale: Tensor | float = self._scaler._get_scale_async()
        return 1.0 if scale is None else scale

    def _warn_if_never_stepped(self) -> None:
        self._num_passes_without_step += 1
        if self._num_passes_without_step == NEVER_STEPPED:
            warnings.warn(
                f"{NEVER_STEPPED} backward passes were measured, but no step was taken through K-FAC: was the "
                f"optimizer made anew after K-FAC was attached, or is kfac.step() missing?",
                stacklevel=2,
            )

    def take(self) -> Measured:
        """Return what was measured since the last call and start anew."""
        window, self.window, self._task = self.window, Window(), -1
        self._num_passes_without_step = 0
        unit: Tensor | float = 1.0
        if self.settings.fisher == "empirical" and self.settings.accumulate in (None, "mean"):
            unit = float(window.num_passes) ** 2
        loss_scale = _here(self.gradient_scale(), window.terms)
        return Measured(window.layers, window.terms, window.num_passes, unit / (loss_scale * loss_scale))

    def _add(self, layer: Layer, sums: Sums, rows: Rows, weight: Tensor | float) -> None:
        for factor in layer.spec.factors:
            if factor.key == "A":
                if not self.column:
                    value, count = self._input_sum(layer, factor, rows)
                    sums.rows = sums.rows + count
                    _accumulate(sums.factors, "A", value)
            else:
                _accumulate(sums.factors, factor.key, self._gradient_sum(layer, factor, rows) * weight)
        basis = self.bases.get(layer.name)
        if basis is not None and sums.called_again:
            # An example's gradient is the sum over the calls, which are seen one at a time.
            self.bases.pop(layer.name)
            sums.moments = None
            self.without_moments.add(layer.name)
            warnings.warn(
                f'layer {layer.name!r} is called several times per example: curvature="ekfac" keeps K-FAC\'s '
                f"eigenvalues for it",
                stacklevel=2,
            )
        elif basis is not None and rows.a is not None:
            moments = _moments(layer, rows.a, rows, basis) * weight
            sums.moments = moments if sums.moments is None else sums.moments.add_(moments)

    def _input_sum(self, layer: Layer, factor: FactorSpec, rows: Rows) -> tuple[Tensor, Tensor | float]:
        """Return the sum that A is made of and the number to divide it by."""
        assert rows.a is not None
        a, kept = rows.a, rows.valid
        mask = self.mask
        if mask is not None and mask.numel() == a.shape[0] * a.shape[1]:
            if 0 < self.settings.batch_dim < mask.ndim and a.shape[0] == rows.examples:
                mask = mask.movedim(self.settings.batch_dim, 0)
            mask = mask.reshape(a.shape[:2]).to(a.device, layer.dtype)
            kept = mask if kept is None else kept * mask
        reduce = self.settings.weight_sharing == "reduce"
        if reduce:
            a = regroup(a, rows.examples, layer.name)
            kept = None if kept is None else regroup(kept, rows.examples, layer.name)
        count: Tensor | float = float(a.shape[0] * (1 if reduce else a.shape[1]))
        if not reduce and kept is not None:
            count = kept.sum()
        if factor.form == "diagonal":
            diagonal = ops.token_mean_squares if reduce else ops.token_counts
            return diagonal(a, kept, factor.dim, layer.dtype), count
        if reduce:
            a, kept = ops.mean_over_positions(a, kept, layer.dtype), None
        return ops.gram(a, ones=layer.has_bias, dtype=layer.dtype, weight=kept), count

    def _gradient_sum(self, layer: Layer, factor: FactorSpec, rows: Rows) -> Tensor:
        g = rows.g
        if factor.form == "diagonal":
            return ops.square_sum(g, layer.dtype)
        if factor.key == "G" and self.settings.weight_sharing == "reduce":
            g = regroup(g, rows.examples, layer.name).to(layer.dtype).sum(1, keepdim=True)
        return ops.gram(g, ones=False, dtype=layer.dtype)


def reaches(weight: Tensor) -> bool:
    """Whether the backward pass that runs now also computes this weight's gradient.

    One for the input alone (adversarial examples, saliency) passes through the layer and must not count.
    """
    if not weight.requires_grad:
        return False
    try:
        with torch._C._ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS):  # a compiled backward runs us below autograd
            node = get_gradient_edge(weight).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad with the weight among its inputs
        return True


def _moments(layer: Layer, a: Tensor, rows: Rows, basis: dict[str, Eigen]) -> Tensor:
    """Sum over examples of the squared gradient in the eigenbasis, ``[B, O, I]``."""
    q_a, q_g = basis["A"].vectors, basis["G"].vectors
    assert q_a is not None
    assert q_g is not None
    a = regroup(a, rows.examples, layer.name).to(layer.dtype)
    g = regroup(rows.g, rows.examples, layer.name).to(layer.dtype)
    q_a, q_g = q_a.to(a), q_g.to(g)  # the model may have been converted since
    if layer.has_bias:
        a = torch.einsum("nsbi,bij->nsbj", a, q_a[:, :-1]) + q_a[:, -1]
    else:
        a = torch.einsum("nsbi,bij->nsbj", a, q_a)
    return ops.gradient_square_sum(a, torch.einsum("nsbo,bop->nsbp", g, q_g))


def _here(value: Tensor | float, like: Tensor | float) -> Tensor | float:
    """Return the value where the other is, if both are tensors."""
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


def _accumulate(sums: dict[str, Tensor], key: str, value: Tensor) -> None:
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value
