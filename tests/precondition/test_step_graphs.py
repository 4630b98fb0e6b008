"""Steps from graphs take the same steps, whatever is captured when.

Graphs are acted here: a replay runs what was captured once more, on the memory it was captured with, and makes waste of
what other graphs of its memory had returned. The real ones are tested on a GPU by test_gpu_speed.py.
"""

import functools
import importlib.util
import os

import helpers_parity
import pytest
import torch
import torch.nn.functional as F
from helpers_kernels import assert_passes_interpreted
from helpers_optimizers import optimizer_of
from helpers_ranks import on_threads
from torch import nn

import dkfac
from dkfac.ops import graph_cache
from dkfac.precondition import step_graph
from dkfac.runtime import engine
from dkfac.tools.recipes.char_gpt import GPT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return [t for item in found or () for t in tensors(item)]


class Acted:
    """What a captured graph does."""

    replays = 0

    def __init__(self, function, pool):
        self.function, self.pool, self.found, self.is_fresh = function, pool, function(), True
        pool.append(self)

    def replay(self):
        type(self).replays += 1
        mine = [tensor.clone() for tensor in tensors(self.found)]
        for other in self.pool:
            if other is not self:
                for tensor in tensors(other.found):
                    tensor.fill_(True if tensor.dtype == torch.bool else 12345.0)
        if not self.is_fresh:  # nothing runs while a real one is captured, but here it did
            mine = tensors(self.function())
        self.is_fresh = False
        for old, new in zip(tensors(self.found), mine, strict=True):
            old.copy_(new)


@pytest.fixture
def played(monkeypatch):
    """Graphs are acted; who wants them is as in the library."""
    pools = {}

    def capture(self, function, device):
        made = Acted(function, pools.setdefault(id(self), []))
        return made, made.found

    monkeypatch.setattr(Acted, "replays", 0)
    monkeypatch.setattr(graph_cache.GraphPool, "capture", capture)
    monkeypatch.setattr(engine, "has_one_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return pools


@pytest.fixture
def acted(played, monkeypatch):
    monkeypatch.setattr(engine, "wants_graphs", lambda settings, *_: settings.cuda_graph)
    return played


def build(dtype):
    """Layers of one shape, with and without bias, and parameters of no layer's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 3),
    ).to(dtype)  # fmt: skip


def train(dtype=torch.float64, steps=16, *, change=lambda step, model: None, batch=12, **options):
    model = build(dtype).to(memory_format=torch.channels_last)
    optimizer = optimizer_of(model, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    options = {"solver": "cholesky", "factor_interval": 1, "inverse_interval": 4, "warmup_refresh": None} | options
    kfac = dkfac.KFAC(model, optimizer, announce=False, **options)
    generator, kept = torch.Generator().manual_seed(1), []
    for step in range(steps):
        size = batch // 2 - 1 if step in (7, 8) else batch
        x = torch.randn(size, 2, 6, 6, generator=generator).to(dtype)
        y = torch.randint(0, 3, (size,), generator=generator)
        change(step, model)
        kept.append(torch.empty(1000 * step % 7))  # memory does not lie the same at each step
        optimizer.zero_grad()
        F.cross_entropy(model(x * float("nan") if step == 10 else x), y).backward()
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in model.parameters()], kfac


CASES = [
    {},
    {"kl_clip": 1e-9},
    {"rescale": "norm-global"},
    {"solver": "warm-eigen", "damping": 0.1},
    {"damping_mode": "relative", "rescale": "norm"},
    {"spread_refresh": 3},
    {"statistics_fraction": 0.25},
    {"factor_interval": 2, "inverse_interval": 8, "spread_refresh": 8},
    {"curvature": "adam-eigen", "solver": "warm-eigen"},
    {"curvature": "adam-eigen", "solver": "warm-eigen", "spread_refresh": 3},
    {"curvature": "adam-eigen", "inverse_interval": 100, "solver": "warm-eigen", "l2": True},
    {"curvature": "adam-eigen", "solver": "warm-eigen", "rescale": "kl-clip", "kl_clip": 1e-8},
]


def assert_same(ours, theirs, tolerance):
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).norm() <= tolerance * other.norm() + tolerance
    metrics = ours[1].metrics(), theirs[1].metrics()
    for name in ("skipped_batches", "refreshes"):
        assert metrics[0][name] == metrics[1][name]
    assert metrics[0].get("clipped_steps") == metrics[1].get("clipped_steps")
    for name in ("grad_norm", "update_norm", *({"clip_factor"} & metrics[1].keys())):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=100 * tolerance)
    for name, factors in theirs[1].factors().items():
        for key, factor in factors.items():
            assert (ours[1].factors()[name][key] - factor).norm() <= tolerance * factor.norm() + tolerance


def test_a_clip_that_changes_with_the_steps_is_read_by_the_graph(acted):
    options = {**CASES[-1], "kl_clip": lambda step: 1e-8 / (1 + step)}
    ours, theirs = train(**options, cuda_graph=True), train(**options)
    assert Acted.replays >= 20
    assert_same(ours, theirs, 1e-9)
    assert theirs[1].metrics()["clipped_steps"] > 10
    assert any((p - q).norm() > 1e-6 for p, q in zip(theirs[0], train(**CASES[-1])[0], strict=True))


@pytest.mark.parametrize(
    "options", [{"kl_clip": 1e-9}, {"kl_clip": lambda step: 1e-8 / (1 + step)}], ids=["", "changes"]
)
def test_what_holds_steps_back_is_read_by_the_graph(acted, options):
    ours, theirs = train(**options, cuda_graph=True), train(**options)
    assert Acted.replays >= 20
    assert_same(ours, theirs, 1e-9)
    assert theirs[1].metrics()["clipped_steps"] > 10
    assert any((p - q).norm() > 1e-6 for p, q in zip(theirs[0], train()[0], strict=True))


def test_a_weight_and_a_bias_with_rates_of_their_own_go_without_a_graph_and_say_so(acted, monkeypatch):
    def apart(model, options):
        names = [n for n, _ in model.named_parameters()]
        groups = [{"params": [model.get_parameter(n)], "lr": 0.1 if n.endswith("bias") else 0.05} for n in names]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    monkeypatch.setitem(globals(), "optimizer_of", apart)
    theirs = train(kl_clip=1e-9)
    with pytest.warns(UserWarning, match="no graph of a step held back"):
        ours = train(kl_clip=1e-9, cuda_graph=True)
    assert_same(ours, theirs, 1e-9)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_steps_from_graphs_are_the_steps(acted, options):
    theirs = train(**options)
    assert Acted.replays == 0
    ours = train(**options, cuda_graph=True)
    assert Acted.replays >= 20
    assert bool(ours[1]._engine.graph._adam.parameters) == ("curvature" in options)
    assert_same(ours, theirs, 1e-9)


def freeze_a_bias(step, model):
    if step == 6:
        model[5].bias.requires_grad_(False)
    if step == 11:
        model[5].bias.requires_grad_(True)


def lay_gradients_otherwise(step, model):
    """Weights, and so their gradients, in another layout."""
    if step in (5, 9):
        model.to(memory_format=torch.contiguous_format if step == 5 else torch.channels_last)


def test_a_learning_rate_that_is_a_tensor_goes_without_a_graph_and_says_so(acted, monkeypatch):
    real = optimizer_of

    def with_tensors(model, options):
        optimizer = real(model, options)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        return optimizer

    monkeypatch.setitem(globals(), "optimizer_of", with_tensors)
    options = {"curvature": "adam-eigen", "solver": "warm-eigen"}
    theirs = train(**options)
    with pytest.warns(UserWarning, match="a learning rate that is a tensor"):
        ours = train(**options, cuda_graph=True)
    assert_same(ours, theirs, 1e-9)


@pytest.mark.parametrize("change", [freeze_a_bias, lay_gradients_otherwise])
def test_a_change_of_the_model_is_noticed(acted, change):
    theirs = train(change=change)
    ours = train(change=change, cuda_graph=True)
    assert Acted.replays > 15
    assert_same(ours, theirs, 1e-9)


def train_text(**options):
    torch.manual_seed(0)
    model = GPT(11, 8, layers=2, width=8, heads=2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 15) * max(0.0, 1 - t / 60))
    options = {"curvature": "adam-eigen", "solver": "warm-eigen", "loss_terms": "token", "announce": False, **options}
    kfac = dkfac.KFAC(model, optimizer, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(45):
        x = torch.randint(0, 11, (6, 9), generator=generator).cumsum(1) % 11
        optimizer.zero_grad()
        F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in model.parameters()], kfac


@pytest.mark.parametrize("rhythm", [(4, 20, 20), (1, 10, 1)], ids=str)
def test_embeddings_and_a_change_of_rhythm_take_the_same_steps(acted, rhythm):
    factors, inverses, spread = rhythm
    options = {"factor_interval": factors, "inverse_interval": inverses, "spread_refresh": spread}
    options |= {"warmup_refresh": (10, 20), "statistics_fraction": 0.25}
    theirs, ours = train_text(**options), train_text(**options, cuda_graph=True)
    assert Acted.replays >= 30
    assert_same(ours, theirs, 1e-8)


@pytest.mark.skipif(not INTERPRETED, reason="for the session in Triton's interpreter")
def test_interpreted_kernels_find_gradients_where_they_lie(acted, monkeypatch):
    def change(step, model):
        freeze_a_bias(step, model)
        lay_gradients_otherwise(step + 2, model)

    described, options = [], {"statistics_fraction": 0.5, "steps": 12, "change": change, "damping": 0.1}
    real = step_graph.describe_gradients
    monkeypatch.setattr(
        step_graph, "describe_gradients", lambda *given: described.append(real(*given)) or described[-1]
    )
    theirs = train(torch.float32, **options)
    ours = train(torch.float32, **options, cuda_graph=True)
    assert len(described) == 5, "one for each layout and set of gradients"
    assert None not in described
    assert_same(ours, theirs, 1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="for the session in Triton's interpreter")
def test_interpreted_kernels_take_adams_steps(acted):
    options = {"curvature": "adam-eigen", "solver": "warm-eigen", "change": lay_gradients_otherwise, "steps": 12}
    theirs = train(torch.float32, **options)
    ours = train(torch.float32, **options, cuda_graph=True)
    assert ours[1]._engine.graph._adam._items is not None
    assert_same(ours, theirs, 1e-3)


@needs_triton
@pytest.mark.slow  # a minute; each kernel by itself is interpreted in the tests of its file, all of it runs on a GPU
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted_")


RANKS = {
    "SGD": {"solver": "warm-eigen", "curvature": "adaptive"},
    "AdamW": {"solver": "warm-eigen", "curvature": "adaptive", "adam": True},
    "kfac": {"solver": "cholesky"},
    "slices": {"solver": "warm-eigen", "curvature": "adaptive", "spread_refresh": 2},
}


@pytest.mark.filterwarnings("ignore:cuda_graph has no effect with strategy='mem-opt'")
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(case, strategy, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, case in enumerate(RANKS)
        for j, strategy in enumerate(("comm-opt", "replicated", "mem-opt"))
    ],
)
def test_ranks_that_precondition_all_layers_take_steps_from_graphs(played, case, strategy):
    options = RANKS[case] | {"strategy": strategy, "net": "wide", "world_size": 2}
    jobs = [functools.partial(helpers_parity.train, cuda_graph=wanted, **options) for wanted in (False, True)]
    plain, ours = (on_threads(2, job) for job in jobs)
    assert (Acted.replays > 20) == (strategy != "mem-opt")
    for one, other in zip([w for weights in plain for w in weights], [w for r in ours for w in r], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)
