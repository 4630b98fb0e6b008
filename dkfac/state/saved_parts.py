"""What each rank saves of K-FAC's state such that every piece is saved, and sent, once.

Input: the state of this rank, and the plan. Output: the part of it that no earlier rank has. Owns: nothing.
"""

from __future__ import annotations

from typing import Any

from dkfac.comm.transport import Transport
from dkfac.layers.rank_plan import RankPlan
from dkfac.state.checkpoint import OF_WORKERS, ON_ALL_RANKS, merge


def once(state: dict[str, Any], ranks: RankPlan) -> dict[str, Any]:
    """Return the state without what a rank before this one has too."""
    if ranks.rank == 0:
        return state
    return {"layers": {name: _shard_layer(saved, ranks, name) for name, saved in state["layers"].items()}} | {
        key: value for key, value in state.items() if key == "staleness"
    }


def _shard_layer(saved: dict[str, Any], ranks: RankPlan, name: str) -> dict[str, Any]:
    who, factors = ranks.placements[name], ranks.by_name[name].spec.factors
    held, decomposed = dict[str, int](), dict[str, int]()
    for factor, holders, by in zip(factors, who.factors, who.decomposed_by, strict=True):
        measures = who.statistics if ranks.plan.moments else ()
        held[factor.key] = min(holders)
        decomposed[factor.key] = min((*who.preconditioned_by, *by, *measures))
    kept: dict[str, Any] = {}
    for section, value in saved.items():
        match section:
            case "running":
                kept[section] = _of_rank(value, held, ranks.rank)
            case "begun":
                kept[section] = {"running": _of_rank(value["running"], held, ranks.rank)}
            case "decompositions":
                kept[section] = _of_rank(value, decomposed, ranks.rank)
            case _ if section in OF_WORKERS and min(who.preconditioned_by) != ranks.rank:
                continue
            case _ if section not in ON_ALL_RANKS:
                kept[section] = value
    return kept


def _of_rank(values: dict[str, Any], owners: dict[str, int], rank: int) -> dict[str, Any]:
    return {key: value for key, value in values.items() if owners[key] == rank}


def share_out(
    state: dict[str, Any], ranks: RankPlan, transport: Transport, *, gather: bool, shard: bool
) -> dict[str, Any]:
    """Return this rank's state; with ``gather`` the whole state on rank 0 and an empty dict elsewhere, which is a
    collective, through the CPU; with ``shard`` what no earlier rank has."""
    if not gather:
        return once(state, ranks) if shard else state
    parts = transport.gather(once(state, ranks))
    whole: dict[str, Any] = {} if parts is None else merge(parts)
    return whole
