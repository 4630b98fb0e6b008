"""Start torch.distributed from what torchrun says, so that elastic restarts work."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is among the ranks."""

    rank: int
    world_size: int
    device: torch.device


def init(backend: str | None = None, *, timeout_seconds: float | None = None) -> Place:
    """Join the ranks that torchrun started and return this one's place; alone, do nothing.

    ``backend``: None takes NCCL for GPUs and gloo for the CPU. After a restart, keys that the dead ranks left in
    torchrun's store would be mistaken for the new ranks', so each restart has a prefix of its own.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), device)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return Place(0, 1, device)
    if missing:
        raise RuntimeError(f"the environment lacks {', '.join(missing)}: start the script with torchrun")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timeout or datetime.timedelta(minutes=5)
    store = dist.TCPStore(address, port, world_size, rank == 0 and not agent_has_store, patience)  # type: ignore[attr-defined]
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
        store=dist.PrefixStore(f"dkfac/{restart}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return Place(rank, world_size, device)


def end() -> None:
    """Leave torch.distributed, if it runs."""
    if dist.is_initialized():
        dist.destroy_process_group()
