"""Time K-FAC's own computation on this machine, by running it on one rank with layers of each size.

Input: a device. Output: cost curves by stage. Owns: nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dkfac.kfac import KFAC
from dkfac.ops.pack import pack_triangle, unpack_triangle
from dkfac.plan.costs import Costs
from dkfac.plan.curves import Curve
from dkfac.tools.measure.fit import Measurements, fit_curve

MEASURED_DIMS = {"cpu": (16, 32, 64, 128, 256, 512, 768, 1024), "cuda": (64, 128, 256, 512, 1024, 2048, 4608)}
_NUM_ROWS = {"cpu": 256, "cuda": 16384}
"""Rows per layer and step: enough for a matrix product to take longer than its launch."""
_NUM_LAYERS, _WIDE_DIM = {"cpu": 1, "cuda": 8}, 1024
"""Number of equal layers in the model up to width ``_WIDE_DIM``; at most two above it. A GPU batches equal layers, as
it does in a real network."""
_MAX_STEP_SECONDS = 2.0
"""If a step takes longer than this, larger dimensions are not measured."""
SOLVERS = ("eigen", "cholesky", "warm-eigen")


def measure_costs(
    device: torch.device,
    process_group: Any = None,
    *,
    largest: int | None = None,
    autocast: torch.dtype | None = None,
    say: Callable[[str], Any] = print,
) -> Costs:
    """Return a cost curve for each stage of a step.

    ``process_group``: under torch.distributed, a group that contains only this rank.
    """
    rows = _NUM_ROWS[device.type]
    points: dict[str, list[tuple[float, float]]] = {}
    for dim in [dim for dim in MEASURED_DIMS[device.type] if largest is None or dim <= largest]:
        longest = 0.0
        for solver in SOLVERS:
            found = _stages(dim, solver, device, process_group, autocast)
            longest = max(longest, sum(found.values()))
            passes = 2 if solver == "cholesky" else 4
            for what, size, seconds in (
                (solver, dim, found["decompose"] / 2),
                ("precondition", passes * 2.0 * dim**3, found["precondition"]),
                ("factor", 2.0 * rows * dim**2, found["capture"] / 2),
                ("average", float(dim) ** 2, found["average"] / 2),
            ):
                points.setdefault(what, []).append((float(size), seconds))
        points.setdefault("products", []).append((2.0 * rows * dim**2, _product(dim, device, autocast)))
        points.setdefault("pack", []).append((dim * (dim + 1) / 2, _packing(dim, device)))
        if longest > _MAX_STEP_SECONDS:
            say(f"a step with one layer of width {dim} takes {longest:.1f} s: larger layers are extrapolated")
            break
    return Costs(curves={name: _curve(values, 3 if name in SOLVERS else 1) for name, values in points.items()})


def _curve(points: Measurements, degree: int) -> Curve:
    """Return a curve fitted to the median of the points of each size."""
    sizes = sorted({size for size, _ in points})
    middle = [sorted(seconds for other, seconds in points if other == size) for size in sizes]
    return fit_curve([(size, values[len(values) // 2]) for size, values in zip(sizes, middle, strict=True)], degree)


def _stages(
    dim: int, solver: str, device: torch.device, process_group: Any, autocast: torch.dtype | None
) -> dict[str, float]:
    """Return the seconds of each stage of a step of K-FAC for one square layer."""
    number = min(_NUM_LAYERS[device.type], _NUM_LAYERS[device.type] if dim <= _WIDE_DIM else 2)
    model = nn.Sequential(*(nn.Linear(dim, dim, bias=False, device=device) for _ in range(number)))
    x = torch.randn(_NUM_ROWS[device.type], dim, device=device)
    options: dict[str, Any] = {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None}
    options |= {"tf32": False, "cuda_graph": False}  # plans are for several ranks, and TF32 is optional
    kfac = KFAC(model, process_group=process_group, solver=solver, damping=0.1, announce=False, **options)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = model(x).square().mean()
        loss.backward()
        kfac.step()

    with kfac:
        begin, before, steps = time.perf_counter(), dict[str, float](), 0
        for warming in range(3):
            step()
            if warming < 2:
                begin = time.perf_counter()
        before = dict(kfac.report()["stage_seconds"])
        budget = time.perf_counter() + max(0.1, 3 * (time.perf_counter() - begin))
        while steps < 3 or (steps < 30 and time.perf_counter() < budget):
            step()
            steps += 1
        after = kfac.report()["stage_seconds"]
    return {stage: max(1e-9, (after[stage] - before.get(stage, 0.0)) / steps / number) for stage in after}


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Return the median seconds of a call, without its first run."""
    found = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return sorted(found[1:])[repeats // 2]


def _product(dim: int, device: torch.device, dtype: torch.dtype | None) -> float:
    x, weight = (torch.randn(n, dim, device=device, dtype=dtype) for n in (_NUM_ROWS[device.type], dim))
    return max(1e-9, seconds_of(lambda: x @ weight, device))


def _packing(dim: int, device: torch.device) -> float:
    """Return the seconds to pack a triangle into a buffer and to unpack it."""
    matrix = torch.eye(dim, device=device).unsqueeze(0)
    return max(1e-9, seconds_of(lambda: unpack_triangle(pack_triangle(matrix), dim), device))
