"""Executes a step: the plan's work that is this rank's, and the transfers in between. One rank has no transfers.

Every decision (skip, due, rung, raise) is a function of values that all ranks have, so ranks never part ways.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dkfac import health, lengths, reduce, shares, stages
from dkfac.checkpoint import Holding, Loaded
from dkfac.exchange import Exchange
from dkfac.layers.layer import Layer, read_grad
from dkfac.notices import Notices
from dkfac.ops.decompose import Decomposition
from dkfac.overlap import Overlap
from dkfac.plan.plan import Plan
from dkfac.plan.program import expand
from dkfac.refresh import RUNGS, Rung
from dkfac.settings import Settings
from dkfac.state import LayerState
from dkfac.tape import Measured, Tape


class Runner:
    """The state of K-FAC on one rank, and what a step does to it."""

    def __init__(
        self,
        layers: list[Layer],
        settings: Settings,
        tape: Tape,
        notices: Notices,
        plan: Plan,
        exchange: Exchange | None,
    ) -> None:
        self.layers, self.settings, self.plan = layers, settings, plan
        self.by_name = {layer.name: layer for layer in layers}
        self.index = {layer.name: i for i, layer in enumerate(layers)}
        self.tape, self.exchange, self.notices = tape, exchange, notices
        self.rank = 0 if exchange is None else exchange.rank
        tape.defer_errors = exchange is not None
        self._overlap()
        self.placements = {layer.name: plan.placement(layer.name) for layer in layers}
        self.states = {layer.name: LayerState(len(layer.spec.factors)) for layer in layers}
        self.step = 0
        self.measuring = self.decomposing = True
        self.counters: dict[str, int] = {"refreshes": 0, **dict.fromkeys(RUNGS, 0)}
        self.device: dict[str, Tensor] = {}
        """Counters and norms that live on the device."""
        self._health = health.Watch()
        self._error: BaseException | None = None
        self._lacking: set[str] = set()
        self._resumed = False
        self._last_reduced: reduce.Reduced | None = None
        self._rows_seen: dict[str, float] = {}
        """Most rows of a layer in a step since the last refresh; -1: not known to the host."""
        self._flag: Tensor | None = None
        """Whether a rank failed in the last measured step, on its way to the host."""

    def _overlap(self) -> None:
        if self.exchange is not None and self.settings.overlap and self.settings.fisher != "exact":
            layers = frozenset() if self.tape.overlap is None else self.tape.overlap.layers
            self.tape.overlap = Overlap(self.exchange, self.tape, layers)

    def holds(self, name: str) -> Holding:
        """Return what of a layer lives here."""
        layer, placement = self.by_name[name], self.placements[name]
        keys = [factor.key for factor in layer.spec.factors]
        uses = self.rank in placement.preconditioned_by or (
            self.plan.moments and shares.has_moments(layer.spec) and self.rank in placement.statistics
        )
        by = zip(keys, placement.decomposed_by, strict=True)
        return Holding(
            running=frozenset(k for k, ranks in zip(keys, placement.factors, strict=True) if self.rank in ranks),
            decompositions=frozenset(k for k, ranks in by if uses or self.rank in ranks),
            moments=self.plan.moments and shares.has_moments(layer.spec) and self.rank in placement.preconditioned_by,
        )

    def steps(self, name: str) -> bool:
        """Whether this rank's optimizer steps a layer."""
        return self.plan.share == "gradients" or self.rank in self.placements[name].preconditioned_by

    def resume(self, loaded: Loaded) -> None:
        """Go on from a loaded state; the ranks compare theirs at the next step."""
        self.states, self.step, self.device = loaded.states, loaded.step, loaded.device
        self.counters = {"refreshes": 0, **dict.fromkeys(RUNGS, 0), **loaded.counters}
        self._lacking = set(loaded.lacking)
        self._resumed = True
        self._flag = None
        if self.exchange is None:
            self._start_anew(self._lacking)
        self.publish_bases()

    def _compare_resumed(self) -> None:
        """After loading: the same step everywhere, and layers that a rank lacks start anew on all."""
        if not self._resumed or self.exchange is None:
            return
        self._resumed = False
        missing = [float(layer.name in self._lacking) for layer in self.layers]
        told = self.exchange.gather_numbers([float(self.step), *missing])
        steps = [int(numbers[0]) for numbers in told]
        if len(set(steps)) > 1:
            raise RuntimeError(f"ranks resumed at different steps {steps}: load the same K-FAC state on all ranks")
        self._start_anew({la.name for i, la in enumerate(self.layers) if any(row[1 + i] > 0 for row in told)})

    def _start_anew(self, names: set[str]) -> None:
        for name in names:
            self.states[name] = LayerState(self.states[name].num_factors)
        if names and self.rank == 0:
            warnings.warn(
                f"the K-FAC state that was loaded lacks {len(names)} of {len(self.layers)} layers, which are measured "
                f"anew. Was it saved by one rank of several? Save with torch.distributed.checkpoint, or "
                f"kfac.state_dict(gather=True) on all ranks.",
                stacklevel=2,
            )

    def plan_next(self) -> None:
        """Decide what the coming step measures, before its forward."""
        self.measuring, self.decomposing = self.settings.rhythm(self.step)

    def take_step(self, optimizer: Any, parameters: list[Tensor], rates: dict[int, Any]) -> None:
        """Statistics in, preconditioned gradients out. No stage reads from a later one."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients = [g._values() if g.is_sparse else g for g in gradients]
        device = gradients[0].device if gradients else self.layers[0].weight.device
        timer = self.tape.timer
        for layer in self.layers:
            self.states[layer.name].follow(layer.weight, layer.dtype)
        self._raise_what_failed(wait=True)
        self._compare_resumed()
        norms = stages.gradient_norms(parameters, device)
        good = stages.are_finite(norms, getattr(optimizer, "found_inf", None), device)
        good_batch = good
        if self.measuring:
            measured = self.tape.take()
            self.notices.accumulation(measured.num_passes)
            self._see_rows(measured)
            if self.exchange is None:
                self.notices.capture(measured.layers, measured.num_passes)
            with timer.stage("average", device):
                good_batch = self._average(measured, good, device)
            if self.exchange is not None:
                good = good_batch
        with timer.stage("decompose", device):
            self._decompose()
        with timer.stage("precondition", device):
            self._precondition(optimizer, rates, norms, device)
            bad = ~good
            for gradient in gradients:
                gradient.masked_fill_(bad.to(gradient.device), 0)
        self.count("skipped_batches", ~good_batch)
        self.step += 1

    def shadow_step(self) -> None:
        """Take part in a step without a batch of one's own: no statistics, but the decompositions that are due."""
        device = self.layers[0].weight.device
        self._raise_what_failed(wait=True)
        self._compare_resumed()
        good = torch.ones((), dtype=torch.bool, device=device)
        if self.measuring:
            good = self._average(self.tape.take(), good, device)
        self._decompose()
        self.count("skipped_batches", ~good)
        self.step += 1

    def count(self, name: str, happened: Tensor) -> None:
        count = happened.to(torch.float32)
        self.device[name] = count + self.device[name].to(count.device) if name in self.device else count

    # --- measured sums into running factors ------------------------------------------------------------------

    def _average(self, measured: Measured, good: Tensor, device: torch.device) -> Tensor:
        """Absorb the batch factors unless anything in them is not finite; returns whether they were good."""
        decay = self.settings.at("factor_decay", self.step)
        absorb: dict[str, Tensor] = {}
        if self.exchange is None:
            batch = reduce.finish_alone(self, measured, measured.layers)
            good = good & stages.all_finite((t for factors in batch.values() for t in factors.values()), device)
        else:
            reduced = reduce.Reduced(self, self.exchange, measured, good)
            batch, good, absorb = reduced.batch, reduced.good, reduced.absorb
            self._last_reduced = reduced
        for name, factors in batch.items():
            layer, state = self.by_name[name], self.states[name]
            stages.average(layer, state, factors, decay=decay, good=good & absorb.get(name, good))
        for name in self.tape.without_moments:
            self.states[name].moments = None
        return good

    @property
    def by_terms(self) -> bool:
        """Whether the loss was summed over the step's terms and divided by their number."""
        return self.settings.accumulate == "terms" and self.settings.fisher == "empirical"

    def note_failure(self, flag: Tensor, error: BaseException | None) -> None:
        """Keep a rank's error until all ranks have seen its flag: on the CPU now, on a GPU at the next step."""
        self._error = error
        self._flag = flag if flag.device.type == "cpu" else flag.to("cpu", non_blocking=True)
        self._raise_what_failed(wait=flag.device.type == "cpu")

    def _raise_what_failed(self, *, wait: bool) -> None:
        if self._flag is None or not wait or self.exchange is None:
            return
        if self.exchange.device.type == "cuda":
            torch.cuda.current_stream(self.exchange.device).synchronize()
        flag, self._flag = self._flag, None
        if float(flag) > 0:
            self.exchange.raise_everywhere(self._error)

    # --- decompositions ------------------------------------------------------------------------------------

    def _decompose(self) -> None:
        """Refresh the decompositions; between refreshes only those of layers first seen since the last."""
        new = [layer for layer in self.layers if self.states[layer.name].decomposed_at < 0]
        if not self.decomposing and not (self.measuring and new):
            return
        measured = shares.agree_on_means(self)
        due = [layer for layer in (self.layers if self.decomposing else new) if layer.name in measured]
        if self.exchange is not None and self.measuring:
            self.notices.capture(measured, 0)
            self._choose_overlapped()
            if self.decomposing and self.settings.wire_form == "rows":
                self._choose_rows(self.exchange)
        if not due:
            return
        found: dict[str, dict[str, tuple[Decomposition | None, Rung]]] = {}
        error: BaseException | None = None
        try:
            for layer in due:
                keys = shares.decomposed_here(self, layer)
                found[layer.name] = stages.decompose(layer, self.states[layer.name], keys, self.settings, self.step)
        except Exception as caught:
            if self.exchange is None:
                raise
            error = caught
        rungs = shares.agree_on_rungs(self, due, found, error)
        results = shares.share_decompositions(self, due, found, rungs)
        for layer in due:
            state = self.states[layer.name]
            stages.adopt(layer, state, rungs[layer.name], results[layer.name], self.settings.max_failures, self.step)
            for rung in rungs[layer.name].values():
                self.counters[rung] += 1
        self.counters["refreshes"] += 1
        self.notices.thawed()
        self.publish_bases()
        dominated = sum(stages.is_dominated(la, self.states[la.name], self.settings, self.step) for la in due)
        self._health.look(
            self.step,
            kfac_seconds=sum(self.tape.timer.seconds(wait=False).values()),
            dominated_share=dominated / len(due),
            clipped_share=float(self.device.get("clipped_steps", 0.0)) / max(1, self.step),
        )

    def _choose_overlapped(self) -> None:
        """Let those layers leave early that every rank called once per pass. Waits for the device."""
        overlap, reduced = self.tape.overlap, self._last_reduced
        if overlap is None or overlap.layers or reduced is None or float(reduced.num_passes) == 0:
            return
        once = ((reduced.calls == reduced.num_passes) & (reduced.again == 0)).tolist()
        overlap.layers = frozenset(la.name for la, flag in zip(self.layers, once, strict=True) if flag)

    def _choose_rows(self, exchange: Exchange) -> None:
        """Let rows travel instead of sums where every rank had few of them; a new plan, agreed by what was gathered."""
        told = exchange.gather_numbers([self._rows_seen.get(layer.name, 0.0) for layer in self.layers])
        self._rows_seen.clear()
        wanted = []
        for layer, numbers in zip(self.layers, zip(*told, strict=True), strict=True):
            if min(numbers) >= 0 and layer.kind in ("linear", "conv1d-transposed"):
                wanted += reduce.worth_as_rows(layer.spec, self.placements[layer.name], int(max(numbers)))
        if tuple(wanted) != self.plan.rows:
            self.plan = replace(self.plan, rows=tuple(wanted))
            self.exchange = Exchange(self.plan, expand(self.plan), exchange.groups, exchange.device)
            self.tape.as_rows = {(name, key) for name, key, _ in wanted}
            self._overlap()

    def _see_rows(self, measured: Measured) -> None:
        for name, sums in measured.layers.items():
            rows = -1.0 if isinstance(sums.rows, Tensor) else sums.rows
            seen = self._rows_seen.get(name, 0.0)
            self._rows_seen[name] = -1.0 if min(rows, seen) < 0 else max(rows, seen)

    def publish_bases(self) -> None:
        """Let the tape measure EKFAC's moments in the bases now in use."""
        if self.settings.curvature != "ekfac":
            return
        self.tape.bases = {
            layer.name: basis
            for layer in self.layers
            if shares.has_moments(layer.spec)
            and layer.name not in self.tape.without_moments
            and self.rank in self.placements[layer.name].statistics
            and (basis := self.states[layer.name].basis()) is not None
        }

    # --- gradients -----------------------------------------------------------------------------------------

    def _precondition(
        self, optimizer: Any, rates: dict[int, Any], norms: dict[int, Tensor], device: torch.device
    ) -> None:
        """Replace the gradients of the layers by preconditioned ones of the right length.

        ``norms``: of the gradients, by the parameters' ids.
        """
        layers = [
            layer
            for layer in self.layers
            if layer.weight.grad is not None and stages.is_ready(layer, self.states[layer.name])
        ]
        updates: dict[str, Tensor] = {}
        sane: dict[str, Tensor] = {}
        for layer in layers:
            if self.rank in self.placements[layer.name].preconditioned_by:
                raw = read_grad(layer)
                assert raw is not None
                update = stages.direction(layer, self.states[layer.name], raw, self.settings, self.step)
                sane[layer.name] = torch.isfinite(stages.norms([update], update.device)[0])
                updates[layer.name] = torch.where(sane[layer.name], update, raw)
        if self.exchange is not None and self.plan.share == "gradients":
            wanted = {layer.name for layer in layers}
            for name, update in shares.share_gradients(self.exchange, updates).items():
                sane.pop(name, None)  # a bad one went out as the raw gradient: the same on all ranks
                if name in wanted:
                    updates[name] = update
        loss_scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer has yet to divide by it
        lengths.rescale(self, lengths.Updates(layers, updates, sane), norms, rates, loss_scale, device)
        if self.exchange is not None and self.plan.share == "weights":
            for layer in self.layers:
                if self.rank not in self.placements[layer.name].preconditioned_by:
                    for parameter in layer.parameters():
                        parameter.grad = None

    def share_weights(self) -> None:
        """After the optimizer's step: get the weights that their owners updated."""
        if self.exchange is not None and self.plan.share == "weights":
            shares.share_weights(self.exchange, self.by_name)
