"""R26: attaching, closing, copying, two at a time. test_memory.py has the long runs."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dkfac import KFAC

EXACT = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4}
FISHERS = [{"fisher": "empirical"}, {"fisher": "exact", "fisher_loss": "cross-entropy"}]


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(27, 4))


def make(**options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, KFAC(model, optimizer, norm_form="unit", **(EXACT | options))


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 1, 5, 5, generator=generator), torch.randint(0, 4, (6,), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        backward(model, step)
        optimizer.step()


def hooks(model, optimizer):
    """Everything a hook can be registered in, by place."""
    found = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if "hook" in attribute and isinstance(value, dict):
                found[name, attribute] = dict(value)
    for attribute, value in vars(optimizer).items():
        if "hook" in attribute and isinstance(value, dict):
            found["optimizer", attribute] = dict(value)
    for name, parameter in model.named_parameters():
        found[name, "parameter"] = dict(parameter._backward_hooks or {})
        found[name, "accumulate"] = dict(parameter._post_accumulate_grad_hooks or {})
    return found


def assert_same_factors(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        for key in wanted[name]:
            assert torch.equal(found[name][key], wanted[name][key]), (name, key)


# --- closing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", FISHERS, ids=["empirical", "exact"])
def test_close_removes_every_hook_and_leaves_the_users_own(fisher):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].register_forward_hook(lambda *_: None)
    optimizer.register_step_pre_hook(lambda *_: None)
    before = hooks(model, optimizer)
    kfac = KFAC(model, optimizer, norm_form="unit", **EXACT, **fisher)
    assert hooks(model, optimizer) != before
    train(model, optimizer, 3)
    kfac.close()
    assert hooks(model, optimizer) == before
    kfac.close()
    assert hooks(model, optimizer) == before


def test_after_close_the_optimizer_steps_on_raw_gradients():
    model, optimizer, kfac = make()
    train(model, optimizer, 3)
    kfac.close()
    twin = copy.deepcopy(model)
    raw = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    raw.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    factors = kfac.factors()
    train(model, optimizer, 5, start=3)
    train(twin, raw, 5, start=3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert_same_factors(kfac.factors(), factors)
    assert kfac.metrics()["step"] == 3


def test_the_context_manager_closes_also_after_an_exception():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks(model, optimizer)
    with KFAC(model, optimizer, **EXACT) as kfac:
        assert isinstance(kfac, KFAC)
        train(model, optimizer, 1)
    assert hooks(model, optimizer) == before
    with pytest.raises(ZeroDivisionError), KFAC(model, optimizer, **EXACT):
        raise ZeroDivisionError
    assert hooks(model, optimizer) == before


def test_closing_between_forward_and_backward_does_no_harm():
    model, optimizer, kfac = make()
    x, y = torch.randn(6, 1, 5, 5), torch.randint(0, 4, (6,))
    loss = F.cross_entropy(model(x), y)
    kfac.close()
    del kfac
    gc.collect()
    loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_closed_kfac_does_not_precondition_by_hand():
    model = make_model()
    kfac = KFAC(model, **EXACT)
    backward(model, 0)
    kfac.step(lr=0.1)
    kfac.close()
    backward(model, 1)
    raw = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="close"):
        kfac.step(lr=0.1)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))


def test_kfac_can_be_attached_again_after_close():
    model, optimizer, kfac = make()
    train(model, optimizer, 2)
    kfac.close()
    again = KFAC(model, optimizer, **EXACT)
    train(model, optimizer, 2)
    assert again.metrics()["step"] == 2


@pytest.mark.parametrize("fisher", FISHERS, ids=["empirical", "exact"])
def test_dropping_model_and_optimizer_frees_all_without_close(fisher):
    model, optimizer, kfac = make(**fisher)
    train(model, optimizer, 3)
    alive = [weakref.ref(thing) for thing in (model, model[0], optimizer, kfac)]
    del model, optimizer, kfac
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


# --- two at a time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m[3:], lambda m: nn.Sequential(nn.Linear(2, 2), m)])
def test_a_second_kfac_on_the_same_layers_is_refused_naming_one(part):
    model, optimizer, kfac = make()
    before = hooks(model, optimizer)
    with pytest.raises(RuntimeError, match=r"layer '.+' is already attached to another KFAC"):
        KFAC(part(model), announce=False)
    assert hooks(model, optimizer) == before
    train(model, optimizer, 2)
    assert kfac.metrics()["step"] == 2


def test_two_kfacs_on_two_models_do_not_disturb_each_other():
    alone = make()
    train(*alone[:2], 6)
    one, two = make(), make()
    for step in range(6):
        train(*one[:2], 1, start=step)
        train(*two[:2], 1, start=step + 50)
    assert_same_factors(one[2].factors(), alone[2].factors())
    assert all(torch.equal(p, q) for p, q in zip(one[0].parameters(), alone[0].parameters(), strict=True))


# --- copies --------------------------------------------------------------------------------------------------


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("fisher", FISHERS, ids=["empirical", "exact"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copied_model_trains_without_kfac_and_the_original_goes_on(duplicate, steps, fisher):
    undisturbed, its_optimizer, its_kfac = make(**fisher)
    train(undisturbed, its_optimizer, steps + 4)

    model, optimizer, kfac = make(**fisher)
    train(model, optimizer, steps)
    clone = duplicate(model)
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    step = kfac.metrics()["step"]
    for net in (clone, plain):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 4)
    assert all(torch.equal(p, q) for p, q in zip(clone.parameters(), plain.parameters(), strict=True))
    assert kfac.metrics()["step"] == step

    train(model, optimizer, 4, start=steps)
    assert_same_factors(kfac.factors(), its_kfac.factors())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), undisturbed.parameters(), strict=True))
    on_clone = KFAC(clone, **EXACT)
    assert len(on_clone.layers) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copied_model_does_not_keep_the_original_alive(duplicate):
    model, optimizer, kfac = make()
    train(model, optimizer, 1)
    clone = duplicate(model)
    alive = [weakref.ref(thing) for thing in (model[0], optimizer, kfac)]
    del model, optimizer, kfac
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    backward(clone, 1)
