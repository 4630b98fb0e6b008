"""Executes a step: the plan's work that is this rank's, and the transfers in between. One rank has no transfers.

Every decision (skip, due, rung, raise) is a function of values that all ranks have, so ranks never part ways.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import health, reduce, renew, stages, updates
from dkfac.absorb import Absorber
from dkfac.adaptive import Grafts
from dkfac.checkpoint import Loaded
from dkfac.decomposing import decompose
from dkfac.exchange import Exchange
from dkfac.graph import StepGraph, look_at_gradients, wants_graphs
from dkfac.later import Begun, Later
from dkfac.layers.layer import Layer
from dkfac.notices import Notices
from dkfac.ops.decompose import stored
from dkfac.ops.precision import rounds_products, tf32
from dkfac.overlap import Overlap
from dkfac.plan.plan import Holding, Plan
from dkfac.refresh import RUNGS
from dkfac.settings import Settings
from dkfac.shares import share_weights
from dkfac.stacks import Stack, make_stacks
from dkfac.staleness import Staleness
from dkfac.state import LayerState
from dkfac.tape import Tape
from dkfac.window import Measured

if TYPE_CHECKING:
    from dkfac.crew.remote import Remote


class Runner:
    """The state of K-FAC on one rank, and what a step does to it."""

    def __init__(
        self, layers: list[Layer], settings: Settings, tape: Tape, notices: Notices, plan: Plan,
        exchange: Exchange | None,
    ) -> None:  # fmt: skip
        self.layers, self.settings, self.plan = layers, settings, plan
        self.by_name = {layer.name: layer for layer in layers}
        self.index = {layer.name: i for i, layer in enumerate(layers)}
        self.tape, self.exchange, self.notices = tape, exchange, notices
        self.rank = 0 if exchange is None else exchange.rank
        tape.defer_errors, tape.rank = exchange is not None, self.rank
        self.set_overlap()
        self.placements = {layer.name: plan.placement(layer.name) for layer in layers}
        self.states = {layer.name: LayerState(len(layer.spec.factors)) for layer in layers}
        self.renewal, self.later = renew.Renewal(), Later(settings)
        self.staleness = None if settings.staleness == "fixed" else Staleness(settings, layers)
        self.refreshing: frozenset[tuple[str, str]] | None = None
        """Statistics that are decomposed in this step, if not all of a layer."""
        self.remote: Remote | None = None
        """Who measures and decomposes instead, under ``roles``."""
        self.graph, self.absorber = StepGraph(tape.waiting.staged.pool), Absorber(tape.waiting.staged.pool)
        self._refreshed_at = -1
        self.is_adam, self.stepped = settings.takes_steps, list[Tensor]()
        """Whether layers take their steps here, and the parameters that took one."""
        self.grafts: Grafts | None = None  # wait for the optimizer's step
        self._stack()
        self.step = 0
        self.measuring = self.decomposing = True
        self.delicate: set[str] = set()
        """Layers whose gradients TF32 would spoil."""
        self.counters: dict[str, int] = dict.fromkeys(("refreshes", "late", "repaired", *RUNGS), 0)
        self.device: dict[str, Tensor] = {}
        """Counters and norms that live on the device."""
        self._health = health.Watch()
        self._error: BaseException | None = None
        self.last_reduced: reduce.Reduced | None = None
        self.rows_seen: dict[str, float] = {}
        """Most rows of a layer in a step since the last refresh; -1: not known to the host."""
        self._flag: Tensor | None = None
        """Whether a rank failed in the last measured step, on its way to the host."""
        self._arrived: torch.cuda.Event | None = None

    def set_overlap(self) -> None:
        if self.exchange is not None and self.settings.overlap and self.settings.fisher == "empirical":
            layers = frozenset() if self.tape.overlap is None else self.tape.overlap.layers
            self.tape.overlap = Overlap(self.exchange, self.tape, layers)

    def _stack(self) -> None:
        """Lay side by side what this rank preconditions."""
        mine = [layer for layer in self.layers if self.rank in self.placements[layer.name].preconditioned_by]
        self.stacks, self.alone = make_stacks(mine), {layer.name: Stack([layer], pad=False) for layer in mine}
        self.weights = [layer.weight for layer in self.layers]
        self._places = [(w.dtype, w.device) for w in self.weights]
        self.renewal.rewind()
        self.uses_graphs = self.tape.waiting.stages = wants_graphs(self)

    def settle(self) -> None:
        """Draw all conclusions from what was decomposed so far. Waits for the device."""
        self.renewal.join()
        self.renewal.look(self, all_of_it=True)

    def close(self) -> None:
        self.renewal.join()
        self.later.close()
        if self.remote is not None:
            self.remote.close()

    def holds(self, name: str) -> Holding:
        """Return what of a layer lives here."""
        adam = self.is_adam and self.rank in self.placements[name].preconditioned_by
        return replace(self.plan.holding(name, self.rank), adam=adam)

    def steps(self, name: str) -> bool:
        """Whether this rank's optimizer steps a layer."""
        return self.plan.share == "gradients" or self.rank in self.placements[name].preconditioned_by

    def resume(self, loaded: Loaded) -> None:
        """Go on from a loaded state. A collective call."""
        self.states, self.step, self.device = loaded.states, loaded.step, loaded.device
        self._keep_bases()
        self._places.clear()
        self.counters = dict.fromkeys(("refreshes", "late", "repaired", *RUNGS), 0) | loaded.counters
        self._flag = None
        self.renewal.forget()
        self.later.forget()
        anew = set(loaded.lacking) if self.exchange is None else self._lacking(self.exchange, loaded)
        self._start_anew(anew)
        self.publish_bases()
        layers = [layer for layer in self.layers if layer.name in loaded.begun]
        if layers:
            self.later.rounds = rounds_products() if layers[0].weight.is_cuda else False
            settings = replace(self.settings, **loaded.begun_schedules)
            self.later.restart(self, Begun(loaded.begun_at, layers, loaded.begun, settings))
        if self.remote is not None:
            self.remote.forget()
        if self.staleness is not None:
            self.staleness.load(self, loaded.staleness, anew)
        for layer in self.layers if self.settings.tf32 else ():
            self.note_rounding(layer, stages.may_round(layer, self.states[layer.name], self.settings, self.step))

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint says besides the states."""
        return self.later.saved() | {"staleness": None if self.staleness is None else self.staleness.saved(self)}

    def _keep_bases(self) -> None:
        """Bring bases that were loaded or converted to the type they are kept in."""
        kept = self.settings.basis_dtype
        for state in self.states.values():
            state.decompositions = {key: stored(found, kept) for key, found in state.decompositions.items()}

    def _lacking(self, exchange: Exchange, loaded: Loaded) -> set[str]:
        """Return the layers that a rank lacks; all ranks load the same step."""
        missing = [float(layer.name in loaded.lacking) for layer in self.layers]
        told = exchange.gather_numbers([float(self.step), *missing])
        steps = [int(numbers[0]) for numbers in told]
        if len(set(steps)) > 1:
            raise RuntimeError(f"ranks resumed at different steps {steps}: load the same K-FAC state on all ranks")
        return {la.name for i, la in enumerate(self.layers) if any(row[1 + i] > 0 for row in told)}

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
        due = None if self.staleness is None else self.staleness.due(self.step)
        if due is not None:
            self.measuring = self.decomposing = bool(due)
        self.measuring = self.measuring and self.remote is None
        self.tape.begin_step(self.step, due)

    def take_step(self, optimizer: Any, parameters: list[Tensor], rates: dict[int, Any]) -> None:
        """Statistics in, preconditioned gradients out. No stage reads from a later one."""
        device = next((p.device for p in parameters if p.grad is not None), self.layers[0].weight.device)
        timer = self.tape.timer
        self.renewal.join()
        self.weights = [layer.weight for layer in self.layers]
        if self._places != [(w.dtype, w.device) for w in self.weights]:
            for layer in self.layers:
                self.states[layer.name].follow(layer.weight, layer.dtype)
            self._keep_bases()
            if self.staleness is not None:
                self.staleness.follow(self)
            self._stack()  # the model was moved or converted, or its state was loaded
        self._raise_what_failed()
        self._check_placement()
        norms, good = look_at_gradients(self, optimizer, parameters, device)
        good_batch = good
        if self.measuring:
            measured = self.tape.take()
            self.notices.accumulation(measured.num_passes)
            reduce.see_rows(measured, self.rows_seen)
            if self.exchange is None:
                self.notices.capture(measured.called, measured.num_passes)
            with timer.stage("average", device):
                good_batch = self._average(measured, good, device)
        if self.settings.inverse_lag and device.type == "cuda":
            self.later.rounds = rounds_products()
        with timer.stage("decompose", device), tf32(False, device):
            decompose(self)
        with timer.stage("precondition", device):
            if norms is not None or not self.graph.finish(self, optimizer, rates):
                norms = norms or stages.Norms(parameters, device)
                written = updates.precondition(self, optimizer, rates, norms, good, device)
                stages.zero_where(~good, stages.gradients([p for p in parameters if id(p) not in written]))
        for p in self.stepped:  # the optimizer's, from before its layer was decomposed, or loaded
            optimizer.state.pop(p, None)
        self.count("skipped_batches", ~good_batch)
        self.renewal.launch(self)
        self.step += 1

    def shadow_step(self) -> None:
        """Take part in a step without a batch of one's own: no statistics, but the decompositions that are due."""
        device = self.layers[0].weight.device
        self._raise_what_failed()
        good = torch.ones((), dtype=torch.bool, device=device)
        if self.measuring:
            good = self._average(self.tape.take(), good, device)
        decompose(self)
        self.count("skipped_batches", ~good)
        self.step += 1

    def _check_placement(self) -> None:
        """Refuse a model that was converted or moved after its plan was made."""
        if self.exchange is None:
            return
        for layer in self.layers:
            if str(layer.dtype) != f"torch.{layer.spec.dtype}" or layer.weight.device.type != self.exchange.device.type:
                raise RuntimeError(
                    f"layer {layer.name!r} was {layer.spec.dtype} on {self.exchange.device.type} when K-FAC was "
                    f"attached and is {layer.dtype} on {layer.weight.device.type} now: with several ranks attach K-FAC "
                    f"after the model is converted and moved"
                )

    def count_refresh(self) -> None:
        """Count a refresh, once in a step."""
        if self._refreshed_at != self.step:
            self._refreshed_at = self.step
            self.counters["refreshes"] += 1

    def count(self, name: str, happened: Tensor) -> None:
        known = self.device.get(name)
        if known is not None and known.device == happened.device:
            known += happened
        else:
            self.device[name] = happened.float() + (0.0 if known is None else known.to(happened.device))

    def note_clip(self, factor: Tensor) -> None:
        self.device["clip_factor"] = factor
        self.count("clipped_steps", factor < 1)

    def _average(self, measured: Measured, good: Tensor, device: torch.device) -> Tensor:
        """Absorb the batch factors unless anything in them is not finite; returns whether they were good."""
        decay = self.settings.at("factor_decay", self.step)
        if self.exchange is None:
            look = None if self.staleness is None else reduce.look_alone(self, measured)
            good = self.absorber.absorb(self, measured, good, decay)
            self._gather(look, good)
        else:
            exchange = self.exchange if self.tape.due is None else self.exchange.only("factors", self.tape.due)
            reduced = self.last_reduced = reduce.Reduced(self, exchange, measured, good)
            good = reduced.good
            self._gather(None if self.staleness is None else reduced.look(self), good)
            for name, factors in reduced.batch.items():
                once = reduced.again[self.index[name]] == 0
                fit = good & reduced.absorb.get(name, good)
                stages.average(self.by_name[name], self.states[name], factors, decay=decay, good=fit, once=once)
            reduced.batch = {}  # as large as the running factors; only the counts are looked at again
        for name in self.tape.without_moments:
            self.states[name].moments = None
        return good

    def _gather(self, look: reduce.Look | None, good: Tensor) -> None:
        """Let what was measured be judged. Waits for the device."""
        if self.staleness is not None and look is not None and self.tape.due is not None and bool(good):
            self.staleness.gather(self, self.tape.due, look)

    @property
    def by_terms(self) -> bool:
        """Whether the loss was summed over the step's terms and divided by their number."""
        return self.settings.accumulate == "terms" and self.settings.fisher == "empirical"

    def note_failure(self, flag: Tensor, error: BaseException | None) -> None:
        """Keep a rank's error until all ranks have seen its flag: on the CPU now, on a GPU at the next step."""
        self._error, self._flag = error, flag
        if flag.device.type == "cuda":
            self._flag = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._flag.copy_(flag, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(flag.device))
        else:
            self._raise_what_failed()

    def _raise_what_failed(self) -> None:
        if self._flag is None or self.exchange is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()  # recorded a step ago
        flag, self._flag = self._flag, None
        if float(flag) > 0:
            self.exchange.raise_everywhere(self._error)

    def watch(self, dominated_share: float) -> None:
        """Warn if K-FAC does not pay."""
        self._health.look(
            self.step,
            kfac_seconds=sum(self.tape.timer.seconds(wait=False).values()),
            dominated_share=dominated_share,
            clipped_share=lambda: 0.0 if self.is_adam else float(self.device.get("clipped_steps", 0.0)) / self.step,
        )

    def note_rounding(self, layer: Layer, may: bool) -> None:
        """Keep whether a layer may be preconditioned in TF32."""
        (self.delicate.discard if may else self.delicate.add)(layer.name)

    def may_round(self, stack: Stack) -> bool:
        """Whether layers are preconditioned in TF32."""
        return self.settings.tf32 and self.delicate.isdisjoint(layer.name for layer in stack.layers)

    def publish_bases(self) -> None:
        """Let the tape measure EKFAC's moments in the bases now in use."""
        if self.settings.curvature != "ekfac":
            return
        self.tape.bases = {
            layer.name: basis
            for layer in self.layers
            if layer.spec.has_moments
            and layer.name not in self.tape.without_moments
            and self.rank in self.placements[layer.name].statistics
            and (basis := self.states[layer.name].basis()) is not None
        }

    def share_weights(self) -> None:
        """After the optimizer's step: get the weights that their owners updated."""
        if self.exchange is not None and self.plan.share == "weights":
            share_weights(self.exchange, self.by_name)
