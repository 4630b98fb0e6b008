"""Several ranks for a test: as threads of this process (any number), or as real processes (2 to 4)."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

TIMEOUT_SECONDS = 100


def on_threads(world_size, function, *args):
    """Return ``[function(rank, *args) for each rank]``, run at the same time on a threaded process group.

    The first exception of a rank is raised here.
    """
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = _install_threaded_pg()
    store = dist.HashStore()
    results, errors = [None] * world_size, []

    def work(rank):
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank, *args)
        except BaseException as error:
            errors.append((rank, error))
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        assert not any(thread.is_alive() for thread in threads), f"ranks hang; errors so far: {errors}"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        del world
    if errors:
        raise errors[0][1]
    return results


def on_processes(world_size, function, *args, timeout=TIMEOUT_SECONDS, debug="OFF", check=True):
    """Return ``[function(rank, *args) for each rank]``, each in a process of its own on gloo.

    ``function`` lives at the top level of a test module. With ``check`` a rank that fails fails the test; without, its
    place holds ``(exit code, stderr)``. ``debug="DETAIL"`` finds collectives that do not match, but torch 2.13 may
    crash under it when a process makes a DDP.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = Path(sys.modules[function.__module__].__file__)
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call.pkl"
        call.write_bytes(pickle.dumps((function.__name__, args)))
        code = (
            "import helpers_ranks, sys; "
            f"helpers_ranks._child({str(module.parent)!r}, {module.stem!r}, {str(call)!r}, sys.argv[1])"
        )
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISTRIBUTED_DEBUG": debug,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)]),
        }
        out = [Path(folder) / f"{rank}.pkl" for rank in range(world_size)]
        children = [
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-W", "error", "-c", code, str(out[rank])],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            said = [child.communicate(timeout=timeout)[1] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        results = []
        for rank, child in enumerate(children):
            if child.returncode == 0:
                results.append(pickle.loads(out[rank].read_bytes()))
            else:
                assert not check, f"rank {rank} ended with {child.returncode}:\n{said[rank][-3000:]}"
                results.append((child.returncode, said[rank]))
        return results


def _child(folder, module, call, out):
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    name, args = pickle.loads(Path(call).read_bytes())
    function = getattr(__import__(module), name)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = function(rank, *args)
    Path(out).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def average_gradients(model):
    """What DDP does, for ranks that are threads: the mean over ranks; a gradient that no rank has stays None."""
    for p in model.parameters():
        has = torch.tensor([float(p.grad is not None)])
        dist.all_reduce(has)
        if has > 0:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
