"""Refresh decompositions: decide what is due, decompose it now or in the background, agree on outcomes and share.

Input: running factors. Output: decompositions in the layers' states, and a report. Owns: what is in flight (slices of a
refresh, background decompositions) and the intervals of single factors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dkfac.capture.collector import Collector
from dkfac.comm.buffers import vector
from dkfac.comm.transport import Transport
from dkfac.config.settings import Settings
from dkfac.config.step_context import FactorName, StepContext
from dkfac.decompose import layer_damping, layer_factors, refresh_sync
from dkfac.decompose.async_refresh import AsyncRefresh, PendingRefresh
from dkfac.decompose.initial_basis import initial_bases
from dkfac.decompose.refresh_scheduler import RefreshScheduler
from dkfac.decompose.refresh_sync import Found
from dkfac.decompose.report import RefreshReport
from dkfac.experimental.staleness import FactorIntervals
from dkfac.factors.layer_state import LayerState
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.precision import rounds_products, tf32
from dkfac.runtime.notices import Notices
from dkfac.runtime.replan import Replanner
from dkfac.state.restore import Loaded
from dkfac.workers.remote import Remote


class Refresher:
    """Refreshes decompositions, whichever component computes them."""

    def __init__(
        self,
        layers: list[Layer],
        settings: Settings,
        transport: Transport,
        collector: Collector,
        notices: Notices,
        replanner: Replanner,
        remote: Remote | None,
    ) -> None:
        """``remote`` measures and decomposes instead of this rank, under ``roles``."""
        self._settings, self._transport, self._collector, self._notices = settings, transport, collector, notices
        self._replanner = replanner
        self.remote = remote
        self.scheduler, self.async_refresh = RefreshScheduler(collector.timer), AsyncRefresh(settings)
        self.staleness = None if settings.experimental.staleness == "fixed" else FactorIntervals(settings, layers)

    def refresh(
        self,
        context: StepContext,
        ranks: RankPlan,
        states: dict[str, LayerState],
        *,
        use_graphs: bool,
    ) -> RefreshReport:
        """Refresh the decompositions; between refreshes, only those of layers first measured since the last one.

        Existing decompositions are updated in place without waiting for the device, if the solver can start from them.
        New ones take the synchronous path. With ``inverse_lag``, existing ones are started here and used at a later
        step.
        """
        if self.remote is not None:
            report = self.remote.refresh(context, ranks, states, self._transport)
            self.publish_bases(ranks, states)
            return report
        if self.staleness is not None:
            return self._refresh_changed(context, ranks, states, self.staleness)
        report = self._take_up(context, ranks, states)
        if context.refreshes:
            self._replanner.judge_earlier_calls(ranks)
        lag = self._settings.inverse_lag
        new = {layer.name for layer in ranks.layers if states[layer.name].decomposed_at < 0}
        if not self._transport.program.transfers:  # skip layers never called: checking them would synchronize
            new = {name for name in new if states[name].running}
        due = set(ranks.by_name) if context.refreshes else set()
        if not lag:
            due, done = self.scheduler.run(context, ranks, states, new, self._transport, use_graphs=use_graphs)
            report.add(done)
            report.add(self._look(context, ranks, states))
        if context.measures and context.refreshes and self._settings.experimental.wire_form == "rows":
            ranks = self._replanner.choose_rows(ranks)
        report.plan = ranks.plan
        if not due and not (context.measures and new):
            if context.measures and context.refreshes:
                self._replanner.note_calls()
            return report
        means = refresh_sync.agree_on_means(ranks, states, self._transport, context)
        if context.measures:
            self._replanner.judge_calls(ranks)
        layers = [layer for layer in ranks.layers if layer.name in due | new and layer.name in means]
        if lag:
            old = [layer for layer in layers if layer.name not in new]
            self.async_refresh.begin(context, old, states, means, ranks, self._transport)
            layers = [layer for layer in layers if layer.name in new]
        for layer in layers:
            states[layer.name].means = means[layer.name]
        if layers:
            report.add(self._decompose(context, ranks, states, layers)[1])
            report.refreshed |= context.refreshes or any(layer.name in new for layer in layers)
        return report

    def launch(self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState], *, use_graphs: bool) -> None:
        """Called after a step: decompose the slice of a refresh that is due. Collective."""
        self.scheduler.launch(context, ranks, states, self._transport, use_graphs=use_graphs)

    def join(self) -> None:
        """Make the current streams wait for the slice that was launched last."""
        self.scheduler.join()

    def settle(self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState]) -> RefreshReport:
        """Read the outcome of every decomposition launched so far and repair failures. Synchronizes with the device.

        Several ranks read it later, in a step: a repair is collective, and a state may be saved by one rank.
        """
        self.scheduler.join()
        return RefreshReport() if self._transport.program.transfers else self._look(context, ranks, states, True)

    def _look(
        self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState], all_of_it: bool = False
    ) -> RefreshReport:
        """Read which of the decompositions that were updated in place failed, and decompose these again."""
        failed, report = self.scheduler.look(context, states, self._transport, all_of_it=all_of_it)
        if failed:
            layers = [layer for layer in ranks.layers if any(layer.name == name for name, _ in failed)]
            before = {layer.name: states[layer.name].decomposed_at for layer in layers}
            with torch.autocast(layers[0].weight.device.type, enabled=False):
                repaired = self._decompose(context, ranks, states, layers, frozenset(failed))[1]
            for name, step in before.items():  # the layer's other factors are not newer than they were
                states[name].decomposed_at = step
            report.outcomes.update(repaired.outcomes)
            report.tf32_safe |= repaired.tf32_safe
            report.num_repaired += len(failed)
        return report

    def note_rounding(self, device: torch.device) -> None:
        """Check whether a process-wide switch rounds matrix products, before decomposing in the background."""
        if self._settings.inverse_lag and device.type == "cuda":
            self.async_refresh.note_rounding(rounds_products())

    def _take_up(self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState]) -> RefreshReport:
        """Use the results of a background refresh if they are due."""
        if not self.async_refresh.is_due(context.step):
            return RefreshReport()
        pending = self.async_refresh.take(self._transport)
        for layer in pending.layers:
            if layer.name in pending.states:
                means = pending.states[layer.name].means
                here = {key: mean.to(layer.weight.device, layer.dtype) for key, mean in means.items()}
                states[layer.name].means = here
        report = self._adopt(context, ranks, states, pending.layers, pending.found, pending.error, pending.since)
        report.num_late += int(pending.is_late)
        report.refreshed = True
        return report

    def _refresh_changed(
        self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState], staleness: FactorIntervals
    ) -> RefreshReport:
        """Refresh the factors whose interval is over and that have enough rows, and set their next intervals."""
        ready = staleness.ready(states)
        if not ready:
            return RefreshReport()
        changes = vector(staleness.changes(ranks, states, ready), ranks.layers[0].weight.device)
        told = self._transport.sum_vector("changes", changes).tolist()
        self._replanner.judge_calls(ranks)
        means = refresh_sync.agree_on_means(ranks, states, self._transport, context)
        ready = frozenset(name for name in staleness.without_lost(ready, told) if name[0] in means)
        names = {name for name, _ in ready}
        layers = [layer for layer in ranks.layers if layer.name in names]
        for layer in layers:
            states[layer.name].means = means[layer.name]
        found, report = Found(), RefreshReport()
        if layers:
            found, report = self._decompose(context, ranks, states, layers, ready)
            report.refreshed = True
        staleness.conclude(ranks, context.step, ready, told, found)
        report.plan = ranks.plan
        return report

    def _decompose(
        self,
        context: StepContext,
        ranks: RankPlan,
        states: dict[str, LayerState],
        due: list[Layer],
        only: frozenset[FactorName] | None = None,
    ) -> tuple[Found, RefreshReport]:
        """Decompose this rank's factors of some layers now. ``only`` restricts the factors."""
        found: Found = {}
        error: BaseException | None = None
        try:
            keys = {layer.name: ranks.decomposes(layer, only) for layer in due}
            found = initial_bases(ranks, states, context, due, keys)
            for layer in due:
                begun, state = found.get(layer.name, {}), states[layer.name]
                others = [key for key in keys[layer.name] if key not in begun]
                with tf32(False, layer.weight.device):
                    both = begun | layer_factors.decompose(layer, state, others, self._settings, context.step)
                found[layer.name] = {key: both[key] for key in keys[layer.name]}
        except Exception as caught:
            error = self._transport.defer(caught)
        return found, self._adopt(context, ranks, states, due, found, error, context.step, only)

    def _adopt(
        self,
        context: StepContext,
        ranks: RankPlan,
        states: dict[str, LayerState],
        due: list[Layer],
        found: Found,
        error: BaseException | None,
        since: int,
        only: frozenset[FactorName] | None = None,
    ) -> RefreshReport:
        """Agree on the outcomes, share the results and start using them. ``since`` is the step of the factors."""
        settings, report = self._settings, RefreshReport()
        outcomes = refresh_sync.agree_on_outcomes(ranks, states, self._transport, due, found, error, only)
        results = refresh_sync.share_decompositions(settings, self._transport, due, found, outcomes, only)
        for layer in due:
            state = states[layer.name]
            layer_factors.adopt(layer, state, outcomes[layer.name], results[layer.name], settings, since)
            report.outcomes.update(outcomes[layer.name].values())
            if settings.tf32:
                is_safe = layer_damping.may_round(layer, state, settings, context.step)
                report.tf32_safe[layer.name] = is_safe
        self._notices.thawed()
        self.publish_bases(ranks, states)
        divided = [] if settings.takes_steps else due  # Adam has no damping
        dominated = [layer_damping.is_dominated(la, states[la.name], settings, context.step) for la in divided]
        report.dominated_share = sum(dominated) / len(due)
        return report

    def publish_bases(self, ranks: RankPlan, states: dict[str, LayerState]) -> None:
        """Give the collector the bases in which it measures EKFAC's moments."""
        if not self._settings.measures_moments:
            return
        names = [
            layer.name
            for layer in ranks.layers
            if layer.spec.has_moments
            and layer.name not in self._collector.without_moments
            and ranks.rank in ranks.placements[layer.name].statistics
        ]
        found = {name: states[name].basis() for name in names}
        self._collector.use_bases({name: basis for name, basis in found.items() if basis is not None})

    # --- checkpoints and moved models ------------------------------------------------------------------------

    def saved(self, ranks: RankPlan) -> dict[str, Any]:
        """Return the checkpoint entries beyond the layers' states."""
        return self.async_refresh.saved() | {
            "staleness": None if self.staleness is None else self.staleness.saved(ranks)
        }

    def resume(self, loaded: Loaded, ranks: RankPlan, states: dict[str, LayerState], anew: set[str]) -> None:
        """Continue from a loaded state. ``anew`` are layers that are measured from scratch. Collective."""
        self.publish_bases(ranks, states)
        layers = [layer for layer in ranks.layers if layer.name in loaded.begun]
        if layers:
            self.async_refresh.note_rounding(rounds_products() if layers[0].weight.is_cuda else False)
            settings = replace(self._settings, **loaded.begun_schedules)
            pending = PendingRefresh(loaded.begun_at, layers, loaded.begun, settings)
            self.async_refresh.restart(pending, loaded.step, ranks)
        if self.remote is not None:
            self.remote.forget()
        if self.staleness is not None:
            self.staleness.load(ranks, self._transport, states, loaded.step, loaded.staleness, anew)

    def follow(self, layers: dict[str, Layer]) -> None:
        """Move to the model's device and dtype."""
        if self.staleness is not None:
            self.staleness.follow(layers)

    def rewind(self) -> None:
        """Partition the layers again, because their shared tensors were replaced."""
        self.scheduler.rewind()

    def forget(self) -> None:
        """Cancel what is in flight, because the step and the states are about to be replaced."""
        self.scheduler.forget()
        self.async_refresh.cancel()

    def close(self) -> None:
        self.scheduler.join()
        self.async_refresh.close()
        if self.remote is not None:
            self.remote.close()
