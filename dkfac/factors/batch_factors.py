"""Convert sums over rows to batch factors, and absorb batch factors into running ones.

Input: sums and counts. Output: batch factors; running factors, updated in a layer's state. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from dkfac.capture.statistics import BatchStatistics
from dkfac.comm.buffers import vector
from dkfac.comm.packing import Name, alike, in_one
from dkfac.factors.layer_state import Average, LayerState
from dkfac.layers.layer import Layer
from dkfac.plan.spec import is_input

Factors = dict[str, dict[str, Tensor]]
"""Batch factors by layer and key."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch factors of one shape, in_one along their blocks."""

    names: list[Name]
    values: Tensor

    def factors(self) -> list[Tensor]:
        return list(self.values.chunk(len(self.names)))


def by_layer_and_key(batches: list[Batch]) -> Factors:
    """Return batch factors by layer and key."""
    found: Factors = {}
    for batch in batches:
        for (name, key), factor in zip(batch.names, batch.factors(), strict=True):
            found.setdefault(name, {})[key] = factor
    return found


def batch_factor(key: str, total: Tensor, rows: Tensor | float, scale: Tensor | float) -> Tensor:
    """Return a batch factor, or moments, from a sum. ``rows``: divisor of A; ``scale``: multiplier of G, F, moments."""
    return total / _near(rows, total) if is_input(key) else total * _near(scale, total)


def _near(value: Tensor | float, like: Tensor) -> Tensor | float:
    return value.to(like.device, like.dtype) if isinstance(value, Tensor) else value


def scale_alone(measured: BatchStatistics, mean_terms: Tensor | float | None = None) -> Tensor | float:
    """Return the multiplier of this rank's sums of products of gradients."""
    if not measured.layers:
        return 1.0
    scale = measured.grad_correction / measured.terms
    if measured.by_terms:
        terms = measured.terms if mean_terms is None else mean_terms
        scale = scale * terms * terms
    return scale


def finish_alone(
    measured: BatchStatistics, names: Iterable[str], mean_terms: Tensor | float
) -> tuple[list[Batch], dict[str, Tensor]]:
    """Return batch factors and moments of layers that only this rank measures. ``mean_terms``: mean over the ranks."""
    scale = scale_alone(measured, mean_terms)
    found = {name: measured.layers[name] for name in names}
    totals = {(name, key): total for name, sums in found.items() for key, total in sums.factors.items()}
    batches = []
    for same in alike(totals, lambda n: (is_input(n[1]), totals[n].shape, totals[n].dtype, totals[n].device)):
        values = in_one([totals[name] for name in same])
        if is_input(same[0][1]):
            rows = vector([found[name].rows for name, _ in same], values.device).to(values.dtype)
            values = (values.view(len(same), -1) / rows[:, None]).view(values.shape)
        else:
            values = batch_factor(same[0][1], values, 1.0, scale)
        batches.append(Batch(same, values))
    moments = {name: sums.moments for name, sums in found.items() if sums.moments is not None}
    return batches, {name: batch_factor("moments", m, 1.0, scale) for name, m in moments.items()}


def over_terms(key: str, total: Tensor, correction: Tensor | float) -> Tensor:
    """Return a sum of products of gradients as a sum over terms of the loss; a sum over inputs unchanged."""
    if is_input(key) or (isinstance(correction, float) and correction == 1.0):
        return total
    return total * (correction.to(total.device, total.dtype) if isinstance(correction, Tensor) else correction)


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
