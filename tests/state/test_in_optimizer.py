"""K-FAC's state in the optimizer's own state dict: moments under its keys, and a bitwise resume from it alone."""

import io
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dkfac

EVERY_STEP = {"announce": False, "factor_interval": 1, "inverse_interval": 2}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
CASES = [(name, "adaptive") for name in OPTIMIZERS] + [("AdamW", "adam-eigen"), ("SGD", "kfac"), ("AdamW", "ekfac")]


def make(name="AdamW", seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    model = model.to(dtype)
    return model, OPTIMIZERS[name](model.parameters())


def train(model, optimizer, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(16, 2, 4, 4, generator=draw).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x) - x[:, 0, 0, :3]).square().mean().backward()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(model, other):
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("name", "curvature"), CASES)
@pytest.mark.parametrize("when", ["attached", "before it is attached"])
def test_a_run_resumes_bitwise_from_model_and_optimizer_alone(name, curvature, when):
    whole, optimizer = make(name)
    dkfac.KFAC(whole, optimizer, curvature=curvature, **EVERY_STEP)
    train(whole, optimizer, range(5))
    saved = through_a_file({"model": whole.state_dict(), "optimizer": optimizer.state_dict()})
    train(whole, optimizer, range(5, 10))
    model, again = make(name, seed=1)
    model.load_state_dict(saved["model"])
    if when == "attached":
        kfac = dkfac.KFAC(model, again, curvature=curvature, **EVERY_STEP)
        again.load_state_dict(saved["optimizer"])
    else:
        again.load_state_dict(saved["optimizer"])
        kfac = dkfac.KFAC(model, again, curvature=curvature, **EVERY_STEP)
    assert kfac.metrics()["step"] == 5
    train(model, again, range(5, 10))
    assert_same(model, whole)


def test_bfloat16_parameters_do_not_round_the_state():
    whole, optimizer = make(dtype=torch.bfloat16)
    dkfac.KFAC(whole, optimizer, **EVERY_STEP)
    train(whole, optimizer, range(4))
    saved = through_a_file({"model": whole.state_dict(), "optimizer": optimizer.state_dict()})
    train(whole, optimizer, range(4, 8))
    model, again = make(seed=1, dtype=torch.bfloat16)
    model.load_state_dict(saved["model"])
    dkfac.KFAC(model, again, **EVERY_STEP)
    again.load_state_dict(saved["optimizer"])
    train(model, again, range(4, 8))
    assert_same(model, whole)


def test_saving_changes_nothing():
    plain, optimizer = make()
    dkfac.KFAC(plain, optimizer, **EVERY_STEP)
    train(plain, optimizer, range(6))
    model, saving = make()
    dkfac.KFAC(model, saving, **EVERY_STEP)
    for step in range(6):
        kept = {p: set(entry) for p, entry in saving.state.items()}
        saving.state_dict()
        assert {p: set(entry) for p, entry in saving.state.items()} == kept
        train(model, saving, [step])
    assert_same(model, plain)


# --- the optimizer's own keys --------------------------------------------------------------------------------


def moments_of(name, curvature="adaptive", **options):
    """Train with K-FAC, and return the entries of the optimizer's state dict, with those of the optimizer alone on the
    gradients that K-FAC saw."""
    model, optimizer = make(name, dtype=torch.float64)
    kfac = dkfac.KFAC(model, optimizer, curvature=curvature, **EVERY_STEP | options)
    twin, alone = make(name, dtype=torch.float64)
    for step in range(6):
        twin.load_state_dict(model.state_dict())
        x = torch.randn(16, 2, 4, 4, generator=torch.Generator().manual_seed(step)).double()
        for net, opt in ((model, optimizer), (twin, alone)):
            opt.zero_grad()
            (net(x) - x[:, 0, 0, :3]).square().mean().backward()
            opt.step()
    return kfac, model, optimizer, alone


def test_sgds_momentum_is_exactly_its_own():
    _, _, optimizer, alone = moments_of("SGD")
    found, wanted = optimizer.state_dict()["state"], alone.state_dict()["state"]
    assert sorted(found) == sorted(wanted) == list(range(8))
    for i, entry in wanted.items():
        torch.testing.assert_close(found[i]["momentum_buffer"], entry["momentum_buffer"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", ["adaptive", "adam-eigen"])
def test_adams_first_moment_and_step_are_its_own_and_the_second_has_its_size(curvature):
    _, _, optimizer, alone = moments_of("AdamW", curvature)
    found, wanted = optimizer.state_dict()["state"], alone.state_dict()["state"]
    assert sorted(found) == sorted(wanted) == list(range(8))
    for i, entry in wanted.items():
        torch.testing.assert_close(found[i]["exp_avg"], entry["exp_avg"], rtol=1e-9, atol=1e-12)
        assert found[i]["step"] == entry["step"] == 6
        assert found[i]["step"].dtype == entry["step"].dtype
    for weight, bias in ((0, 1), (4, 5), (6, 7)):  # rotations keep the sum over a layer
        total, own = (sum(float(e[i]["exp_avg_sq"].sum()) for i in (weight, bias)) for e in (found, wanted))
        assert 0.5 * own < total < 2 * own


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD without momentum"])
def test_after_close_the_optimizer_goes_on_with_these_moments(name):
    kfac, model, optimizer, alone = moments_of(name)
    saved = optimizer.state_dict()["state"]
    kfac.close()
    left = optimizer.state_dict()["state"]
    for i, entry in left.items():
        assert not any(key.startswith("dkfac") for key in entry)
        assert all(torch.equal(value, saved[i][key]) for key, value in entry.items())
    assert {tuple(entry) for entry in left.values()} == {
        tuple(e) for e in alone.state_dict()["state"].values()
    } or "SGD w" in name
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(16, 2, 4, 4).double()
    optimizer.zero_grad()
    (model(x) - x[:, 0, 0, :3]).square().mean().backward()
    optimizer.step()
    moved = max(float((p.detach() - q).abs().max()) for p, q in zip(model.parameters(), before, strict=True))
    assert 0 < moved < 0.1


# --- torch.distributed.checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD without momentum"])
def test_torchs_own_helpers_carry_the_state(name, tmp_path):
    import torch.distributed.checkpoint as dcp

    whole, optimizer = make(name)
    dkfac.KFAC(whole, optimizer, **EVERY_STEP)
    train(whole, optimizer, range(5))
    saved = {"model": whole.state_dict(), "optimizer": get_optimizer_state_dict(whole, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, without a process group
        dcp.save(saved, checkpoint_id=tmp_path)
    train(whole, optimizer, range(5, 10))
    model, again = make(name, seed=1)
    kfac = dkfac.KFAC(model, again, **EVERY_STEP)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, again)}
    assert kfac.metrics()["step"] == 0  # the step that initializes the optimizer is not one of K-FAC's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, again, state["optimizer"])
    assert kfac.metrics()["step"] == 5
    train(model, again, range(5, 10))
    assert_same(model, whole)


def test_torchs_flattened_form_restores_the_optimizer_and_what_it_drops_is_said():
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = make()
    dkfac.KFAC(model, optimizer, **EVERY_STEP)
    train(model, optimizer, range(3))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other, again = make()
    dkfac.KFAC(other, again, **EVERY_STEP)
    set_optimizer_state_dict(other, again, saved, options=options)
    weight = other[3].weight
    assert torch.equal(again.state[weight]["exp_avg"], saved["state.3.weight.exp_avg"])
    with pytest.warns(UserWarning, match="loaded a state without K-FAC's"):
        train(other, again, [3])


# --- what does not fit ---------------------------------------------------------------------------------------


def test_a_checkpoint_without_it_is_said_once_at_the_next_step():
    model, optimizer = make()
    train(model, optimizer, range(3))
    plain = optimizer.state_dict()
    kfac = dkfac.KFAC(model, optimizer, **EVERY_STEP)
    optimizer.load_state_dict(plain)
    with pytest.warns(UserWarning, match=r"loaded a state without K-FAC's.*start anew.*kfac.load_state_dict"):
        train(model, optimizer, [3])
    train(model, optimizer, range(4, 8))
    assert kfac.metrics()["step"] == 5


def test_nothing_is_said_if_kfac_loads_its_own_state():
    model, optimizer = make()
    kfac = dkfac.KFAC(model, optimizer, **EVERY_STEP)
    train(model, optimizer, range(3))
    own = kfac.state_dict()
    kfac.close()
    plain = optimizer.state_dict()
    kfac = dkfac.KFAC(model, optimizer, **EVERY_STEP)
    optimizer.load_state_dict(plain)
    kfac.load_state_dict(own)
    train(model, optimizer, range(3, 6))
    assert kfac.metrics()["step"] == 6


@pytest.mark.parametrize("when", ["attached", "before it is attached"])
def test_a_state_of_other_settings_is_not_used_and_said(when):
    model, optimizer = make()
    kfac = dkfac.KFAC(model, optimizer, **EVERY_STEP)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    kfac.close()
    model, optimizer = make()
    match = "not used, and its statistics start anew: .*does not fit the model|not used.*incomplete"
    if when == "attached":
        kfac = dkfac.KFAC(model, optimizer, norm_form="unit", **EVERY_STEP)
        optimizer.load_state_dict(saved)
        with pytest.warns(UserWarning, match="loaded a state without"):
            train(model, optimizer, [0])
    else:
        optimizer.load_state_dict(saved)
        with pytest.warns(UserWarning, match=match):
            kfac = dkfac.KFAC(model, optimizer, norm_form="unit", **EVERY_STEP)
        train(model, optimizer, [0])
    assert kfac.metrics()["step"] == 1
    assert not any(str(key).startswith("dkfac") for entry in optimizer.state.values() for key in entry)


def test_a_checkpoint_with_it_loads_into_an_optimizer_without_kfac():
    model, optimizer = make()
    dkfac.KFAC(model, optimizer, **EVERY_STEP)
    train(model, optimizer, range(3))
    other, plain = make()
    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    train(other, plain, range(3))
