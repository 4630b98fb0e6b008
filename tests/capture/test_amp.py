"""Mixed precision (R12): float32 factors, no trace of the loss scale, overflows as if they had not happened."""

import pytest
import torch
from helpers_capture import assert_factors, assert_same, attach, batch, batches, mean_loss, mlp, parameters, train

SINGLE = torch.float32
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    # without momentum: torch's fused SGD leaves the buffer uninitialised when its first step overflows
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def relative_error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def measure(autocast=None, init_scale=None, **options):
    """Factors of one step, with the model run under autocast and the loss multiplied by ``init_scale``."""
    model, (x, y) = mlp(dtype=SINGLE), batch(12, 4, dtype=SINGLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, enabled=init_scale is not None)
    kfac = attach(model, optimizer, grad_scaler=scaler, **options)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = mean_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return kfac.factors(), kfac.metrics()


@pytest.mark.parametrize(
    ("autocast", "scale", "tol"),
    [(torch.bfloat16, None, 2e-2), (torch.float16, 2.0**8, 2e-3)],
    ids=["bfloat16", "float16"],
)
def test_factors_under_autocast_are_float32_and_close_to_the_single_precision_ones(autocast, scale, tol):
    single, _ = measure()
    mixed, _ = measure(autocast, scale)
    for name, factors in single.items():
        for key, factor in factors.items():
            assert mixed[name][key].dtype == torch.float32
            assert relative_error(mixed[name][key], factor) < tol, (name, key)
        assert not torch.equal(mixed[name]["G"], factors["G"])  # it did run in half precision


@pytest.mark.parametrize("autocast", [None, torch.float16], ids=["single", "float16"])
@pytest.mark.parametrize("scale", [2.0**4, 2.0**11, 3000.0])
def test_g_does_not_depend_on_the_loss_scale(autocast, scale):
    expected, _ = measure(autocast, 2.0**8)
    got, _ = measure(autocast, scale)
    for name, factors in expected.items():
        for key, factor in factors.items():
            assert relative_error(got[name][key], factor) < 1e-3, (name, key)


def scaled_run(make, data, *, bad=(), init_scale=2.0**8, autocast=True, clip=None, repeat=False, **options):
    """Train under a GradScaler; the losses of the steps in ``bad`` are infinite.

    With ``repeat`` a batch is tried until its step was taken. Returns parameters, KFAC, optimizer and the number
    of overflows.
    """
    model = mlp(dtype=SINGLE)
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=10**6)
    kfac = attach(model, optimizer, grad_scaler=scaler, **options)
    overflows = 0
    for i, (x, y) in enumerate(data):
        for _ in range(40 if repeat else 1):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                loss = mean_loss(model(x).float(), y)
            scaler.scale(loss * torch.inf if i in bad else loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            overflowed = scaler.get_scale() < before
            overflows += overflowed
            if not overflowed:
                break
    return parameters(model), kfac, optimizer, overflows


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("bad", [(0,), (2,), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["float16", "single"])
def test_overflowing_steps_leave_no_trace(make, bad, autocast):
    good = batches([8, 8, 8, 8], dtype=SINGLE)
    data = list(good)
    for i in bad:
        data.insert(i, batch(8, 4, seed=99, dtype=SINGLE))
    expected, kfac_expected, plain, _ = scaled_run(make, good, autocast=autocast)
    got, kfac, optimizer, overflows = scaled_run(make, data, bad=bad, autocast=autocast)
    assert overflows == len(bad)
    assert_same(got, expected, 1e-3)
    assert_factors(kfac.factors(), kfac_expected.factors(), 1e-3)
    steps = [[s["step"] for s in o.state.values() if "step" in s] for o in (optimizer, plain)]
    assert steps[0] == steps[1]
    metrics = kfac.metrics()
    assert metrics["step"] - metrics["skipped_batches"] == len(good)
    assert metrics["abandoned_steps"] + metrics["skipped_batches"] == len(bad)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_scale_that_is_far_too_large_finds_its_way_down(make):
    data = batches([8, 8, 8], dtype=SINGLE)
    expected, kfac_expected, _, none = scaled_run(make, data, init_scale=2.0**6)
    got, kfac, _, overflows = scaled_run(make, data, init_scale=2.0**30, repeat=True)
    assert none == 0
    assert overflows > 5
    assert_same(got, expected, 1e-3)
    assert_factors(kfac.factors(), kfac_expected.factors(), 1e-2)


def test_an_overflow_on_a_measuring_step_moves_the_measurement_to_the_next_step():
    good = batches([8, 8, 8, 8, 8], dtype=SINGLE)
    data = [*good[:2], batch(8, 4, seed=99, dtype=SINGLE), *good[2:]]
    options = {"factor_interval": 2, "inverse_interval": 2, "autocast": False}
    expected, _, _, _ = scaled_run(OPTIMIZERS["SGD"], good, **options)
    got, _, _, overflows = scaled_run(OPTIMIZERS["SGD"], data, bad=(2,), **options)
    assert overflows == 1
    assert_same(got, expected, 1e-6)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("rescale", ["norm", "norm-kl", "kl-clip", "none"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "unscale_ and clip"])
def test_a_scaler_changes_nothing(make, rescale, clip):
    """In single precision, where a power of two is exact up to damping's rounding."""
    data = batches([8, 8, 8], dtype=SINGLE)
    model = mlp(dtype=SINGLE)
    optimizer = make(model.parameters())
    attach(model, optimizer, rescale=rescale)
    for x, y in data:
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    got, _, _, _ = scaled_run(make, data, autocast=False, rescale=rescale, clip=clip)
    assert_same(got, parameters(model), 1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rescale", ["norm-kl", "kl-clip"])
def test_the_kl_clip_does_not_depend_on_the_loss_scale(rescale, fused):
    data = batches([8, 8], dtype=SINGLE)

    def clip_factor(scale):
        def make(params):
            return torch.optim.SGD(params, lr=0.5, fused=fused)

        options = {"rescale": rescale, "kl_clip": 1e-4}
        return scaled_run(make, data, init_scale=scale, autocast=False, **options)[1].metrics()["clip_factor"]

    found = [clip_factor(scale) for scale in (1.0, 2.0**6, 2.0**12)]
    assert found[0] < 1  # it clips at all
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-4)


def test_accumulated_micro_batches_under_a_scaler_equal_those_without():
    data = batches([6, 6, 6, 6], dtype=SINGLE)

    def run(scaler):
        model = mlp(dtype=SINGLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kfac = attach(model, optimizer, grad_scaler=scaler, accumulate="mean")
        for pair in (data[:2], data[2:]):
            optimizer.zero_grad()
            for x, y in pair:
                loss = mean_loss(model(x), y) / 2
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        return parameters(model), kfac.factors()

    weights, factors = run(None)
    scaled_weights, scaled_factors = run(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    assert_same(scaled_weights, weights, 1e-5)
    assert_factors(scaled_factors, factors, 1e-5)


def test_float16_autocast_without_a_scaler_is_an_error_that_names_the_argument():
    model, (x, _) = mlp(dtype=SINGLE), batch(6, 4, dtype=SINGLE)
    attach(model)
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match=r"layer '0'.*grad_scaler=scaler"):
        model(x)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        model(x)  # evaluation needs no scaler


def test_a_disabled_scaler_is_no_scaler():
    data = batches([6, 6], dtype=SINGLE)
    model = mlp(dtype=SINGLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach(model, optimizer)
    train(model, optimizer, data)
    twin = mlp(dtype=SINGLE)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    attach(twin, twin_optimizer, grad_scaler=scaler)
    for x, y in data:
        twin_optimizer.zero_grad()
        scaler.scale(mean_loss(twin(x), y)).backward()
        scaler.step(twin_optimizer)
        scaler.update()
    assert_same(parameters(twin), parameters(model), 0)


def test_something_that_is_not_a_scaler_is_refused():
    with pytest.raises(TypeError, match="grad_scaler must be a torch"):
        attach(mlp(), grad_scaler=2.0)
