"""Rows that are sent to a factor's owner instead of their sum (``wire_form="rows"``).

Input: this rank's rows, or numbers of rows. Output: rows as they are sent, or which factors are worth it. Owns:
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dkfac.capture.statistics import BatchStatistics
from dkfac.comm import collectives
from dkfac.comm.buffers import dtype_of, places_of
from dkfac.comm.collectives import Pending
from dkfac.comm.packing import Named
from dkfac.comm.transport import Transport
from dkfac.factors.batch_factors import over_terms
from dkfac.ops.factors import gram
from dkfac.plan.plan import Placement, Plan
from dkfac.plan.spec import LayerSpec
from dkfac.plan.transfer import Part, Transfer

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


def launch_rows(transport: Transport, rows: Named) -> list[tuple[Transfer, Pending]]:
    """Launch the transfer of rows ``[R, D]``, R at most the capacity in the plan; the rest stays zero."""
    launched = []
    for transfer in (t for t in transport.program.stage("factors") if t.how == "rows"):
        dtype = dtype_of(transfer.dtype)
        flat = torch.zeros(transfer.elements(transport.rank), dtype=dtype, device=transport.device)
        for part, place in places_of(transfer.parts, flat):
            mine = rows.get((part.layer, part.key))
            if mine is not None:
                place[: mine.numel()].copy_(mine.reshape(-1))
        pending = collectives.exchange(flat, *transport.splits(transfer), transport.groups.everyone)
        launched.append((transfer, pending))
    return launched


def finish_rows(
    transport: Transport, launched: list[tuple[Transfer, Pending]], scale: Callable[[Part], Tensor]
) -> Named:
    """Wait for rows and return the sums of their outer products, for the factors that this rank holds.

    ``scale``: multiplier of a sum; it is applied to the rows, which have fewer elements.
    """
    result: Named = {}
    for transfer, pending in launched:
        mine = [part for part in transfer.parts if part.owner == transport.rank]
        received = pending.wait().view(transport.world_size, -1)
        position = 0
        for part in mine:
            dim = transport.factors[part.layer, part.key].dim
            rows = received[:, position : position + part.elements].reshape(-1, 1, 1, dim)
            position += part.elements
            dtype = transport.dtypes[part.layer]
            rows = rows.to(dtype) * scale(part).sqrt().to(rows.device, dtype)
            result[part.layer, part.key] = gram(rows, ones=False, dtype=dtype)
    return result
