"""The arithmetic of a step as CUDA graphs, for models whose steps are dominated by kernel launches.

Input: gradients at any address. Output: what ``apply.py`` does, replayed from a graph, and the same report. Owns: the
buffers that the graphs read and write.

A graph reads and writes fixed memory, but gradients may be at a new address in every step. So their addresses are
written to a persistent tensor, and the graph reads them from there (``ops/many.py``); without Triton, gradients are
copied to and from persistent buffers. A graph is captured again when a buffer, decomposition or setting that it uses is
replaced.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_damping, layer_factors
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack, write_back
from dkfac.ops import many
from dkfac.ops.fused import finish_
from dkfac.ops.graph_cache import GraphedFunction, GraphPool
from dkfac.ops.layer_norms import LayerNorms, write_totals
from dkfac.ops.precision import tf32
from dkfac.ops.torch_private import foreach_copy_
from dkfac.precondition import gradient_norms, kronecker, trust_region
from dkfac.precondition.adam_graph import AdamSteps
from dkfac.precondition.buffer_items import describe_gradients, lay_out
from dkfac.precondition.report import UpdateReport
from dkfac.precondition.step_length import scales_of

LARGE = 2**22
"""A gradient outside of the layers with at least this many elements is not copied but read where it is."""


class StepGraph:
    """The two halves of a step: read the gradients and check that they are finite; compute and write updates."""

    def __init__(self, pool: GraphPool) -> None:
        self._reading, self._writing = GraphedFunction(pool), GraphedFunction(pool)
        self._adam = AdamSteps()
        self._stacks: list[Stack] = []
        self._parameters: list[Tensor] = []
        self._forms: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._used: list[Tensor] = []
        """The layers' parameters and the small ones outside of the layers."""
        self._large: list[Tensor] = []
        self._others: list[Tensor] = []
        self._views: list[Tensor] = []
        self._items: list[many.Items] | None = None
        """Mapping between gradients and memory: of all, of each stack and then of the other parameters; None: gradients
        are copied."""
        self._memory: Tensor | None = None
        """Memory of all buffers, if kernels can read it; the other parameters' is last."""
        self._layer_norms: LayerNorms | None = None
        self._absent: list[Tensor] = []
        """Parts of the stacks' buffers whose parameters have no gradient."""
        self._pointers = self._flat = self._good = self._before = self._told = self._rates = torch.zeros(0)
        self._norms = torch.zeros(0)
        """Of the layers' gradients, and of the other parameters' together."""
        self._is_told = False

    def begin(
        self, stacks: list[Stack], weights: list[Tensor], parameters: list[Tensor], optimizer: Any
    ) -> Tensor | None:
        """Read the gradients. Returns whether they are finite, as a tensor, or None if a layer has no gradient.

        ``weights`` are the layers'; ``parameters`` are all that the step will update.
        """
        if any(weight.grad is None for weight in weights):
            self._stacks = []  # the eager path will write to the buffers
            return None
        device = stacks[0].device
        given = [p for p in parameters if p.grad is not None]
        is_known = self._stacks is stacks and len(given) == len(self._parameters)
        if not is_known or any(map(operator.is_not, given, self._parameters)):
            self._prepare(stacks, given, device)
        grads = [p.grad for p in self._used if p.grad is not None]
        forms = [(g.stride(), g.dtype) for g in grads]
        if forms != self._forms:
            self._forms, self._items = forms, describe_gradients(stacks, self._used, self._views)
        if self._items is None:
            self._copy_in(stacks)
        else:
            self._pointers.copy_(many.on_its_way([g.data_ptr() for g in grads], device), non_blocking=True)
        flat, good, before = self._flat, self._good, self._before

        def read() -> None:
            for part in self._absent:
                part.zero_()
            if self._items is not None and self._memory is not None:
                many.gather_tensors(self._pointers, self._items[0], self._memory)
            if self._layer_norms is not None:
                self._layer_norms.write(self._norms, good)
                return
            before.copy_(torch.cat([stack.norms(stack.buffer) for stack in stacks]))
            rest = torch.linalg.vector_norm(flat) if len(flat) else flat.new_zeros(())
            good.copy_(torch.isfinite(before).all() & torch.isfinite(rest))

        self._reading.run([*stacks, flat, self._items], read, device)
        if self._large:
            good &= torch.isfinite(gradient_norms.norms(gradient_norms.dense_gradients(self._large), device)).all()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            good &= found_inf.to(device).reshape(()) == 0
        return good

    def _prepare(self, stacks: list[Stack], given: list[Tensor], device: torch.device) -> None:
        """Allocate buffers for the step's results and for the small gradients outside of the layers."""
        mine = {id(p) for stack in stacks for layer in stack.layers for p in layer.parameters()}
        mine_first = [p for stack in stacks for layer in stack.layers for p in layer.parameters()]
        rest, dtype = [p for p in given if id(p) not in mine], stacks[0].dtype
        small = [p for p in rest if p.numel() < LARGE and p.dtype == dtype and p.device == device
                 and p.grad is not None and not p.grad.is_sparse]  # fmt: skip
        chosen = {id(p) for p in small}
        self._stacks, self._parameters, self._others, self._forms = stacks, given, small, []
        self._large = [p for p in rest if id(p) not in chosen]
        self._layer_norms = None
        weights = [p for p in mine_first if p.grad is not None]
        self._memory, self._flat = lay_out(stacks, weights, sum(p.numel() for p in small), self._memory)
        views = torch.split(self._flat, [p.numel() for p in small]) if small else ()
        self._views = [part.view(p.shape) for p, part in zip(small, views, strict=True)]
        for stack in stacks:
            stack.read()  # allocates the buffers
        pairs = [zip(layer.parameters(), parts, strict=True) for stack in stacks for layer, parts in stack.parts()]
        self._absent = [part for pair in pairs for p, part in pair if p.grad is None]
        self._used = [p for p in (*mine_first, *small) if p.grad is not None]
        self._pointers = torch.zeros(len(self._used), dtype=torch.int64, device=device)
        self._good = torch.ones((), dtype=torch.bool, device=device)
        number = sum(stack.num_layers for stack in stacks)
        self._norms = torch.zeros(number + 1, device=device, dtype=dtype)
        self._before = self._norms[:number]
        if self._memory is not None:
            layers = [part for stack in stacks for part in stack.buffer.view(stack.num_layers, -1)]
            self._layer_norms = LayerNorms([*layers, self._flat])
        self._told = torch.ones(3, device=device, dtype=dtype)
        """Norms of all gradients and of all updates, and the smallest clip factor."""
        self._rates = torch.zeros_like(self._before)
        """By layer, the squared learning rate divided by the bound on the total predicted change."""

    def _copy_in(self, stacks: list[Stack]) -> None:
        for stack in stacks:
            stack.read()
        if self._others:
            foreach_copy_(self._views, gradient_norms.dense_gradients(self._others))

    def finish(
        self,
        stacks: list[Stack],
        states: dict[str, LayerState],
        context: StepContext,
        optimizer: Any,
        rates: dict[int, Any],
        may_round: Callable[[Stack], bool],
    ) -> UpdateReport | None:
        """Compute updates from the gradients that ``begin`` read, and write them or step the parameters.

        Returns None if the layers cannot all be processed by one graph. ``rates`` are learning rates by
        ``id(parameter)``, where the step length depends on them.
        """
        flat, good, before, told, settings = self._flat, self._good, self._before, self._told, context.settings
        bound, is_held = self._bound(stacks, states, context, optimizer, may_round), settings.rescale == "norm-kl"
        if bound is None or (is_held and not self._bring_rates(stacks, context, optimizer, rates)):
            self._stacks = []  # the eager path will write to the buffers
            return None

        rounding = tuple([may_round(stack) for stack in stacks])

        def direction(stack: Stack) -> Tensor:
            with tf32(may_round(stack), flat.device):
                return kronecker.kronecker_updates(stack, states, stack.buffer, context)

        def write() -> None:
            after = self._adam.take_adaptive(before, good) if settings.adapts_damping else None
            if after is not None:
                write_totals(before, after, told)
                self._put_others(before)
                return
            if settings.takes_steps:
                updates = self._adam.directions(settings, stacks, states, good, may_round)
            else:
                updates = [direction(stack) for stack in stacks]
            after = torch.cat([stack.norms(update) for stack, update in zip(stacks, updates, strict=True)])
            sane = torch.isfinite(after)
            after = torch.where(sane, after, before)
            scales = scales_of(settings.rescale, before, after, sane, self._adam.elements)
            if is_held:
                pairs = zip(stacks, updates, strict=True)
                dots = [trust_region.dots(stack, stack.buffer, u, settings, context.step) for stack, u in pairs]
                most = trust_region.largest_scale(torch.where(sane, torch.cat(dots) * self._rates, 0.0), 1.0)
                scales, told[2] = trust_region.hold(scales, sane, most)
            told[:2] = torch.stack((before, after * scales)).square().sum(1).sqrt()
            if self._adam.factors:
                told[2:] = torch.stack(self._adam.factors).amin()
            if settings.takes_steps:
                self._adam.take(stacks, updates, scales, sane, good)
            else:
                self._put(stacks, updates, scales, sane)
            self._put_others(scales)

        self._writing.run([*stacks, *bound, rounding, flat, self._rates, self._items], write, flat.device)
        if self._items is None:
            if self._others:
                foreach_copy_(gradient_norms.dense_gradients(self._others), self._views)
            if not settings.takes_steps:
                write_back(stacks)
        report = UpdateReport()
        if settings.takes_steps:
            report.stepped += self._adam.parameters
        loss_scale = getattr(optimizer, "grad_scale", None)
        if is_held or (settings.takes_steps and settings.rescale == "kl-clip"):
            report.clip_factor = told[2].clone()
        norms = told[:2] if loss_scale is None else told[:2] / loss_scale.to(told.device)
        report.grad_norm, report.update_norm = norms.unbind()
        if self._large:
            gradient_norms.zero_where(~good, gradient_norms.dense_gradients(self._large))
        return report

    def _bring_rates(self, stacks: list[Stack], context: StepContext, optimizer: Any, rates: dict[int, Any]) -> bool:
        """Copy the layers' learning rates to the buffer that the graph reads; False if a layer has no single number."""
        lrs = trust_region.rates_of([layer for stack in stacks for layer in stack.layers], rates)
        if lrs is None or any(isinstance(lr, Tensor) for lr in lrs):
            if not self._is_told:
                self._is_told = True
                what = "weights and biases that have different ones" if lrs is None else "one that is a tensor"
                warnings.warn(f"cuda_graph: no graph of a step held back by its learning rate: {what}", stacklevel=2)
            return False
        kl_clip = context.at("kl_clip")
        numbers = many.on_its_way([float(lr) ** 2 / kl_clip for lr in lrs], self._rates.device, self._rates.dtype)
        self._rates.copy_(numbers, non_blocking=True)
        loss_scale = getattr(optimizer, "grad_scale", None)
        if loss_scale is not None:
            self._rates /= loss_scale.to(self._rates).square()
        return True

    def _bound(
        self, stacks: list[Stack], states: dict[str, LayerState], context: StepContext, optimizer: Any,
        may_round: Callable[[Stack], bool],
    ) -> list[Any] | None:  # fmt: skip
        """Return the objects that the second graph depends on, or None if it cannot be captured."""
        settings, layers = context.settings, [layer for stack in stacks for layer in stack.layers]
        joined = [stack.decompositions(states) for stack in stacks]
        is_ready = all(layer_factors.is_ready(layer, states[layer.name]) for layer in layers)
        if not is_ready or any(d is None or not layer_factors.is_uniform(d, settings) for d in joined):
            return None
        bound: list[Any] = [d for found in joined if found is not None for d in found.values()]
        if settings.takes_steps:
            steps = self._adam.prepare(stacks, states, context, optimizer, bound, may_round, self._memory)
            return None if steps is None else bound + steps
        if settings.damping_mode == "relative" or settings.uses_inverses:  # a bias that A leaves out is damped by them
            bound += [mean for layer in layers for mean in states[layer.name].means.values()]
        return [*bound, layer_damping.damping_values(settings, context.step)]

    def _put(self, stacks: list[Stack], updates: list[Tensor], scales: Tensor, sane: Tensor) -> None:
        """Scale the updates and write them to the gradients, or to the buffers that are copied back."""
        lengths = [stack.num_layers for stack in stacks]
        every = zip(stacks, updates, torch.split(scales, lengths), torch.split(sane, lengths), strict=True)
        for i, (stack, update, scale, is_sane) in enumerate(every):
            if self._items is None:
                flat = (stack.num_layers, -1)
                finish_(stack.buffer.view(flat), update.view(flat), scale, is_sane, self._good)
            else:
                many.scatter(self._pointers, self._items[1 + i], stack.buffer, update, scale, is_sane, self._good)

    def _put_others(self, scales: Tensor) -> None:
        """Zero the gradients outside of the layers if the step is skipped; otherwise leave them unchanged."""
        if self._items is None:
            self._flat.masked_fill_(~self._good, 0)
        elif self._others:
            never = torch.zeros(1, dtype=torch.bool, device=self._good.device)
            many.scatter(self._pointers, self._items[-1], self._flat, self._flat, scales, never, self._good)


def has_one_gpu(weights: list[Tensor]) -> bool:
    devices = {weight.device for weight in weights}
    return len(devices) == 1 and next(iter(devices)).type == "cuda"
