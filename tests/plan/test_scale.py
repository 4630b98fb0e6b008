"""What a host does for thousands of ranks, counted in calls of functions: 156 layers of ResNet-152, on a fake group.

``benchmarks/scale_hosts.py`` has the seconds.
"""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dkfac.comm import collectives, groups
from dkfac.comm.transport import Transport
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS
from dkfac.plan.strategies import STRATEGIES

MANY, FEW = 4096, 64
META = torch.device("meta")


@contextlib.contextmanager
def world_of(size):
    dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Done:
    def wait(self, *_):
        pass


@pytest.fixture
def created(monkeypatch):
    """Leave out transfers; return the groups that ranks create together."""
    groups_made, real = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: groups_made.append(ranks) or real(ranks, **more))
    for module, names in (
        (dist, ("all_to_all_single", "all_reduce")),
        (collectives, ("_all_gather", "_reduce_scatter")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: Done())
    return groups_made


def calls(function):
    """Return what a function returns, and the number of calls of functions in it, of C's too."""
    number = 0

    def count(_frame, event, _arg):
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = function()
    finally:
        sys.setprofile(None)
    return found, number


def attach(strategy, size):
    specs = tuple(shape.spec for shape in MODELS["resnet152"]())
    plan = make_plan(specs, size, Choices(strategy=strategy))
    plan.bytes_by_rank()  # for the announcement
    return Transport(plan, groups.make_groups(), META).open()


def step_of(transport):
    """Return a step of each kind: ordinary, measure, refresh."""
    stages = [t for stage in ("gradients", "decompositions") for t in transport.program.stage(stage)]
    owned = {
        part: torch.empty(part.elements, device=META)
        for t in stages
        for part in t.parts
        if part.owner == transport.rank
    }
    sent = {id(t): torch.empty(t.elements(transport.rank), device=META) for t in transport.program.stage("factors")}

    def fill(transfer):
        return sent[id(transfer)]

    return {
        "ordinary": lambda: transport.share("gradients", owned.get),
        "measure": lambda: transport.finish_factors(
            [one for bucket in range(transport.num_buckets) for one in transport.launch_factors(bucket, fill)]
        ),
        "refresh": lambda: transport.share("decompositions", owned.get),
    }


def measured(strategy, size):
    with world_of(size):
        transport, attaching = calls(lambda: attach(strategy, size))
        try:
            found = {"attach": attaching}
            for kind, step in step_of(transport).items():
                step()  # fills the caches
                found[kind] = calls(step)[1]
            return found
        finally:
            transport.close()


QUICK = ("comm-opt", "hybrid-opt", "spd", "sharded")


@pytest.mark.parametrize("strategy", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES])
def test_a_step_of_4096_ranks_takes_a_host_no_more_calls_than_one_of_64(strategy, created):
    many = measured(strategy, MANY)
    assert sum(MANY - 1 in ranks for ranks in created) <= 3
    few = measured(strategy, FEW)
    for kind in ("ordinary", "measure", "refresh"):
        assert many[kind] <= max(few[kind], 1500), kind
    assert many["attach"] < 250_000  # most by torch, for the 2,049 groups of hybrid-opt
