"""Agreement between ranks: the same plan before the first collective, one rank's error on all."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dkfac.comm.collectives import all_gather, broadcast
from dkfac.comm.groups import Groups
from dkfac.plan.plan import difference

MESSAGE_BYTES = 2048


def check_same(groups: Groups, description: dict[str, Any], device: torch.device) -> None:
    """Raise on every rank if one describes itself otherwise than rank 0, and say who, where and how."""
    text = json.dumps(description, default=str).encode()
    digest = hashlib.sha256(text).digest()
    digests = all_gather(_bytes(digest, device), groups.everyone).wait().view(groups.world_size, -1)
    different = (digests != digests[0]).any(1).nonzero().flatten().tolist()
    if not different:
        return
    size = broadcast(torch.tensor([len(text)], device=device), groups.global_rank(0), groups.everyone).wait()
    reference = _bytes(text, device) if groups.rank == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    first = json.loads(_text(broadcast(reference, groups.global_rank(0), groups.everyone).wait()))
    mine = difference(json.loads(text), first) or "nothing that can be shown"
    said = exchange_text(groups, mine, device)
    rank = different[0]
    others = f" (so did ranks {', '.join(map(str, different[1:9]))})" if different[1:] else ""
    raise RuntimeError(
        f"rank {rank} attached K-FAC differently from rank 0{others} "
        f"({bytes(digests[rank][:4].tolist()).hex()}... instead of {bytes(digests[0][:4].tolist()).hex()}...): "
        f"first difference on rank {rank}: {said[rank]}. Do all ranks build the same model with the same settings?"
    )


def exchange_text(groups: Groups, text: str, device: torch.device) -> list[str]:
    """Return what each rank says, cut to a fixed length."""
    buffer = _bytes(text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"), device)
    gathered = all_gather(buffer, groups.everyone).wait().view(groups.world_size, -1)
    return [_text(row) for row in gathered]


def tell(groups: Groups, text: str, device: torch.device) -> str:
    """Return what rank 0 says, on all ranks."""
    size = torch.tensor([len(text.encode())], device=device)
    broadcast(size, groups.global_rank(0), groups.everyone).wait()
    said = torch.empty(int(size), dtype=torch.uint8, device=device) if groups.rank else _bytes(text.encode(), device)
    return bytes(broadcast(said, groups.global_rank(0), groups.everyone).wait().tolist()).decode()


def raise_everywhere(groups: Groups, error: BaseException | None, device: torch.device) -> None:
    """Raise one rank's error on all; called on all ranks once they know that there is one."""
    said = exchange_text(groups, "" if error is None else f"{type(error).__name__}: {error}", device)
    rank = next((r for r, text in enumerate(said) if text), None)
    where = "" if rank is None else f"rank {rank} failed in K-FAC's part of the step: {said[rank]}"
    if error is not None:
        raise error
    raise RuntimeError(where or "a rank failed in K-FAC's part of the step, and does not say how")


def gather_objects(groups: Groups, mine: Any) -> list[Any] | None:
    """Return every rank's object on rank 0, None elsewhere."""
    gathered: list[Any] | None = [None] * groups.world_size if groups.rank == 0 else None
    dist.gather_object(mine, gathered, dst=groups.global_rank(0), group=groups.everyone)
    return gathered


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
