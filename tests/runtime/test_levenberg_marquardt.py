"""Levenberg-Marquardt damping: the model's prediction against one written out, and what damping makes of it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_parity import LOCK
from helpers_ranks import on_threads
from torch import nn

from dkfac import KFAC, LevenbergMarquardt

PLAIN = {"announce": False, "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1, "rescale": "none"}
MSE = {"fisher": "exact", "fisher_loss": "mse", "factor_decay": 0.0}


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, 6).double()
    return x, torch.randn(40, 4, generator=generator, dtype=torch.float64)


def linear():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4, bias=False)).double()


def descend(model, x, y, damping, steps, scale=1.0, lr=1.0, **options):
    """``scale``: of the loss, of which K-FAC's curvature does not know."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    kfac = KFAC(model, optimizer, damping=damping, **(PLAIN | MSE | options))
    ratios = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = scale * F.mse_loss(model(x), y)
        loss.backward()
        if isinstance(damping, LevenbergMarquardt):
            kfac.lm_step(loss, lambda: scale * F.mse_loss(model(x), y))
            ratios.append(damping.ratio)
        else:
            optimizer.step()
    with torch.no_grad():
        return float(scale * F.mse_loss(model(x), y)), ratios, kfac


def test_on_an_exact_quadratic_damping_reaches_its_floor():
    (x, y), damping = problem(), LevenbergMarquardt(1.0, low=1e-3, every=1)
    _, ratios, _ = descend(linear(), x, y, damping, 160)
    assert min(ratios) > 1 - 1e-6
    assert damping.value == 1e-3


@pytest.mark.filterwarnings("ignore:K-FAC may not pay off")
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 / 0.3])
def test_the_final_loss_is_that_of_the_best_fixed_damping(scale):
    """With a loss whose curvature K-FAC takes for 0.3 of what it is, undamped steps are too long and diverge."""
    x, y = problem()
    grid = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 20.0, 30.0, 60.0, 100.0)
    rare = {"factor_interval": 100, "inverse_interval": 100}  # the curvature of a quadratic stays what it is
    fixed = {d: descend(linear(), x, y, d, 300, scale, **rare)[0] for d in grid}
    finite = [loss for loss in fixed.values() if loss < 1e6]
    found, _, _ = descend(linear(), x, y, LevenbergMarquardt(1.0, low=1e-4, every=1), 300, scale, **rare)
    assert found <= 1.05 * min(finite)
    if scale > 1:
        assert not fixed[1e-4] < 1e6


def test_the_prediction_is_the_models():
    """Two layers, one of them a convolution, and a bias in no layer: against the dense matrix."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.BatchNorm1d(3)).double()
    x, y = torch.randn(12, 1, 3, 3).double(), torch.tensor([0, 1, 2] * 4)
    damping, optimizer = LevenbergMarquardt(0.1, every=1), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(model, optimizer, damping=damping, **PLAIN)
    for _ in range(3):
        optimizer.zero_grad()
        before = F.cross_entropy(model(x), y)
        before.backward()
        old = copy.deepcopy(model.state_dict())
        raw = {name: p.grad.clone() for name, p in model.named_parameters()}
        used = damping.value
        kfac.lm_step(before, lambda: F.cross_entropy(model(x), y))
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, old[name])  # neither by the look nor, after the forward, by the step
        assert damping.ratio > 0, "it would have been taken back"
        moves = {name: p.detach() - old[name] for name, p in model.named_parameters()}
        predicted = sum(float((moves[n] * raw[n]).sum() + 0.5 * used * moves[n].square().sum()) for n in moves)
        for name, pair in kfac.factors().items():
            rows = torch.cat([moves[f"{name}.weight"].flatten(1), moves[f"{name}.bias"][:, None]], 1)
            predicted += 0.5 * float((rows * (pair["G"] @ rows @ pair["A"])).sum())
        with torch.no_grad():
            actual = float(F.cross_entropy(model(x), y) - before.detach())
        assert damping.ratio == pytest.approx(actual / predicted, rel=1e-6)
        buffers = {k: v for k, v in old.items() if "running" in k or "tracked" in k}
        model.load_state_dict(model.state_dict() | buffers)


def test_damping_rises_falls_and_stays_within_its_bounds():
    damping = LevenbergMarquardt(1.0, low=0.9, high=1.1, every=5)
    for actual, expected in ((-1.0, 0.9), (-0.5, 0.9), (-0.1, 1.1), (float("nan"), 1.1), (1.0, 1.1), (-0.8, 0.9)):
        damping.value = 1.0 if actual != -0.5 else 0.9
        damping.look(actual, -1.0)
        assert damping.value == pytest.approx(expected)
    damping = LevenbergMarquardt(1.0, every=5)
    damping.look(-1.0, -1.0)
    assert damping.value == pytest.approx(0.95**5)
    damping.look(-1.0, 0.5)  # the model itself expects no improvement
    assert damping.value == pytest.approx(1.0)


def test_a_step_that_raises_the_loss_is_taken_back():
    (x, y), model = problem(), linear()
    start = model[0].weight.detach().clone()
    damping = LevenbergMarquardt(1e-4, every=1)
    loss, ratios, _ = descend(model, x, y, damping, 1, lr=5.0)
    assert ratios[0] < 0
    assert torch.equal(model[0].weight, start)
    assert damping.value == pytest.approx(1e-4 / 0.95)
    assert loss == pytest.approx(F.mse_loss(linear()(x), y).item())


def test_it_looks_every_few_steps_and_the_state_holds_the_damping():
    (x, y), damping = problem(), LevenbergMarquardt(1.0, every=3)
    model = linear()
    _, ratios, kfac = descend(model, x, y, damping, 4)
    assert len(set(ratios[:3])) == 1
    assert damping.value == pytest.approx(0.95**6)
    other = LevenbergMarquardt(5.0)
    fresh = linear()
    again = KFAC(fresh, torch.optim.SGD(fresh.parameters(), lr=1.0), damping=other, **(PLAIN | MSE))
    again.load_state_dict(kfac.state_dict())
    assert other.value == damping.value


def on_rank(rank, world_size, strategy):
    x, y = (t.chunk(world_size)[rank] for t in problem())
    with LOCK:
        damping, model = LevenbergMarquardt(0.5, every=2), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kfac = KFAC(model, optimizer, damping=damping, strategy=strategy, **(PLAIN | MSE))
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if world_size > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world_size
        kfac.lm_step(loss, lambda: F.mse_loss(model(x), y))
    return damping.value, damping.ratio, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_is_the_same_on_several_ranks(strategy):
    value, ratio, weights = on_rank(0, 1, "auto")
    for found in on_threads(2, on_rank, 2, strategy):
        assert found[:2] == pytest.approx((value, ratio), rel=1e-9)
        torch.testing.assert_close(found[2], weights, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 1e-3}, "LevenbergMarquardt"),
        ({"damping_mode": "relative"}, "absolute"),
        ({"solver": "cholesky"}, "solver"),
    ],
)
def test_what_it_does_not_go_with_is_said(options, message):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kfac = KFAC(model, optimizer, **(PLAIN | {"damping": LevenbergMarquardt()} | options))
    with pytest.raises(RuntimeError, match=message):
        kfac.lm_step(1.0, lambda: 1.0)


@pytest.mark.parametrize("bad", [{"initial": 0.0}, {"low": 1.0, "initial": 0.5}, {"every": 0}, {"factor": 1.0}])
def test_bounds_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="LevenbergMarquardt"):
        LevenbergMarquardt(**bad)
