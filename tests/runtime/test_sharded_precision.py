"""R03 and R16: float32 on shards against one process, and FSDP2's bfloat16 policy on uneven shards against DDP."""

import pytest
import torch
from helpers_ranks import on_processes
from helpers_sharded import alone, attach, build, shard, train, whole
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

FLOAT32 = {
    "adaptive-adamw": ("adamw", {"solver": "eigen"}),
    "adaptive-sgd": ("sgd", {"solver": "eigen"}),
    "kfac": ("sgd", {"curvature": "kfac", "damping": 1e-3}),
    "kfac-cholesky": ("sgd", {"curvature": "kfac", "solver": "cholesky", "damping": 1e-3}),
}
"""For K-FAC the damping at which RELIABILITY gives its tolerance."""
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def moved(weights, begin):
    return torch.cat([(w - b).flatten() for w, b in zip(weights, begin, strict=True)])


def in_float32(rank, world_size, hsdp):
    found = {}
    for case, (optimizer, options) in FLOAT32.items():
        trained = []
        for is_sharded in (False, True):
            model = build("gpt").float()
            if is_sharded:
                shard(model, hsdp=hsdp)
            group = {} if is_sharded else {"process_group": alone()}
            own, kfac = attach(model, optimizer, **options, **group)
            train(model, "gpt", own, **({"rank": rank, "world_size": world_size} if is_sharded else {}))
            kfac.close()
            trained.append(whole(model))
        found[case] = float(max((a - b).abs().max() for a, b in zip(*trained, strict=True)))
    return found, trained[1]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "hsdp"), [(2, False), (4, False), (4, True)])
def test_in_float32_shards_train_like_one_process(world_size, hsdp):
    results = on_processes(world_size, in_float32, world_size, hsdp)
    for found, weights in results:
        assert max(found.values()) < 1e-4, found
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][1], strict=True))


class Autocast(nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            return self.model(x).float()


def in_bfloat16(rank, world_size, optimizer):
    begin, ends = whole(build("gpt").float()), {}
    for way in ("shards", "ddp", "ddp in float32"):
        model = build("gpt").float()
        if way == "shards":
            trained = shard(model, mp_policy=POLICY)
        else:
            dtype = torch.bfloat16 if way == "ddp" else torch.float32
            trained = DistributedDataParallel(Autocast(model, dtype))
        own, kfac = attach(trained, optimizer, solver="eigen")
        train(trained, "gpt", own, rank=rank, world_size=world_size)
        assert all(factor.dtype is torch.float32 for each in kfac.factors().values() for factor in each.values())
        kfac.close()
        ends[way] = moved(whole(model), begin)
    apart = {way: float((ends[way] - ends["ddp in float32"]).norm()) for way in ("shards", "ddp")}
    return apart, float((ends["shards"] - ends["ddp"]).norm()), float(ends["ddp in float32"].norm())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_bfloat16_policy_on_uneven_shards_trains_like_ddp(world_size, optimizer):
    """Widths of 6, 13 and 11 on 2 and 4 ranks. Both round activations, in different places: FSDP2 norms and the softmax
    too. After 20 steps they are about 1% of the way apart."""
    for apart, between, length in on_processes(world_size, in_bfloat16, world_size, optimizer):
        assert 0 < between < 0.02 * length
        assert apart["shards"] < 3 * apart["ddp"]
