"""R03, R04, R09, R10, R12, R13, R14 with DDP on real processes: all cases in one launch per world size."""

import functools
import traceback

import pytest
import torch
import torch.distributed as dist
from helpers_parity import EXACT, SGD, batch, build, cut, distinct, mean_loss, oracle, part, train_unevenly, weights_of
from helpers_ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dkfac import KFAC
from dkfac.plan.strategies import STRATEGIES

EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
SIZE, FOR_MICRO = 64, 80
"""Global batches: of 2 and 4 ranks' equal parts, and of 5 equal parts of those."""
STEPS = 20
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, weight_decay=1e-3, **SGD),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Checkpointed(nn.Module):
    """The network with its middle under activation checkpointing; ``how`` is None or whether it is reentrant."""

    def __init__(self, net, how):
        super().__init__()
        self.first, self.middle, self.last, self.how = net[:2], net[2:4], net[4:], how

    def forward(self, x):
        x = self.first(x)
        x = self.middle(x) if self.how is None else checkpoint(self.middle, x, use_reentrant=self.how)
        return self.last(x)


class Branching(nn.Module):
    """Only the examples marked go through ``branch``, which is not called where there are none."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, marked):
        h = torch.tanh(self.first(x))
        if marked.any():
            chosen = marked.nonzero().flatten()
            h = h.index_add(0, chosen, torch.tanh(self.branch(h[chosen])))
        return self.last(h)


def fit(
    rank=0,
    world=1,
    *,
    dtype=torch.float32,
    attach="after",
    micro=1,
    optimizer="sgd",
    autocast=False,
    overflows=None,
    checkpointing=None,
    ddp=None,
    steps=STEPS,
    size=SIZE,
    **options,
):
    """Train on this rank's part of each batch, in ``micro`` pieces; returns weights, dtypes of factors, counters.

    ``overflows``: steps that are tried twice, at first with an infinite loss on one rank; implies a scaler.
    """
    model = Checkpointed(build("small", dtype), checkpointing)
    wrapped = model if world == 1 or attach == "before" else DistributedDataParallel(model, **(ddp or {}))
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6, enabled=overflows is not None)
    kfac = KFAC(wrapped, optimizer, grad_scaler=scaler, accumulate="mean", **(EXACT | {"curvature": "kfac"} | options))
    if world > 1 and attach == "before":
        wrapped = DistributedDataParallel(model, **(ddp or {}))
    for step in range(steps):
        x, y = (part(t, rank, world) for t in batch(step, "small", dtype, size))
        for bad in [True, False] if step in (overflows or ()) else [False]:
            optimizer.zero_grad()
            for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
                if world > 1:
                    wrapped.require_backward_grad_sync = i == micro - 1  # what no_sync() sets
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = mean_loss(wrapped(a).to(dtype), b) / micro
                scaler.scale(loss * torch.inf if bad and rank == step % world else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    metrics = kfac.metrics()
    result = {
        "weights": weights_of(model),
        "dtypes": {str(f.dtype) for factors in kfac.factors().values() for f in factors.values()},
        "counts": {key: metrics[key] for key in ("step", "skipped_batches", "abandoned_steps")},
        "optimizer steps": {float(s["step"]) for s in optimizer.state.values() if "step" in s},
    }
    kfac.close()
    return result


def marked(step, size, world):
    """Who uses the branch, by steps: the first rank's examples, everyone's, the last rank's, nobody's."""
    who = torch.arange(size) * world // size
    return [who == 0, who >= 0, who == world - 1, who < 0][step % 4]


def branch(rank=0, world=1, *, parts=None, **options):
    """``parts``: of how many ranks, where one process stands for them."""
    torch.manual_seed(0)
    model = Branching().double()
    wrapped = model if world == 1 else DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    kfac = KFAC(wrapped, optimizer, **(EXACT | {"factor_interval": 1, "inverse_interval": 1} | options))
    for step in range(12):
        x, y = batch(step, size=SIZE)
        x, y, use = (part(t, rank, world) for t in (x, y, marked(step, SIZE, parts or world)))
        optimizer.zero_grad()
        mean_loss(wrapped(x, use), y).backward()
        optimizer.step()
    kfac.close()
    return {"weights": weights_of(model)}


def uneven_steps(world):
    """Whole batches, a single example on a rank, and a rank without any."""
    sizes = [[5] * world, [5] * (world - 1) + [1], [0] + [4] * (world - 1)]
    return [cut(step, sizes[step % 3]) for step in range(9)]


def uneven(rank, world, **options):
    weights, _ = train_unevenly(rank, uneven_steps(world), wrap=DistributedDataParallel, **options)
    return {"weights": weights}


SCALED = {"overflows": (0, 3, 7), **EVERY_STEP, "steps": 10, "strategy": "sharded"}
CUT = {"size": FOR_MICRO, "dtype": torch.float64, "steps": 10, "strategy": "hybrid-opt"}
OTHERS = {
    "5 micro-batches": (fit, {"micro": 5, **CUT}),
    "fused sgd overflowing": (fit, {"optimizer": "fused sgd", **SCALED}),
    "branch sharded": (branch, {"strategy": "sharded"}),
    "uneven": (uneven, {"strategy": "hybrid-opt"}),
}
ON_TWO = {
    "2 micro-batches": (fit, {"micro": 2, **CUT}),
    "sgd overflowing": (fit, {"optimizer": "sgd", **SCALED}),
    "fused adamw overflowing": (fit, {"optimizer": "fused adamw", **SCALED}),
    "fused sgd overflowing, local": (fit, {"optimizer": "fused sgd", **SCALED, "strategy": "local"}),
    "branch comm-opt": (branch, {"strategy": "comm-opt"}),
    "branch local": (branch, {"strategy": "local"}),
    "bfloat16": (fit, {"strategy": "comm-opt", "autocast": True}),
    "again": (fit, {"strategy": "sharded"}),
    "checkpointed": (fit, {"strategy": "sharded", "checkpointing": False}),
    "checkpointed, reentrant": (fit, {"strategy": "sharded", "checkpointing": True}),
    "bucket views": (fit, {"strategy": "sharded", "ddp": {"gradient_as_bucket_view": True}}),
}


def strategies(world):
    """``{(strategy, when K-FAC is attached): case}``; strategies that have the same plan are one case. On 4 ranks K-FAC
    is attached before the wrap."""
    groups = distinct((*STRATEGIES, "auto"), world, "small")
    when = ("before", "after") if world == 2 else ("before",)
    return {(name, attach): f"{'='.join(group)} {attach}" for group in groups for name in group for attach in when}


@functools.cache
def cases(world):
    found = {case: (fit, {"strategy": s, "attach": a}) for (s, a), case in strategies(world).items()}
    return found | OTHERS | (ON_TWO if world == 2 else {})


def run_cases(rank):
    """Results by case; an error becomes one, and is as a rule raised on all ranks."""
    world = dist.get_world_size()
    found = {}
    for name, (function, options) in cases(world).items():
        try:
            found[name] = function(rank, world, **options)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def ranks(world):
    """``[rank][case]``. Without torch's debug mode DETAIL, in which DDP ends with a segmentation fault (torch 2.13)."""
    return on_processes(world, run_cases, debug="OFF")


def result(world, case, rank=0, key="weights"):
    found = ranks(world)[rank][case]
    assert isinstance(found, dict), found
    return found.get(key)


@functools.cache
def alone(function, **options):
    return function(**options)["weights"]


def distance(weights, expected):
    return max(float((p - q).abs().max()) for p, q in zip(weights, expected, strict=True))


def on_2_and_4(*wanted):
    """Parametrize by world size and the cases whose names contain one of these words."""
    chosen = [(world, case) for world in (2, 4) for case in cases(world) if any(word in case for word in wanted)]
    return pytest.mark.parametrize(("world", "case"), chosen)


@on_2_and_4("")
def test_ranks_are_bitwise_equal(world, case):
    for rank in range(1, world):
        assert distance(result(world, case, rank), result(world, case)) == 0
        assert result(world, case, rank, "counts") == result(world, case, key="counts")


@pytest.mark.parametrize(
    ("world", "strategy", "attach"),
    [(w, *key) for w in (2, 4) for key in strategies(w) if "local" not in key],
)
def test_ddp_trains_like_one_process(world, strategy, attach):
    assert distance(result(world, strategies(world)[strategy, attach]), alone(fit)) < 1e-4


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_attached_before_or_after_the_wrap_is_bitwise_the_same(strategy):
    before, after = (result(2, strategies(2)[strategy, attach]) for attach in ("before", "after"))
    assert distance(before, after) == 0


@pytest.mark.parametrize("case", ["again", "checkpointed", "checkpointed, reentrant", "bucket views"])
def test_a_second_run_and_checkpointing_and_bucket_views_change_no_bit(case):
    assert distance(result(2, case), result(2, strategies(2)["sharded", "after"])) == 0


@on_2_and_4("micro-batches")
def test_micro_batches_without_synchronisation_equal_the_big_batch(world, case):
    assert distance(result(world, case), alone(fit, dtype=torch.float64, size=FOR_MICRO, steps=CUT["steps"])) < 1e-10


def test_under_bfloat16_autocast_factors_are_float32_and_training_goes_the_same_way():
    start, expected = weights_of(build("small", torch.float32)), alone(fit, autocast=True)
    found = result(2, "bfloat16")
    assert {dtype for rank in (0, 1) for dtype in result(2, "bfloat16", rank, "dtypes")} == {"torch.float32"}
    assert distance(found, alone(fit)) > 1e-4  # it did run in bfloat16
    assert distance(found, expected) < 0.05 * distance(start, expected)


@on_2_and_4("overflowing")
def test_an_overflow_on_one_rank_is_skipped_by_all(world, case):
    for rank in range(world):
        counts = result(world, case, rank, "counts")
        assert counts["step"] - counts["skipped_batches"] == SCALED["steps"]
        assert counts["abandoned_steps"] + counts["skipped_batches"] == len(SCALED["overflows"])
        assert result(world, case, rank, "optimizer steps") <= {SCALED["steps"]}


@pytest.mark.parametrize(("world", "optimizer"), [*((2, name) for name in OPTIMIZERS), (4, "fused sgd")])
def test_overflows_leave_no_trace(world, optimizer):
    expected = alone(fit, optimizer=optimizer, steps=SCALED["steps"], **EVERY_STEP)
    assert distance(result(world, f"{optimizer} overflowing"), expected) < 1e-4


@on_2_and_4("branch comm-opt", "branch sharded")
def test_a_layer_that_some_ranks_run_is_measured_as_if_the_others_examples_did_not_use_it(world, case):
    assert distance(result(world, case), alone(branch, parts=world)) < 1e-10


@pytest.mark.parametrize("world", [2, 4])
def test_partial_and_empty_batches_under_ddp_equal_the_oracle(world):
    assert distance(result(world, "uneven"), oracle(uneven_steps(world), ["0", "2", "4", "6", "8"])) < 1e-10


@pytest.mark.slow
def test_two_launches_of_two_hundred_steps_are_bitwise_equal():
    first, second = (on_processes(2, two_hundred_steps, debug="OFF") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert distance(a, b) == 0


def two_hundred_steps(rank):
    return fit(rank, 2, strategy="hybrid-opt", steps=200)["weights"]
