"""Activation checkpointing changes no statistic (R14): layers run again inside the backward and still count once."""

import copy
import itertools
from functools import partial

import pytest
import torch
from helpers_capture import assert_factors, assert_same, attach, batch, batches, gradients, mean_loss, oracle_factors
from torch import nn
from torch.utils.checkpoint import checkpoint

# torch warns when a reentrant checkpoint runs under no_grad, as it does in an evaluation or in another one
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

MODES = {"non-reentrant": False, "reentrant": True}


def plain(function, x):
    return function(x)


class Block(nn.Module):
    """Two layers and the block's own ``shared`` layer between them."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.shared = shared

    def forward(self, x, run=plain):
        x = torch.relu_(self.first(x))
        return run(lambda t: torch.tanh(self.last(self.shared(t))), x)


class Net(nn.Module):
    """``outer`` runs each block, ``inner`` a part of each block; both are plain calls or checkpoints.

    With ``wrap_all`` no layer is outside a checkpoint.
    """

    def __init__(self, outer, inner, wrap_all):
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(5, 5)
        self.embed, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList([Block(shared), Block(shared)])
        self.outer, self.inner, self.wrap_all = outer, inner, wrap_all
        self.double()

    def forward(self, x):
        x = x.clone().requires_grad_()  # a reentrant checkpoint needs an input with a gradient
        edge = (lambda layer, t: self.outer(partial(self.inner, layer), t)) if self.wrap_all else plain
        x = edge(self.embed, x)
        for block in self.blocks:
            x = self.outer(partial(block, run=self.inner), x)
        return edge(self.head, x)


def runner(mode):
    return plain if mode == "plain" else partial(checkpoint, use_reentrant=MODES[mode])


def measure(outer="plain", inner="plain", wrap_all=False, micro_batches=1, between=None, **options):
    """One step; returns factors, preconditioned gradients and the number of backward passes counted."""
    model = Net(runner(outer), runner(inner), wrap_all)
    kfac = attach(model, accumulate="mean", **options)
    for x, y in batches([6] * micro_batches):
        loss = mean_loss(model(x), y) / micro_batches
        if between is not None:
            between(model)
        loss.backward()
    passes = kfac._collector.window.num_passes
    kfac.step()
    return kfac.factors(), gradients(model), passes


COMBINATIONS = [pair for pair in itertools.product(("plain", *MODES), repeat=2) if pair != ("plain", "plain")]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("wrap_all", [False, True], ids=["some layers outside", "all layers inside"])
@pytest.mark.parametrize(("outer", "inner"), COMBINATIONS, ids=[f"{o}, inside {i}" for o, i in COMBINATIONS])
def test_checkpointed_layers_have_bitwise_the_same_factors(outer, inner, wrap_all, micro_batches):
    factors, grads, passes = measure(micro_batches=micro_batches)
    again, grads_again, passes_again = measure(outer, inner, wrap_all, micro_batches)
    assert passes_again == passes == micro_batches
    assert_factors(again, factors, 0)
    assert_same(grads_again, grads, 1e-13)  # autograd adds the uses of a shared weight in another order


def test_the_plain_network_equals_the_oracle():
    x, y = batches([6])[0]
    model = Net(plain, plain, wrap_all=False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert "blocks.0.shared" in names
    assert_factors(measure()[0], oracle_factors(copy.deepcopy(model), x, y, names))


def evaluate_other_size(model):
    with torch.no_grad():
        model(batch(3, 4, seed=5)[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_an_evaluation_of_another_size_before_the_backward_changes_nothing(mode, weight_sharing):
    factors, _, _ = measure(weight_sharing=weight_sharing)
    again, _, passes = measure(mode, between=evaluate_other_size, wrap_all=True, weight_sharing=weight_sharing)
    assert passes == 1
    assert_factors(again, factors, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpointed_model_equals_one_with_checkpointed_blocks(mode):
    """The whole model inside one checkpoint: its own hook runs again too."""
    factors, grads, _ = measure()
    model = Net(plain, plain, wrap_all=False)
    kfac = attach(model)
    x, y = batches([6])[0]
    mean_loss(checkpoint(model, x.requires_grad_(), use_reentrant=MODES[mode]), y).backward()
    assert kfac._collector.window.num_passes == 1
    kfac.step()
    assert_factors(kfac, factors, 0)
    assert_same(gradients(model), grads, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{"curvature": "ekfac"}, {"fisher": "exact", "fisher_loss": "mse"}], ids=["ekfac", "exact"]
)
def test_moments_and_the_exact_fisher_are_the_same_under_checkpointing(mode, options):
    if mode == "reentrant" and "fisher" in options:
        pytest.skip("a reentrant checkpoint refuses autograd.grad, which the exact Fisher is made of")

    def run(outer):
        model = Net(runner(outer), plain, wrap_all=False)
        kfac = attach(model, skip=["blocks.?.shared"], **options)  # EKFAC has no moments of a layer called twice
        for x, y in batches([6, 6]):
            model.zero_grad()
            mean_loss(model(x), y).backward()
            kfac.step()
        return kfac.factors(), gradients(model)

    factors, grads = run("plain")
    again, grads_again = run(mode)
    assert_factors(again, factors, 0)
    assert_same(grads_again, grads, 0)


def test_checkpointed_layers_between_measurements_are_left_alone():
    data = batches([6, 6, 6])

    def run(mode):
        model = Net(runner(mode), plain, wrap_all=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kfac = attach(model, optimizer, factor_interval=2, inverse_interval=2)
        for x, y in data:
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            optimizer.step()
        return kfac.factors(), gradients(model)

    factors, grads = run("plain")
    for mode in MODES:
        again, grads_again = run(mode)
        assert_factors(again, factors, 0)
        assert_same(grads_again, grads, 0)
