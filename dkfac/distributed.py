"""Initialize torch.distributed from the environment of torchrun or srun, such that elastic restarts work.

Input: environment variables. Output: this process's rank, world size and device. Owns: nothing.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Place:
    """The rank and device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1


def init(backend: str | None = None, *, timeout_seconds: float | None = None) -> Place:
    """Initialize the default process group, and return this process's rank, world size and device.

    Does nothing but select the device if the process was not started by torchrun or srun, or if the process group is
    already initialized. ``backend=None`` is NCCL for GPUs and gloo for the CPU; ``timeout_seconds=None`` is PyTorch's
    default, and 5 minutes for the rendezvous. After an elastic restart, keys that dead ranks left in torchrun's store
    would be mistaken for those of the new ranks, so the store is prefixed with the restart count.
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
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timeout or datetime.timedelta(minutes=5)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world_size, rank == 0 and not agent_has_store, patience)  # type: ignore[attr-defined]
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
        store=dist.PrefixStore(f"dkfac/{restart}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and "nccl" in (backend or "nccl") else None,  # for splits
    )
    return Place(rank, world_size, device)


def is_step_of_slurm() -> bool:
    """Whether srun started this process as one of several tasks. The batch script itself is not one."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def _read_slurm() -> None:
    """Set rank and address from srun's environment, if torchrun has not set them and there are several tasks."""
    if "RANK" in os.environ or not is_step_of_slurm():
        return
    # Task 0 runs on the first host of e.g. "gpu[03-07,12],other".
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", os.environ.get("SLURM_STEP_NODELIST", "localhost"))
    job, step = (int(os.environ.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID"))
    said = {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"]}
    said["MASTER_ADDR"] = "".join(part or "" for part in found.groups()) if found else "localhost"
    said["MASTER_PORT"] = str(20000 + (job + 101 * step) % 10000)  # below the range of ephemeral ports
    for name, value in said.items():
        os.environ.setdefault(name, value)


def end() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(numbers: list[float], device: torch.device) -> list[list[float]]:
    """Return every rank's numbers, the same count on each, on every rank; without a process group, only this rank's.
    Collective, and synchronizes with the device."""
    if not dist.is_initialized():
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [t.tolist() for t in found]


def from_first(text: str, place: Place) -> str:
    """Return rank 0's text on every rank. Collective."""
    found = [text]
    if not place.is_alone:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def broadcast(tensors: Iterable[torch.Tensor], place: Place) -> None:
    """Copy rank 0's values to all ranks, in place. Collective."""
    for tensor in () if place.is_alone else tensors:
        dist.broadcast(tensor, src=0)


def backends() -> list[str]:
    """Return the backends that torch was built with."""
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_there in known.items() if is_there()]


def launch(num_processes: int, module: str, arguments: list[str]) -> int:
    """Run a module in ``num_processes`` processes on this machine with torchrun's launcher. Returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # seconds: for a last step, a test and a checkpoint
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
