"""dkfac.distributed.init: the ranks that torchrun starts, and starts again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dkfac

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import dkfac

place = dkfac.distributed.init(timeout_seconds=60)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dkfac.KFAC(model, optimizer, announce=False)
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    if step == 2 and restart < int(os.environ["KILLS"]) and place.rank == restart % 2:
        os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {place.rank} of {place.world_size} done after {restart} restarts, {int(total)} ranks", flush=True)
dkfac.distributed.end()
"""


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_under_torchrun_are_recovered(kills, tmp_path):
    """R18: ten in one run."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=11"]
    root = str(Path(dkfac.__file__).parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "KILLS": str(kills)}
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=230, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"rank 0 of 2 done after {kills} restarts, 2 ranks" in done.stdout
    assert f"rank 1 of 2 done after {kills} restarts, 2 ranks" in done.stdout


def test_alone_it_does_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    place = dkfac.distributed.init()
    assert (place.rank, place.world_size) == (0, 1)
    assert not torch.distributed.is_initialized()
    dkfac.distributed.end()


def test_half_an_environment_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT.*torchrun"):
        dkfac.distributed.init()
