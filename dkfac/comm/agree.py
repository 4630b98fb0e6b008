"""Agreement between ranks: equal plans before the first collective, and one rank's error raised on all.

Input: what this rank describes, says or failed with. Output: the same of other ranks. Owns: nothing. Every function is
a collective.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from dkfac.comm.buffers import on_cpu
from dkfac.comm.collectives import all_gather, broadcast_from, exchange
from dkfac.comm.groups import Groups
from dkfac.comm.messages import decode, to_tensor

MESSAGE_BYTES = 2048


def check_same(groups: Groups, description: dict[str, Any], device: torch.device) -> None:
    """Raise on every rank if one rank's description differs from rank 0's; the message names rank and difference."""
    text = json.dumps(description, default=str).encode()
    digest = hashlib.sha256(text).digest()
    digests = all_gather(_bytes(digest, device), groups.everyone).wait().view(groups.world_size, -1)
    different = (digests != digests[0]).any(1).nonzero().flatten().tolist()
    if not different:
        return
    size = broadcast_from(torch.tensor([len(text)], device=device), groups.global_rank(0), groups.everyone).wait()
    reference = _bytes(text, device) if groups.rank == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    first = json.loads(_text(broadcast_from(reference, groups.global_rank(0), groups.everyone).wait()))
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
    """Return the text of each rank, truncated to a fixed length."""
    buffer = _bytes(text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"), device)
    gathered = all_gather(buffer, groups.everyone).wait().view(groups.world_size, -1)
    return [_text(row) for row in gathered]


def tell(groups: Groups, text: str, device: torch.device) -> str:
    """Return rank 0's text, on all ranks."""
    size = torch.tensor([len(text.encode())], device=device)
    broadcast_from(size, groups.global_rank(0), groups.everyone).wait()
    said = torch.empty(int(size), dtype=torch.uint8, device=device) if groups.rank else _bytes(text.encode(), device)
    return bytes(broadcast_from(said, groups.global_rank(0), groups.everyone).wait().tolist()).decode()


def raise_everywhere(groups: Groups, error: BaseException | None, device: torch.device) -> None:
    """Raise one rank's error on all ranks. A collective, called once all ranks know that one failed."""
    said = exchange_text(groups, "" if error is None else f"{type(error).__name__}: {error}", device)
    rank = next((r for r, text in enumerate(said) if text), None)
    where = "" if rank is None else f"rank {rank} failed in K-FAC's part of the step: {said[rank]}"
    if error is not None:
        raise error
    raise RuntimeError(where or "a rank failed in K-FAC's part of the step, and does not say how")


def gather_state(groups: Groups, mine: Any) -> list[Any] | None:
    """Return every rank's dicts of tensors, numbers and strings on rank 0, None elsewhere. Tensors come back on the
    CPU; nothing goes through a GPU's memory."""
    group, is_first = groups.for_cpu(), groups.rank == 0
    own = torch.empty(0, dtype=torch.uint8) if is_first else to_tensor(mine)
    sizes = all_gather(torch.tensor([len(own)]), group).wait().tolist()
    nobody = [0] * groups.world_size
    flat = exchange(own, [len(own), *nobody[1:]], sizes if is_first else nobody, group).wait()
    if not is_first:
        return None
    return [on_cpu(mine), *(decode(part) for part in torch.split(flat, sizes)[1:])]


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")


def difference(mine: Any, reference: Any, path: str = "") -> str | None:
    """Return the first difference between two JSON values, as ``path: mine instead of reference``; None if equal."""
    if isinstance(mine, dict) and isinstance(reference, dict):
        for key in [*reference, *(k for k in mine if k not in reference)]:
            if key not in mine or key not in reference:
                where = "is missing here" if key not in mine else "is only here"
                return f"{path}{key} {where}"
            found = difference(mine[key], reference[key], f"{path}{key}: ")
            if found:
                return found
        return None
    if isinstance(mine, list) and isinstance(reference, list):
        for i, (a, b) in enumerate(zip(mine, reference, strict=False)):
            name = next((f"{v[k]!r}" for v in (b, a) if isinstance(v, dict) for k in ("name", "key") if k in v), f"{i}")
            found = difference(a, b, f"{path}{name}: ")
            if found:
                return found
        if len(mine) != len(reference):
            longer, where = (mine, "is only here") if len(mine) > len(reference) else (reference, "is missing here")
            extra = longer[min(len(mine), len(reference))]
            name = extra.get("name", extra) if isinstance(extra, dict) else extra
            return f"{path}{name!r} {where}"
        return None
    return None if mine == reference else f"{path}{mine!r} instead of {reference!r}"
