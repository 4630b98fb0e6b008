"""R17: a rank that is killed in any phase ends the others, and a run that resumes ends as if nobody had been killed.

Gradients are averaged in one all-reduce. DDP sums in another order in its first iteration than later (it rebuilds its
buckets), so a run that resumes under DDP differs from an undisturbed one by rounding, with and without K-FAC.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers_ranks import on_processes
from helpers_training import RHYTHM, backward, build

from dkfac import KFAC
from dkfac.decompose import layer_factors, refresh_sync
from dkfac.factors import reduce

WORLD, STEPS, AT = 3, 8, 4
"""Step 4 measures and refreshes."""
PLACES = {
    "reduce": (reduce, "local_sums"),
    "decompose": (layer_factors, "refresh"),
    "share": (refresh_sync, "share_decompositions"),
}
PHASES = ("forward", *PLACES, "optimizer", "save")


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def save(state, path, *, dies):
    """Write a file whole or not at all."""
    torch.save(state, path.with_suffix(".part"))
    if dies:
        path.with_suffix(".part").write_bytes(path.with_suffix(".part").read_bytes()[:500])
        die()
    path.with_suffix(".part").rename(path)


def latest(folder):
    """Return the last step of which every rank has a file; 0 if there is none."""
    steps = [step for step in range(1, STEPS + 1) if all((folder / f"{step}-{r}.pt").exists() for r in range(WORLD))]
    return max(steps, default=0)


def train(rank, folder, phase=None, odd=0):
    """Train to the end from the last step that was saved; the odd rank is killed on the way."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(model, optimizer, strategy="comm-opt", **RHYTHM)
    begin = latest(folder)
    if begin:
        saved = torch.load(folder / f"{begin}-{rank}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        kfac.load_state_dict(saved["kfac"])

    def dies(name):
        return rank == odd and phase == name and kfac.metrics()["step"] == AT

    for name, (module, function) in PLACES.items():
        if rank == odd and phase == name:
            real = getattr(module, function)
            setattr(module, function, lambda *a, real=real, name=name, **k: die() if dies(name) else real(*a, **k))
    for step in range(begin, STEPS):
        if dies("forward"):
            die()
        optimizer.zero_grad()
        backward(model, step, rank, WORLD)
        optimizer.step()
        if rank == odd and phase == "optimizer" and step == AT:
            die()
        state = {"kfac": kfac.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, folder / f"{step + 1}-{rank}.pt", dies=rank == odd and phase == "save" and step == AT)
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return on_processes(WORLD, train, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("odd", range(WORLD))
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_ends_the_others_and_the_run_resumes_bitwise(phase, odd, whole, tmp_path):
    folder = Path(tmp_path)
    found = on_processes(WORLD, train, folder, phase, odd, check=False)  # 30 minutes are the group's time-out
    for rank, ended in enumerate(found):
        assert isinstance(ended, tuple), f"rank {rank} did not notice"
        assert ended[0] == (-signal.SIGKILL if rank == odd else 1)
    assert latest(folder) == AT
    for weights, expected in zip(on_processes(WORLD, train, folder), whole, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(weights, expected, strict=True))
