"""Small networks, one training loop for ranks, and an oracle that writes out what several ranks are to do."""

import contextlib
import functools
import itertools
import json
import threading

import reference as ref
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.config.settings import Settings
from dkfac.layers.find import find_layers
from dkfac.plan.make import Choices, make_plan

EXACT = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4, "damping": 1e-3}
SGD = {"lr": 0.05, "momentum": 0.9}
BATCH = 192
"""Equal parts for 2, 3, 4, 6, 8, 16 and 64 ranks."""
STEPS = 20
IGNORED = -100
LOCK = threading.Lock()
"""Ranks that are threads share torch's random numbers."""


def deep():
    """Five layers: more than ranks up to 4, fewer from 8 on."""
    sizes = [5, 4, 6, 5, 4, 3]
    layers = [nn.Linear(i, o, bias=n != 1) for n, (i, o) in enumerate(itertools.pairwise(sizes))]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))[:-1]


def tiny():
    """Two layers, one of them wide enough for ``spd`` to give its input factor to one rank."""
    return nn.Sequential(nn.Linear(60, 3), nn.Tanh(), nn.Linear(3, 3))


def small():
    """Three layers, the first as wide."""
    return nn.Sequential(nn.Linear(60, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))


def wide():
    """Three layers whose factors are all wider than 8, some of them with a rest, and one wider than 64."""
    return nn.Sequential(nn.Linear(72, 18), nn.Tanh(), nn.Linear(18, 17, bias=False), nn.Tanh(), nn.Linear(17, 9))


def vision():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3, bias=False),
    )


def language():
    return nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.RMSNorm(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


NETS = {
    "deep": (deep, (5,)),
    "tiny": (tiny, (60,)),
    "small": (small, (60,)),
    "wide": (wide, (72,)),
    "vision": (vision, (1, 6, 6)),
    "language": (language, (4,)),
}


def build(net="deep", dtype=torch.float64):
    with LOCK:
        torch.manual_seed(0)
        return NETS[net][0]().to(dtype)


@functools.cache
def batch(step, net="deep", dtype=torch.float64, size=BATCH):
    """A global batch; the labels follow from the inputs, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (size, *NETS[net][1])
    if net == "language":
        x = torch.randint(0, 9, shape, generator=generator)
        return x, (x + torch.randint(0, 2, shape, generator=generator)) % 3
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x.flatten(1)[:, :3] + 0.5 * noise).argmax(1)


def distinct(strategies, world_size, net):
    """Groups of strategies that have the same plan for a network of these sizes, so that one run tells for all."""
    layers = [layer.spec for layer in find_layers(build(net), Settings(), None)[0]]
    groups = {}
    for strategy in strategies:
        plan = json.loads(make_plan(layers, world_size, Choices(strategy=strategy)).to_json())
        groups.setdefault(json.dumps(plan | {"strategy": ""}), []).append(strategy)
    return list(groups.values())


def part(tensor, rank, world_size):
    """A rank's consecutive part of a global batch."""
    share = len(tensor) // world_size
    return tensor[rank * share : (rank + 1) * share]


def mean_loss(output, y):
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def summed_loss(output, y):
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=IGNORED)


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def layer_states(kfac):
    """Return what the engine keeps of each layer, by name: the tensors themselves, not copies as in a state dict."""
    return kfac._engine.states


def average_in_one(model):
    """What DDP does where all ranks have all gradients: one flat all-reduce, which is quick on 64 threads."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(mean.view_as(g))


def train(rank=0, world_size=1, *, net="deep", steps=STEPS, dtype=torch.float64, adam=False, **options):
    """Train on this rank's part of each global batch, without DDP; returns the weights."""
    model = build(net, dtype)
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=1e-3, **SGD)
    if adam:
        # Where factors have no rank, bases follow rounding: eps is more than what the gradient has there.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    if net == "language":
        options = {"loss_terms": "token"} | options
    KFAC(model, optimizer, **arranged(EXACT | options))
    for step in range(steps):
        x, y = (part(t, rank, world_size) for t in batch(step, net, dtype))
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        if world_size > 1:
            average_in_one(model)
        optimizer.step()
    return weights_of(model)


# Ranks that differ: batches as ``[rank][micro-batch] -> (x, y)``


def terms_of(y):
    return int((y != IGNORED).sum())


def cut(step, sizes, net="deep"):
    """A global batch cut into micro-batches of ``sizes[rank]``, an int or a tuple of ints."""
    sizes = [(s,) if isinstance(s, int) else s for s in sizes]
    x, y = batch(step, net, size=sum(map(sum, sizes)))
    if net == "language":
        y = y.where(batch(step + 500, net, size=len(y))[0] > 2, torch.tensor(IGNORED))  # ranks count differently
    pieces = iter(zip(x.split(sum(sizes, ())), y.split(sum(sizes, ())), strict=True))
    return [[next(pieces) for _ in own] for own in sizes]


def train_unevenly(rank, steps, *, net="deep", average=average_in_one, wrap=None, **options):
    """Train on ``steps[i][rank]``, a list of micro-batches; an empty one has the loss 0 * sum. Returns the weights
    and who measures each layer."""
    model = build(net)
    wrapped = model if wrap is None else wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    kfac = KFAC(wrapped, optimizer, **arranged(EXACT | options))
    how = options.get("accumulate", "mean")
    for shards in steps:
        mine, total = shards[rank], sum(terms_of(y) for own in shards for _, y in own)
        optimizer.zero_grad()
        for i, (x, y) in enumerate(mine):
            terms = terms_of(y)
            if terms and net == "language":
                kfac.set_terms(terms)
            by = {"mean": len(mine) * terms, "sum": terms, "terms": total / len(shards)}[how]
            last = i == len(mine) - 1
            with contextlib.nullcontext() if last or wrap is None else wrapped.no_sync():
                output = wrapped(x)
                (summed_loss(output, y) / by if terms else 0 * output.sum()).backward()
        if wrap is None:
            average(model)
        optimizer.step()
    return weights_of(model), {layer.name: kfac.plan.placement(layer.name).statistics for layer in kfac.layers}


class RanksOracle(ref.ReferenceKFAC):
    """One process that does what all ranks are to do together.

    The gradient is the plain mean over ranks of what each rank's loss gives. Factors are made of all ranks' examples,
    each with the gradient of its own loss (n_r times that of a mean over n_r); with ``owners``, of the owner's alone.
    """

    owners: dict | None = None
    accumulate = "mean"

    def _backward(self, shards, _targets):
        self.model.zero_grad()
        total = sum(terms_of(y) for own in shards for _, y in own)
        for own in shards:
            for x, y in own:
                n, ranks = terms_of(y), len(shards)
                by = {"mean": ranks * len(own) * n, "sum": ranks * n, "terms": total}[self.accumulate]
                output = self.model(x)
                (summed_loss(output, y) / by if n else 0 * output.sum()).backward()
        return 0.0, total

    def _measure(self, shards, _targets, terms):
        everything = self.modules
        for name, module in everything.items():
            used = shards if self.owners is None else [shards[self.owners[name]]]
            x, y = (torch.cat([pair[i] for own in used for pair in own]) for i in (0, 1))
            if len(x):
                self.modules = {name: module}
                super()._measure(x, y, terms_of(y))
        self.modules = everything


def oracle(steps, layers, *, net="deep", owners=None, accumulate="mean", **options):
    """Return the weights after the steps."""
    rhythm = {key: EXACT[key] for key in ("factor_interval", "inverse_interval", "damping")}
    settings = ref.ReferenceSettings(**({"rescale": ref.default_length(options)} | SGD | rhythm | options))
    found = RanksOracle(lambda: build(net), layers, summed_loss, settings)
    found.owners, found.accumulate = owners, accumulate
    for shards in steps:
        found.step(shards, None)
    return weights_of(found.model)
