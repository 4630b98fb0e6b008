"""R08: failed decompositions in the middle of training are counted, survived, and in the end named."""

import copy
import math

import pytest
import torch
from torch import nn

from dkfac import KFAC

EXACT = {"announce": False, "rescale": "norm", "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1}
COUNTERS = ("fallbacks_float64", "fallbacks_cholesky", "fallbacks_kept", "fallbacks_raw")
LinAlgError = torch.linalg.LinAlgError


class Sabotage:
    """Breaks the decompositions of factors of one size: eigh in given dtypes, or everything."""

    def __init__(self, monkeypatch, dim, *, dtypes=(torch.float32, torch.float64), cholesky=False, calls=None):
        self.dim, self.dtypes, self.calls, self.active, self.seen = dim, dtypes, calls, True, 0
        eigh, cholesky_ex = torch.linalg.eigh, torch.linalg.cholesky_ex

        def broken_eigh(matrix):
            if self.hits(matrix):
                raise LinAlgError("linalg.eigh: failed to converge")
            return eigh(matrix)

        def broken_cholesky(matrix):
            lower, info = cholesky_ex(matrix)
            return lower, info + (1 if self.active and cholesky and matrix.shape[-1] == dim else 0)

        monkeypatch.setattr(torch.linalg, "eigh", broken_eigh)
        monkeypatch.setattr(torch.linalg, "cholesky_ex", broken_cholesky)

    def hits(self, matrix):
        if not self.active or matrix.shape[-1] != self.dim or matrix.dtype not in self.dtypes:
            return False
        self.seen += 1
        return self.calls is None or self.seen in self.calls


def make(**options):
    """Two layers with factors of dims A=4, G=5 and A=6, G=2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, KFAC(model, optimizer, **(EXACT | options))


def backward(model, step):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(x).square().mean().backward()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        backward(model, step)
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


def fallbacks(kfac):
    metrics, counters = kfac.metrics(), kfac.report()["counters"]
    assert [metrics[name] for name in COUNTERS] == [counters[name] for name in COUNTERS]
    return tuple(counters[name] for name in COUNTERS)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("dim", [4, 5, 6, 2])
def test_every_rung_is_counted_once_per_failed_factor(dim, curvature, monkeypatch):
    model, optimizer, kfac = make(curvature=curvature)
    sabotage = Sabotage(monkeypatch, dim, dtypes=(torch.float32,))
    train(model, optimizer, 3)
    assert fallbacks(kfac) == (3, 0, 0, 0)
    sabotage.dtypes = (torch.float32, torch.float64)
    train(model, optimizer, 3, start=3)
    assert fallbacks(kfac) == (3, 3, 0, 0)
    sabotage.active = False
    train(model, optimizer, 3, start=6)
    assert fallbacks(kfac) == (3, 3, 0, 0)
    assert kfac.metrics()["refreshes"] == 9


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("dim", [4, 5, 6, 2])
def test_a_factor_that_fails_later_keeps_its_previous_decomposition(dim, curvature, monkeypatch):
    model, optimizer, kfac = make(curvature=curvature)
    train(model, optimizer, 2)
    layer, key = {4: ("0", "A"), 5: ("0", "G"), 6: ("2", "A"), 2: ("2", "G")}[dim]
    before = kfac.state_dict()["layers"][layer]["decompositions"]
    Sabotage(monkeypatch, dim, cholesky=True)
    train(model, optimizer, 4, start=2)
    assert fallbacks(kfac) == (0, 0, 4, 0)
    after = kfac.state_dict()["layers"][layer]["decompositions"]
    for name in before:
        same = all(torch.equal(before[name][part], after[name][part]) for part in before[name] if part != "form")
        assert same == (name == key), name


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("dim", [4, 5, 6, 2])
def test_a_layer_whose_factor_never_decomposed_passes_its_raw_gradient(dim, curvature, monkeypatch):
    """The optimizer gets exactly the raw gradient there, and a preconditioned one in the other layer."""
    model, optimizer, kfac = make(curvature=curvature)
    Sabotage(monkeypatch, dim, cholesky=True)
    broken, sound = (model[0], model[2]) if dim in (4, 5) else (model[2], model[0])
    for step in range(4):
        backward(model, step)
        raw = {p: p.grad.clone() for p in model.parameters()}
        optimizer.step()
        assert all(torch.allclose(p.grad, raw[p], rtol=1e-6) for p in broken.parameters())
        assert not torch.allclose(sound.weight.grad, raw[sound.weight], rtol=1e-2)
    assert fallbacks(kfac) == (0, 0, 0, 4)


def test_the_kth_eigh_call_failing_costs_one_float64_refresh_and_nothing_else(monkeypatch):
    model, optimizer, kfac = make()
    Sabotage(monkeypatch, 5, calls={3})
    train(model, optimizer, 6)
    assert fallbacks(kfac) == (1, 0, 0, 0)


@pytest.mark.parametrize("max_failures", [1, 3, 10])
@pytest.mark.parametrize(("dim", "layer", "key"), [(4, "0", "A"), (2, "2", "G")])
@pytest.mark.parametrize("first", [True, False], ids=["raw", "kept"])
def test_max_failures_in_a_row_raise_and_name_layer_and_factor(max_failures, dim, layer, key, first, monkeypatch):
    model, optimizer, _ = make(max_failures=max_failures)
    healthy = 0 if first else 1
    train(model, optimizer, healthy)
    Sabotage(monkeypatch, dim, cholesky=True)
    train(model, optimizer, max_failures - 1, start=healthy)
    backward(model, 100)
    with pytest.raises(RuntimeError, match=rf"factor {key} of layer '{layer}' .* {max_failures} times in a row") as e:
        optimizer.step()
    assert f"max_failures={max_failures}" in str(e.value)


def test_a_success_in_between_starts_the_count_of_failures_anew(monkeypatch):
    model, optimizer, kfac = make(max_failures=3)
    train(model, optimizer, 1)
    sabotage = Sabotage(monkeypatch, 4, cholesky=True)
    for step in range(1, 13):
        sabotage.active = step % 3 != 0
        train(model, optimizer, 1, start=step)
    assert fallbacks(kfac) == (0, 0, 8, 0)


@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
@pytest.mark.parametrize("damping", [0.0, 1e-3, 1e3])
def test_decomposing_never_changes_the_running_factors(damping, solver):
    """Damping does not leak: the running factors of any damping, solver and refresh rhythm are the same bits."""
    model, optimizer, kfac = make(solver=solver, damping=damping, factor_decay=0.9)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.0)
    seldom = KFAC(twin, other, **(EXACT | {"inverse_interval": 1000, "damping": 0.5, "factor_decay": 0.9}))
    optimizer.param_groups[0]["lr"] = 0.0
    for step in range(6):
        for net, opt in ((model, optimizer), (twin, other)):
            backward(net, step)
            opt.step()
    for name, factors in seldom.factors().items():
        for key, factor in factors.items():
            assert torch.equal(kfac.factors()[name][key], factor), (name, key)


@pytest.mark.parametrize("rung", ["float64", "cholesky", "kept", "raw"])
def test_no_rung_changes_the_running_factors(rung, monkeypatch):
    dtypes = (torch.float32,) if rung == "float64" else (torch.float32, torch.float64)
    runs = []
    for broken in (False, True):
        model, optimizer, kfac = make(damping=0.1)
        optimizer.param_groups[0]["lr"] = 0.0
        with monkeypatch.context() as patch:
            healthy = 1 if rung == "kept" else 0
            train(model, optimizer, healthy)
            if broken:
                Sabotage(patch, 4, dtypes=dtypes, cholesky=rung in ("kept", "raw"))
            train(model, optimizer, 5, start=healthy)
        runs.append(kfac)
    assert runs[1].metrics()[f"fallbacks_{rung}"] == 5
    found, wanted = runs[1].factors(), runs[0].factors()
    assert all(torch.equal(found[n][k], wanted[n][k]) for n in wanted for k in wanted[n])


def test_a_run_with_an_eigh_that_lies_stays_finite(monkeypatch):
    """A basis that is not orthonormal, or NaN, is seen although no exception comes."""
    eigh, calls = torch.linalg.eigh, iter(range(10**6))

    def lying(matrix):
        values, vectors = eigh(matrix)
        match next(calls) % 5:
            case 0 | 3:
                return values, vectors * math.nan
            case 1:
                return values, vectors + 0.1
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", lying)
    model, optimizer, kfac = make()
    train(model, optimizer, 12)
    # 48 factors. Lie, lie: Cholesky; truth: eigen; lie, truth: float64; and again.
    assert fallbacks(kfac) == (16, 16, 0, 0)
