"""Large batches on few devices: the exact step from micro-batches on any number of ranks, and the recipe."""

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_pictures import write_folder
from helpers_ranks import on_processes
from helpers_settings import arranged
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dkfac
from dkfac.tools.recipes import checkpoints, large_batch
from dkfac.tools.recipes.folder import entries
from dkfac.tools.recipes.job import TrainingJob
from dkfac.tools.recipes.large_batch import LARGE_BATCH
from dkfac.tools.recipes.training import train_recipe as run

BATCH, MICRO, STEPS = 4096, 256, 5
SETTINGS = {
    "damping": 1e-3, "strategy": "sharded", "accumulate": "mean", "norm_form": "unit", "announce": False,
    "factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None,
}  # fmt: skip


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8),
        nn.Tanh(), nn.Linear(8, 5),
    ).double()  # fmt: skip


def step_of(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (BATCH,), generator=generator)


def train(rank=0, world_size=1):
    """Take steps of 4,096 examples in micro-batches of 256, 16 on one rank or 4 on each of four."""
    model = network()
    ranked = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = dkfac.KFAC(ranked, optimizer, **arranged(SETTINGS))
    for step in range(STEPS):
        x, y = (t.chunk(world_size)[rank].split(MICRO) for t in step_of(step))
        optimizer.zero_grad()
        for i, (images, labels) in enumerate(zip(x, y, strict=True)):
            if world_size > 1:
                ranked.require_backward_grad_sync = i == len(x) - 1  # as no_sync() does
            (F.cross_entropy(ranked(images), labels) / len(x)).backward()
        optimizer.step()
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    kfac.close()
    del ranked
    gc.collect()
    return found


def on_rank(rank, world_size):
    return train(rank, world_size).numpy()


def test_a_batch_of_4096_is_the_same_step_on_one_two_and_four_ranks():
    alone = train()
    whole, optimizer = network(), None
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    dkfac.KFAC(whole, optimizer, **arranged(SETTINGS))
    for step in range(STEPS):  # all 4,096 at once
        x, y = step_of(step)
        optimizer.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        optimizer.step()
    at_once = torch.cat([p.detach().flatten() for p in whole.parameters()])
    assert (at_once - torch.cat([p.flatten() for p in network().parameters()])).norm() > 0.1
    torch.testing.assert_close(alone, at_once, rtol=0, atol=1e-10)
    for world_size in (2, 4):
        for found in on_processes(world_size, on_rank, world_size):
            torch.testing.assert_close(torch.from_numpy(found), alone, rtol=0, atol=1e-10)


def bytes_alive():
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return sum({t.data_ptr(): t.nbytes for t in alive}.values())


@pytest.mark.parametrize("staleness", ["fixed", "change"])
def test_memory_is_the_same_however_many_micro_batches(staleness):
    rhythm = {} if staleness == "change" else {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None}
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = SETTINGS | {"staleness": staleness} | rhythm
    dkfac.KFAC(model, optimizer, **arranged(options))
    held = []
    x, y = step_of(0)
    for _ in range(2):
        optimizer.zero_grad()
        for micro in range(8):
            (F.cross_entropy(model(x[:64]), y[:64]) / 8).backward()
            held += [bytes_alive()] if micro in (1, 7) else []
        optimizer.step()
    assert held[0] == held[1]
    assert held[2] == held[3]


def test_the_published_rows():
    assert list(large_batch.PUBLISHED_ROWS) == [2**n for n in range(12, 18)]
    assert large_batch.PUBLISHED_ROWS[32768] == large_batch.PublishedRow(
        3e-2, 3.5, 1.5, 49.5, 0.97, 2e-4, 0.6, 45, 1024
    )
    hyper = large_batch.with_published_values(replace(LARGE_BATCH.hyper, batch=131072), {})
    assert (hyper.lr, hyper.momentum, hyper.epochs) == (0.07, 0.93, 80)
    assert large_batch.with_published_values(replace(LARGE_BATCH.hyper, batch=131072, lr=0.5), {"lr": 0.5}).lr == 0.5
    assert LARGE_BATCH.settings(hyper)["damping"] == 1e-4
    with pytest.raises(ValueError, match=r"batch=1000 is none of the published rows 4096, .*131072"):
        large_batch.with_published_values(replace(LARGE_BATCH.hyper, batch=1000), {})


def trial(folder, data, **options):
    """A run of 12 pictures a step with the row of 8,192's figures."""
    hyper = replace(LARGE_BATCH.hyper, batch=12, micro_batch=3, size=64, more={"row": 8192, "width": 4})
    hyper = large_batch.with_published_values(hyper, {})
    return TrainingJob(
        recipe=LARGE_BATCH, hyper=hyper, kfac={"announce": False}, folder=folder, data=str(data), **options
    )


def test_the_recipe_trains_on_a_folder(tmp_path):
    write_folder(tmp_path / "data", sizes=[(70, 90), (40, 40), (64, 80)], number=8)
    place = dkfac.distributed.Place(0, 1, torch.device("cpu"))
    assert run(trial(tmp_path / "run", tmp_path / "data", max_steps=3), place) == "done"
    points = [entry for entry in entries(tmp_path / "run/metrics.jsonl") if entry["kind"] == "test"]
    assert [point["step"] for point in points] == [2, 3]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {f["key"] for layer in summary["plan"]["layers"] for f in layer["factors"]} == {"A", "G", "F"}
    saved = checkpoints.newest(tmp_path / "run/checkpoints", [])
    first = checkpoints.read_state(saved, "common", place.device)["model"]["0.weight"]  # followed by a norm
    assert float(first.norm()) == pytest.approx((2 * 4) ** 0.5, rel=1e-4)


def recipe_on_rank(rank, folder, data):
    place = dkfac.distributed.Place(rank, 2, torch.device("cpu"))
    return run(trial(Path(folder), data, max_steps=2), place)


@pytest.mark.slow
def test_the_recipe_on_two_ranks(tmp_path):
    write_folder(tmp_path / "data", sizes=[(20, 20)], number=8)
    assert on_processes(2, recipe_on_rank, str(tmp_path / "run"), str(tmp_path / "data")) == ["done", "done"]
    plan = json.loads((tmp_path / "run/summary.json").read_text())["plan"]
    assert (plan["strategy"], plan["wire_dtype"], plan["adaptive"]) == ("sharded", "bfloat16", False)
