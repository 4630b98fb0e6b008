"""From what the ranks measured to batch factors: sums and counts over ranks, then a division."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dkfac import stages
from dkfac.comm.collectives import Pending
from dkfac.exchange import Exchange, Named
from dkfac.ops.decompose import mean_eigenvalue
from dkfac.plan.plan import Placement
from dkfac.plan.program import HEADER_FIXED, Part, Transfer
from dkfac.plan.spec import LayerSpec, is_input
from dkfac.window import Measured

if TYPE_CHECKING:
    from dkfac.run import Runner

Factors = dict[str, dict[str, Tensor]]
"""Batch factors, and moments, by layer and key."""


def scale_alone(runner: Runner, measured: Measured, mean_terms: Tensor | float | None = None) -> Tensor | float:
    """Return what this rank's sums of gradients' products are multiplied by."""
    if not measured.layers:
        return 1.0
    scale = measured.unit / measured.terms
    if runner.by_terms:
        terms = measured.terms if mean_terms is None else mean_terms
        scale = scale * terms * terms
    return scale


def finish_alone(runner: Runner, measured: Measured, names: Iterable[str], mean_terms: Tensor | float) -> Factors:
    """Return batch factors of layers that this rank alone measures. ``mean_terms``: of the ranks."""
    scale = scale_alone(runner, measured, mean_terms)
    batch: Factors = {}
    for name in names:
        sums = measured.layers[name]
        totals = sums.factors | ({} if sums.moments is None else {"moments": sums.moments})
        batch[name] = {key: stages.batch_factor(key, s, sums.rows, scale) for key, s in totals.items()}
    return batch


@dataclass(frozen=True, slots=True)
class Look:
    """What a step tells of the statistics: batch factors held here, their noise, and rows of all layers."""

    factors: Factors
    noise: dict[tuple[str, str], Tensor]
    """The square of how far a batch factor is expected to be from that of endless batches; NaN where the factor did not
    survive the wire."""
    rows: dict[str, float]


def look_alone(runner: Runner, measured: Measured) -> Look:
    """Return what this rank's own sums tell."""
    scale = scale_alone(runner, measured)
    factors = finish_alone(runner, measured, measured.layers, measured.terms)
    noise = {
        (name, key): stages.batch_factor(key, spread, sums.rows, scale).double().square().sum()
        for name, sums in measured.layers.items()
        for key, spread in sums.spreads.items()
    }
    rows = dict.fromkeys(runner.by_name, 0.0)
    for name, sums in measured.layers.items():
        rows[name] = float(measured.terms if runner.by_name[name].is_norm else sums.rows)
    return Look(factors, noise, rows)


def local_sums(runner: Runner, measured: Measured) -> Named:
    """Return this rank's sums over terms, of the layers that several ranks measure."""
    sums: Named = {}
    for name, layer_sums in measured.layers.items():
        if len(runner.placements[name].statistics) < 2:
            continue
        for key, total in layer_sums.factors.items():
            sums[name, key] = over_terms(key, total, measured.unit)
        if layer_sums.moments is not None:
            sums[name, "moments"] = over_terms("moments", layer_sums.moments, measured.unit)
    return sums


def see_rows(measured: Measured, seen: dict[str, float]) -> None:
    """Note the most rows of each layer in a step; -1 where the host does not know."""
    for name, sums in measured.layers.items():
        rows = -1.0 if isinstance(sums.rows, Tensor) else sums.rows
        before = seen.get(name, 0.0)
        seen[name] = -1.0 if min(rows, before) < 0 else max(rows, before)


FEW_ELEMENTS = 1024
"""Of a factor's rows: a network takes longer to start than to send them."""


def worth_as_rows(layer: LayerSpec, placement: Placement, number: int) -> list[tuple[str, str, int]]:
    """Return a layer's factors that have one holder and are fewer elements as rows; or so few that one transfer less
    is worth more."""
    if len(placement.statistics) < 2 or number < 1:
        return []
    return [
        (layer.name, factor.key, number)
        for factor, held in zip(layer.factors, placement.factors, strict=True)
        if len(held) == 1
        and factor.form == "dense"
        and factor.num_blocks == 1
        and (2 * number < factor.dim or number * factor.dim <= FEW_ELEMENTS)
    ]


def local_rows(runner: Runner, measured: Measured) -> Named:
    """Return this rank's rows, scaled as the sums are; NaN where the plan does not have room for all of them."""
    rows: Named = {}
    for name, key, room in runner.plan.rows:
        sums = measured.layers.get(name)
        pieces = None if sums is None else sums.pieces.get(key)
        if not pieces:
            continue
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        root = measured.unit**0.5
        rows[name, key] = over_terms(key, joined, root)[:room]
        if len(joined) > room:  # the owner will see that it cannot use them
            rows[name, key] = torch.full_like(rows[name, key], torch.nan)
    return rows


def over_terms(key: str, total: Tensor, unit: Tensor | float) -> Tensor:
    """Return a sum of gradients' products as a sum over terms of the loss; a sum over inputs as it is."""
    if is_input(key) or (isinstance(unit, float) and unit == 1.0):
        return total
    return total * (unit.to(total.device, total.dtype) if isinstance(unit, Tensor) else unit)


class Reduced:
    """What all ranks measured together, in the parts that this rank holds."""

    def __init__(self, runner: Runner, exchange: Exchange, measured: Measured, good: Tensor) -> None:
        """Launch and wait for the sums; ``good``: whether this rank's gradients are finite."""
        error, runner.tape.error = runner.tape.error, None
        sums = local_sums(runner, measured)
        device = good.device
        rows = local_rows(runner, measured)
        good = good & stages.all_finite(sums, device)
        header = _header(runner, measured, good, error, sums)
        scales: Named = {}
        if runner.plan.wire_dtype == "float16":  # little range: first agree on what to divide by
            told = exchange.sum("header", header)
            names = _scaled_names(runner)
            scales = {name: _power_of_two(told[i - len(names)]) for i, name in enumerate(names)}
            launched = exchange.launch_rest(sums, scales)
            sent = exchange.launch_rows(rows)
        else:
            launched = exchange.launch_rest(sums, scales)
            sent = exchange.launch_rows(rows)
            told = exchange.sum("header", header)
        totals = exchange.finish_factors(launched, scales)
        num = len(runner.layers)
        self.terms, self.num_bad, self.num_failed, self.num_passes = told[:HEADER_FIXED]
        self.rows, self.calls, self.again = (told[HEADER_FIXED + i * num :][:num] for i in range(3))
        self._spreads = told[HEADER_FIXED + 3 * num :]
        runner.note_failure(self.num_failed, error)
        self.good = ((self.num_bad == 0) & (self.num_failed == 0)).to(device)
        own = [n for n, p in runner.placements.items() if p.statistics == (runner.rank,) and n in measured.layers]
        self.batch = finish_alone(runner, measured, own, self.terms / exchange.world_size)
        self.absorb: dict[str, Tensor] = {}
        """Whether a layer was measured at all, and its sums survived the wire."""
        self._divide(runner, exchange, totals)
        self._multiply(runner, exchange, sent)
        for name, factors in self.batch.items():
            ran = self.absorb.get(name, self.good)
            named = {(name, key): factor for key, factor in factors.items()}
            self.absorb[name] = ran.to(device) & stages.all_finite(named, device)

    def look(self, runner: Runner) -> Look:
        """Return what all ranks' sums tell. Waits for the device."""
        assert runner.exchange is not None
        scale, noise = self._scale(runner, runner.exchange), dict[tuple[str, str], Tensor]()
        for i, (name, key) in enumerate(_names(runner)):
            by = 1 / self.rows[runner.index[name]].clamp(min=1) if is_input(key) else scale
            noise[name, key] = self._spreads[i] * by**2
            if name in self.absorb:
                noise[name, key] = noise[name, key].where(self.absorb[name].to(by.device), torch.nan)
        told, calls, terms = self.rows.tolist(), self.calls.tolist(), float(self.terms)
        rows = {la.name: terms * (calls[i] > 0) if la.is_norm else told[i] for i, la in enumerate(runner.layers)}
        return Look(self.batch, noise, rows)

    def _scale(self, runner: Runner, exchange: Exchange) -> Tensor:
        """Return what sums over terms are multiplied by."""
        scale: Tensor = self.terms / exchange.world_size**2 if runner.by_terms else 1 / self.terms
        return scale

    def _multiply(self, runner: Runner, exchange: Exchange, sent: list[tuple[Transfer, Pending]]) -> None:
        """Form the batch factors that travelled as rows."""
        scale = self._scale(runner, exchange)

        def scale_of(part: Part) -> Tensor:
            return 1 / self.rows[runner.index[part.layer]].clamp(min=1) if is_input(part.key) else scale

        for (name, key), factor in exchange.finish_rows(sent, scale_of).items():
            self.batch.setdefault(name, {})[key] = factor
            self.absorb[name] = self.calls[runner.index[name]] > 0

    def _divide(self, runner: Runner, exchange: Exchange, totals: Named) -> None:
        scale = self._scale(runner, exchange)
        for (name, key), total in totals.items():
            holding = runner.holds(name)
            if key not in holding.running and not (key == "moments" and holding.moments):
                continue
            i = runner.index[name]
            factor = stages.batch_factor(key, total, self.rows[i].clamp(min=1), scale)
            self.batch.setdefault(name, {})[key] = factor
            has_inputs = is_input(runner.by_name[name].spec.factors[0].key)
            self.absorb[name] = (self.calls[i] > 0) & (self.rows[i] > 0) if has_inputs else self.calls[i] > 0


def _header(
    runner: Runner, measured: Measured, good: Tensor, error: BaseException | None, sums: Named
) -> list[Tensor | float]:
    """Terms, flags and passes; then rows, calls and repeated calls of each layer; for float16 the sums' traces."""
    found = [measured.layers.get(layer.name) for layer in runner.layers]
    values: list[Tensor | float] = [measured.terms, (~good).to(torch.float64), float(error is not None)]
    values.append(float(measured.num_passes))
    values += [0.0 if s is None else s.rows for s in found]
    called = [float(layer.name in measured.called) for layer in runner.layers]
    values += [here if s is None else float(s.calls) for here, s in zip(called, found, strict=True)]
    values += [0.0 if s is None else float(s.called_again) for s in found]
    if runner.plan.adaptive:
        values += [_spread_square(measured, name, key) for name, key in _names(runner)]
    if runner.plan.wire_dtype == "float16":
        values += [_trace(name[1], sums[name]) if name in sums else 0.0 for name in _scaled_names(runner)]
    return values


def _scaled_names(runner: Runner) -> list[tuple[str, str]]:
    return _names(runner) + ([(layer.name, "moments") for layer in runner.layers] if runner.plan.moments else [])


def _names(runner: Runner) -> list[tuple[str, str]]:
    return [(layer.name, factor.key) for layer in runner.layers for factor in layer.spec.factors]


def _spread_square(measured: Measured, name: str, key: str) -> Tensor | float:
    """Return the variance of this rank's sum over terms: variances of ranks add up."""
    sums = measured.layers.get(name)
    spread = None if sums is None else sums.spreads.get(key)
    return 0.0 if spread is None else over_terms(key, spread, measured.unit).double().square().sum()


def _trace(key: str, total: Tensor) -> Tensor:
    return total.sum() if key == "moments" else mean_eigenvalue(total).sum() * total.shape[-1]


def _power_of_two(total: Tensor) -> Tensor:
    """Return what brings a sum of this trace to about 16; 1 where it is zero or not finite."""
    exponent = torch.floor(torch.log2(total)) - 4
    return torch.where(torch.isfinite(exponent), torch.exp2(exponent), 1.0)
