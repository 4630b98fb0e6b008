"""Move gradients from the shards of parameters to the owners of layers, and updates back.

Input: this rank's shards, or the updates of the layers that it owns. Output: the shards of the layers that it owns, or
its own shards of all updates. Owns: nothing.

A rank sends no more than its shards and receives no more than the layers that it owns; no tensor has the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dkfac.comm import collectives
from dkfac.comm.buffers import dtype_of
from dkfac.comm.collectives import Pending
from dkfac.comm.packing import Name
from dkfac.comm.transport import Transport
from dkfac.plan.shards import sent_elements, shard_elements
from dkfac.plan.transfer import Part, Transfer


def to_owners(transport: Transport, shard: Callable[[Name], Tensor]) -> dict[Name, list[Tensor]]:
    """Return the shards, flat and in order, of each parameter whose layer this rank owns. ``shard``: returns this
    rank's shard of a parameter."""
    sharding = transport.plan.sharding
    assert sharding is not None
    if not transport.program.transfers:
        return {(p.layer, p.key): [shard((p.layer, p.key)).reshape(-1)] for p in sharding.parameters}
    mine, moving = sharding.replica_of(transport.rank), list[tuple[Transfer, Pending]]()
    for transfer in _ours(transport, "to-owners"):
        parts = [part for _, part in _by_owner(transfer, mine)]
        index = mine.index(transport.rank)
        sent = [shard((p.layer, p.key)) for p in parts if sent_elements(p, mine, index)]
        moving.append((transfer, _exchange(transport, transfer, sent)))
    found: dict[Name, list[Tensor]] = {}
    for transfer, pending in moving:
        flat, position = pending.wait(), 0
        owned = [part for part in transfer.parts if part.owner == transport.rank]
        for part in owned:
            found[part.layer, part.key] = [flat.new_empty(0)] * len(mine)
        for index in sorted(range(len(mine)), key=mine.__getitem__):  # in the order of the group
            for part in owned:
                end = position + sent_elements(part, mine, index)
                found[part.layer, part.key][index] = flat[position:end].to(transport.dtypes[part.layer])
                position = end
    return found


def to_shards(transport: Transport, pieces: Callable[[Name], Sequence[Tensor] | None]) -> dict[Name, Tensor]:
    """Return this rank's shard of each update, flat. ``pieces``: returns the shards, in order, of a parameter whose
    layer this rank owns; None sends zeros."""
    sharding = transport.plan.sharding
    assert sharding is not None
    if not transport.program.transfers:
        given = {(p.layer, p.key): pieces((p.layer, p.key)) for p in sharding.parameters}
        return {name: found[0].reshape(-1) for name, found in given.items() if found is not None}
    moving, index_of = list[tuple[Transfer, Pending]](), {r: i for ranks in sharding.mesh for i, r in enumerate(ranks)}
    found: dict[Name, Tensor] = {}
    for transfer in _ours(transport, "to-shards"):
        owned = [part for part in transfer.parts if part.owner == transport.rank]
        values = [(part, pieces((part.layer, part.key))) for part in owned]
        sent: list[Tensor] = []
        for holder in transfer.group:
            index = index_of[holder]
            for part, shards in values:
                elements = shard_elements(part, index)
                sent.append(torch.zeros(elements, device=transport.device) if shards is None else shards[index])
        moving.append((transfer, _exchange(transport, transfer, sent)))
    for transfer, pending in moving:
        flat, position = pending.wait(), 0
        for _, part in _by_owner(transfer, transfer.group):
            end = position + shard_elements(part, index_of[transport.rank])
            found[part.layer, part.key] = flat[position:end].to(transport.dtypes[part.layer])
            position = end
    return found


def _ours(transport: Transport, how: str) -> list[Transfer]:
    return [t for t in transport.program.stage("gradients") if t.how == how and transport.rank in t.group]


def _by_owner(transfer: Transfer, owners: Sequence[int]) -> Iterator[tuple[int, Part]]:
    """Yield the parts of these owners, in the order of the group."""
    owned: dict[int, list[Part]] = {rank: [] for rank in transfer.group}
    for part in transfer.parts:
        owned[part.owner].append(part)
    for rank, parts in owned.items():
        yield from ((rank, part) for part in parts if rank in owners)


def _exchange(transport: Transport, transfer: Transfer, sent: Sequence[Tensor]) -> Pending:
    blank = torch.empty(0, dtype=dtype_of(transfer.dtype), device=transport.device)
    flat = torch.cat([t.reshape(-1).to(blank) for t in sent]) if sent else blank
    return collectives.exchange(flat, *transport.splits(transfer), transport.groups.get(transfer.group))
