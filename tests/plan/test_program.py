"""R05: the collectives of a step, and their payload bytes, are those of the program, on every rank."""

import contextlib
import threading
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import on_threads
from helpers_training import attach, backward, build
from torch.testing._internal.distributed.fake_pg import FakeStore

from dkfac.comm import collectives
from dkfac.comm.replicas import FIRST_STEPS
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.program import NUM_SCHEDULES, expand
from dkfac.plan.spec import FactorSpec, LayerSpec
from dkfac.plan.strategies import STRATEGIES

WIRED = {"all-reduce": "all_reduce", "all-gather": "all_gather"}
WIRED |= dict.fromkeys(("reduce-scatter", "collect", "deal"), "all_to_all")
"""How a transfer of the program is called on the CPU, where the chunks of a reduce-scatter are exchanged."""
INPUT = {"all_reduce": 0, "all_to_all": 1, "all_gather": 1, "broadcast": 0}
"""Which argument of a call is sent."""


@dataclass(frozen=True)
class Call:
    what: str
    group: tuple[int, ...]
    num_bytes: int


class Done:
    def wait(self):
        pass


@contextlib.contextmanager
def every_call_recorded(monkeypatch, answer=None):
    """Give ``{rank: calls}`` of K-FAC's own groups; where ``answer`` returns True the call itself is left out."""
    calls, lock = {}, threading.Lock()

    def wrap(module, name, what):
        real = getattr(module, name)

        def recorded(*args, **kwargs):
            group = kwargs.get("group")
            if group is None:  # the test's own
                return real(*args, **kwargs)
            for tensor in (a for a in args if isinstance(a, torch.Tensor)):
                assert tensor.ndim == 1
                assert tensor.is_contiguous()
            sent = args[INPUT[what]]
            ranks = tuple(dist.get_process_group_ranks(group))
            with lock:
                calls.setdefault(dist.get_rank(), []).append(Call(what, ranks, sent.numel() * sent.element_size()))
            if answer is not None and answer(what, args[0]):
                return Done()
            return real(*args, **kwargs)

        patch.setattr(module, name, recorded)

    with monkeypatch.context() as patch:
        wrap(dist, "all_reduce", "all_reduce")
        wrap(dist, "all_to_all_single", "all_to_all")
        wrap(dist, "broadcast", "broadcast")
        wrap(collectives, "_all_gather", "all_gather")
        patch.setattr(collectives, "_reduce_scatter", lambda *a, **k: pytest.fail("not on the CPU"))
        yield calls


def expected(kfac, rank, step):
    """What the program says of a step: on step 0 and each fourth a refresh, on even ones factors. These and the first
    steps compare replicas."""
    refreshes, compares = step % 4 == 0, step % 4 == 0 or step < FIRST_STEPS
    program = kfac._engine.transport.program.of(rank, measures=step % 2 == 0, decomposes=refreshes, compares=compares)
    return [Call(WIRED[t.how], t.group, t.num_bytes(rank)) for t in program]


def train_recording(rank, world_size, calls, options, dtype):
    """Return, for each step, what the program says and what was called."""
    model = build(dtype)
    optimizer, kfac = attach(model, **options)
    calls.pop(rank, None)  # the agreement at the start
    found = []
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step, rank, world_size, dtype)
        optimizer.step()
        found.append((expected(kfac, rank, step), calls.pop(rank, [])))
    return found


SETTINGS = [
    (2, {"strategy": "comm-opt"}),
    (2, {"strategy": "sharded", "wire_dtype": "bfloat16"}),
    (2, {"strategy": "local", "curvature": "ekfac"}),
    (2, {"strategy": "auto"}),
    (3, {"strategy": "replicated"}),
    (3, {"strategy": "factor-wise", "solver": "cholesky"}),
    (3, {"strategy": "sharded", "curvature": "ekfac"}),
    (3, {"strategy": "hybrid-opt"}),
    (3, {"strategy": "spd", "wire_dtype": "float16"}),
    (4, {"strategy": "layer-wise", "wire_dtype": "float32"}),
    (4, {"strategy": "hybrid-opt", "worker_fraction": 0.5}),
    (4, {"strategy": "hybrid-opt", "wire_dtype": "bfloat16", "curvature": "ekfac"}),
    (4, {"strategy": "mem-opt", "solver": "cholesky", "wire_dtype": "float16"}),
    (4, {"strategy": "comm-opt", "experimental": {"replicate_factors": True}, "wire_dtype": "float32"}),
    (4, {"strategy": "comm-opt", "curvature": "ekfac", "wire_dtype": "float16"}),
    (5, {"strategy": "sharded", "experimental": {"fusion": "optimal"}}),
    (5, {"strategy": "mem-opt", "experimental": {"fusion": "spd", "replicate_factors": True}}),
    (5, {"strategy": "comm-opt", "solver": "warm-eigen"}),
    (7, {"strategy": "layer-wise", "curvature": "ekfac", "share": "gradients"}),
    (8, {"strategy": "hybrid-opt", "worker_fraction": 0.25, "experimental": {"fusion": "optimal"}}),
    (8, {"strategy": "local", "wire_dtype": "bfloat16"}),
]


def name(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("world_size", "options"), SETTINGS, ids=name)
def test_what_is_called_is_the_program_to_the_byte(world_size, options, monkeypatch):
    dtype = torch.float64 if "wire_dtype" in options else torch.float32
    with every_call_recorded(monkeypatch) as calls:
        ranks = on_threads(world_size, train_recording, world_size, calls, options, dtype)
    for rank, steps in enumerate(ranks):
        for step, (program, called) in enumerate(steps):
            assert Counter(called) == Counter(program), f"rank {rank}, step {step}"
    for step in range(5):
        by_group = [grouped(steps[step][1]) for steps in ranks]
        for group in {group for found in by_group for group in found}:
            orders = {tuple(by_group[rank][group]) for rank in group}
            assert len(orders) == 1, f"ranks {group} call in different orders in step {step}"


def grouped(called):
    """Return the calls of each group, in order."""
    found = {}
    for call in called:
        found.setdefault(call.group, []).append(call.what)
    return found


# --- 1,024 ranks, of which one runs ----------------------------------------------------------------------------


class Answers:
    """What the other ranks would have said: every layer was measured, every decomposition went well."""

    def __init__(self):
        self.kfac = None

    def __call__(self, what, buffer):
        """Write what a call would return into its buffer; False: the agreement at the start."""
        if self.kfac is None:
            return False
        if what != "all_reduce":
            buffer.zero_()
            return True
        plan, program = self.kfac.plan, self.kfac._engine.transport.program
        sizes = {t.used: t.stage for t in program.stage("header", "means", "status")}
        assert len(sizes) == 3
        stage = sizes[buffer.numel()] if buffer.dtype == torch.float64 else "factors"
        by = [len(ranks) for placement in plan.placements for ranks in placement.decomposed_by]
        if stage == "means":
            buffer[: 2 * NUM_SCHEDULES] *= plan.world_size  # the others have the same damping
            buffer[2 * NUM_SCHEDULES :] = 1.0
        elif stage == "status":
            buffer.copy_(torch.tensor([0.0, *by, *by]))
        return True


def run_one_of_many(rank, world_size, options, monkeypatch):
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        answers = Answers()
        with every_call_recorded(monkeypatch, answers) as calls:
            model = build(torch.float32)
            optimizer, kfac = attach(model, **options)
            answers.kfac = kfac
            calls.clear()
            steps = []
            for step in range(5):
                optimizer.zero_grad()
                x = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                steps.append((expected(kfac, rank, step), calls.pop(rank, [])))
        return kfac.plan, kfac._engine.transport.program, steps
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "comm-opt"},
        {"strategy": "sharded", "wire_dtype": "bfloat16"},
        {"strategy": "hybrid-opt", "worker_fraction": 1 / 32, "experimental": {"fusion": "optimal"}},
    ],
    ids=name,
)
def test_at_1024_ranks_each_rank_runs_its_part_of_one_program(options, monkeypatch):
    plans = []
    for rank in (0, 1, 511, 1023):
        plan, program, steps = run_one_of_many(rank, 1024, options, monkeypatch)
        plans.append(plan)
        assert program.transfers == tuple(t for t in expand(plan).transfers if rank in t.group)
        for step, (wanted, called) in enumerate(steps):
            assert Counter(called) == Counter(wanted), f"rank {rank}, step {step}"
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("moments", [True, False])
@pytest.mark.parametrize("replicate_factors", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_collective_adds_up_in_half_precision(strategy, replicate_factors, moments, wire_dtype):
    """``reduce_scatter`` exchanges half-precision chunks and adds them up in float32."""
    layers = [
        LayerSpec(f"{i}", "linear", (FactorSpec("A", 9), FactorSpec("G", dim)), 9 * dim)
        for i, dim in enumerate((3, 70))
    ]
    choices = Choices(
        strategy=strategy, replicate_factors=replicate_factors, moments=moments, wire_dtype=wire_dtype, fusion="optimal"
    )
    program = expand(make_plan(layers, 4, choices))
    assert program.stage("factors") or strategy == "local"
    assert all(t.how != "all-reduce" or t.dtype == "float64" for t in program.transfers)
