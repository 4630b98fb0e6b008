"""R10: ranks that run out of batches at different steps, under torch's Join context."""

import pytest
import torch
import torch.nn.functional as F
from helpers_parity import EXACT, batch, build
from helpers_ranks import on_processes
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC

STEPS = (9, 6)
"""How many batches each of the two ranks has."""
PART = 12


def pieces(step):
    x, y = batch(step, "deep")
    return [(x[r * PART :][:PART], y[r * PART :][:PART]) for r in range(2)]


def train(rank, strategy):
    model = build("deep")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(ddp, optimizer, strategy=strategy, **EXACT)
    with Join([ddp, kfac]):
        for step in range(STEPS[rank]):
            x, y = pieces(step)[rank]
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
    counted = kfac.metrics()["step"]
    kfac.close()
    return [p.detach().clone() for p in model.parameters()], counted


def forget_kfac(rank):
    model = build("deep")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    KFAC(ddp, optimizer, strategy="comm-opt", **EXACT)
    with ddp.join(), pytest.raises(RuntimeError, match=r"Join\(\[model, kfac\]\)"):
        ddp(pieces(0)[rank][0])
    sharded = KFAC(build("deep"), strategy="sharded", **EXACT)
    with pytest.raises(ValueError, match=r"strategy='sharded'.*comm-opt"):
        Join([ddp, sharded])


def all_cases(rank):
    results = [train(rank, strategy) for strategy in ("comm-opt", "replicated", "spd", "factor-wise")]
    forget_kfac(rank)
    return results


def oracle():
    """One process: the mean over two ranks of the loss of each, which is zero for a rank without a batch."""
    model = build("deep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # The loss is not a mean over its terms while one rank is gone: say what it is by the number of terms and a factor.
    kfac = KFAC(model, optimizer, accumulate="sum", **EXACT)
    for step in range(max(STEPS)):
        optimizer.zero_grad()
        for rank, (x, y) in enumerate(pieces(step)):
            if step < STEPS[rank]:
                F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad /= 2
        optimizer.step()
    kfac.close()
    return [p.detach().clone() for p in model.parameters()]


def test_ranks_that_run_out_of_batches_leave_the_others_right():
    expected = oracle()
    for results in on_processes(2, all_cases):
        for weights, counted in results:
            assert counted == max(STEPS)
            for p, q in zip(weights, expected, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
