"""wire_form="rows": what travels changes, the numbers do not."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_ranks import average_gradients, on_threads
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.factors.sent_rows import FEW_ELEMENTS

EXACT = {"announce": False, "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 3, "damping": 1e-3}
LOCK = threading.Lock()
BATCH, STEPS = 48, 10


def build():
    with LOCK:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(90, 80), nn.Tanh(), nn.Linear(80, 52, bias=False), nn.Tanh(), nn.Linear(52, 3))
    return net.double()


def batch(step, size=BATCH):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 90, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def train(rank=0, world_size=1, micro=1, sizes=(), **options):
    """``sizes``: global batch sizes by step that differ from the usual."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(model, optimizer, **arranged({"accumulate": "mean"} | EXACT | options))
    sizes = dict(sizes)
    for step in range(STEPS):
        x, y = (t.chunk(world_size)[rank] for t in batch(step, sizes.get(step, BATCH)))
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(micro), y.chunk(micro), strict=True):
            (F.cross_entropy(model(xs), ys) / micro).backward()
        if world_size > 1:
            average_gradients(model)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], kfac


def weights_of(rank, world_size, options):
    weights, kfac = train(rank, world_size, **options)
    return weights, kfac.plan, kfac.metrics()["skipped_batches"], kfac.report()["transfers"]


def assert_same(found, expected, tolerance=1e-10):
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("options", [{"strategy": "sharded"}, {"strategy": "comm-opt", "solver": "cholesky"}], ids=str)
def test_rows_give_the_weights_of_one_process(world_size, options):
    expected, _ = train(**options)
    for weights, plan, skipped, _ in on_threads(world_size, weights_of, world_size, {"wire_form": "rows", **options}):
        assert_same(weights, expected)
        assert skipped == 0
        per_rank = BATCH // world_size
        wanted = {(n, k) for n, k, d in DIMS if 2 * per_rank < d or per_rank * d <= FEW_ELEMENTS}
        assert {(name, key) for name, key, _ in plan.rows} == wanted
        assert all(number == per_rank for *_, number in plan.rows)


DIMS = [("0", "A", 91), ("0", "G", 80), ("2", "A", 80), ("2", "G", 52), ("4", "A", 53), ("4", "G", 3)]
CASES = {
    "micro-batches": {"micro": 3},
    "mean of sums": {"accumulate": "sum", "micro": 2},
    "by terms": {"accumulate": "terms"},
    "a smaller last batch": {"sizes": ((5, 12), (9, 8))},
    "hybrid": {"strategy": "hybrid-opt"},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_go_with(case):
    expected, _ = train(**CASES[case])
    for weights, plan, skipped, _ in on_threads(
        4, weights_of, 4, {"strategy": "sharded", "wire_form": "rows", **CASES[case]}
    ):
        assert plan.rows
        assert skipped == 0
        assert_same(weights, expected)


def test_statistics_of_more_rows_than_there_is_room_for_are_left_out_until_the_next_refresh_makes_room():
    sizes = {"sizes": tuple((step, 2 * BATCH) for step in range(4, STEPS))}
    found = on_threads(4, weights_of, 4, {"wire_form": "rows", "strategy": "sharded", **sizes})
    for weights, plan, skipped, _ in found:
        assert skipped == 0  # the gradient of such a step is good
        assert {number for *_, number in plan.rows} == {2 * BATCH // 4}
        assert_same(weights, found[0][0], 0)


def test_rows_are_fewer_bytes_and_exactly_those_of_the_plan():
    (*_, few), (*_, many) = (
        on_threads(4, weights_of, 4, {"wire_form": form, "strategy": "sharded"})[0] for form in ("rows", "sums")
    )
    rows = [t for t in few if t["how"] == "rows"]
    assert [t["bytes"] for t in rows] == [8 * (BATCH // 4) * sum(d for *_, d in DIMS)]
    assert {t["how"] for t in few if t["stage"] == "factors"} == {"rows"}
    assert sum(t["bytes"] for t in few) < sum(t["bytes"] for t in many)


def test_replicated_factors_travel_as_sums():
    for _, plan, *_ in on_threads(2, weights_of, 2, {"wire_form": "rows", "strategy": "replicated"}):
        assert plan.rows == ()


def bfloat16(rank):
    return train(rank, dist.get_world_size(), wire_form="rows", strategy="sharded", wire_dtype="bfloat16")[0]


def test_rounded_rows_leave_all_ranks_alike():
    found = on_threads(4, bfloat16)
    exact, _ = train()
    for weights in found:
        assert_same(weights, found[0], 0)
        assert_same(weights, exact, 0.05)
