"""Real steps as timelines."""

import itertools

import pytest
import torch
from helpers_ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dkfac
from dkfac.comm import collectives
from dkfac.tools.measure.record import Recorder


def record(rank=0, world=1, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    wrapped = model if world == 1 else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"factor_interval": 1, "inverse_interval": 2, "warmup_refresh": None, "announce": False}
    kfac = dkfac.KFAC(wrapped, optimizer, **options)
    found = kfac.instruments()
    with Recorder(found.timer, found.transport.gather, wrapped, optimizer) as recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            wrapped(torch.randn(16, 20)).square().mean().backward()
            optimizer.step()
    wrapped(torch.randn(16, 20)).square().mean().backward()
    found = recorder.timelines()
    kfac.close()
    return found, collectives.listener


def test_a_step_is_what_was_done_one_after_the_other():
    found, listener = record()
    assert listener is None
    assert len(found) == 3
    for step, timeline in enumerate(found):
        spans = sorted(timeline.of(0, "compute"), key=lambda span: span.begin)
        stages = [span.stage for span in spans]
        assert stages[0] == "forward"
        assert stages[-1] == "optimizer"
        assert {"backward", "measure", "average", "precondition"} <= set(stages)
        assert "decompose" in stages
        assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(spans)), step
        assert timeline.seconds == pytest.approx(spans[-1].end)
    assert found[0].busy(0)["decompose"] > 10 * found[1].busy(0)["decompose"], "every second step has nothing to do"


def test_ranks_spans_come_together_with_their_transfers():
    (found, _), (others, _) = on_processes(2, record, 2)
    assert others == []
    assert found[0].ranks == [0, 1]
    hows = {span.stage for span in found[0].of(1, "network")}
    assert "all-reduce" in hows
    hidden, exposed = map(sum, zip(*found[0].network(0).values(), strict=True))
    assert hidden + exposed > 0
