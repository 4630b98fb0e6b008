"""What ranks conclude, all alike, from what they counted together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dkfac import reduce
from dkfac.exchange import Exchange
from dkfac.plan.plan import Plan
from dkfac.plan.program import expand

if TYPE_CHECKING:
    from dkfac.run import Runner


def look_at_calls(runner: Runner) -> None:
    """Draw conclusions from how often all ranks together called the layers. Waits for the device."""
    reduced = runner.last_reduced
    if reduced is None or float(reduced.num_bad) > 0 or float(reduced.calls.sum()) == 0:
        return
    calls, again = reduced.calls.tolist(), reduced.again.tolist()
    alone = {n for n, p in runner.placements.items() if len(p.statistics) == 1}  # others' calls are not counted
    runner.notices.capture({name for name, i in runner.index.items() if calls[i] > 0} | alone, 0)
    twice = {name for name, i in runner.index.items() if again[i] > 0}
    runner.tape.give_up_moments(twice, warn=runner.rank == 0)
    overlap = runner.tape.overlap
    if overlap is not None and not overlap.layers:
        passes = float(reduced.num_passes)
        once = {name for name, i in runner.index.items() if calls[i] == passes and again[i] == 0}
        overlap.layers = frozenset(once)


def choose_rows(runner: Runner, exchange: Exchange) -> None:
    """Let rows travel instead of sums where every rank had few of them; a new plan, agreed by what was gathered."""
    told = exchange.gather_numbers([runner.rows_seen.get(layer.name, 0.0) for layer in runner.layers])
    runner.rows_seen.clear()
    wanted = []
    for layer, numbers in zip(runner.layers, zip(*told, strict=True), strict=True):
        if min(numbers) >= 0 and layer.kind in ("linear", "conv1d-transposed"):
            wanted += reduce.worth_as_rows(layer.spec, runner.placements[layer.name], int(max(numbers)))
    if tuple(wanted) != runner.plan.rows:
        _change(runner, exchange, replace(runner.plan, rows=tuple(wanted)))
        runner.tape.as_rows = {(name, key) for name, key, _ in wanted}


def end_warmup(runner: Runner, exchange: Exchange) -> None:
    """Let decompositions travel in pieces from the step on in which they are."""
    if runner.plan.whole and runner.step >= runner.settings.split_warmup:
        _change(runner, exchange, replace(runner.plan, whole=False))


def _change(runner: Runner, exchange: Exchange, plan: Plan) -> None:
    runner.plan, runner.exchange = plan, Exchange(plan, expand(plan), exchange.groups, exchange.device)
    runner.set_overlap()
