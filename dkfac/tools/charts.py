"""Charts of timelines and refresh intervals, drawn with matplotlib.

Input: timelines, or the interval history of ``kfac.report()``. Output: an image file. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dkfac.plan.spec import is_input
from dkfac.plan.timeline import Timeline

_STAGE_COLOURS = {
    "forward": "#4c78a8", "backward": "#72b7b2", "measure": "#e45756", "pack": "#ff9da6", "average": "#9d755d",
    "decompose": "#b279a2", "precondition": "#54a24b", "optimizer": "#bab0ac", "gradients": "#eeca3b",
    "factors": "#f58518", "decompositions": "#d67195", "header": "#79706e", "means": "#79706e", "status": "#79706e",
    "norms": "#79706e", "weights": "#eeca3b", "all-reduce": "#f58518", "reduce-scatter": "#f58518",
    "all-gather": "#d67195", "exchange": "#d67195",
}  # fmt: skip


def draw_gantt(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draw timelines below each other on one scale, with two rows per rank: compute above transfers."""
    plt = _matplotlib()
    rows = [max(1, len(timeline.ranks)) for _, timeline in timelines]
    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(11, 1.2 + 0.5 * sum(rows)), sharex=True, squeeze=False, height_ratios=rows
    )
    used: set[str] = set()
    for ax, (title, timeline) in zip(axes[:, 0], timelines, strict=True):
        for place, rank in enumerate(timeline.ranks):
            for span in timeline.of(rank):
                low = 2 * place + (0.9 if span.stream == "network" else 0.0)
                colour = _STAGE_COLOURS.get(span.stage, "#79706e")
                ax.broken_barh([(1e3 * span.begin, 1e3 * (span.end - span.begin))], (low, 0.8), color=colour)
                used.add(span.stage)
        ax.set_yticks([2 * place + 0.85 for place in range(len(timeline.ranks))])
        ax.set_yticklabels([f"rank {rank}" for rank in timeline.ranks])
        ax.set_title(f"{title}: {1e3 * timeline.seconds:.1f} ms", fontsize=9)
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel("ms; for each rank, compute above transfers")
    handles = [plt.Rectangle((0, 0), 1, 1, color=_STAGE_COLOURS.get(stage, "#79706e")) for stage in sorted(used)]
    figure.legend(handles, sorted(used), ncol=8, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    figure.savefig(path, bbox_inches="tight", dpi=120)
    plt.close(figure)


def draw_intervals(history: Sequence[Mapping[str, Any]], steps: int, path: Path) -> None:
    """Draw the intervals of ``kfac.report()["interval_history"]`` over the steps, one line per factor.

    Input factors are in the upper panel, the others in the lower one; colors run from the first layer (dark) to the
    last.
    """
    plt = _matplotlib()
    lines: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for entry in history:
        lines.setdefault((entry["layer"], entry["factor"]), [(0, 1)]).append((entry["step"], entry["interval"]))
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    order = {layer: place for place, layer in enumerate(dict.fromkeys(layer for layer, _ in lines))}
    for (layer, key), points in lines.items():
        ax = axes[0 if is_input(key) else 1]
        colour = plt.cm.viridis(order[layer] / max(1, len(order) - 1))
        xs, ys = zip(*points, (steps, points[-1][1]), strict=True)
        ax.step(xs, ys, where="post", color=colour, linewidth=1, label=f"{layer}.{key}")
    for ax, title in zip(axes, ("inputs", "gradients"), strict=True):
        ax.set_ylabel(f"interval of {title}, steps")
        ax.set_yscale("log")
        if len(ax.get_lines()) <= 12:
            ax.legend(fontsize=6)
    axes[1].set_xlabel("step")
    figure.savefig(path, bbox_inches="tight", dpi=120)
    plt.close(figure)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
