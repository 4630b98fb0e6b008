"""Start torch.distributed from what torchrun says, so that elastic restarts work."""

from __future__ import annotations

import datetime
import os
import sys
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
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), device)
    _read_slurm()
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


def _read_slurm() -> None:
    """Take rank and address from srun's environment, where torchrun has not set them and there are several tasks."""
    number = int(os.environ.get("SLURM_NTASKS", "1"))
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ or number < 2:
        return
    host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or os.environ.get("SLURMD_NODENAME", "localhost")
    said = {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": str(number), "MASTER_ADDR": host}
    said["MASTER_PORT"] = str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000)
    for name, value in said.items():
        os.environ.setdefault(name, value)


def end() -> None:
    """Leave torch.distributed, if it runs."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(numbers: list[float], device: torch.device) -> list[list[float]]:
    """Return every rank's numbers, as many on each, on every rank; alone, one's own. Waits for the device."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [t.tolist() for t in found]


def backends() -> list[str]:
    """Return what torch was built with."""
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_there in known.items() if is_there()]


def launch(num_processes: int, module: str, arguments: list[str]) -> int:
    """Run a module on so many processes of this machine, by torchrun's own program; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_processes, run_id=f"dkfac-{os.getpid()}", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.5, start_method="spawn",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return 128 - status if status < 0 else status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
