"""R23: a state that does not fit is refused with words that say why, and changes nothing."""

import pytest
import torch
from torch import nn

from dkfac import KFAC


def small_net(width=4, names=("first", "second")):
    model = nn.Sequential()
    model.add_module(names[0], nn.Linear(3, width))
    model.add_module(names[1], nn.Linear(width, 2))
    return model


def saved_state():
    model = small_net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with KFAC(model, opt, announce=False) as kfac:
        model(torch.randn(5, 3)).square().mean().backward()
        opt.step()
        return kfac.state_dict()


def without(state, key):
    return {k: v for k, v in state.items() if k != key}


def edited(path, value):
    """The saved state with one entry replaced."""
    state = saved_state()
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


WRONG = {
    "another model": (saved_state, lambda: small_net(names=("first", "other")), ["second", "other"]),
    "missing layer": (lambda: edited(["layers"], without(saved_state()["layers"], "first")), small_net, ["first"]),
    "other shape": (saved_state, lambda: small_net(width=6), ["first", "G", "[1, 4, 4]", "[1, 6, 6]"]),
    "other version": (lambda: edited(["version"], 99), small_net, ["version", "99"]),
    "no version": (lambda: without(saved_state(), "version"), small_net, ["version"]),
    "no layers": (lambda: without(saved_state(), "layers"), small_net, ["layers"]),
    "no step": (lambda: without(saved_state(), "step"), small_net, ["step"]),
    "not a dict": (lambda: [1, 2], small_net, ["list", "state"]),
    "none": (lambda: None, small_net, ["None", "state"]),
    "layers not a dict": (lambda: edited(["layers"], [1]), small_net, ["layers"]),
    "a layer not a dict": (lambda: edited(["layers", "first"], 3), small_net, ["first", "int"]),
    "a number for a tensor": (
        lambda: edited(["layers", "first", "running", "A", "weight"], 1.0),
        small_net,
        ["first", "float"],
    ),
    "a string for a factor": (
        lambda: edited(["layers", "first", "running", "A", "value"], "x"),
        small_net,
        ["first", "str"],
    ),
    "an unknown factor": (
        lambda: edited(["layers", "first", "running", "Q"], {"value": torch.ones(1), "weight": torch.ones(())}),
        small_net,
        ["first", "Q"],
    ),
    "a decomposition of another size": (
        lambda: edited(["layers", "first", "decompositions", "A"], {"values": torch.ones(1, 2)}),
        small_net,
        ["first", "A"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_does_not_fit_is_refused_naming_the_difference_and_changes_nothing(case):
    state, net, words = WRONG[case]
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, opt, announce=False)
    model(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    before = kfac.state_dict()
    with pytest.raises((ValueError, TypeError)) as refused:
        kfac.load_state_dict(state())
    for word in words:
        assert word in str(refused.value), word
    assert repr(kfac.state_dict()) == repr(before)
