"""The gradient workers' side of ``roles``: weights go out, decompositions come back, at agreed steps."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import shares, stages
from dkfac.comm import agree, collectives
from dkfac.crew.hub import Hub
from dkfac.crew.place import PATIENCE, RolesPlace
from dkfac.layers.layer import Layer
from dkfac.plan.strategies import balance
from dkfac.refresh import Rung
from dkfac.settings import SCHEDULES

if TYPE_CHECKING:
    from dkfac.run import Runner


def _schedules(runner: Runner, step: int) -> dict[str, Any]:
    """Return what settings that may be functions, which cannot be sent, are at a step."""
    return {name: runner.settings.at(name, step) for name in SCHEDULES}


def _mean(pairs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several workers' batch factors of one layer."""
    return {key: torch.stack([pair[key] for pair in pairs]).mean(0) for key in pairs[0]}


class Remote:
    """Refreshes that are carried out by helpers."""

    def __init__(self, place: RolesPlace, model: torch.nn.Module) -> None:
        self.place, self.model = place, model
        self._posted = self._asked = -1
        """The step whose weights are out, and whose factors are with the inverse workers."""
        self._told: set[tuple[str, int]] = set()
        self._started = False
        self._share: dict[str, int] = {}

    def refresh(self, runner: Runner) -> None:
        """At refreshes send the weights; take up results that are due. The first ones are waited for."""
        self._start(runner)
        lag = runner.settings.inverse_lag
        first = all(runner.states[layer.name].decomposed_at < 0 for layer in runner.layers)
        if self._posted >= 0 and runner.step >= self._posted + lag:
            self._take_up(runner)
        if runner.decomposing:
            self._post(runner)
            if first or lag == 0:
                self._take_up(runner)
        elif self.place.hub is not None:
            self._pass_on(self.place.hub, runner, wait=False)

    def _start(self, runner: Runner) -> None:
        """Send the settings, once; schedules as what they are at this step."""
        hub = self.place.hub
        if self._started or hub is None:
            return
        self._started = True
        hub.wait_for_all(PATIENCE)
        costs = [(float(sum(f.dim**3 for f in layer.spec.factors)), layer.name) for layer in runner.layers]
        bins = balance(costs, self.place.counts["inverse"])
        self._share = {layer.name: owner for layer, owner in zip(runner.layers, bins, strict=True)}
        plain = replace(runner.settings, **_schedules(runner, runner.step))
        specs = {layer.name: layer.spec for layer in runner.layers}
        for role in ("statistics", "inverse"):
            for i in range(self.place.counts[role]):
                hub.post((role, i), (plain, specs, self.place.counts[role]))

    def _post(self, runner: Runner) -> None:
        """Send this step's weights to the statistics workers."""
        self._posted, self._asked = runner.step, -1
        hub = self.place.hub
        if hub is None:
            return
        state = self.model.state_dict().items()
        weights = {name: t.detach().cpu().clone() if isinstance(t, Tensor) else t for name, t in state}
        for who in hub.all_of("statistics"):
            hub.post(who, (runner.step, weights))

    def _pass_on(self, hub: Hub, runner: Runner, *, wait: bool) -> None:
        """Send factors that have come to the inverse workers."""
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
            hub.post(who, (since, (_schedules(runner, since), factors)))

    def _take_up(self, runner: Runner) -> None:
        """Use the decompositions of the weights that were sent last, the same on all gradient workers."""
        since, hub, exchange = self._posted, self.place.hub, runner.exchange
        results: dict[str, Any] = {}
        if hub is not None:
            late = self._asked != since or not hub.are_there("inverse", since)
            runner.counters["late"] += int(late and runner.settings.inverse_lag > 0)
            self._pass_on(hub, runner, wait=True)
            for answer in hub.answers("inverse", since) if self._asked == since else ():
                results |= answer
            self._warn(hub)
        self._posted = -1
        device = runner.layers[0].weight.device
        rungs = {name: result[0] for name, result in results.items()}
        if exchange is not None:
            rungs = json.loads(agree.tell(exchange.groups, json.dumps(rungs), device))
        due = [layer for layer in runner.layers if layer.name in rungs]
        for layer in due:
            self._adopt(runner, layer, rungs[layer.name], results.get(layer.name), since)
        if due:
            runner.count_refresh()
            runner.publish_bases()

    def _adopt(self, runner: Runner, layer: Layer, rungs: dict[str, Rung], result: Any, since: int) -> None:
        """Broadcast one layer's decompositions among the gradient workers and use them."""
        state, solver, exchange = runner.states[layer.name], runner.settings.solver, runner.exchange
        found = {}
        for factor in layer.spec.factors:
            key = factor.key
            if rungs[key] in ("kept", "raw"):
                continue
            size = factor.wire_elements(solver, whole=True)
            flat = torch.zeros(size + factor.num_blocks, dtype=layer.dtype, device=layer.weight.device)
            if result is not None:
                _, flats, means = result
                flat = torch.cat([flats[key].reshape(-1), means[key].reshape(-1)]).to(flat)
            if exchange is not None:
                groups = exchange.groups
                flat = collectives.broadcast(flat.contiguous(), groups.global_rank(0), groups.everyone).wait()
            is_inverse = solver == "cholesky" or rungs[key] == "cholesky"
            found[key] = shares.unpack_decomposition(
                flat[:size], factor, is_inverse=is_inverse, packed=solver == "cholesky"
            )
            state.means[key] = flat[size:].clone()
        for rung in rungs.values():
            runner.counters[rung] += 1
        stages.adopt(layer, state, rungs, found, runner.settings, since)
        if runner.settings.tf32:
            runner.note_rounding(layer, stages.may_round(layer, state, runner.settings, runner.step))

    def _warn(self, hub: Hub) -> None:
        fresh = {who: why for who, why in hub.lost.items() if who not in self._told}
        if fresh:
            self._told |= set(fresh)
            which = ", ".join(f"{role} worker {number} ({why})" for (role, number), why in sorted(fresh.items()))
            warnings.warn(f"lost: {which}; training goes on with the decompositions there are", stacklevel=2)

    def forget(self) -> None:
        """Let nothing come of what is under way: the step and the weights are others. Helpers go on with the factors
        they have."""
        self._posted = self._asked = -1

    def close(self) -> None:
        self.place.close()
