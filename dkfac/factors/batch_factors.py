"""Convert sums over rows to batch factors, and absorb batch factors into running ones.

Input: sums and counts. Output: batch factors; running factors, updated in a layer's state. Owns: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.factors.layer_state import Average, LayerState
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import mean_eigenvalue
from dkfac.plan.spec import is_input


def all_finite(named: dict[tuple[str, str], Tensor], device: torch.device) -> Tensor:
    """Return whether all factors and moments are finite, as a flag on the device: a bad entry shows in the trace."""
    traces = [(t if key == "moments" else mean_eigenvalue(t)).sum().to(device) for (_, key), t in named.items()]
    if not traces:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.stack([t.to(torch.float64) for t in traces])).all()


def batch_factor(key: str, total: Tensor, rows: Tensor | float, scale: Tensor | float) -> Tensor:
    """Return a batch factor, or moments, from a sum. ``rows``: divisor of A; ``scale``: multiplier of G, F, moments."""
    return total / _near(rows, total) if is_input(key) else total * _near(scale, total)


def _near(value: Tensor | float, like: Tensor) -> Tensor | float:
    return value.to(like.device, like.dtype) if isinstance(value, Tensor) else value


def average(
    layer: Layer, state: LayerState, batch: dict[str, Tensor], *, decay: float, good: Tensor, once: Tensor | None = None
) -> None:
    """Absorb a layer's batch factors, and moments, into the running ones unless ``good`` is False.

    ``once``: False if a rank called the layer several times per example, which makes moments meaningless.
    """
    good = good.to(layer.weight.device)
    for key, value in batch.items():
        if key == "moments":
            good = good if once is None else good & once.to(good.device)
            if state.moments is None:
                state.moments = Average.empty(value)
            state.moments.update(value, decay, good)
        else:
            state.running.setdefault(key, Average.empty(value)).update(value, decay, good)
