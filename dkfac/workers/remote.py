"""The gradient workers' side of ``roles``: send weights, receive decompositions, at agreed steps.

Input: the weights of a step. Output: decompositions in the layers' states, and a report. Owns: the step whose results
are pending.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from dkfac.comm.messages import largest_message
from dkfac.comm.transport import Transport
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_damping, layer_factors, sent_decompositions
from dkfac.decompose.fallback import Outcome
from dkfac.decompose.report import RefreshReport
from dkfac.factors.layer_state import LayerState
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.plan.strategies import balance
from dkfac.workers.hub import Hub
from dkfac.workers.place import START_SECONDS, RolesPlace


def _schedules(settings: Settings, step: int) -> dict[str, Any]:
    """Return the scheduled settings as numbers at a step: they may be functions, which cannot be sent."""
    return {name: settings.at(name, step) for name in SCHEDULES}


def _mean(pairs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several workers' batch factors of one layer."""
    return {key: torch.stack([pair[key] for pair in pairs]).mean(0) for key in pairs[0]}


class Remote:
    """Refreshes that are carried out by helpers."""

    def __init__(self, place: RolesPlace, model: torch.nn.Module) -> None:
        self.place, self.model = place, model
        self._posted = self._asked = -1
        """The step whose weights were sent, and the step whose factors were sent to the inverse workers; -1: none."""
        self._told: set[tuple[str, int]] = set()
        self._started = False
        self._share: dict[str, int] = {}

    def refresh(
        self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState], transport: Transport
    ) -> RefreshReport:
        """Send the weights at refresh steps, and use the results that are due. Blocks for the first results."""
        self._start(context, ranks)
        lag, report = context.settings.inverse_lag, RefreshReport()
        first = all(states[layer.name].decomposed_at < 0 for layer in ranks.layers)
        if self._posted >= 0 and context.step >= self._posted + lag:
            report.add(self._take_up(context, ranks, states, transport))
        if context.refreshes:
            self._post(context.step)
            if first or lag == 0:
                report.add(self._take_up(context, ranks, states, transport))
        elif self.place.hub is not None:
            self._pass_on(self.place.hub, context.settings, wait=False)
        return report

    def _start(self, context: StepContext, ranks: RankPlan) -> None:
        """Send the settings once, with schedules fixed at their values at this step."""
        hub = self.place.hub
        if self._started or hub is None:
            return
        self._started = True
        hub.wait_for_all(START_SECONDS)
        costs = [(float(sum(f.dim**3 for f in layer.spec.factors)), layer.name) for layer in ranks.layers]
        bins = balance(costs, self.place.counts["inverse"])
        self._share = {layer.name: owner for layer, owner in zip(ranks.layers, bins, strict=True)}
        plain = replace(context.settings, **_schedules(context.settings, context.step)).describe()
        specs = {layer.name: asdict(layer.spec) for layer in ranks.layers}
        hub.expect(largest_message(self.model, (layer.spec for layer in ranks.layers)))
        for role in ("statistics", "inverse"):
            for i in range(self.place.counts[role]):
                hub.post((role, i), (plain, specs, self.place.counts[role]))

    def _post(self, step: int) -> None:
        """Send this step's weights to the statistics workers. Synchronizes with the device."""
        self._posted, self._asked = step, -1
        hub = self.place.hub
        if hub is None:
            return
        state = self.model.state_dict().items()
        weights = {name: t.detach().cpu().clone() if isinstance(t, Tensor) else t for name, t in state}
        for who in hub.all_of("statistics"):
            hub.post(who, (step, weights))

    def _pass_on(self, hub: Hub, settings: Settings, *, wait: bool) -> None:
        """Forward the batch factors that have arrived to the inverse workers."""
        since = self._posted
        if since < 0 or self._asked == since or not (wait or hub.are_there("statistics", since)):
            return
        found = hub.answers("statistics", since)
        if not found:
            return
        self._asked = since
        for who in hub.all_of("inverse"):
            mine = [name for name, owner in self._share.items() if owner == who[1] and all(name in f for f in found)]
            factors = {name: _mean([f[name] for f in found]) for name in mine}
            hub.post(who, (since, (_schedules(settings, since), factors)))

    def _take_up(
        self, context: StepContext, ranks: RankPlan, states: dict[str, LayerState], transport: Transport
    ) -> RefreshReport:
        """Use the decompositions for the last weights sent, identically on all gradient workers. Collective."""
        since, hub, settings, report = self._posted, self.place.hub, context.settings, RefreshReport()
        results: dict[str, Any] = {}
        if hub is not None:
            late = self._asked != since or not hub.are_there("inverse", since)
            report.num_late = int(late and settings.inverse_lag > 0)
            self._pass_on(hub, settings, wait=True)
            for answer in hub.answers("inverse", since) if self._asked == since else ():
                results |= answer
            self._warn(hub)
        self._posted = -1
        mine = {name: result[0] for name, result in results.items()}
        outcomes: dict[str, dict[str, Outcome]] = json.loads(transport.tell(json.dumps(mine)))
        for layer in (layer for layer in ranks.layers if layer.name in outcomes):
            state = states[layer.name]
            _adopt(layer, state, settings, transport, outcomes[layer.name], results.get(layer.name), since)
            report.refreshed = True
            report.outcomes.update(outcomes[layer.name].values())
            if settings.tf32:
                report.tf32_safe[layer.name] = layer_damping.may_round(layer, state, settings, context.step)
        return report

    def _warn(self, hub: Hub) -> None:
        fresh = {who: why for who, why in hub.lost.items() if who not in self._told}
        if fresh:
            self._told |= set(fresh)
            which = ", ".join(f"{role} worker {number} ({why})" for (role, number), why in sorted(fresh.items()))
            warnings.warn(f"lost: {which}; training goes on with the decompositions there are", stacklevel=2)

    def forget(self) -> None:
        """Discard the refresh in flight, because the step and the weights are about to be replaced. Helpers keep their
        running factors."""
        self._posted = self._asked = -1

    def close(self) -> None:
        self.place.close()


def _adopt(
    layer: Layer, state: LayerState, settings: Settings, transport: Transport, outcomes: dict[str, Outcome],
    result: Any, since: int,
) -> None:  # fmt: skip
    """Broadcast one layer's decompositions among the gradient workers and start using them."""
    found = {}
    for factor in layer.spec.factors:
        key = factor.key
        if outcomes[key] in ("kept", "raw"):
            continue
        size = factor.wire_elements(settings.solver)
        flat = torch.zeros(size + factor.grad_blocks, dtype=layer.dtype, device=layer.weight.device)
        if result is not None:
            _, flats, means = result
            flat = torch.cat([flats[key].reshape(-1), means[key].reshape(-1)]).to(flat)
        flat = transport.broadcast(flat)
        is_inverse = settings.uses_inverses or outcomes[key] == "cholesky"
        found[key] = sent_decompositions.unpack_decomposition(
            flat[:size], factor, is_inverse=is_inverse, packed=settings.uses_inverses
        )
        state.means[key] = flat[size:].clone()
    layer_factors.adopt(layer, state, outcomes, found, settings, since)
