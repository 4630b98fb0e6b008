"""A refresh of decompositions: what is due, decomposed now or beside the steps to come, agreed on and shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dkfac import conclude, first, shares, stages
from dkfac.exchange import vector
from dkfac.layers.layer import Layer
from dkfac.ops.precision import tf32
from dkfac.staleness import Staleness

if TYPE_CHECKING:
    from dkfac.run import Runner


def decompose(runner: Runner) -> None:
    """Refresh the decompositions; between refreshes only those of layers first seen since the last.

    One process improves those it has in place and without waiting; several, and what is new, go the careful way. With
    ``inverse_lag`` what is not new is begun here and taken up at a later step.
    """
    if runner.remote is not None:
        runner.remote.refresh(runner)
        return
    if runner.staleness is not None:
        _decompose_changed(runner, runner.staleness)
        return
    take_up(runner)
    lag = runner.settings.inverse_lag
    new = {layer.name for layer in runner.layers if runner.states[layer.name].decomposed_at < 0}
    if runner.exchange is None:  # what was never called needs no look, which would wait for the device
        new = {name for name in new if runner.states[name].running}
    due = {layer.name for layer in runner.layers} if runner.decomposing else set()
    if runner.exchange is None and not lag:
        due = runner.renewal.run(runner, new)
    if not due and not (runner.measuring and new):
        return
    if runner.exchange is not None:
        conclude.end_warmup(runner, runner.exchange)
    means = shares.agree_on_means(runner)
    if runner.exchange is not None and runner.measuring:
        conclude.look_at_calls(runner)
        if runner.decomposing and runner.settings.wire_form == "rows":
            conclude.choose_rows(runner, runner.exchange)
    layers = [layer for layer in runner.layers if layer.name in due | new and layer.name in means]
    if lag:
        runner.later.begin(runner, [layer for layer in layers if layer.name not in new], means)
        layers = [layer for layer in layers if layer.name in new]
    for layer in layers:
        runner.states[layer.name].means = means[layer.name]
    if layers:
        _decompose_now(runner, layers)
        if runner.decomposing or any(layer.name in new for layer in layers):
            runner.count_refresh()


def take_up(runner: Runner) -> None:
    """Use what was begun earlier if its step has come."""
    later = runner.later
    if not later.is_due(runner.step):
        return
    begun = later.take(runner)
    for layer in begun.layers:
        if layer.name in begun.states:
            means = begun.states[layer.name].means
            here = {key: mean.to(layer.weight.device, layer.dtype) for key, mean in means.items()}
            runner.states[layer.name].means = here
    _adopt(runner, begun.layers, begun.found, begun.error, begun.since)
    runner.count_refresh()


def _decompose_changed(runner: Runner, staleness: Staleness) -> None:
    """Refresh the statistics whose interval is over and of which enough was seen, and set their next intervals."""
    ready = staleness.ready(runner)
    if not ready:
        return
    changes = vector(staleness.changes(runner, ready), runner.layers[0].weight.device)
    if runner.exchange is not None:
        conclude.end_warmup(runner, runner.exchange)
        changes = runner.exchange.sum_vector("changes", changes)
        conclude.look_at_calls(runner)
    told = changes.tolist()
    means = shares.agree_on_means(runner)
    ready = frozenset(name for name in staleness.without_lost(ready, told) if name[0] in means)
    names = {name for name, _ in ready}
    layers = [layer for layer in runner.layers if layer.name in names]
    for layer in layers:
        runner.states[layer.name].means = means[layer.name]
    runner.refreshing = ready
    try:
        found = _decompose_now(runner, layers) if layers else {}
    finally:
        runner.refreshing = None
    staleness.conclude(runner, ready, told, found)
    if layers:
        runner.count_refresh()


def _decompose_now(runner: Runner, due: list[Layer]) -> shares.Found:
    found: shares.Found = {}
    error: BaseException | None = None
    try:
        keys = {layer.name: shares.decomposed_here(runner, layer) for layer in due}
        found = first.decompositions(runner, due, keys)
        for layer in due:
            begun = found.get(layer.name, {})
            others = [key for key in keys[layer.name] if key not in begun]
            with tf32(False, layer.weight.device):
                both = begun | stages.decompose(layer, runner.states[layer.name], others, runner.settings, runner.step)
            found[layer.name] = {key: both[key] for key in keys[layer.name]}
    except Exception as caught:
        if runner.exchange is None:
            raise
        error = caught
    _adopt(runner, due, found, error, runner.step)
    return found


def _adopt(runner: Runner, due: list[Layer], found: shares.Found, error: BaseException | None, since: int) -> None:
    """Agree on how it went, share what was found, and use it from now on. ``since``: the step of the factors."""
    settings = runner.settings
    rungs = shares.agree_on_rungs(runner, due, found, error)
    results = shares.share_decompositions(runner, due, found, rungs, since)
    for layer in due:
        state = runner.states[layer.name]
        stages.adopt(layer, state, rungs[layer.name], results[layer.name], settings, since)
        for rung in rungs[layer.name].values():
            runner.counters[rung] += 1
        if settings.tf32:
            runner.note_rounding(layer, stages.may_round(layer, state, settings, runner.step))
    runner.notices.thawed()
    runner.publish_bases()
    divided = [] if runner.is_adam else due  # Adam has no damping
    dominated = sum(stages.is_dominated(la, runner.states[la.name], settings, runner.step) for la in divided)
    runner.watch(dominated / len(due))
