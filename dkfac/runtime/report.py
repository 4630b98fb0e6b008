"""K-FAC's own reports: the line printed when it is attached, the table of layers, metrics.

Input: layers, settings, states and counters. Output: strings and dicts. Owns: nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dkfac.capture.timing import StageTimer
from dkfac.comm.transport import Transport
from dkfac.config.settings import Settings
from dkfac.experimental.staleness import FactorIntervals
from dkfac.factors.layer_state import LayerState
from dkfac.layers.find import Left
from dkfac.layers.layer import Layer
from dkfac.plan.plan import Plan
from dkfac.plan.sharing import per_rank
from dkfac.plan.spec import Ranks

COUNTERS = (
    "refreshes",
    "late_refreshes",
    "repaired_factors",
    "fallbacks_float64",
    "fallbacks_cholesky",
    "fallbacks_kept",
    "fallbacks_raw",
    "skipped_batches",
    "abandoned_steps",
    "clipped_steps",
)


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the timeline of a step is recorded from (``tools/measure/beside.py``)."""

    settings: Settings
    layers: list[Layer]
    transport: Transport
    timer: StageTimer
    rows_seen: Mapping[str, float]
    """Rows of each layer in a step; see ``Replanner``."""


def announcement(layers: list[Layer], left: list[Left], settings: Settings, optimizer: Any, plan: Plan) -> str:
    """Return the line that summarizes what was attached, with the share of the optimizer's parameters."""
    ours = sum(layer.spec.grad_elements for layer in layers)
    total = ours + sum(item.num_parameters for item in left)
    if optimizer is not None:
        total = sum({id(p): p.numel() for group in optimizer.param_groups for p in group["params"]}.values())
    share = ours / max(1, total)
    extra = _size(sum(state_bytes(layer, settings) for layer in layers))
    where = ""
    if plan.world_size > 1:
        extra = f"{_size(max(bytes_by_rank(layers, settings, plan)))} per rank"
        where = f", strategy {plan.strategy} on {plan.world_size} ranks"
    damping = "scheduled" if callable(settings.damping) else f"{settings.damping:g}"
    is_adam = settings.takes_steps
    how = f"damping {damping} {settings.damping_mode}, rescale {settings.rescale}, "
    is_plain = settings.curvature == "adam-eigen"
    advice = "try a larger lr and fewer steps: dkfac.suggest" if is_plain else "keep your lr and schedule"
    early = f", more often before step {settings.early_steps}" if settings.early_steps else ""
    when = f"factors every {settings.factor_interval}, inverses every {settings.inverse_interval} steps{early}"
    if settings.experimental.staleness != "fixed":
        when = f"each factor refreshed as it changes, at least every {settings.experimental.max_interval} steps"
    speed = "".join(f"{name}, " for name in ("tf32", "cuda_graph") if getattr(settings, name))
    room = _size(3 * sum(layer.spec.grad_elements * layer.dtype.itemsize for layer in layers))
    graphs = f" (graphs: up to {room} more)" if settings.cuda_graph else ""
    with_what = type(optimizer).__name__ if optimizer is not None else "your own steps"
    return (
        f"dkfac: {len(layers)} layers with {share:.1%} of the parameters preconditioned, for {with_what} "
        f"({settings.curvature}, {settings.solver}, {speed}{'' if is_adam else how}{when}{where}); about {extra} "
        f"extra memory{graphs}; {advice}"
    )


def state_bytes(layer: Layer, settings: Settings) -> int:
    """Return the bytes that K-FAC keeps for a layer."""
    elements = layer.spec.state_elements
    if settings.measures_moments and not layer.is_norm and layer.kind != "embedding":
        elements += layer.spec.grad_elements
    if settings.takes_steps:  # the optimizer does not keep these
        elements += 2 * layer.spec.grad_elements
    return elements * layer.dtype.itemsize


def bytes_by_rank(layers: list[Layer], settings: Settings, plan: Plan) -> list[int]:
    """Return the bytes that K-FAC keeps on each rank: factors, decompositions, and moments of EKFAC or Adam."""
    shares = list[tuple[Ranks, float]]()
    for layer in layers:
        number = 2 * settings.takes_steps + (plan.moments and layer.spec.has_moments)
        if number:
            size = number * layer.spec.grad_elements * layer.dtype.itemsize
            shares.append((plan.placement(layer.name).preconditioned_by, size))
    moments = per_rank(shares, plan.world_size)
    return [held + int(more) for held, more in zip(plan.bytes_by_rank(), moments, strict=True)]


def warn_of_left(left: list[Left]) -> None:
    tied = [item for item in left if item.warn]
    if tied:
        lines = "; ".join(f"layer {item.name!r} {item.reason}" for item in tied)
        first = tied[0].name
        warnings.warn(
            f"K-FAC leaves shared weights to the optimizer, because their gradient is the sum of several uses: "
            f"{lines}. To precondition one use with that use's statistics, exclude the other: skip=[{first!r}].",
            stacklevel=4,
        )


def warn_of_partial_optimizer(optimizer: Any) -> None:
    warnings.warn(
        'share="weights": on this rank the optimizer, and so optimizer.state_dict(), has state only for the layers '
        "that the rank owns. kfac.state_dict() includes this state and redistributes it when it is loaded.",
        stacklevel=4,
    )


def table(layers: list[Layer], left: list[Left], states: dict[str, LayerState]) -> str:
    """Return a table of what is preconditioned, with its dimensions, and what is left to the optimizer and why."""
    rows = [("layer", "kind", "factors", "parameters", "")]
    for layer in layers:
        dims = " ".join(
            f"{f.key}={f'{f.num_blocks}x' if f.num_blocks > 1 else ''}{f.dim}{'d' if f.form == 'diagonal' else ''}"
            for f in layer.spec.factors
        )
        note = "" if states[layer.name].running else "not measured yet"
        rows.append((layer.name, layer.kind, dims, f"{layer.spec.grad_elements:,}", note))
    ours = sum(layer.spec.grad_elements for layer in layers)
    others = sum(item.num_parameters for item in left)
    lines = [f"KFAC: {len(layers)} layers, {ours:,} parameters preconditioned", *_align(rows)]
    if left:
        lines.append(f"left to the optimizer: {others:,} parameters")
        lines += _align([(item.name, item.what, f"{item.num_parameters:,}", item.reason) for item in left])
    return "\n".join(lines)


def metrics(
    step: int, settings: Settings, counters: dict[str, int], device: dict[str, Tensor], abandoned: int
) -> dict[str, float]:
    """Return a flat dict of floats. Synchronizes with the device."""
    last = max(0, step - 1)
    result = {
        "step": float(step),
        "damping": settings.at("damping", last),
        "refreshes": float(counters["refreshes"]),
        "skipped_batches": 0.0,
        "abandoned_steps": float(abandoned),
    }
    result["late_refreshes"] = float(counters["late"])
    result["repaired_factors"] = float(counters["repaired"])
    for outcome in ("float64", "cholesky", "kept", "raw"):
        result[f"fallbacks_{outcome}"] = float(counters[outcome])
    result |= {name: float(value) for name, value in device.items()}
    return result


def full(
    step: int,
    counters: dict[str, int],
    states: dict[str, LayerState],
    stage_seconds: dict[str, float],
    tf32_unsafe_layers: set[str],
    staleness: FactorIntervals | None,
    transport: Transport,
) -> dict[str, Any]:
    """Return counters, memory in bytes, seconds by stage, and the plan's memory and transfers."""
    plan, rank = transport.plan, transport.rank
    held = {name: state.num_bytes() for name, state in states.items()}
    return {
        "steps": step,
        "layers": len(states),
        "counters": counters,
        "memory_bytes": held,
        "total_memory_bytes": sum(held.values()),
        "stage_seconds": stage_seconds,
        "delicate_layers": sorted(tf32_unsafe_layers),
        **intervals(staleness),
        "strategy": plan.strategy,
        "rank": rank,
        "world_size": plan.world_size,
        "rank_memory_bytes": plan.bytes_by_rank(),
        "transfers": [
            {"stage": t.stage, "how": t.how, "num_ranks": len(t.group), "dtype": t.dtype,
             "bytes": t.num_bytes(rank), "padding_bytes": t.padding_bytes}
            for t in transport.program.transfers
            if rank in t.group
        ],
    }  # fmt: skip


def intervals(staleness: FactorIntervals | None) -> dict[str, Any]:
    """Return the refresh intervals, if each factor has its own."""
    if staleness is None:
        return {}
    history = [{"step": s, "layer": name, "factor": key, "interval": n} for s, name, key, n in staleness.history]
    return {
        "intervals": staleness.intervals(),
        "interval_history": history,
        "refreshed_factors": staleness.num_refreshes,
        "staleness_memory_bytes": staleness.num_bytes(),
    }


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
