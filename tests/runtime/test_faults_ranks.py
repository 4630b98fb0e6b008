"""R06, R08, R09 at several ranks: what goes wrong on one of them is dealt with by all of them, and alike."""

import datetime
import math
import random
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_ranks import on_processes, on_threads
from helpers_training import (
    LOCK,
    SHARE,
    assert_ranks_are_bitwise_equal,
    attach,
    average_gradients,
    batch,
    build,
    weights,
)
from torch import nn

from dkfac.capture import calls
from dkfac.comm.groups import make_groups, only
from dkfac.decompose import layer_factors
from dkfac.ops import decompose
from dkfac.plan.strategies import FULL_STATISTICS

WORLD = 4


def step_on(model, optimizer, step, rank, spoil=lambda x, loss: None, dtype=torch.float64):
    x, y = batch(step, WORLD, dtype)
    mine = slice(rank * SHARE, (rank + 1) * SHARE)
    x, y = x[mine].clone(), y[mine]
    spoil(x, None)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    factor = spoil(None, loss)
    (loss if factor is None else loss * factor).backward()
    average_gradients(model)
    optimizer.step()


def running(kfac):
    return {f"{layer}.{key}": factor for layer, factors in kfac.factors().items() for key, factor in factors.items()}


# --- R06: a batch that is not finite, on one rank -----------------------------------------------------------------

STEPS = 12


def injections(num, seed):
    """Return ``{step: (rank, where, value)}``; step 0 stays whole, because there the oracle has to see the layers."""
    rng = random.Random(seed)
    bad = [math.nan, math.inf, -math.inf]
    return {
        step: (rng.randrange(WORLD), rng.choice(["input", "loss"]), rng.choice(bad))
        for step in rng.sample(range(1, STEPS), num)
    }


def train_through(rank, bad, options, absent):
    """Train; at a bad step one rank's batch is spoilt or, if ``absent``, no rank has a batch and gradients are zero."""
    model = build()
    optimizer, kfac = attach(model, **options)
    for step in range(STEPS):
        where, value = bad[step][1:] if step in bad and bad[step][0] == rank else (None, None)

        def spoil(x, loss, where=where, value=value):
            if x is not None and where == "input":
                x[2, 1, 3, 3] = value
            return value if loss is not None and where == "loss" else None

        if step in bad and absent:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        else:
            step_on(model, optimizer, step, rank, spoil)
    return weights(model), running(kfac), kfac.metrics()["skipped_batches"]


@pytest.mark.parametrize(
    "options",
    [{"strategy": s, "curvature": "kfac"} for s in ("replicated", "comm-opt", "hybrid-opt", "sharded", "local")]
    + [
        {"strategy": "sharded", "wire_dtype": "float16", "curvature": "kfac"},
        {"strategy": "comm-opt", "curvature": "ekfac"},
    ],
    ids=lambda o: "-".join(o.values()),
)
def test_a_bad_batch_on_one_rank_is_skipped_by_all_as_if_it_had_not_been_there(options):
    bad = injections(6, seed=len(options["strategy"]))
    found = on_threads(WORLD, train_through, bad, options, False)
    expected = on_threads(WORLD, train_through, bad, options, True)
    assert [skipped for *_, skipped in found] == [len(bad)] * WORLD
    assert [skipped for *_, skipped in expected] == [0] * WORLD
    assert_ranks_are_bitwise_equal([w for w, *_ in found])
    for (ours, factors, _), (theirs, wanted, _) in zip(found, expected, strict=True):
        assert all(p.isfinite().all() for p in ours)
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
        assert factors.keys() == wanted.keys()
        assert all(torch.equal(factors[name], wanted[name]) for name in wanted)


# --- R08: decompositions that fail on one rank --------------------------------------------------------------------

BAD_RANK = 1


def break_eigh(monkeypatch, mode):
    """Make rank 1's ``eigh`` fail: its second call raises, returns NaN, or every call raises; Cholesky too, or not."""
    real, real_inverse, calls = decompose.eigen, decompose.damped_inverse, threading.local()

    def eigen(factor):
        if dist.get_rank() != BAD_RANK:
            return real(factor)
        calls.number = getattr(calls, "number", 0) + 1
        if mode == "nan":
            return decompose.Eigen(factor * math.nan, factor[..., 0] * math.nan)
        if mode != "second" or calls.number == 2:
            raise decompose.LinAlgError("forced")
        return real(factor)

    def inverse(factor, shift):
        if dist.get_rank() == BAD_RANK and mode == "for-ever":
            raise decompose.LinAlgError("forced")
        return real_inverse(factor, shift)

    monkeypatch.setattr(decompose, "eigen", eigen)
    monkeypatch.setattr(decompose, "damped_inverse", inverse)


def train_with_broken(rank, options, steps):
    """Return weights, counters and, if training ended early, why and when."""
    model = build(torch.float32)
    optimizer, kfac = attach(model, **({"inverse_interval": 2} | options))
    ended = None
    for step in range(steps):
        try:
            step_on(model, optimizer, step, rank, dtype=torch.float32)
        except RuntimeError as error:
            ended = (step, str(error))
            break
    counters = {k: v for k, v in kfac.metrics().items() if k.startswith("fallbacks") or k == "refreshes"}
    mine = sum(BAD_RANK in by for p in kfac.plan.placements for by in p.decomposed_by)
    return weights(model), counters, ended, mine


@pytest.mark.parametrize("mode", ["second", "nan", "raises", "for-ever"])
@pytest.mark.parametrize("strategy", ["replicated", "spd", "comm-opt", "hybrid-opt", "sharded", "local"])
def test_failed_decompositions_of_one_rank_count_on_all_and_leave_ranks_equal(strategy, mode, monkeypatch):
    break_eigh(monkeypatch, mode)
    found = on_threads(WORLD, train_with_broken, {"strategy": strategy}, 3)
    assert_ranks_are_bitwise_equal([w for w, *_ in found])
    assert all(p.isfinite().all() for p in found[0][0])
    assert all(counters == found[0][1] for _, counters, *_ in found)
    assert all(ended is None for *_, ended, _ in found)
    counters, mine = found[0][1], found[0][3]
    assert counters["refreshes"] == 2
    assert mine > 0
    failed = {"second": 1, "nan": 2 * mine, "raises": 2 * mine, "for-ever": 2 * mine}[mode]
    if strategy in ("replicated", "spd"):  # others decomposed the same and went on: all keep what they had
        assert sum(counters[f"fallbacks_{rung}"] for rung in ("kept", "raw")) == failed
    else:
        rung = {"second": "float64", "nan": "cholesky", "raises": "cholesky", "for-ever": "raw"}[mode]
        assert counters[f"fallbacks_{rung}"] == failed
    assert sum(counters[f"fallbacks_{rung}"] for rung in ("float64", "cholesky", "kept", "raw")) == failed


@pytest.mark.parametrize("strategy", ["replicated", "spd", "comm-opt", "sharded", "local"])
def test_too_many_failures_in_a_row_are_raised_on_all_ranks_alike(strategy, monkeypatch):
    break_eigh(monkeypatch, "for-ever")
    found = on_threads(WORLD, train_with_broken, {"strategy": strategy, "max_failures": 2}, 8)
    ends = {ended for *_, ended, _ in found}
    assert len(ends) == 1
    step, message = ends.pop()
    assert step == 2
    assert "could not be decomposed 2 times in a row" in message
    assert_ranks_are_bitwise_equal([w for w, *_ in found])


# --- an exception on one rank -------------------------------------------------------------------------------------


CURRENT = threading.local()
"""Each rank's step."""


def raises_there(real, failing_step):
    """Return the function, which raises on rank 1 in this step."""

    def wrapped(*args, **kwargs):
        if dist.get_rank() == BAD_RANK and CURRENT.step == failing_step:
            raise TypeError("a forced error")
        return real(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    ("module", "name", "step"), [(calls, "rows_of", 2), (calls, "rows_of", 0), (layer_factors, "refresh", 4)]
)
@pytest.mark.parametrize("strategy", ["replicated", "comm-opt", "local"])
def test_an_exception_on_one_rank_is_raised_on_all_in_the_same_step(strategy, module, name, step, monkeypatch):
    """In the capture, inside backward; in the decomposition."""
    monkeypatch.setattr(module, name, raises_there(getattr(module, name), step))
    found = on_threads(WORLD, train_until_it_raises, {"strategy": strategy})
    assert [where for where, *_ in found] == [step] * WORLD
    for rank, (_, kind, message) in enumerate(found):
        if rank == BAD_RANK:
            assert (kind, message) == ("TypeError", "a forced error")
        else:
            assert kind == "RuntimeError"
            assert f"rank {BAD_RANK} failed in K-FAC's part of the step: TypeError: a forced error" in message


def train_until_it_raises(rank, options):
    model = build()
    optimizer, _ = attach(model, **options)
    for step in range(6):
        CURRENT.step = step
        try:
            step_on(model, optimizer, step, rank)
        except Exception as error:
            return step, type(error).__name__, str(error)
    return None, None, None


# --- R09: layers that not every rank runs -------------------------------------------------------------------------


class Branching(nn.Module):
    """Runs each example through ``branch`` as often as it says."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x, times):
        h = torch.tanh(self.stem(x))
        for k in range(int(times.max())):
            chosen = times > k
            h = h.index_put((chosen,), torch.tanh(self.branch(h[chosen])))
        return self.head(h)


PATTERNS = {
    "one-rank-only": lambda step, rank: int(rank == 2),
    "all-but-one": lambda step, rank: int(rank != 0),
    "another-rank-each-step": lambda step, rank: int(rank == step % WORLD),
    "nobody-until-step-3": lambda step, rank: int(step >= 3),
    "one-rank-from-step-3": lambda step, rank: int(step >= 3 and rank == 1),
    "nobody-for-a-while": lambda step, rank: int(not 3 <= step < 7),
    "twice-on-one-rank": lambda step, rank: 1 + int(rank == 1),
    "0-1-2-3-times": lambda step, rank: rank,
}


def train_branching(rank, pattern, options):
    """Rank None: one process on the global batch."""
    with LOCK:
        torch.manual_seed(0)
        model = Branching().double()
    optimizer, kfac = attach(model, **options)
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SHARE * WORLD, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (len(x),), generator=generator)
        times = torch.tensor([PATTERNS[pattern](step, r) for r in range(WORLD)]).repeat_interleave(SHARE)
        if rank is not None:
            x, y, times = (t[rank * SHARE : (rank + 1) * SHARE] for t in (x, y, times))
        optimizer.zero_grad()
        F.cross_entropy(model(x, times), y).backward()
        if rank is not None:
            average_gradients(model)
        optimizer.step()
    return weights(model), running(kfac)


@pytest.mark.parametrize(
    ("strategy", "pattern"),
    [
        pytest.param(s, p, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, s in enumerate(("comm-opt", "sharded"))
        for j, p in enumerate(PATTERNS)
    ]
    + [(s, "0-1-2-3-times") for s in FULL_STATISTICS if s not in ("comm-opt", "sharded")],
)
def test_layers_that_not_every_rank_runs_train_like_one_process(strategy, pattern):
    expected, factors = train_branching(None, pattern, {})
    found = on_threads(WORLD, train_branching, pattern, {"strategy": strategy})
    assert_ranks_are_bitwise_equal([w for w, _ in found])
    for p, q in zip(found[0][0], expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
    held = {name: factor for _, mine in found for name, factor in mine.items()}
    assert held.keys() == factors.keys()
    for name, factor in factors.items():
        torch.testing.assert_close(held[name], factor, rtol=1e-10, atol=1e-10)


def patience(rank):
    """Of groups below the world, and below a user's own group."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=77)
    )
    world, own = make_groups(), make_groups(dist.new_group([0], timeout=datetime.timedelta(seconds=55)))
    made = [world.everyone, only(world), own.everyone, only(own)]
    return [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in made]


def test_its_own_groups_wait_as_long_as_the_users():
    """Seen with a rank that slept, too: a step ends after that time, where it waited for half an hour."""
    assert on_processes(1, patience) == [[77, 77, 55, 55]]
