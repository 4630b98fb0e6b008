"""Section on the plan: which rank decomposes and preconditions which layer, and the memory of each rank.

Input: groups of runs. Output: HTML. Owns: nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from dkfac.plan.plan import Placement, Plan
from dkfac.plan.spec import FactorSpec, LayerSpec
from dkfac.tools.report_page.bars import bar_chart
from dkfac.tools.report_page.chart import colour
from dkfac.tools.report_page.groups import Group
from dkfac.tools.report_page.html import (
    DASH,
    Html,
    charts,
    counted,
    details,
    html_table,
    join_html,
    number,
    size,
    tag,
    unit_of_bytes,
)
from dkfac.tools.report_page.read import RunRecord, as_dict, real

_MAX_RANKS, _MAX_LAYERS = 64, 400
"""Most ranks and layers that are shown."""


def plans_section(groups: Sequence[Group]) -> Html | None:
    """Return each distinct plan once, with the labels of the groups that used it."""
    found: dict[str, list[tuple[str, RunRecord]]] = {}
    for group in groups:
        for run in group.runs:
            if run.summary.get("plan") is not None:
                key = json.dumps(run.summary["plan"], sort_keys=True)
                found.setdefault(key, []).append((group.label, run))
    if not found:
        return None
    parts = []
    for key, users in found.items():
        names = ", ".join(dict.fromkeys(label for label, _ in users))
        parts += [tag("h3", names)] if len(found) > 1 else []
        try:
            parts.append(_picture(Plan.from_json(key), users[0][1]))
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
        ) as error:  # written by another version
            folders, why = ", ".join(run.name for _, run in users), str(error) or type(error).__name__
            parts.append(tag("p", f"The plan of {folders} cannot be drawn: {why}", class_="note"))
    return join_html(parts)


def _picture(plan: Plan, run: RunRecord) -> Html:
    ranks = range(min(plan.world_size, _MAX_RANKS))
    layers = list(zip(plan.layers, plan.placements, strict=True))[:_MAX_LAYERS]
    said = f"Strategy {plan.strategy}, {counted(plan.world_size, 'rank')}, solver {plan.solver}. "
    said += "A letter marks a factor that the rank decomposes, darker for more work; P a layer that it preconditions."
    left = []
    if plan.world_size > len(ranks):
        left.append(f"ranks from {len(ranks)} on")
    if len(plan.layers) > len(layers):
        left.append(f"{len(plan.layers) - len(layers)} more layers")
    said += f" Not shown: {' and '.join(left)}." if left else ""
    most = max((_work(factor) for layer, _ in layers for factor in layer.factors), default=1.0)
    head = ["layer", "factors", *(f"rank {rank}" for rank in ranks)]
    rows = [
        [
            tag("span", layer.name, class_="name"),
            _sizes(layer),
            *(_cell(layer, placement, rank, most) for rank in ranks),
        ]
        for layer, placement in layers
    ]
    texts = [
        [layer.name, layer.kind, _sizes(layer), f"{layer.grad_elements:,}", _told(layer, p.factors),
         _told(layer, p.decomposed_by), _ranks(p.preconditioned_by)]
        for layer, p in layers
    ]  # fmt: skip
    about = ["layer", "kind", "factors", "parameters", "factors stored by", "decomposed by", "preconditioned by"]
    return join_html([
        tag("p", said, class_="note"),
        html_table(head, rows, class_="plan"),
        details("The plan as text", html_table(about, texts), _repr(run)),
        tag("h3", "Memory of each rank"),
        _memory(plan, run, list(ranks)),
    ])  # fmt: skip


def _cell(layer: LayerSpec, placement: Placement, rank: int, most: float) -> Html:
    """Return one chip for each task of a rank in a layer."""
    chips = []
    for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
        if rank in by:
            strength = 10 + round(35 * (_work(factor) / most) ** (1 / 3))
            title = f"rank {rank} decomposes {factor.key} of {layer.name}: {_size(factor)}"
            back = f"--strength:{strength}%"
            chips.append(tag("b", factor.key, class_="decompose", style=back, title=title))
    if rank in placement.preconditioned_by:
        title = f"rank {rank} preconditions the gradient of {layer.name}"
        chips.append(tag("b", "P", class_="precondition", title=title))
    return join_html(chips) if chips else tag("span", "·", class_="nothing")


def _memory(plan: Plan, run: RunRecord, ranks: list[int]) -> Html:
    """Return the planned and the measured memory of each rank, as charts and as a table."""
    planned = [plan.memory_bytes(rank) for rank in ranks]
    peaks = run.summary.get("peak_memory_bytes")
    peak = [real(value) for value in peaks][: len(ranks)] if isinstance(peaks, list) else []
    peak += [None] * (len(ranks) - len(peak))
    unit, factor = unit_of_bytes(max(sum(parts.values()) for parts in planned))
    rows = [(f"rank {r}", {k: v / factor for k, v in p.items()}) for r, p in zip(ranks, planned, strict=True)]
    big, large = unit_of_bytes(max([value or 0.0 for value in peak], default=0.0))
    tops = [(f"rank {r}", {"peak": v / large}) for r, v in zip(ranks, peak, strict=True) if v is not None]
    work = [_work_of(plan, rank) for rank in ranks]
    whole = max(1.0, sum(_work(f) for layer in plan.layers for f in layer.factors))
    shares = [(f"rank {r}", {"share": 100 * value / whole}) for r, value in zip(ranks, work, strict=True)]
    where = "GPU" if "cpu" not in str(run.environment.get("device", "cpu")) else "process"
    held = real(run.report.get("total_memory_bytes"))
    at = real(run.report.get("rank"))
    cells = [
        [f"rank {r}", size(p["factors"]), size(p["decompositions"]), size(held) if r == at else DASH,
         size(top), f"{number(100 * w / whole, 3)}%"]
        for r, p, top, w in zip(ranks, planned, peak, work, strict=True)
    ]  # fmt: skip
    head = ["rank", "factors (plan)", "decompositions (plan)", "K-FAC's state, measured", f"peak of the {where}",
            "share of decomposing"]  # fmt: skip
    said = "The work of a decomposition is counted as dimension cubed; work that several ranks repeat counts for each."
    kfac = {"factors": colour(7), "decompositions": colour(3)}
    return join_html([
        charts(
            bar_chart("K-FAC's state by the plan", rows, unit, kfac),
            bar_chart(f"Peak memory of the {where}, measured", tops, big, {"peak": colour(0)}),
            bar_chart("Work of decomposing", shares, "% of the work of all factors", {"share": colour(3)}),
        ),
        tag("p", said, class_="note"),
        details("Data of these charts", html_table(head, cells)),
    ])  # fmt: skip


def _work(factor: FactorSpec) -> float:
    """Return the work of a decomposition as dimension cubed; 0 for a diagonal factor."""
    if factor.form == "diagonal":
        return 0.0
    return float(factor.num_blocks * factor.dim**3)


def _work_of(plan: Plan, rank: int) -> float:
    return sum(
        _work(factor)
        for layer, placement in zip(plan.layers, plan.placements, strict=True)
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True)
        if rank in by
    )


def _size(factor: FactorSpec) -> str:
    blocks = f"{factor.num_blocks} of " if factor.num_blocks > 1 else ""
    shape = f"{factor.dim} × {factor.dim}" if factor.form == "dense" else f"diagonal of {factor.dim}"
    return f"{blocks}{shape}"


def _sizes(layer: LayerSpec) -> str:
    return ", ".join(
        f"{f.key} {f'{f.num_blocks}·' if f.num_blocks > 1 else ''}{f.dim}{'' if f.form == 'dense' else ' (diagonal)'}"
        for f in layer.factors
    )


def _told(layer: LayerSpec, each: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{f.key}: {_ranks(ranks)}" for f, ranks in zip(layer.factors, each, strict=True))


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``(0, 1, 2, 5)`` as 0–2 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _repr(run: RunRecord) -> Html:
    layers_text = run.summary.get("layers")
    memory = as_dict(run.report.get("memory_bytes"))
    parts = [tag("pre", layers_text)] if isinstance(layers_text, str) else []
    if memory:
        rows = [[name, size(real(value))] for name, value in memory.items()]
        parts.append(html_table(["layer", "K-FAC's state on rank 0, measured"], rows))
    return join_html(parts)
