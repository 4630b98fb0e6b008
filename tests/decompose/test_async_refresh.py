"""inverse_lag: the same trajectory whatever computes the decompositions, and an oracle that keeps those of the past."""

import gc
import threading
import time

import pytest
import reference as ref
import torch
from helpers_parity import EXACT, SGD, build, cut, mean_loss, summed_loss, train, weights_of
from helpers_ranks import on_processes, on_threads
from helpers_settings import arranged

from dkfac import KFAC
from dkfac.config.settings import Settings
from dkfac.decompose import async_refresh, layer_factors
from dkfac.layers.find import find_layers

BACKENDS = ["inline", "threads"]
STEPS = 16


class LagOracle(ref.ReferenceKFAC):
    """Uses the factors of a refresh from a later step on; those of the first at once."""

    lag = 0

    def _refresh(self, name):
        fresh = {key: self.factor(name, key) for key in self.running[name]}
        self.waiting.append((self.steps + self.lag if name in self.used else self.steps, name, fresh))

    def _precondition(self):
        for due, name, fresh in self.waiting:
            if due == self.steps:
                self.used[name] = fresh
        super()._precondition()


def expected(lag, solver, net="small"):
    layers = [layer.name for layer in find_layers(build(net), Settings(), None)[0]]
    rhythm = {key: EXACT[key] for key in ("factor_interval", "inverse_interval", "damping")}
    settings = ref.ReferenceSettings(**({"rescale": "norm-global", "solver": solver} | SGD | rhythm))
    found = LagOracle(lambda: build(net), layers, summed_loss, settings)
    found.lag, found.waiting = lag, []
    for step in range(STEPS):
        ((x, y),) = cut(step, [24], net)[0]
        found.step(x, y)
    return weights_of(found.model)


def start(net="small", **options):
    model = build(net)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    return model, optimizer, KFAC(model, optimizer, **arranged(EXACT | options))


def take(model, optimizer, begin, end, net="small"):
    for step in range(begin, end):
        ((x, y),) = cut(step, [24], net)[0]
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()


def trained(steps=STEPS, **options):
    model, optimizer, kfac = start(**options)
    take(model, optimizer, 0, steps)
    return weights_of(model), kfac


def assert_same(found, wanted, tolerance=1e-9):
    for p, q in zip(found, wanted, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("lag", [0, 1, 3, 4])
def test_equals_the_oracle(lag, solver):
    assert_same(trained(inverse_lag=lag, solver=solver)[0], expected(lag, solver))


@pytest.mark.parametrize("options", [{}, {"solver": "cholesky"}, {"solver": "warm-eigen"}, {"curvature": "ekfac"}])
def test_every_back_end_takes_the_same_steps_to_the_last_bit(options):
    found = [trained(inverse_lag=2, inverse_backend=backend, **options)[0] for backend in BACKENDS]
    assert_same(found[0], found[1], 0.0)
    without = trained(**options)[0]
    assert max(float((p - q).abs().max()) for p, q in zip(found[0], without, strict=True)) > 1e-6


def test_adam_in_the_eigenbasis_has_a_lag_too():
    found = []
    for backend in BACKENDS:
        model = build("small")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        KFAC(model, optimizer, **arranged(EXACT | {"inverse_lag": 3, "inverse_backend": backend}))
        take(model, optimizer, 0, STEPS)
        found.append(weights_of(model))
    assert_same(*found, 0.0)


def in_world(rank, world_size, options):
    return train(rank, world_size, net="small", steps=STEPS, **options)


@pytest.mark.parametrize(
    ("strategy", "solver"),
    [
        pytest.param(strategy, solver, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, strategy in enumerate(["comm-opt", "hybrid-opt", "sharded", "replicated"])
        for j, solver in enumerate(["eigen", "cholesky"])
    ],
)
def test_is_the_same_on_several_ranks(strategy, solver):
    options = {"inverse_lag": 3, "solver": solver}
    alone = in_world(0, 1, options)
    for weights in on_threads(4, in_world, 4, options | {"strategy": strategy}):
        assert_same(weights, alone)


def test_real_processes_take_the_same_steps_with_every_back_end():
    found = [
        on_processes(2, in_world, 2, {"inverse_lag": 2, "inverse_backend": b, "strategy": "comm-opt"}) for b in BACKENDS
    ]
    for ranks in found:
        assert_same(ranks[0], ranks[1], 0.0)
    assert_same(found[0][0], found[1][0], 0.0)


def test_a_late_worker_is_waited_for_and_counted(monkeypatch):
    real, main = layer_factors.decompose, threading.get_ident()

    def slow(*given):
        if threading.get_ident() != main:
            time.sleep(0.3)
        return real(*given)

    monkeypatch.setattr(layer_factors, "decompose", slow)
    late, kfac = trained(inverse_lag=1, inverse_backend="threads")
    assert kfac.metrics()["late_refreshes"] == kfac.metrics()["refreshes"] - 1 == 3
    assert kfac.report()["counters"]["late_refreshes"] == 3
    assert_same(late, trained(inverse_lag=1, inverse_backend="inline")[0], 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"solver": "warm-eigen"}])
def test_a_run_resumes_bitwise_at_every_step_of_an_interval(backend, options):
    options = {"inverse_lag": 3, "inverse_backend": backend} | options
    straight = trained(**options)[0]
    for stop in range(4, 9):
        model, optimizer, kfac = start(**options)
        take(model, optimizer, 0, stop)
        saved = [what.state_dict() for what in (model, optimizer, kfac)]
        assert saved[2]["begun_at"] == (-1 if stop in (4, 8) else 4)
        again = start(**options)
        for what, state in zip(again, saved, strict=True):
            what.load_state_dict(state)
        take(again[0], again[1], stop, STEPS)
        assert_same(weights_of(again[0]), straight, 0.0)


def test_what_is_overdue_under_another_lag_holds_from_the_next_step_on():
    model, optimizer, kfac = start(inverse_lag=4)
    take(model, optimizer, 0, 6)
    _, _, other = start(inverse_lag=1)
    other.load_state_dict(kfac.state_dict())
    assert other._engine.refresher.async_refresh.is_due(6)
    _, _, none = start()
    none.load_state_dict(kfac.state_dict())
    assert none._engine.refresher.async_refresh.is_due(6)


def test_an_error_of_a_worker_is_raised_at_the_step_where_its_result_is_due(monkeypatch):
    model, optimizer, _ = start(inverse_lag=2, inverse_backend="threads")
    take(model, optimizer, 0, 4)

    def fails(*_):
        raise torch.OutOfMemoryError("no room for that")

    monkeypatch.setattr(layer_factors, "decompose", fails)
    take(model, optimizer, 4, 6)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        take(model, optimizer, 6, 7)


def workers():
    return {t for t in threading.enumerate() if t.name.startswith("dkfac-decompose")}


@pytest.mark.parametrize("end", ["close", "forget"])
def test_workers_end_with_the_kfac(end):
    gc.collect()
    before = workers()
    kfac = trained(inverse_lag=2, inverse_backend="threads")[1]
    mine = workers() - before
    assert mine
    if end == "close":
        kfac.close()
    del kfac
    gc.collect()
    for thread in mine:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_on_a_gpu_a_stream_is_chosen_unless_something_rounds_products():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    lag = Settings(inverse_lag=1)
    assert async_refresh.choose_backend(lag, cuda, rounds=False) == "stream"
    assert async_refresh.choose_backend(lag, cuda, rounds=True) == "threads"
    assert async_refresh.choose_backend(Settings(inverse_lag=1, tf32=True), cuda, rounds=False) == "threads"
    assert async_refresh.choose_backend(lag, cpu, rounds=False) == "threads"
    assert (
        async_refresh.choose_backend(
            Settings(inverse_lag=1, experimental={"inverse_backend": "inline"}), cuda, rounds=True
        )
        == "inline"
    )


def test_a_layer_first_used_while_a_refresh_is_under_way_keeps_its_own_after_a_resume():
    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.a, self.b = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 3).double()

        def forward(self, x, late):
            return self.b(self.a(x)) if late else self.a(x)[:, :3]

    def start():
        model = Late()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options = EXACT | {"factor_interval": 1, "inverse_interval": 8, "inverse_lag": 6, "inverse_backend": "inline"}
        return model, optimizer, KFAC(model, optimizer, **arranged(options))

    def take(model, optimizer, begin, end):
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x, step >= 9).square().mean().backward()
            optimizer.step()

    straight = start()
    take(*straight[:2], 0, 18)
    first = start()
    take(*first[:2], 0, 11)
    again = start()
    for new, old in zip(again, first, strict=True):
        new.load_state_dict(old.state_dict())
    take(*again[:2], 11, 18)
    assert_same(weights_of(again[0]), weights_of(straight[0]), 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damping_that_follows_the_loss_is_that_of_the_refreshs_step(backend):
    found = []
    for delay in (0.0, 0.05):
        model = build("small")
        seen = {"loss": 1.0}
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        options = {"inverse_lag": 3, "inverse_backend": backend, "solver": "cholesky"}
        KFAC(model, optimizer, **arranged(EXACT | options | {"damping": lambda step, seen=seen: 1e-2 * seen["loss"]}))
        for step in range(10):
            ((x, y),) = cut(step, [24], "small")[0]
            optimizer.zero_grad()
            loss = mean_loss(model(x), y)
            loss.backward()
            optimizer.step()
            seen["loss"] = float(loss.detach())
            time.sleep(delay)
        found.append(weights_of(model))
    assert_same(*found, 0.0)
