"""R23 at several ranks: a state saved under one strategy and world size goes on under another."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers_parity import BATCH, EXACT, batch, build
from helpers_ranks import average_gradients, on_processes, on_threads
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC

MIDDLE, END = 7, 14
"""Saved between two refreshes, at a step that measures nothing."""


class Run:
    """A model, its optimizer and K-FAC on one rank, and the steps they take on the rank's share of global batches."""

    def __init__(self, rank=0, world_size=1, optimizer=torch.optim.SGD, ddp=False, **options):
        self.rank, self.share = rank, BATCH // world_size
        self.model = build("vision")
        settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        self.optimizer = optimizer(self.model.parameters(), lr=0.05, **settings)
        self.net = DistributedDataParallel(self.model) if ddp else self.model
        self.ddp, self.world_size = ddp, world_size
        self.kfac = KFAC(self.net, self.optimizer, **(EXACT | {"curvature": "kfac"} | options))

    def train(self, start, end):
        for step in range(start, end):
            x, y = batch(step, "vision")
            own = slice(self.rank * self.share, (self.rank + 1) * self.share)
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(x[own]), y[own]).backward()
            if self.world_size > 1 and not self.ddp:
                average_gradients(self.model)
            self.optimizer.step()
        return self

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def straight(**options):
    return Run(**options).train(0, END).weights()


def assert_same(found, expected, tolerance=1e-10):
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def plain_optimizer_state(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # share="weights" says that it is this rank's alone
        return run.optimizer.state_dict()


def save_gathered(rank, world_size, options):
    run = Run(rank, world_size, **options).train(0, MIDDLE)
    state = run.kfac.state_dict(gather=True)
    return {"model": run.model.state_dict(), "optimizer": plain_optimizer_state(run), "kfac": state}


def go_on(rank, world_size, saved, options):
    saved = copy.deepcopy(saved)  # an optimizer adopts the tensors it loads, and ranks here are threads
    run = Run(rank, world_size, **options)
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.kfac.load_state_dict(saved["kfac"])
    return run.train(MIDDLE, END).weights()


STRATEGIES = [
    ("sharded", "comm-opt"),
    ("comm-opt", "sharded"),
    ("hybrid-opt", "replicated"),
    ("spd", "layer-wise"),
    ("mem-opt", "hybrid-opt"),
]


@pytest.mark.parametrize(
    ("before", "after", "world_size"),
    [
        pytest.param(*pair, world, marks=() if world == 2 or i % 2 == 0 else pytest.mark.slow)
        for i, pair in enumerate(STRATEGIES)
        for world in (1, 2, 8)
    ],
)
def test_four_ranks_go_on_as_any_number_under_another_strategy(before, after, world_size):
    saved = on_threads(4, save_gathered, 4, {"strategy": before})
    assert saved[1]["kfac"] == {}
    options = {"strategy": after}
    expected = straight()
    if world_size == 1:
        assert_same(go_on(0, 1, saved[0], options), expected)
        return
    for weights in on_threads(world_size, go_on, world_size, saved[0], options):
        assert_same(weights, expected)


@pytest.mark.parametrize("options", [{"curvature": "ekfac", "damping": 0.1}, {"solver": "cholesky"}], ids=str)
def test_moments_and_inverses_are_dealt_out_too(options):
    expected = straight(**options)
    saved = on_threads(4, save_gathered, 4, {"strategy": "sharded", **options})
    for weights in on_threads(2, go_on, 2, saved[0], {"strategy": "comm-opt", **options}):
        assert_same(weights, expected, 1e-8)


@pytest.mark.parametrize(
    ("optimizer", "world_size", "share"),
    [
        pytest.param(kind, *case, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, kind in enumerate([torch.optim.SGD, torch.optim.AdamW])
        for j, case in enumerate([(2, "weights"), (1, "weights"), (2, "gradients"), (8, "weights")])
    ],
)
def test_the_optimizers_state_of_owned_layers_is_dealt_out_again(optimizer, world_size, share):
    expected = straight(optimizer=optimizer)
    saved = on_threads(4, save_gathered, 4, {"strategy": "sharded", "share": "weights", "optimizer": optimizer})
    options = {"strategy": "sharded", "share": share, "optimizer": optimizer}
    if world_size == 1:
        assert_same(go_on(0, 1, saved[0], options), expected)
        return
    for weights in on_threads(world_size, go_on, world_size, saved[0], options):
        assert_same(weights, expected)


def which_have_state(rank, world_size):
    run = Run(rank, world_size, strategy="sharded", share="weights").train(0, 3)
    return [p in run.optimizer.state for layer in run.kfac.layers for p in layer.parameters()]


def test_under_shared_weights_each_layer_has_optimizer_state_on_one_rank():
    held = on_threads(4, which_have_state, 4)
    assert [sum(flags) for flags in zip(*held, strict=True)] == [1] * len(held[0])


def save_one_part(rank, world_size):
    run = Run(rank, world_size, strategy="sharded").train(0, MIDDLE)
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "kfac": run.kfac.state_dict()}


@pytest.mark.parametrize("world_size", [1, 4])
def test_one_ranks_part_of_a_state_is_taken_up_with_a_warning_and_the_rest_measured_anew(world_size):
    saved = on_threads(4, save_one_part, 4)[0]
    with pytest.warns(UserWarning, match=r"lacks \d of 4 layers.*gather=True"):
        found = [go_on(0, 1, saved, {})] if world_size == 1 else on_threads(4, go_on, 4, saved, {"strategy": "sharded"})
    for weights in found:
        assert all(bool(torch.isfinite(p).all()) for p in weights)
        assert_same(weights, found[0], 0)


def resume_at_different_steps(rank, world_size):
    run = Run(rank, world_size, strategy="sharded").train(0, 2)
    state = run.kfac.state_dict()
    state["step"] += rank == 1
    with pytest.raises(RuntimeError, match=r"different steps \[2, 3\]"):
        run.kfac.load_state_dict(state)


def test_ranks_that_resume_at_different_steps_are_told():
    on_threads(2, resume_at_different_steps, 2)


def bytes_held(rank, world_size, options):
    run = Run(rank, world_size, **options).train(0, 5)
    states = run.kfac.state_dict()["layers"].values()
    running = [t["value"] for state in states for t in state["running"].values()]
    decomposed = [t for state in states for d in state["decompositions"].values() for n, t in d.items() if n != "form"]
    report = run.kfac.report()
    small = sum(t.numel() * t.element_size() for state in states for t in state["means"].values())
    small += sum(t["weight"].element_size() for state in states for t in state["running"].values())
    held = sum(t.numel() * t.element_size() for t in (*running, *decomposed))
    return held, report["rank_memory_bytes"], report["total_memory_bytes"] - small


@pytest.mark.parametrize("strategy", ["sharded", "comm-opt", "hybrid-opt", "replicated", "local"])
def test_factors_and_decompositions_live_only_where_the_plan_says(strategy):
    found = on_threads(4, bytes_held, 4, {"strategy": strategy})
    assert [held for held, *_ in found] == found[0][1]
    assert [really for *_, really in found] == found[0][1]
    if strategy in ("sharded", "local"):
        alone = bytes_held(0, 1, {})[0]
        assert sum(found[0][1]) == alone


# --- torch.distributed.checkpoint ----------------------------------------------------------------------------

WEIGHTS = {"strategy": "sharded", "share": "weights"}
SAVED = [{"strategy": "sharded"}, {"strategy": "comm-opt", "solver": "cholesky"}, WEIGHTS]
LOADED = [
    {"strategy": "hybrid-opt"},
    {"strategy": "mem-opt", "solver": "cholesky"},
    {**WEIGHTS, "strategy": "layer-wise"},
]


def save_distributed(rank, path):
    for i, options in enumerate(SAVED):
        run = Run(rank, dist.get_world_size(), ddp=True, **options).train(0, MIDDLE)
        dcp.save({"model": run.model.state_dict(), "kfac": run.kfac}, checkpoint_id=path / f"{i}")
        if rank == 0:
            torch.save(plain_optimizer_state(run), path / f"{i}.pt")


def load_distributed(rank, path):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    results = []
    for i, options in enumerate(LOADED):
        run = Run(rank, world_size, ddp=world_size > 1, **options)
        state = {"model": run.model.state_dict(), "kfac": run.kfac}
        run.optimizer.load_state_dict(torch.load(path / f"{i}.pt"))
        dcp.load(state, checkpoint_id=path / f"{i}")
        results.append(run.train(MIDDLE, END).weights())
    return results


def test_a_distributed_checkpoint_of_four_processes_loads_on_one_and_three(tmp_path):
    on_processes(4, save_distributed, tmp_path)
    expected = [straight(solver=options.get("solver", "eigen")) for options in SAVED]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        found = [load_distributed(0, tmp_path)]
    found += [
        *on_processes(2, load_distributed, tmp_path),
        *on_processes(3, load_distributed, tmp_path),
    ]
    for results in found:
        for weights, wanted in zip(results, expected, strict=True):
            assert_same(weights, wanted)
