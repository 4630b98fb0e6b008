"""Add what several ranks measured to the running factors that this rank holds, in few launches.

Input: batch factors by shape, or buffers of packed sums. Output: running factors, updated in place. Owns: the tensors
of which the layers' states hold views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dkfac.comm.packing import Layout, Name
from dkfac.factors.layer_state import Average, LayerState
from dkfac.factors.reduce import ReducedStatistics
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops import constants
from dkfac.plan.spec import is_input


@dataclass(eq=False, slots=True)
class Bank:
    """Running factors that are updated together."""

    names: Sequence[Name]
    values: Tensor
    """All of them, flat."""
    weights: Tensor
    averages: list[Average]
    """Of which the states hold these: views of both."""
    addresses: Tensor | None = None

    def is_held(self, states: dict[str, LayerState]) -> bool:
        pairs = zip(self.names, self.averages, strict=True)
        return all(states[name].running.get(key) is average for (name, key), average in pairs)

    def count(self, here: Tensor, decay: float) -> None:
        """Update the weights where a value was absorbed."""
        torch.where(here, self.weights * decay + 1, self.weights, out=self.weights)


class RankAverage:
    """Running factors of this rank, in the tensors that each step updates at once."""

    def __init__(self) -> None:
        self._banks: dict[tuple[Name, ...], Bank] = {}

    def absorb(self, reduced: ReducedStatistics, ranks: RankPlan, states: dict[str, LayerState], decay: float) -> None:
        """Absorb the batch factors of the layers that were measured, unless a rank found a value that is not finite."""
        fit = reduced.absorb & reduced.good.to(reduced.absorb.device)
        for layout, buffer in reduced.packed:
            self._absorb_packed(reduced, ranks, states, decay, fit, layout, buffer)
        for batch in reduced.batches:
            bank = self._bank(batch.names, ranks, states, batch.values)
            here = fit[_places(batch.names, ranks, fit.device)].to(bank.values.device)
            rows = bank.values.view(len(here), -1)
            new = torch.add(batch.values.view_as(rows), rows, alpha=decay)
            torch.where(here[:, None], new, rows, out=rows)
            bank.count(here, decay)
        fit = fit & (reduced.counts.again == 0) if reduced.moments else fit
        for name, value in reduced.moments.items():
            state = states[name]
            state.moments = state.moments or Average.empty(value)
            state.moments.update(value, decay, fit[ranks.index[name]].to(value.device))

    def _absorb_packed(
        self,
        reduced: ReducedStatistics,
        ranks: RankPlan,
        states: dict[str, LayerState],
        decay: float,
        fit: Tensor,
        layout: Layout,
        buffer: Tensor,
    ) -> None:
        """Divide and absorb the sums in a buffer in one launch."""
        if not layout.held:
            return
        bank = self._bank(layout.held, ranks, states, buffer.new_empty(0, dtype=torch.float32))
        table, places = layout.table(buffer.device), _places(layout.held, ranks, fit.device)
        inputs = constants.constant(tuple([is_input(key) for _, key in layout.held]), fit.device, torch.bool)
        factor = torch.where(inputs, reduced.counts.rows[places].clamp(min=1).reciprocal(), reduced.scale)
        here = fit[places]
        if bank.addresses is None:
            bank.addresses = table.addresses([average.value for average in bank.averages])
        table.absorb(buffer, bank.addresses, factor.to(torch.float32), here, decay)
        bank.count(here, decay)

    def _bank(self, names: Sequence[Name], ranks: RankPlan, states: dict[str, LayerState], like: Tensor) -> Bank:
        """Return running factors as views of one tensor of the dtype and on the device of ``like``."""
        bank = self._banks.get(tuple(names))
        if bank is not None and bank.is_held(states):
            return bank
        specs = [ranks.by_name[name].spec.factor(key) for name, key in names]
        values = like.new_zeros(sum([spec.num_elements for spec in specs]))
        weights = like.new_zeros(len(names))
        parts = values.split([spec.num_elements for spec in specs])  # type: ignore[no-untyped-call]
        averages = []
        for (name, key), spec, part, weight in zip(names, specs, parts, weights.unbind(), strict=True):
            averages.append(Average(part.view(spec.shape), weight))
            before = states[name].running.get(key)
            if before is not None:
                averages[-1].value.copy_(before.value)
                averages[-1].weight.copy_(before.weight)
            states[name].running[key] = averages[-1]
        self._banks = {key: other for key, other in self._banks.items() if other.is_held(states)}
        self._banks[tuple(names)] = Bank(names, values, weights, averages)
        return self._banks[tuple(names)]


def _places(names: Sequence[Name], ranks: RankPlan, device: torch.device) -> Tensor:
    """Return the indices of the layers of some factors."""
    return constants.constant(tuple([ranks.index[name] for name, _ in names]), device, torch.int64)
