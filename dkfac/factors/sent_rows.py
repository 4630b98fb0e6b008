"""Rows that are sent to a factor's owner instead of their sum (``wire_form="rows"``).

Input: this rank's rows, or numbers of rows. Output: rows as they are sent, or which factors are worth it. Owns:
nothing.
"""

from __future__ import annotations

import torch

from dkfac.capture.statistics import BatchStatistics
from dkfac.comm.packing import Named
from dkfac.factors.batch_factors import over_terms
from dkfac.plan.plan import Placement, Plan
from dkfac.plan.spec import LayerSpec

FEW_ELEMENTS = 1024
"""If a factor's rows have at most this many elements, starting a transfer takes longer than sending them."""


def worth_as_rows(layer: LayerSpec, placement: Placement, number: int) -> list[tuple[str, str, int]]:
    """Return a layer's factors that have a single holder and fewer elements as rows, or so few that saving a transfer
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


def local_rows(measured: BatchStatistics, plan: Plan) -> Named:
    """Return this rank's rows, scaled like the sums; NaN where they exceed the capacity in the plan."""
    rows: Named = {}
    for name, key, room in plan.rows:
        sums = measured.layers.get(name)
        pieces = None if sums is None else sums.pieces.get(key)
        if not pieces:
            continue
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        root = measured.grad_correction**0.5
        rows[name, key] = over_terms(key, joined, root)[:room]
        if len(joined) > room:  # tells the owner that it cannot use them
            rows[name, key] = torch.full_like(rows[name, key], torch.nan)
    return rows
