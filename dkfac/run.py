"""Executes a step: the plan's work that is this rank's, and the transfers in between. One rank has no transfers.

Every decision (skip, due, rung, raise) is a function of values that all ranks have, so ranks never part ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dkfac import health, shares, stages
from dkfac.exchange import Exchange, Named
from dkfac.layers.layer import Layer, read_grad, split_grad
from dkfac.notices import Notices
from dkfac.ops.decompose import Decomposition
from dkfac.plan.plan import Plan
from dkfac.plan.program import HEADER_FIXED
from dkfac.refresh import RUNGS, Rung
from dkfac.settings import Settings
from dkfac.state import LayerState
from dkfac.tape import Measured, Tape

Factors = dict[str, dict[str, Tensor]]
"""Batch factors, and moments, by layer and key."""


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
        self._by_name = {layer.name: layer for layer in layers}
        self.tape, self.exchange, self.notices = tape, exchange, notices
        self.rank = 0 if exchange is None else exchange.rank
        tape.defer_errors = exchange is not None
        self.placements = {layer.name: plan.placement(layer.name) for layer in layers}
        self.states = {layer.name: LayerState(len(layer.spec.factors)) for layer in layers}
        self.step = 0
        self.measuring = self.decomposing = True
        self.counters: dict[str, int] = {"refreshes": 0, **dict.fromkeys(RUNGS, 0)}
        self.device: dict[str, Tensor] = {}
        """Counters and norms that live on the device."""
        self._health = health.Watch()
        self._error: BaseException | None = None
        self._flag: Tensor | None = None
        """Whether a rank failed in the last measured step, on its way to the host."""

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
        good = stages.gradients_are_finite(gradients, getattr(optimizer, "found_inf", None), device)
        good_batch = good
        if self.measuring:
            measured = self.tape.take()
            self.notices.accumulation(measured.num_passes)
            if self.exchange is None:
                self.notices.capture(measured.layers, measured.num_passes)
            with timer.stage("average", device):
                good_batch = self._average(measured, good, device)
            if self.exchange is not None:
                good = good_batch
        with timer.stage("decompose", device):
            self._decompose()
        with timer.stage("precondition", device):
            self._precondition(optimizer, rates, device)
            bad = ~good
            for gradient in gradients:
                gradient.masked_fill_(bad.to(gradient.device), 0)
        self.count("skipped_batches", ~good_batch)
        self.step += 1

    def count(self, name: str, happened: Tensor) -> None:
        count = happened.to(torch.float32)
        self.device[name] = count + self.device[name].to(count.device) if name in self.device else count

    # --- measured sums into running factors ------------------------------------------------------------------

    def _average(self, measured: Measured, good: Tensor, device: torch.device) -> Tensor:
        """Absorb the batch factors unless anything in them is not finite; returns whether they were good."""
        decay = self.settings.at("factor_decay", self.step)
        ran: dict[str, Tensor] = {}
        if self.exchange is None:
            batch = self._finish_alone(measured, measured.layers)
            good = good & stages.all_finite((t for factors in batch.values() for t in factors.values()), device)
        else:
            batch, good, ran = self._reduce(self.exchange, measured, good, device)
        for name, factors in batch.items():
            layer, state = self._by_name[name], self.states[name]
            absorb = good if name not in ran else good & ran[name].to(good.device)
            stages.average(layer, state, factors, decay=decay, good=absorb)
        for name in self.tape.without_moments:
            self.states[name].moments = None
        return good

    def _finish_alone(self, measured: Measured, names: Any) -> Factors:
        """Return batch factors of layers from this rank's own sums."""
        terms = measured.terms
        scale = measured.unit * (terms if self._by_terms else 1.0) if measured.layers else 1.0
        if measured.layers and not self._by_terms:
            scale = scale / terms
        batch: Factors = {}
        for name in names:
            sums = measured.layers[name]
            totals = sums.factors | ({} if sums.moments is None else {"moments": sums.moments})
            batch[name] = {key: stages.batch_factor(key, s, sums.rows, scale) for key, s in totals.items()}
        return batch

    @property
    def _by_terms(self) -> bool:
        return self.settings.accumulate == "terms" and self.settings.fisher == "empirical"

    def _reduce(
        self, exchange: Exchange, measured: Measured, good: Tensor, device: torch.device
    ) -> tuple[Factors, Tensor, dict[str, Tensor]]:
        """Sum what all ranks measured; returns the batch factors held here, whether all is good, which layers ran."""
        sums = self.local_sums(measured)
        error, self.tape.error = self.tape.error, None
        good = good & stages.all_finite(sums.values(), device)
        count = [measured.layers.get(layer.name) for layer in self.layers]
        values: list[Tensor | float] = [measured.terms, (~good).to(torch.float64), float(error is not None)]
        values += [0.0 if s is None else s.rows for s in count]
        values += [0.0 if s is None else float(s.calls) for s in count]
        values += [0.0 if s is None else float(s.called_again) for s in count]
        half = self.plan.wire_dtype == "float16"
        names = [(layer.name, factor.key) for layer in self.layers for factor in layer.spec.factors]
        if half:
            values += [shares.trace(sums[name]) if name in sums else 0.0 for name in names]
        pending = exchange.launch_sum("header", values)
        scales: Named = {}
        if half:  # little range: divide by what all ranks know the sum to be
            header = pending.wait()
            scales = {name: shares.scale_of(header[i - len(names)]) for i, name in enumerate(names)}
        launched = [p for b in range(exchange.num_buckets) for p in exchange.launch_factors(b, sums, scales)]
        header = pending.wait()
        reduced = exchange.finish_factors(launched, scales)
        self._note_failure(header[2], error)
        num = len(self.layers)
        terms = header[0]
        rows, calls, again = (header[HEADER_FIXED + i * num :][:num] for i in range(3))
        scale = terms / exchange.world_size**2 if self._by_terms else 1 / terms
        batch: Factors = self._finish_alone(measured, [n for n in self._own_statistics() if n in measured.layers])
        ran: dict[str, Tensor] = {}
        for (name, key), total in reduced.items():
            i = next(i for i, layer in enumerate(self.layers) if layer.name == name)
            batch.setdefault(name, {})[key] = stages.batch_factor(key, total, rows[i].clamp(min=1), scale)
            ran[name] = (calls[i] > 0) & (rows[i] > 0)
            if key == "moments":
                batch[name][key] = torch.where(again[i] > 0, 0, batch[name][key])
        held = {name: self._held(name, factors) for name, factors in batch.items()}
        good = (header[1] == 0) & (header[2] == 0)
        for name, factors in held.items():  # a sum may overflow on the wire
            ran[name] = ran.get(name, good) & stages.all_finite(factors.values(), device)
        return held, good.to(device), ran

    def local_sums(self, measured: Measured) -> Named:
        """Return this rank's sums over terms, of the layers that several ranks measure."""
        sums: Named = {}
        for name, layer_sums in measured.layers.items():
            if len(self.placements[name].statistics) < 2:
                continue
            for key, total in layer_sums.factors.items():
                sums[name, key] = total if key == "A" else _times(total, measured.unit)
            if layer_sums.moments is not None:
                sums[name, "moments"] = _times(layer_sums.moments, measured.unit)
        return sums

    def _own_statistics(self) -> list[str]:
        return [name for name, p in self.placements.items() if p.statistics == (self.rank,)]

    def _held(self, name: str, factors: dict[str, Tensor]) -> dict[str, Tensor]:
        placement, layer = self.placements[name], self._by_name[name]
        held = {f.key for f, ranks in zip(layer.spec.factors, placement.factors, strict=True) if self.rank in ranks}
        if self.rank in placement.preconditioned_by:
            held.add("moments")
        return {key: factor for key, factor in factors.items() if key in held}

    def _note_failure(self, flag: Tensor, error: BaseException | None) -> None:
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

    def _precondition(self, optimizer: Any, rates: dict[int, Any], device: torch.device) -> None:
        """Replace the gradients of the layers by preconditioned ones of the right length."""
        ready = [layer for layer in self.layers if stages.is_ready(layer, self.states[layer.name])]
        pairs = [(layer, grad) for layer in ready if (grad := read_grad(layer)) is not None]
        updates = {
            layer.name: stages.direction(layer, self.states[layer.name], grad, self.settings, self.step)
            for layer, grad in pairs
            if self.rank in self.placements[layer.name].preconditioned_by
        }
        if self.exchange is not None:
            updates = shares.share_gradients(self.exchange, updates, {layer.name: grad for layer, grad in pairs})
        if not pairs:
            return
        layers, raw = [layer for layer, _ in pairs], [grad for _, grad in pairs]
        before = stages.norms(raw, device)
        found = [updates[layer.name] for layer in layers]
        after = stages.norms(found, device)
        sane = torch.isfinite(after)
        after = torch.where(sane, after, before)
        found = [torch.where(sane[i].to(u.device), u, raw[i]) for i, u in enumerate(found)]
        loss_scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer has yet to divide by it
        if self.settings.rescale == "kl-clip":
            clip = self.settings.at("kl_clip", self.step)
            factor = stages.kl_scale(layers, found, rates, clip, loss_scale, sane)
            self.device["clip_factor"] = factor
            self.count("clipped_steps", factor < 1)
            scales = torch.where(sane, factor, 1.0)
        else:
            scales = stages.scales(self.settings.rescale, before, after, sane)
        divisor = 1.0 if loss_scale is None else loss_scale.to(device)
        self.device["grad_norm"] = before.square().sum().sqrt() / divisor
        self.device["update_norm"] = (after * scales).square().sum().sqrt() / divisor
        for i, layer in enumerate(layers):
            for parameter, part in split_grad(layer, found[i] * scales[i].to(found[i])):
                assert parameter.grad is not None
                parameter.grad.copy_(part)


def _times(total: Tensor, unit: Tensor | float) -> Tensor:
    if isinstance(unit, float) and unit == 1.0:
        return total
    return total * (unit.to(total.device, total.dtype) if isinstance(unit, Tensor) else unit)
