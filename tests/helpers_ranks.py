"""Several ranks for a test: as threads of this process (any number), or as real processes (2 to 4)."""

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
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
        (Path(folder) / "call.pkl").write_bytes(pickle.dumps((function.__name__, args)))
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
        }
        _bear_ranks(str(module), folder, world_size, environment, timeout, debug)
        codes = json.loads((Path(folder) / "codes.json").read_text())
        results = []
        for rank, code in enumerate(codes):
            if code == 0:
                results.append(pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()))
            else:
                said = (Path(folder) / f"{rank}.err").read_text(errors="replace")
                assert not check, f"rank {rank} ended with {code}:\n{said[-3000:]}"
                results.append((code, said))
        return results


_NURSERIES = {}


def _bear_ranks(module, folder, world_size, environment, timeout, debug):
    """Have ranks started and wait for them.

    A process that has imported torch, kept for the next test, forks another one, which imports the test's module and
    forks the ranks: an import takes seconds, and no thread runs yet.
    """
    if debug not in _NURSERIES:
        fixed = {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": debug, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        fixed["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
        command = [sys.executable, "-X", "faulthandler", "-W", "error", "-c", "import helpers_ranks as h; h._nurse()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _NURSERIES[debug] = subprocess.Popen(command, env=os.environ | fixed, text=True, bufsize=1, **pipes)
        atexit.register(_NURSERIES[debug].kill)
    nursery = _NURSERIES[debug]
    nursery.stdin.write(json.dumps([module, folder, world_size, environment]) + "\n")
    mother = int(nursery.stdout.readline())
    is_done, _, _ = select.select([nursery.stdout], [], [], timeout)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(mother, signal.SIGKILL)  # and what ranks may have left
    code = int(nursery.stdout.readline())
    said = (Path(folder) / "mother.err").read_text(errors="replace")
    assert is_done, f"the ranks took more than {timeout} s: {said[-3000:]}"
    assert code == 0, f"no ranks were started: {said[-3000:]}"


def _nurse():
    """Fork a mother of ranks for each line."""
    import pytest  # noqa: F401 - what the tests' modules import too
    import torch._dynamo  # which an optimizer imports, for two seconds
    import torch.distributed.checkpoint

    import dkfac

    assert dkfac.KFAC, "imported when it is asked for"
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        module, folder, world_size, environment = json.loads(line)
        mother = os.fork()
        if mother == 0:
            os.setsid()
            os.environ |= environment
            errors = os.open(Path(folder) / "mother.err", os.O_WRONLY | os.O_CREAT)
            os.dup2(errors, 2)
            os.dup2(2, 1)
            _bear(module, folder, world_size)
            sys.exit(0)
        print(mother, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(mother, 0)[1]), flush=True)


def _bear(module, folder, world_size):
    sys.path.insert(0, str(Path(module).parent))
    imported = __import__(Path(module).stem)
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _child(imported, Path(folder), rank)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (Path(folder) / "codes.json").write_text(json.dumps(codes))


def _child(module, folder, rank):
    """Be one rank, and end as the interpreter would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    name, args = pickle.loads((folder / "call.pkl").read_bytes())
    dist.init_process_group("gloo")
    result = getattr(module, name)(rank, *args)
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
    sys.exit(0)


def average_gradients(model):
    """What DDP does, for ranks that are threads: the mean over ranks; a gradient that no rank has stays None."""
    for p in model.parameters():
        has = torch.tensor([float(p.grad is not None)])
        dist.all_reduce(has)
        if has > 0:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
