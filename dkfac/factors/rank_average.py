"""Add batch factors of several ranks to the running factors that this rank holds, those of one shape at once.

Input: batch factors, and flags by layer. Output: running factors, updated in place. Owns: the tensors of which the
layers' states hold views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.comm.packing import Name
from dkfac.factors.layer_state import Average, LayerState
from dkfac.factors.reduce import Batch, ReducedStatistics
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants


@dataclass(eq=False, slots=True)
class Bank:
    """The running factors of one shape."""

    values: Tensor
    weights: Tensor
    averages: list[Average]
    """What the states hold: views of both."""

    def is_held(self, names: list[Name], states: dict[str, LayerState]) -> bool:
        pairs = zip(names, self.averages, strict=True)
        return all(states[name].running.get(key) is average for (name, key), average in pairs)


class RankAverage:
    def __init__(self) -> None:
        self._banks: dict[tuple[Name, ...], Bank] = {}

    def absorb(self, reduced: ReducedStatistics, ranks: RankPlan, states: dict[str, LayerState], decay: float) -> None:
        """Absorb the batch factors of the layers that were measured, unless a rank found a value that is not finite."""
        fit = reduced.absorb & reduced.good.to(reduced.absorb.device)
        for batch in reduced.batches:
            bank = self._bank(batch, states)
            places = constants.constant(tuple([ranks.index[name] for name, _ in batch.names]), fit.device, torch.int64)
            here = fit[places].to(bank.values.device)
            rows = bank.values.view(len(here), -1)
            new = torch.add(batch.values.view_as(rows), rows, alpha=decay)
            rows.copy_(torch.where(here[:, None], new, rows))
            bank.weights.copy_(torch.where(here, bank.weights * decay + 1, bank.weights))
        if reduced.moments:
            fit = fit & (reduced.counts.again == 0)
        for name, value in reduced.moments.items():
            state = states[name]
            state.moments = state.moments or Average.empty(value)
            state.moments.update(value, decay, fit[ranks.index[name]].to(value.device))

    def _bank(self, batch: Batch, states: dict[str, LayerState]) -> Bank:
        """Return the running factors of a batch, as views of one tensor."""
        names = tuple(batch.names)
        bank = self._banks.get(names)
        if bank is not None and bank.is_held(batch.names, states):
            return bank
        values = torch.zeros_like(batch.values)
        weights = values.new_zeros(len(names))
        averages = [Average(v, w) for v, w in zip(values.chunk(len(names)), weights.unbind(), strict=True)]
        for (name, key), average in zip(names, averages, strict=True):
            before = states[name].running.get(key)
            if before is not None:
                average.value.copy_(before.value)
                average.weight.copy_(before.weight)
            states[name].running[key] = average
        self._banks[names] = Bank(values, weights, averages)
        return self._banks[names]
