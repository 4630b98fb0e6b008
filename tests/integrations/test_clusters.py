"""The examples for Ray Train and Slurm: code from the docs, with stand-ins for Ray and ``srun``; and the real Ray."""

import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from helpers_ranks import on_processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/integrations.md").read_text()


def snippet(title, kind):
    """Return the code of a section of the page."""
    section = PAGE[PAGE.index(f"## {title}") :]
    return re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1]


def pieces_of_ray(rank, folder):
    """Run the example with what ``ray.train`` does on a worker: a DDP, and reports."""
    reports = []
    context = types.SimpleNamespace(get_world_rank=lambda: rank)

    class Checkpoint:
        from_directory = staticmethod(lambda path: sorted(os.listdir(path)))

    class TorchTrainer:
        def __init__(self, train, scaling_config):
            self.fit = train

    names = {"ray": {}, "ray.train": {}, "ray.train.torch": {}}
    names["ray.train"] = {
        "get_context": lambda: context, "Checkpoint": Checkpoint, "ScalingConfig": dict,
        "report": lambda metrics, checkpoint: reports.append((metrics["step"], checkpoint)),
    }  # fmt: skip
    ddp = torch.nn.parallel.DistributedDataParallel
    names["ray.train.torch"] = {"TorchTrainer": TorchTrainer, "prepare_model": ddp}
    for name, members in names.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    sys.modules["ray"].train = sys.modules["ray.train"]
    tempfile.tempdir = folder
    exec(compile(snippet("Ray Train", "python"), "integrations.md", "exec"), {})
    return reports


def test_the_pieces_of_the_ray_example_run_on_ranks_without_ray(tmp_path):
    first, second = on_processes(2, pieces_of_ray, str(tmp_path))
    assert first == [(10, ["state.pt"])]
    assert second == [(10, None)]


@pytest.mark.slow
def test_the_real_ray(tmp_path):
    pytest.importorskip("ray.train", reason="Ray is not installed")
    code = f"import os\nos.environ['RAY_AIR_LOCAL_CACHE_DIR'] = {str(tmp_path)!r}\n" + snippet("Ray Train", "python")
    (tmp_path / "train.py").write_text(code.replace(").fit()", ').fit()\nprint("done")'))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "strategy replicated on 2 ranks" in done.stdout + done.stderr


SRUN = """#!/bin/sh
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_JOB_ID=$$ "$@" &
done
wait
"""
TRAIN = """
import json, torch, dkfac
place = dkfac.distributed.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kfac = dkfac.KFAC(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 4) + place.rank).square().mean().backward()
    optimizer.step()
result = [place.world_size, kfac.metrics()["step"], model.module.weight.tolist()]
open(f"result{place.rank}.json", "w").write(json.dumps(result))
dkfac.distributed.end()
"""


def test_the_slurm_script_runs_with_a_stand_in_for_srun(tmp_path):
    batch = snippet("Slurm", "sh")
    for name, text in {"srun": SRUN, "train.py": TRAIN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    done = subprocess.run(["bash", "-eu", "-c", batch], env=environment, **given)
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0] == results[1], done.stderr
    assert results[0][:2] == [2, 3]
