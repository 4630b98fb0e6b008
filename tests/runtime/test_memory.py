"""R25, R04: long runs hold on to nothing, and two equal runs are bitwise equal."""

import ctypes
import gc
import resource
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dkfac import KFAC

EXACT = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4}
EXACT_FISHER = {"fisher": "exact", "fisher_loss": "cross-entropy"}
MEGABYTE = 1_000_000


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, KFAC(model, optimizer, norm_form="unit", **(EXACT | options))


def train(model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, 5, generator=generator), torch.randint(0, 3, (6,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def memory():
    """Bytes held by Python's small objects (each at most 512), by tensors that Python sees, by the process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return sys.getallocatedblocks() * 512, sum(storages.values()), resident


def tensors():
    return [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]


def assert_no_growth(work, *, warm_up, times):
    """A leak grows in every window; an allocator that settles late, as on a busy machine, only in some."""
    work(warm_up)
    for _ in range(5):
        before = memory()
        work(times)
        grown = {
            what: new - old
            for what, old, new in zip(("Python objects", "tensors", "resident memory"), before, memory(), strict=True)
            if new - old > MEGABYTE
        }
        if not grown:
            return
        assert set(grown) == {"resident memory"}, f"grew by {grown} bytes"
    raise AssertionError(f"grew by {grown} bytes in each of 5 windows")


def test_a_thousand_attach_close_cycles_leave_no_memory_and_no_hooks():
    model, optimizer, kfac = make()
    kfac.close()

    def cycles(number):
        for _ in range(number):
            with KFAC(model, optimizer, norm_form="unit", **EXACT):
                pass

    assert_no_growth(cycles, warm_up=2000, times=1000)  # the allocator settles in about 2,000 cycles
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks


LONG = pytest.mark.filterwarnings("ignore:K-FAC may not pay off")


@LONG
def test_memory_does_not_grow_in_2000_steps():
    model, optimizer, _ = make(factor_interval=5, inverse_interval=20)
    assert_no_growth(lambda n: train(model, optimizer, n), warm_up=100, times=2000)


@LONG
@pytest.mark.parametrize(
    "options",
    [pytest.param({"curvature": "ekfac", "rescale": "kl-clip"}, marks=pytest.mark.slow), EXACT_FISHER],
    ids=str,
)
def test_memory_does_not_grow_with_other_curvatures(options):
    model, optimizer, _ = make(**options)
    assert_no_growth(lambda n: train(model, optimizer, n), warm_up=50, times=400)


@LONG
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
def test_memory_does_not_grow_in_10000_steps(solver):
    model, optimizer, _ = make(solver=solver)
    assert_no_growth(lambda n: train(model, optimizer, n), warm_up=500, times=10_000)


@pytest.mark.parametrize("fisher", [{}, EXACT_FISHER], ids=["empirical", "exact"])
def test_forwards_without_backward_keep_nothing(fisher):
    """Evaluation without no_grad: each graph must go when its output goes."""
    model, _, _ = make(**fisher)
    x = torch.randn(6, 5)

    def forwards(number):
        for _ in range(number):
            model(x)

    assert_no_growth(forwards, warm_up=50, times=300)
    forwards(1)
    gc.collect()
    before = len(tensors())
    forwards(20)
    gc.collect()
    assert len(tensors()) == before


# --- R04 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"solver": "cholesky"},
        {"curvature": "ekfac", "rescale": "kl-clip"},
    ],
    ids=str,
)
def test_200_steps_twice_are_bitwise_the_same(options):
    runs = []
    for _ in range(2):
        model, optimizer, kfac = make(**options)
        train(model, optimizer, 200)
        runs.append((list(model.parameters()), kfac.factors()))
    assert all(torch.equal(p, q) for p, q in zip(runs[0][0], runs[1][0], strict=True))
    for name, factors in runs[0][1].items():
        assert all(torch.equal(runs[1][1][name][key], factor) for key, factor in factors.items()), name
