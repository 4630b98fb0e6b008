"""Section on the bytes that ranks send, by stage and kind of step.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dkfac.tools.report_page.bars import Bar, bar_chart, stage_colour
from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import Html, charts, details, html_table, join_html, size, tag, unit_of_bytes
from dkfac.tools.report_page.read import RunRecord, as_dict, experimental, real

MEASURING = ("header", "factors")
REFRESHING = ("changes", "means", "status", "decompositions")
"""Stages that only measuring and refresh steps have; other stages send at each step."""


def wire_section(groups: Sequence[Group]) -> Html | None:
    """Return the bytes that rank 0 passes to collectives, once for each distinct setting."""
    found: dict[str, tuple[RunRecord, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            if run.report.get("transfers"):
                key = json.dumps([run.report["transfers"], _intervals(run)])
                found.setdefault(key, (run, []))[1].append(group.label)
    if not found:
        return None
    parts = []
    for run, names in found.values():
        parts += [tag("h3", ", ".join(dict.fromkeys(names)))] if len(found) > 1 else []
        parts.append(_run(run))
    return join_html(parts)


def _run(run: RunRecord) -> Html:
    transfers = [as_dict(transfer) for transfer in run.report["transfers"]]
    by_stage: dict[str, float] = defaultdict(float)
    for transfer in transfers:
        by_stage[str(transfer.get("stage"))] += real(transfer.get("bytes")) or 0.0
    kinds = {
        "ordinary step": _less(by_stage, (*MEASURING, *REFRESHING)),
        "factor step": _less(by_stage, REFRESHING),
        "refresh step": dict(by_stage),
    }
    said = (
        "Payload that rank 0 passes to collectives, without DDP's gradient averaging. Factors are sent when they are "
        "measured, decompositions when they are refreshed."
    )
    intervals = _intervals(run)
    if intervals is not None:
        every, refresh = intervals
        mean = {s: b / (every if s in MEASURING else refresh if s in REFRESHING else 1) for s, b in by_stage.items()}
        kinds[f"mean of {refresh:g} steps"] = mean
        said += " The mean uses the intervals after the warm-up."
    else:
        said += " Each factor has its own interval here: a refresh sends those that are due, at most the amount shown."
    kinds = {name: stages for name, stages in kinds.items() if stages}
    unit, factor = unit_of_bytes(sum(by_stage.values()))
    rows: list[Bar] = [(name, {s: b / factor for s, b in stages.items()}) for name, stages in kinds.items()]
    head = ["stage", "how", "ranks", "dtype", "transfers", "payload", "padding"]
    return join_html([
        charts(bar_chart("Bytes on the wire", rows, f"{unit} per step", {s: stage_colour(s) for s in by_stage})),
        tag("p", said, class_="note"),
        details("All transfers", html_table(head, _rows(transfers))),
    ])  # fmt: skip


def _less(stages: dict[str, float], left_out: Sequence[str]) -> dict[str, float]:
    return {stage: value for stage, value in stages.items() if stage not in left_out}


def _intervals(run: RunRecord) -> tuple[float, float] | None:
    """Return the intervals of measuring and refreshing, if they are the same for all factors."""
    settings = as_dict(run.settings.get("kfac"))
    every, refresh = real(settings.get("factor_interval")), real(settings.get("inverse_interval"))
    is_fixed = experimental(settings).get("staleness", "fixed") == "fixed"
    return (every, refresh) if is_fixed and every and refresh else None


def _rows(transfers: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return one row for each group of equal transfers."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for transfer in transfers:
        key = tuple(str(transfer.get(name)) for name in ("stage", "how", "num_ranks", "dtype"))
        sums = found.setdefault(key, [0.0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += real(transfer.get("bytes")) or 0.0
        sums[2] += real(transfer.get("padding_bytes")) or 0.0
    return [[*key, f"{count:g}", size(total), size(padding)] for key, (count, total, padding) in found.items()]
