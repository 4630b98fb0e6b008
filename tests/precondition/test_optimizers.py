"""Every torch optimizer takes preconditioned steps: attaching equals calling ``kfac.step()`` by hand."""

import gc
import weakref

import pytest
import torch
from helpers_capture import (
    assert_factors,
    assert_same,
    attach,
    batch,
    batches,
    gradients,
    mean_loss,
    mlp,
    oracle_factors,
    parameters,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

LAYERS = ["0", "2", "4"]
NAMES = ["SGD", "AdamW", "Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop"]
NAMES += ["Adafactor", "Muon"]  # all of torch.optim but SparseAdam (sparse gradients only) and LBFGS (refused)
CASES = {name: (name, {}) for name in NAMES}
CASES |= {f"{name} foreach": (name, {"foreach": True}) for name in NAMES if name not in ("Adafactor", "Muon")}
CASES |= {f"{name} fused": (name, {"fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")}
CASES |= {
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "SGD maximize": ("SGD", {"maximize": True}),
    "SGD lr as a tensor": ("SGD", {"lr": torch.tensor(0.01)}),
}


def make(case, params):
    name, options = CASES[case]
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no optimizer {name}")
    return getattr(torch.optim, name)(params, **{"lr": 0.01, **options})


def backward(model, x, y):
    model.zero_grad()
    loss = mean_loss(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize("case", CASES)
def test_an_attached_optimizer_steps_as_after_a_step_by_hand(case):
    bias = not case.startswith("Muon")  # Muon takes matrices only
    model, twin = mlp(bias=bias), mlp(bias=bias)
    optimizer, twin_optimizer = make(case, model.parameters()), make(case, twin.parameters())
    kfac, by_hand = attach(model, optimizer), attach(twin)
    for x, y in batches([6, 6, 6]):
        backward(model, x, y)
        raw = gradients(model)
        optimizer.step()
        backward(twin, x, y)
        by_hand.step()
        preconditioned = gradients(twin)
        twin_optimizer.step()
        assert_same(gradients(model), preconditioned, 1e-12)
        assert_same(parameters(model), parameters(twin), 1e-12)
        assert (raw["0.weight"] - preconditioned["0.weight"]).norm() > 0.1 * raw["0.weight"].norm()
    assert_factors(kfac, by_hand.factors(), 1e-12)


@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("case", ["SGD nesterov", "AdamW", "AdamW fused"])
def test_a_closure_takes_the_steps_of_the_ordinary_loop(how, case):
    data = batches([6, 6, 6])
    model, twin = mlp(), mlp()
    optimizer, twin_optimizer = make(case, model.parameters()), make(case, twin.parameters())
    attach(model, optimizer)
    attach(twin, twin_optimizer)
    for x, y in data:
        loss = backward(model, x, y)
        optimizer.step()

        def closure(x=x, y=y):
            return backward(twin, x, y)

        returned = twin_optimizer.step(closure) if how == "positional" else twin_optimizer.step(closure=closure)
        torch.testing.assert_close(returned, loss)
        assert_same(parameters(twin), parameters(model), 1e-12)


def test_lbfgs_is_refused():
    model = mlp()
    with pytest.raises(TypeError, match="LBFGS"):
        attach(model, torch.optim.LBFGS(model.parameters()))


def kl_clipped(x, y, lr, kl_clip=1e-3):
    """The first step's gradients with the KL clip written out, from a KFAC that does not rescale."""
    model = mlp()
    kfac = attach(model, rescale="none")
    backward(model, x, y)
    raw = gradients(model)
    kfac.step()
    update = gradients(model)
    s = sum(lr[name] ** 2 * (update[name] * raw[name]).sum() for name in raw)
    factor = min(1.0, (kl_clip / abs(float(s))) ** 0.5)
    assert factor < 1
    return {name: u * factor for name, u in update.items()}


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_the_kl_clip_uses_each_parameter_groups_own_rate(as_tensor):
    rates = {"0.weight": 0.3, "0.bias": 0.6, "2.weight": 0.1, "2.bias": 0.2, "4.weight": 0.9, "4.bias": 0.05}
    model, (x, y) = mlp(), batch(6, 4)
    groups = [
        {"params": [p], "lr": torch.tensor(rates[name], dtype=p.dtype) if as_tensor else rates[name]}
        for name, p in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups)
    attach(model, optimizer, rescale="kl-clip")
    backward(model, x, y)
    before = parameters(model)
    optimizer.step()
    expected = kl_clipped(x, y, rates)
    assert_same(gradients(model), expected, 1e-10)
    assert_same(parameters(model), {name: p - rates[name] * expected[name] for name, p in before.items()}, 1e-10)


SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, 1, gamma=0.5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: OneCycleLR(o, 1.0, total_steps=5),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_reaches_the_kl_clip_and_the_optimizer(scheduler):
    model, twin = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=1.0, momentum=0.9)
    schedules = [SCHEDULERS[scheduler](o) for o in (optimizer, twin_optimizer)]
    attach(model, optimizer, rescale="kl-clip")
    by_hand = attach(twin, rescale="kl-clip")
    rates = set()
    for x, y in batches([6, 6, 6, 6]):
        backward(model, x, y)
        optimizer.step()
        backward(twin, x, y)
        rates.add(twin_optimizer.param_groups[0]["lr"])
        by_hand.step(lr=twin_optimizer.param_groups[0]["lr"])
        twin_optimizer.step()
        for schedule in schedules:
            schedule.step()
        assert_same(parameters(model), parameters(twin), 1e-12)
    assert len(rates) == 4


def test_clipped_gradients_are_preconditioned_with_the_statistics_of_the_unclipped_backward():
    model, twin, (x, y) = mlp(), mlp(), batch(6, 4)
    expected = oracle_factors(mlp(), x, y, LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = attach(model, optimizer, rescale="none")
    backward(model, x, y)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    assert norm > 1
    optimizer.step()
    by_hand = attach(twin, rescale="none")
    backward(twin, x, y)
    by_hand.step()
    assert_factors(kfac, expected)
    scale = 0.25 / (norm + 1e-6)
    assert_same(gradients(model), {name: g * scale for name, g in gradients(twin).items()}, 1e-10)


def test_layers_outside_the_optimizer_are_left_alone():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(mlp(), x, y, ["0", "2"])
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    kfac = attach(model, optimizer)
    backward(model, x, y)
    raw, before = gradients(model), parameters(model)
    optimizer.step()
    assert set(kfac.factors()) == {"0", "2"}
    assert_factors(kfac, expected)
    assert "not in the optimizer" in repr(kfac)
    for name in ("4.weight", "4.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad, raw[name], rtol=0, atol=0)
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name], rtol=0, atol=0)


@pytest.mark.parametrize("rescale", ["norm", "none", "kl-clip"])
def test_biases_outside_the_optimizer_are_left_alone(rescale):
    """Muon for the matrices and AdamW for the rest: the weights step as if the biases were frozen."""
    model, twin, (x, y) = mlp(), mlp(), batch(6, 4)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.5)
    attach(model, optimizer, rescale=rescale)
    backward(model, x, y)
    raw = gradients(model)
    optimizer.step()
    for p in twin.parameters():
        p.requires_grad_(p.ndim == 2)
    by_hand = attach(twin, rescale=rescale)
    backward(twin, x, y)
    by_hand.step(lr=0.5)
    for name, p in model.named_parameters():
        wanted = twin.get_parameter(name).grad if p.ndim == 2 else raw[name]
        torch.testing.assert_close(p.grad, wanted, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_kfac_that_nobody_keeps_goes_on_working():
    model, twin = mlp(), mlp()
    optimizer, twin_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    alive = weakref.ref(attach(model, optimizer))
    kept = attach(twin, twin_optimizer)
    gc.collect()
    for x, y in batches([6, 6, 6]):
        for net, opt in ((model, optimizer), (twin, twin_optimizer)):
            backward(net, x, y)
            opt.step()
        gc.collect()
    assert_same(parameters(model), parameters(twin), 0)
    assert alive() is not None
    assert alive().metrics()["step"] == kept.metrics()["step"] == 3


def test_kfac_goes_with_its_model_and_optimizer():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive = weakref.ref(attach(model, optimizer))
    del model, optimizer
    gc.collect()
    assert alive() is None


def test_the_kl_clip_by_hand_uses_the_learning_rate_it_is_given():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, rescale="kl-clip")
    backward(model, x, y)
    kfac.step(lr=0.5)
    rates = {name: 0.5 for name, _ in model.named_parameters()}
    assert_same(gradients(model), kl_clipped(x, y, rates), 1e-10)


def test_the_kl_clip_by_hand_without_a_learning_rate_is_an_error_and_the_step_can_be_repeated():
    model, twin, (x, y) = mlp(), mlp(), batch(6, 4)
    kfac, clean = attach(model, rescale="kl-clip"), attach(twin, rescale="kl-clip")
    backward(model, x, y)
    with pytest.raises(ValueError, match=r"kfac\.step\(lr=\.\.\.\)"):
        kfac.step()
    kfac.step(lr=0.5)
    backward(twin, x, y)
    clean.step(lr=0.5)
    assert_same(gradients(model), gradients(twin), 1e-12)
    assert_factors(kfac, clean.factors(), 1e-12)


def test_a_step_by_hand_is_refused_where_the_optimizer_takes_it():
    model = mlp()
    kfac = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="attached to an optimizer"):
        kfac.step()


def test_a_step_without_any_gradient_does_nothing():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = attach(model, optimizer)
    before = parameters(model)
    optimizer.step()
    assert_same(parameters(model), before, 0)
    assert kfac.factors() == {name: {} for name in LAYERS}
