"""Several ranks: the optimizer's state dict has moments, sends nothing, and a closed K-FAC leaves replicas equal."""

import warnings

import pytest
import torch
from helpers_ranks import on_processes
from torch import nn

import dkfac


def train(rank, strategy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"announce": False, "factor_interval": 1, "inverse_interval": 2}
    kfac = dkfac.KFAC(model, optimizer, strategy=strategy, **options)

    def steps(number):
        for step in range(number):
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            (model(x) - x[:, :3]).square().mean().backward()
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()

    steps(4)
    said, entries = [], {}
    if rank == 0:  # a collective would wait for the other rank
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            entries = optimizer.state_dict()["state"]
            optimizer.state_dict()
        said = [str(warning.message) for warning in found]
    kfac.close()
    steps(3)
    return said, {i: sorted(entry) for i, entry in entries.items()}, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_moments_are_there_the_rest_is_said_once_and_replicas_stay_equal(strategy):
    (said, entries, parameters), (_, _, others) = on_processes(2, train, strategy)
    assert len(said) == 1
    assert "save kfac.state_dict() as well" in said[0]
    adams = [["exp_avg", "exp_avg_sq", "step"]]
    assert sorted(entries) == list(range(6))
    kinds = [list(kind) for kind in {tuple(entry) for entry in entries.values()}]
    assert sorted(kinds) == (adams if strategy == "comm-opt" else [[], *adams])
    assert all(torch.equal(p, q) for p, q in zip(parameters, others, strict=True))
