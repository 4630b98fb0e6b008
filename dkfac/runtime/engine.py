"""The engine of a step: this rank's work and the transfers in between. With one rank there are no transfers.

Input: gradients, and the collector's statistics. Output: preconditioned gradients or steps. Owns: the layers' states
and the step counter. Every decision (skip, due, outcome, raise) depends only on values that all ranks have, so ranks
never diverge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dkfac.capture.collector import Collector
from dkfac.capture.statistics import BatchStatistics
from dkfac.comm.errors import ErrorChannel
from dkfac.comm.transport import Transport
from dkfac.config.settings import Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_damping
from dkfac.decompose.report import RefreshReport
from dkfac.experimental.overlap import Overlap
from dkfac.factors import observation, reduce
from dkfac.factors.layer_state import LayerState, named_factors
from dkfac.factors.rank_average import RankAverage
from dkfac.factors.running_average import RunningAverage
from dkfac.factors.stacks import Stack, make_stacks
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.layers.sharded import check_attached
from dkfac.ops.decompose import stored
from dkfac.ops.graph_cache import GraphPool
from dkfac.ops.precision import tf32
from dkfac.precondition import apply, gradient_norms, sharded
from dkfac.precondition.report import UpdateReport
from dkfac.precondition.share_updates import share_weights
from dkfac.precondition.step_graph import StepGraph, has_one_gpu
from dkfac.runtime.metrics import Metrics
from dkfac.runtime.notices import Diagnostics, Notices
from dkfac.runtime.refresh import Refresher
from dkfac.runtime.replan import Replanner
from dkfac.runtime.resume import start_anew
from dkfac.state.restore import Loaded
from dkfac.workers.remote import Remote


class Engine:
    """The state of K-FAC on one rank, and the stages of a step."""

    def __init__(
        self, layers: list[Layer], settings: Settings, collector: Collector, notices: Notices, transport: Transport,
        errors: ErrorChannel, remote: Remote | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.collector, self.transport = settings, collector, transport
        self.ranks = RankPlan(layers, transport.plan, transport.rank, settings.takes_steps)
        self.states = {layer.name: LayerState(len(layer.spec.factors)) for layer in layers}
        self.metrics, self.step = Metrics(), 0
        self._errors, self._notices, self._diagnostics = errors, notices, Diagnostics()
        self._replicas = errors.replicas
        overlap = None
        if transport.program.transfers and settings.experimental.overlap:
            overlap = Overlap(transport, collector, errors)
            collector.use_overlap(overlap)
        self.replanner = Replanner(transport, collector, notices, overlap)
        self.refresher = Refresher(layers, settings, transport, collector, notices, self.replanner, remote)
        pool = GraphPool()
        self.graph, self._average_alone, self._average_ranks = StepGraph(pool), RunningAverage(pool), RankAverage()
        self._places: list[tuple[torch.dtype, torch.device, type]] = []
        self.uses_graphs = False
        self._is_owed = False
        self.context = self._next_context()
        self._stack()
        errors.watch(settings.patience, collector.timer.where)

    # --- the stages of a step --------------------------------------------------------------------------------------

    def plan_next(self) -> StepContext:
        """Decide what the next step measures. Called before its forward pass."""
        self.context = self._next_context()
        self.collector.timer.step = self.step
        self.collector.begin_step(self.step, self.context.due)
        return self.context

    def _next_context(self) -> StepContext:
        measures, refreshes = self.settings.rhythm(self.step)
        staleness = self.refresher.staleness
        due = None if staleness is None else staleness.due(self.step)
        if due is not None:
            measures = refreshes = bool(due)
        measures = (measures or self._is_owed) and self.refresher.remote is None
        return StepContext(self.step, measures, refreshes, self.settings, due)

    def take_step(self, optimizer: Any, parameters: list[Tensor], rates: dict[int, Any]) -> UpdateReport:
        """Run K-FAC's part of a step: statistics in, preconditioned gradients out. No stage reads from a later one.

        ``rates`` are learning rates by ``id(parameter)``, where the step length depends on them.
        """
        context, timer = self.context, self.collector.timer
        device = next((p.device for p in parameters if p.grad is not None), self.ranks.layers[0].weight.device)
        self.refresher.join()
        self._follow_model()
        self._errors.raise_announced()
        if self._replicas is not None:
            self._replicas.begin_step(self.step, refreshes=context.refreshes)
        norms, good = self._read_gradients(optimizer, parameters, device)
        good_batch, measured = good, self.collector.take() if context.measures else None
        self._is_owed = measured is not None and measured.is_postponed
        if measured is not None and not self._is_owed:
            self._notices.accumulation(measured.num_passes)
            self.replanner.see_rows(measured)
            with timer.stage("average", device):
                good_batch = self._average(measured, good)
        self.refresher.note_rounding(device)
        with timer.stage("decompose", device), tf32(False, device):
            self._refresh()
        with timer.stage("precondition", device):
            report = self._precondition(optimizer, parameters, rates, norms, good, device)
        for p in report.stepped:  # the optimizer's state from before the layer was first decomposed, or loaded
            optimizer.state.pop(p, None)
        self.metrics.add_update(report)
        self.metrics.count("skipped_batches", ~good_batch)
        self.refresher.launch(context, self.ranks, self.states, use_graphs=self.uses_graphs)
        self.step += 1
        return report

    def shadow_step(self) -> None:
        """Take part in a step without a batch: contribute no statistics, but decompose the factors that are due."""
        self._errors.raise_announced()
        if self._replicas is not None:
            self._replicas.begin_step(self.step, refreshes=self.context.refreshes, has_batch=False)
        good = torch.ones((), dtype=torch.bool, device=self.ranks.layers[0].weight.device)
        if self.context.measures:
            good = self._average(self.collector.take(), good)
        self._refresh()
        self.metrics.count("skipped_batches", ~good)
        self.refresher.launch(self.context, self.ranks, self.states, use_graphs=False)
        self.step += 1

    def share_weights(self) -> None:
        """Called after the optimizer's step: receive the weights that other ranks updated."""
        if self.transport.program.stage("weights"):
            share_weights(self.transport, self.ranks.by_name)

    def _read_gradients(
        self, optimizer: Any, parameters: list[Tensor], device: torch.device
    ) -> tuple[gradient_norms.Norms | None, Tensor]:
        """Return the gradients' norms, or None if they are in a CUDA graph's buffers, and whether they are finite."""
        if self.uses_graphs:
            good = self.graph.begin(self.stacks, self._weights, parameters, optimizer)
            if good is not None:
                return None, good
        norms = self._read_norms(parameters, device)
        return norms, norms.are_finite(getattr(optimizer, "found_inf", None))

    def _average(self, measured: BatchStatistics, good: Tensor) -> Tensor:
        """Update the running factors if the statistics are finite; returns whether they are, as a tensor."""
        ranks, context, staleness = self.ranks, self.context, self.refresher.staleness
        decay, seen = context.at("factor_decay"), None
        if not self.transport.program.transfers:
            self._notices.capture(measured.called, measured.num_passes)
            if staleness is not None:
                seen = observation.observe_alone(measured, ranks.by_name)
            good = self._average_alone.absorb(
                measured, self.stacks, self.states, good, decay, use_graphs=self.uses_graphs
            )
        else:
            transport = self.transport if context.due is None else self.transport.only("factors", context.due)
            error, flags = self._errors.flags()
            reduced = reduce.reduce(ranks, transport, measured, good, flags)
            self._errors.announce(reduced.counts.flags, error)
            self.replanner.see_counts(reduced.counts)
            good = reduced.good
            if staleness is not None:
                seen = observation.observe(reduced, ranks, transport.world_size, by_terms=measured.by_terms)
            self._average_ranks.absorb(reduced, ranks, self.states, decay)
        if staleness is not None and seen is not None and context.due is not None and bool(good):
            staleness.gather(ranks, context.step, context.due, seen)  # synchronizes
        for name in self.collector.without_moments:
            self.states[name].moments = None
        return good

    def _refresh(self) -> None:
        if self._replicas is not None:
            self._replicas.compare()
        report = self.refresher.refresh(self.context, self.ranks, self.states, use_graphs=self.uses_graphs)
        if report.plan is not None and report.plan is not self.ranks.plan:
            self.ranks = self.ranks.follow(report.plan)
            self._preconditioner = self._make_preconditioner()
        self._count(report)

    def _count(self, report: RefreshReport) -> None:
        """Count what a refresh did, and warn if K-FAC does not pay off."""
        self.metrics.add_refresh(report, self.context.step)
        if report.dominated_share is not None:
            step, takes_steps = self.context.step, self.settings.takes_steps
            self._diagnostics.look(
                step,
                kfac_seconds=sum(self.collector.timer.seconds(wait=False).values()),
                dominated_share=report.dominated_share,
                clipped_share=lambda: 0.0 if takes_steps else self.metrics.clipped_share(step),
            )

    def _precondition(
        self, optimizer: Any, parameters: list[Tensor], rates: dict[int, Any], norms: gradient_norms.Norms | None,
        good: Tensor, device: torch.device,
    ) -> UpdateReport:  # fmt: skip
        """Replace gradients by updates, with a CUDA graph if it has read the gradients."""
        context, states = self.context, self.states
        if norms is None:
            report = self.graph.finish(self.stacks, states, context, optimizer, rates, self._may_round)
            if report is not None:
                return report
            norms = gradient_norms.Norms(parameters, device)
        report = self._apply(self._preconditioner, states, context, optimizer, rates, norms, good, self._may_round)
        others = [p for p in parameters if id(p) not in report.written]
        gradient_norms.zero_where(~good, gradient_norms.dense_gradients(others))
        return report

    def _may_round(self, stack: Stack) -> bool:
        """Whether a stack is preconditioned in TF32."""
        unsafe = self.metrics.tf32_unsafe_layers
        return self.settings.tf32 and unsafe.isdisjoint(layer.name for layer in stack.layers)

    # --- following the model's device and dtype ----------------------------------------------------------------------

    def _stack(self) -> None:
        """Group the layers that this rank preconditions into stacks, and rebuild everything that depends on them."""
        mine = [layer for layer in self.ranks.layers if self.ranks.preconditions(layer.name)]
        self.stacks, self._alone = make_stacks(mine), {layer.name: Stack([layer], pad=False) for layer in mine}
        self._weights = [layer.weight for layer in self.ranks.layers]
        self._places = [(w.dtype, w.device, type(w)) for w in self._weights]
        self._preconditioner, is_sharded = self._make_preconditioner(), self.transport.plan.sharding is not None
        self._apply: Callable[..., UpdateReport] = sharded.precondition_shards if is_sharded else apply.precondition
        norms = functools.partial(sharded.ShardNorms, ranks=self.ranks, transport=self.transport)
        self._read_norms: Callable[..., gradient_norms.Norms] = norms if is_sharded else gradient_norms.Norms
        self.refresher.rewind()
        self.uses_graphs = wants_graphs(self.settings, self._weights, self.transport)

    def _make_preconditioner(self) -> apply.Preconditioner:
        return apply.Preconditioner(self.ranks, self.transport, self._errors, self.stacks, self._alone)

    def _follow_model(self) -> None:
        """Move the state if the model was moved or converted, or a state was loaded. Several ranks refuse that."""
        self._weights = [layer.weight for layer in self.ranks.layers]
        if self._places == [(w.dtype, w.device, type(w)) for w in self._weights]:
            return
        check_attached(self.ranks.layers)
        self.transport.check_unmoved((layer.spec, layer.dtype, layer.weight.device) for layer in self.ranks.layers)
        for layer in self.ranks.layers:
            self.states[layer.name].follow(layer.weight, layer.dtype)
        self._keep_bases()
        self.refresher.follow(self.ranks.by_name)
        self._stack()

    def _keep_bases(self) -> None:
        """Cast bases that were loaded or converted to the dtype in which they are kept."""
        kept = self.settings.experimental.basis_dtype
        for state in self.states.values():
            state.decompositions = {key: stored(found, kept) for key, found in state.decompositions.items()}

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """Return the running factors that this rank holds, by layer or named block."""
        return named_factors(self.ranks.layers, self.states)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Read the outcome of every decomposition launched so far and repair failures. Synchronizes with the device."""
        self._count(self.refresher.settle(self.context, self.ranks, self.states))

    def resume(self, loaded: Loaded) -> None:
        """Continue from a loaded state. Collective."""
        self.collector.timer.current = "load_state_dict"
        self.refresher.forget()  # first: it waits for what still writes to the old states
        self.states, self.step = loaded.states, loaded.step
        self._keep_bases()
        self._places.clear()
        self.metrics.load(loaded.counters, loaded.device)
        self._errors.forget()
        anew = start_anew(loaded, self.ranks, self.transport, self.states)
        self.refresher.resume(loaded, self.ranks, self.states, anew)
        for layer in self.ranks.layers if self.settings.tf32 else ():
            is_safe = layer_damping.may_round(layer, self.states[layer.name], self.settings, self.step)
            self.metrics.add_refresh(RefreshReport(tf32_safe={layer.name: is_safe}), self.step)
        self.collector.timer.current = ""

    def close(self) -> None:
        self.refresher.close()
        self._errors.close()


def wants_graphs(settings: Settings, weights: list[Tensor], transport: Transport) -> bool:
    """Whether steps are replayed from CUDA graphs: they are enabled, and this rank has one GPU and preconditions every
    layer by itself, so that a step which does not measure sends nothing."""
    return settings.cuda_graph and transport.plan.shares_no_updates and has_one_gpu(weights)
