"""R31: ranks that do not train the same model are told so, all of them, before the second refresh."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_ranks import on_processes, on_threads
from helpers_training import RHYTHM, SHARE, assert_ranks_are_bitwise_equal, attach, average_gradients, batch, build
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC
from dkfac.ops import bit_sums

WORLD, ODD, STEPS = 3, 1, 5


def pass_and_average(model, step, rank, *, averages=True):
    x, y = batch(step, WORLD)
    mine = slice(rank * SHARE, (rank + 1) * SHARE)
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    if averages:
        average_gradients(model)


def train(rank, case, options):
    """Return the step at which this rank was told, and what."""
    model = build()
    if rank == ODD and case == "weights":
        with torch.no_grad():
            model[5].weight[2, 1] += 1e-12
    lr = 0.06 if rank == ODD and case == "lr" else 0.05
    optimizer, kfac = attach(model, lr=lr, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        pass_and_average(model, step, rank, averages=case != "no-ddp" and (case, step) != ("late-no-ddp", 4))
        if case == "gradient" and rank == ODD and step == 0:
            model[3].bias.grad[1] *= 1 + 1e-15
        if case == "schedule" and rank == ODD and step == 2:
            optimizer.param_groups[0]["lr"] = 0.07
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return STEPS, kfac.metrics()["refreshes"]


TOLD = {
    "weights": (1, ["weights differ before step 0", "rank 1 differs from the others in '5.weight'"]),
    "no-ddp": (
        1,
        ["gradients differ at step 0", "ranks 0, 1, 2 do not agree in '0.weight'", "DistributedDataParallel"],
    ),
    "gradient": (1, ["gradients differ at step 0", "rank 1 differs from the others in '3.bias'"]),
    "lr": (0, ["rank 1 differs from the others", "lr 0.05 on ranks 0, 2", "lr 0.06 on rank 1"]),
    "schedule": (2, ["rank 1 differs from the others", "lr 0.05 on ranks 0, 2", "lr 0.07 on rank 1"]),
}


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded", "local"])
@pytest.mark.parametrize("case", TOLD)
def test_all_ranks_are_told_who_differs_and_where_before_the_second_refresh(case, strategy):
    told = on_threads(WORLD, train, case, {"strategy": strategy})
    step, words = TOLD[case]
    assert len(set(told)) == 1
    assert told[0][0] == step, told[0]
    assert [word for word in words if word not in told[0][1]] == [], told[0][1]


def test_who_says_that_replicas_may_differ_is_left_alone():
    options = {"experimental": {"replicas_may_differ": True}, "strategy": "comm-opt"}
    for case in ("weights", "no-ddp", "lr"):
        assert on_threads(WORLD, train, case, options) == [(STEPS, 2)] * WORLD


def test_ranks_that_agree_are_left_alone_and_later_differences_are_found_at_the_next_refresh():
    assert on_threads(WORLD, train, "none", {"strategy": "comm-opt"}) == [(STEPS, 2)] * WORLD


def find_differences_late(rank):
    """Other gradients from step 5 on, which neither measures nor refreshes; step 8 refreshes."""
    model = build()
    optimizer, _ = attach(model)
    for step in range(12):
        optimizer.zero_grad()
        pass_and_average(model, step, rank, averages=step < 5)
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return None


def test_replicas_that_come_apart_later_are_found_at_the_next_refresh():
    told = on_threads(WORLD, find_differences_late)
    assert {step for step, _ in told} == {9}
    assert all("weights differ before step 8" in text for _, text in told)


class Parts(nn.Module):
    """Has a part that DDP is told to leave alone, a frozen one, one that some steps do not use, and a sparse one."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 5)
        self.words = nn.Embedding(7, 4, sparse=True)
        torch.manual_seed(rank)
        self.own, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.own(self.first(self.words(x).mean(1)))) + self.frozen(torch.ones(5)))


def legal(rank):
    """Accumulation under ``no_sync``, a part of each rank's own, scaled losses that overflow on one rank."""
    model = Parts(rank)
    vars(model)["_ddp_params_and_buffers_to_ignore"] = ["own.weight", "own.bias"]
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    dense = [p for name, p in model.named_parameters() if not name.startswith("words")]
    optimizer, sparse = torch.optim.SGD(dense, lr=0.1), torch.optim.SGD(model.words.parameters(), lr=0.1)
    kfac = KFAC(ddp, optimizer, **(RHYTHM | {"inverse_interval": 2, "accumulate": "mean", "skip": ["own", "words"]}))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        sparse.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        for last in (False, True):
            x = torch.randint(7, (6, 3), generator=generator)
            y = x[:, 0] % 3
            if last:
                loss = F.cross_entropy(ddp(x), y) / 2
                loss = loss * torch.inf if rank == 1 and step == 3 else loss
                scaler.scale(loss).backward()
            else:
                with ddp.no_sync():
                    scaler.scale(F.cross_entropy(ddp(x), y) / 2).backward()
        scaler.step(optimizer)
        scaler.step(sparse)
        scaler.update()
    kfac.close()
    dist.barrier()
    return [p.detach().clone() for name, p in model.named_parameters() if not name.startswith(("own", "frozen"))]


def without_ddp(rank):
    model = build()
    optimizer, _ = attach(model, strategy="comm-opt")
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, 2)
        F.cross_entropy(model(x[rank * SHARE :][:SHARE]), y[rank * SHARE :][:SHARE]).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return None


def in_processes(rank):
    return legal(rank), without_ddp(rank)


def test_what_replicas_do_not_share_is_not_compared_and_processes_without_ddp_are_told():
    found = on_processes(2, in_processes)
    assert_ranks_are_bitwise_equal([weights for weights, _ in found])
    for _, (step, text) in found:
        assert step == 1
        assert "gradients differ at step 0: ranks 0, 1 do not agree in '0.weight'" in text


# --- sums of bits ---------------------------------------------------------------------------------------------------


def test_bit_sums_are_those_of_the_raw_words_whatever_is_stacked(monkeypatch):
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool]
    given = [torch.randn(n, 3).to(kind) for kind in kinds for n in (2, 5, 2)]
    given += [given[0].t(), given[1][::2], torch.zeros(0), torch.tensor(-0.0)]
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def word_sum(tensor):
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return sum(tensor.contiguous().view(-1).view(words[tensor.element_size()]).tolist())

    expected = [(word_sum(t) + 2**63) % 2**64 - 2**63 for t in given]
    device = torch.device("cpu")
    assert bit_sums.bit_sums(given, device).tolist() == expected
    monkeypatch.setattr(bit_sums, "STACKED_BYTES", 1)
    assert bit_sums.bit_sums(given, device).tolist() == expected
    assert bit_sums.bit_sums([], device).tolist() == []


def test_a_single_flipped_bit_changes_the_sum():
    tensor = torch.randn(50)
    before = bit_sums.bit_sums([tensor], torch.device("cpu"))
    tensor.view(torch.int32)[17] ^= 1 << 5
    assert bit_sums.bit_sums([tensor], torch.device("cpu")) != before
