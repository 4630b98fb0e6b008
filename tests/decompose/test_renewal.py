"""Decompositions updated in place, on any number of ranks: parity, failures, errors, no wait for the device."""

import functools
from contextlib import nullcontext

import pytest
import torch
from helpers_parity import EXACT, SGD, average_in_one, batch, build, mean_loss, part, train, weights_of
from helpers_ranks import on_threads
from helpers_settings import arranged
from torch.utils._python_dispatch import TorchDispatchMode

from dkfac import KFAC
from dkfac.decompose import refresh_scheduler, refresh_sync, renewal
from dkfac.ops import together
from dkfac.ops.decompose import Inverse

SOLVERS = {
    "warm-eigen": {"solver": "warm-eigen", "curvature": "kfac"},
    "adaptive": {"solver": "warm-eigen", "curvature": "adaptive"},
    "cholesky": {"solver": "cholesky"},
}
STRATEGIES = ["comm-opt", "mem-opt", "replicated", "sharded", "spd"]
RHYTHM = {"factor_interval": 2, "inverse_interval": 6}
solvers = pytest.mark.parametrize("solver", SOLVERS)


@functools.cache
def alone(solver, spread, net="deep", adam=False, **options):
    return train(net=net, adam=adam, spread_refresh=spread, **SOLVERS[solver], **RHYTHM, **options)


def assert_same(ranks, expected):
    for weights in ranks:
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


PLACES = [(2, s) for s in STRATEGIES] + [(4, "comm-opt"), (3, "mem-opt")]


@pytest.mark.parametrize(
    ("solver", "spread", "world_size", "strategy"),
    [
        pytest.param(solver, spread, *place, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
        for i, solver in enumerate(SOLVERS)
        for j, spread in enumerate((1, 3))
        for k, place in enumerate(PLACES)
    ],
)
def test_ranks_refresh_as_one_process_does_slice_by_slice(solver, spread, world_size, strategy):
    options = SOLVERS[solver] | RHYTHM | {"spread_refresh": spread, "strategy": strategy}
    job = functools.partial(train, world_size=world_size, **options)
    assert_same(on_threads(world_size, job), alone(solver, spread))


@pytest.mark.parametrize("spread", [1, 3])
def test_adams_moments_are_rotated_on_ranks_as_on_one_process(spread):
    options = SOLVERS["adaptive"] | RHYTHM | {"spread_refresh": spread, "net": "wide", "adam": True}
    job = functools.partial(train, world_size=2, strategy="mem-opt", **options)
    assert_same(on_threads(2, job), alone("adaptive", spread, "wide", True))


def test_factors_in_pieces_on_ranks():
    options = SOLVERS["warm-eigen"] | RHYTHM | {"net": "wide", "block_dim": 8}
    job = functools.partial(train, world_size=3, **options)
    assert_same(on_threads(3, job), alone("warm-eigen", 1, "wide", block_dim=8))


def steps(rank, world_size, solver, number, before=None, **options):
    """Train with K-FAC and return it with the weights; ``before(kfac, step)`` is called before each step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    kfac = KFAC(model, optimizer, **arranged(EXACT | RHYTHM | SOLVERS[solver] | options))
    for step in range(number):
        x, y = (part(t, rank, world_size) for t in batch(step))
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        if world_size > 1:
            average_in_one(model)
        with before(kfac, step):
            optimizer.step()
    return kfac, weights_of(model)


class Waits(TorchDispatchMode):
    """Counts where the host reads a value of a tensor."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world_size", [1, 2])
@solvers
def test_a_refresh_reads_no_more_from_the_device_than_a_step_that_measures(solver, world_size):
    def job(rank):
        found = {}

        def before(kfac, step):
            return found.setdefault(step, Waits())

        steps(rank, world_size, solver, 13, before)
        return [found[step].number for step in (8, 10, 12)]

    for first, second, refresh in on_threads(world_size, job) if world_size > 1 else [job(0)]:
        assert first == second == refresh <= 1  # of several ranks on a CPU, whether one has failed


def spoil(monkeypatch):
    """Make each second batch of decompositions invalid."""
    real, calls = together._renewed, []

    def sometimes(jobs):
        made = []
        for new, sound in real(jobs):
            calls.append(len(sound))
            made.append((new, sound & (len(calls) % 2 == 0)))
        return made

    monkeypatch.setattr(together, "_renewed", sometimes)
    return calls


@pytest.mark.parametrize("world_size", [1, 2])
@solvers
def test_what_fails_in_place_is_decomposed_again_on_all_ranks(solver, world_size, monkeypatch):
    calls = spoil(monkeypatch)

    def job(rank):
        kfac, weights = steps(rank, world_size, solver, 14, lambda *_: nullcontext())
        return kfac.metrics(), kfac.state_dict()["layers"], weights

    results = on_threads(world_size, job) if world_size > 1 else [job(0)]
    assert calls
    for metrics, states, weights in results:
        assert metrics["repaired_factors"] == results[0][0]["repaired_factors"] > 0
        assert metrics["fallbacks_kept"] == metrics["fallbacks_raw"] == 0
        assert all(state["decomposed_at"] == 12 for state in states.values())
        assert all(map(torch.equal, weights, results[0][2]))


@pytest.mark.parametrize("solver", ["warm-eigen", "cholesky"])
def test_an_error_of_one_rank_in_a_renewal_is_raised_on_all(solver, monkeypatch):
    real = renewal._solve_batch

    def failing(batch, states, context):
        if context.step == 6 and {layer.name for layer, _ in batch} & {"0"}:
            raise ValueError("out of luck")
        return real(batch, states, context)

    monkeypatch.setattr(renewal, "_solve_batch", failing)

    def job(rank):
        with pytest.raises((ValueError, RuntimeError), match="out of luck"):
            steps(rank, 2, solver, 10, lambda *_: nullcontext(), strategy="mem-opt")
        return True

    assert on_threads(2, job) == [True, True]


def test_a_factor_of_another_form_is_repaired():
    """A fallback left an inverse where the solver has bases."""

    def job(rank):
        def before(kfac, step):
            if step == 5:
                saved = kfac.state_dict()
                for layer in saved["layers"].values():
                    for entry in layer["decompositions"].values():
                        inverse = torch.eye(entry["matrix"].shape[-1]).expand_as(entry["matrix"])
                        entry |= {"form": "inverse", "matrix": inverse}
                kfac.load_state_dict(saved)
            return nullcontext()

        kfac, weights = steps(rank, 2, "warm-eigen", 10, before)
        layers = kfac.state_dict()["layers"].values()
        forms = {entry["form"] for layer in layers for entry in layer["decompositions"].values()}
        return forms, kfac.metrics()["repaired_factors"], weights

    results = on_threads(2, job)
    assert [forms for forms, *_ in results] == [{"eigen"}] * 2
    assert results[0][1] == results[1][1] > 0
    assert all(map(torch.equal, results[0][2], results[1][2]))


def test_moments_of_a_layer_that_lacks_a_basis_are_not_rotated(monkeypatch):
    """After a fallback to an inverse of one factor they are in the basis of the weights, which a renewal of the other
    factor does not change."""
    real, seen = refresh_scheduler.renew, []

    def spied(layers, ranks, states, context, transport):
        for state in states.values():
            dim = state.decompositions["G"].values.shape[-1]
            state.decompositions["G"] = Inverse(torch.eye(dim, dtype=torch.float64)[None])
        before = {name: (s.momentum.value.clone(), s.moments.value.clone()) for name, s in states.items()}
        flags = real(layers, ranks, states, context, transport)
        seen.append(all(torch.equal(before[n][0], s.momentum.value) for n, s in states.items()))
        seen.append(all(torch.equal(before[n][1], s.moments.value) for n, s in states.items()))
        return flags

    monkeypatch.setattr(refresh_scheduler, "renew", spied)
    steps(0, 1, "adaptive", 8, lambda *_: nullcontext())
    assert seen == [True, True]


def test_a_renewal_is_exact_whatever_surrounds_it(monkeypatch):
    """A rank that takes part by Join's shadow step has the user's autocast around it."""
    real, seen = refresh_sync.exchange_means, []
    told = lambda *given: seen.append(torch.is_autocast_enabled("cpu")) or real(*given)  # noqa: E731
    around, context = refresh_scheduler.renew, torch.autocast("cpu", dtype=torch.bfloat16)

    def surrounded(*given):
        with monkeypatch.context() as patch, context:
            patch.setattr(refresh_sync, "exchange_means", told)
            return around(*given)

    monkeypatch.setattr(refresh_scheduler, "renew", surrounded)
    steps(0, 1, "adaptive", 8, lambda *_: nullcontext())
    assert seen == [False]
