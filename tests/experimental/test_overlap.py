"""Overlap changes launch times alone: the same program, bitwise the same numbers."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from helpers_parity import BATCH, EXACT, batch, build
from helpers_ranks import on_processes, on_threads
from helpers_settings import arranged
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC
from dkfac.comm import groups
from dkfac.comm.transport import Transport


class Watch:
    """Counts the buckets that leave from hooks and those that the step launches."""

    def __init__(self):
        self.early, self.late, self.order = 0, 0, []
        launch, early = Transport.launch_factors, Transport.launch_early

        def launch_factors(exchange, bucket, given):
            self.order.append(bucket)
            return launch(exchange, bucket, given)

        def launch_early(exchange, sums):
            self.early += 1
            return early(exchange, sums)

        Transport.launch_factors, Transport.launch_early = launch_factors, launch_early


def train(rank, world_size, net="vision", steps=8, micro=1, sync_all=False, drop=(), model=None, **options):
    model = model or build(net)
    ddp = DistributedDataParallel(model, find_unused_parameters=net == "branches")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(
        ddp,
        optimizer,
        **arranged({"fusion": "optimal"} | {"accumulate": "mean"} | EXACT | {"factor_interval": 1} | options),
    )
    share = BATCH // world_size // micro
    for step in range(steps):
        x, y = batch(step, "vision" if net == "branches" else net)
        optimizer.zero_grad()
        for m in range(micro):
            own = slice((rank * micro + m) * share, (rank * micro + m + 1) * share)
            quiet = ddp.no_sync() if m < micro - 1 and not sync_all else contextlib.nullcontext()
            with quiet:
                (F.cross_entropy(ddp(x[own]), y[own]) / micro).backward()
        if step in drop:
            continue
        optimizer.step()
    transfers = len([t for t in kfac.report()["transfers"] if t["how"] in ("reduce-scatter", "all-reduce")])
    kfac.close()
    return [p.detach().clone() for p in model.parameters()], transfers


class Branches(nn.Module):
    """A layer that rank 0 uses in every step, rank 1 in every second."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.step = rank, 0
        self.net = build("vision")
        self.sometimes = nn.Linear(3, 3).double()
        with torch.no_grad():
            self.sometimes.weight.copy_(torch.eye(3))
            self.sometimes.bias.zero_()

    def forward(self, x):
        y = self.net(x)
        self.step += 1
        return self.sometimes(y) if self.rank == 0 or self.step % 2 else y


CASES = {
    "plain": {},
    "cholesky sharded": {"strategy": "sharded", "solver": "cholesky"},
    "replicated": {"strategy": "replicated"},
    "comm-opt bfloat16": {"strategy": "comm-opt", "wire_dtype": "bfloat16"},
    "micro-batches": {"micro": 3},
    "micro-batches without no_sync": {"micro": 2, "sync_all": True},
    "ekfac": {"curvature": "ekfac", "damping": 0.1},
    "a step dropped": {"drop": (2, 5)},
    "every second step": {"factor_interval": 2},
    "local": {"strategy": "local"},
}


def both_ways(rank):
    watch = Watch()
    results = {}
    for name, case in CASES.items():
        without, _ = train(rank, 2, **case)
        assert watch.early == 0
        watch.order.clear()
        found, transfers = train(rank, 2, overlap=True, **case)
        results[name] = (without, found, watch.early, list(watch.order), transfers)
        watch.early = 0
    pair = [train(rank, 2, net="branches", model=Branches(rank), overlap=o, steps=9)[0] for o in (False, True)]
    results["only some ranks"] = (*pair, 1, [], 0)
    return results


def test_overlap_gives_bitwise_the_same_weights_and_launches_in_the_plans_order():
    ranks = on_processes(2, both_ways)
    for name in (*CASES, "only some ranks"):
        for without, found, early, order, _ in (rank[name] for rank in ranks):
            assert all(torch.equal(p, q) for p, q in zip(without, found, strict=True)), name
            if name != "local":
                assert early > 0, name
            starts = [i for i, bucket in enumerate(order) if bucket == 0]
            for begin, end in zip(starts, [*starts, len(order)][1:], strict=True):
                assert order[begin:end] == list(range(end - begin)), name
        assert all(torch.equal(p, q) for p, q in zip(ranks[0][name][1], ranks[1][name][1], strict=True)), name


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        self.times = 1

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return self.head(x)


def call_twice_later(rank):
    torch.manual_seed(0)
    model = Twice()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    KFAC(ddp, optimizer, experimental={"overlap": True}, **EXACT)
    for step in range(3):
        model.times = 2 if step == 2 and rank == 1 else 1
        optimizer.zero_grad()
        ddp(torch.randn(4, 4, dtype=torch.float64)).square().mean().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_layer_called_again_after_its_factors_left_is_an_error_on_all_ranks():
    said = on_processes(2, call_twice_later)
    assert all("layer 'layer' was called several times" in text and "overlap=False" in text for text in said), said
    assert "rank 1" in said[0]


def test_float16_on_the_wire_is_refused_with_overlap():
    model = build("deep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"overlap=True with wire_dtype=\"float16\".*bfloat16"):
        KFAC(model, optimizer, experimental={"overlap": True}, wire_dtype="float16")


def refused_with_nccl(_rank):
    with pytest.raises(ValueError, match=r"overlap=True with NCCL: .* autograd's threads .* omit overlap"):
        train(0, 2, overlap=True)


def test_overlap_is_refused_with_nccl(monkeypatch):
    """Before any group is made: DDP's communicator and K-FAC's would be used from several threads."""
    monkeypatch.setattr(groups, "sends_by_nccl", lambda device, group=None: True)
    monkeypatch.setattr(groups, "make_groups", lambda *_: pytest.fail("a group was made"))
    on_threads(2, refused_with_nccl)


def test_which_groups_send_by_nccl(monkeypatch):
    for config, device, expected in (
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:gloo", "cuda", False),
        ("cuda:nccl", "cuda", True),
    ):
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group, config=config: config)
        assert groups.sends_by_nccl(torch.device(device)) == expected
