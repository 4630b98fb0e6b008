"""What a step shows of each factor, for intervals that follow it (``staleness``).

Input: sums of this rank, or of all. Output: :class:`Observation`. Owns: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.capture.statistics import BatchStatistics
from dkfac.factors.batch_factors import Factors, batch_factor, by_layer_and_key, finish_alone, scale_alone
from dkfac.factors.reduce import ReducedStatistics, names_of
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step shows of each factor: the batch factors held here, their noise, and the rows of all layers."""

    factors: Factors
    noise: dict[tuple[str, str], Tensor]
    """Expected squared distance of a batch factor from that of an infinite batch; NaN where the factor was not finite
    after its transfer."""
    rows: dict[str, float]


def observe_alone(measured: BatchStatistics, layers: dict[str, Layer]) -> Observation:
    """Return the observation from this rank's own sums."""
    scale = scale_alone(measured)
    factors = by_layer_and_key(finish_alone(measured, measured.layers, measured.terms)[0])
    noise = {
        (name, key): batch_factor(key, spread, sums.rows, scale).double().square().sum()
        for name, sums in measured.layers.items()
        for key, spread in sums.spreads.items()
    }
    rows = dict.fromkeys(layers, 0.0)
    for name, sums in measured.layers.items():
        rows[name] = float(measured.terms if layers[name].is_norm else sums.rows)
    return Observation(factors, noise, rows)


def observe(reduced: ReducedStatistics, ranks: RankPlan, world_size: int, *, by_terms: bool) -> Observation:
    """Return the observation from the sums of all ranks. Synchronizes with the device."""
    counts, noise = reduced.counts, dict[tuple[str, str], Tensor]()
    factors, scale = by_layer_and_key(reduced.batches), counts.scale(world_size, by_terms=by_terms)
    for i, (name, key) in enumerate(names_of(ranks)):
        by = counts.scale_of(key, ranks.index[name], scale)
        noise[name, key] = counts.spreads[i] * by**2
        if name in factors:
            noise[name, key] = noise[name, key].where(reduced.absorb[ranks.index[name]].to(by.device), torch.nan)
    told, calls, terms = counts.rows.tolist(), counts.calls.tolist(), float(counts.terms)
    rows = {la.name: terms * (calls[i] > 0) if la.is_norm else told[i] for i, la in enumerate(ranks.layers)}
    return Observation(factors, noise, rows)
