"""``dkfac run`` on several ranks: all attach or none, nobody waits forever; errors do not end the script."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(name, model, steps=3, absent=False, by_hand=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if absent:
        return
    for _ in range(steps):
        optimizer.zero_grad()
        if by_hand:
            sum(p.square().sum() for p in model.parameters()).backward()
        else:
            model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    sys.stderr.write(f"{name} {rank} done\\n")  # in one piece: both ranks write


def net(out=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, out))


train("good", net())
train("refuses", nn.Sequential(nn.PReLU(), nn.PReLU()) if rank else net())
train("differs", net(2 + rank))
train("by hand", net(), by_hand=rank == 1)
train("good again", net())
train("absent", net(), absent=rank == 1)
dist.destroy_process_group()
"""


def on_two_ranks(folder, text, *options):
    script = folder / "train.py"
    script.write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DKFAC_RUN_PATIENCE": "5"}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [sys.executable, *torchrun, "-m", "dkfac", "run", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_all_ranks_attach_or_none_and_all_go_on(tmp_path):
    done = on_two_ranks(tmp_path, SCRIPT)
    for name in ("good", "refuses", "differs", "by hand", "good again"):
        assert all(f"{name} {rank} done" in done.stderr for rank in (0, 1)), done.stderr
    assert "absent 0 done" in done.stderr
    lines = done.stderr.splitlines()
    assert sum(line.startswith("dkfac: 2 layers") and "on 2 ranks" in line for line in lines) == 2
    told = [line for line in lines if line.startswith("dkfac run: ")]
    reasons = [
        "(optimizer 2, 58 parameters): rank 1: the model has no layer that K-FAC can precondition",
        "(optimizer 3, 58 parameters): rank 1 attached K-FAC differently from rank 0",
        "(optimizer 4, 58 parameters): rank 1: no model was found before the first step",
        "(optimizer 6, 58 parameters): rank 1 did not get to a training forward pass within 5 s",
    ]
    assert len(told) == len(reasons), told
    for line, reason in zip(told, reasons, strict=True):
        assert reason in line
        assert line.endswith("It goes on without K-FAC")


FAILS = """
import sys
import time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(4, 8), nn.Linear(8, 3), 0

    def forward(self, x):
        self.calls += 1
        y = self.two(self.one(x).relu())
        return (y,) if rank == 1 and self.calls == 3 else y  # which K-FAC refuses with the exact Fisher


model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    y = model(torch.randn(8, 4))
    nn.functional.cross_entropy(y[0] if isinstance(y, tuple) else y, torch.randint(3, (8,))).backward()
    optimizer.step()
inner = model.module.one
sys.stderr.write(f"rank {rank} ends with {inner.weight.sum().item()} and {len(inner._forward_hooks)} hooks\\n")
time.sleep(0.5)  # a thread of torch's releases DDP's last transfer, and aborts if Python is at its end by then
dist.destroy_process_group()
"""


EACH = ["--set", "factor_interval=1", "--set", "inverse_interval=1"]


def test_an_error_on_one_rank_switches_kfac_off_on_all_in_the_same_step(tmp_path):
    done = on_two_ranks(tmp_path, FAILS, "--set", "fisher=exact", "--set", "fisher_loss=cross-entropy", *EACH)
    assert done.stderr.count("K-FAC is switched off after 3 steps: rank 1 failed in K-FAC's part of the step") == 1
    ends = re.findall(r"rank . ends with (\S+) and 0 hooks", done.stderr)
    assert len(ends) == 2
    assert ends[0] == ends[1]
