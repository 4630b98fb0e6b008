"""Models that are not called themselves: the number of examples is that of the outermost call that has a hook."""

import contextlib

import pytest
import torch
from helpers_capture import assert_factors, attach, batch, batches, mean_loss, oracle_factors
from torch import nn


class Net(nn.Module):
    """An encoder of frames ``[N, 3, 4]``, which it folds into the batch, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = Encoder(), nn.Linear(5, 3)
        self.double()

    def forward(self, x):
        return self.head(self.encoder(x))

    def loss(self, x, y):
        return mean_loss(self.head(self.encoder(x)), y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh())

    def forward(self, x):
        return self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)


NAMES = ["encoder.body.0", "head"]


def frames(size, seed=1):
    x, y = batch(size, 3, 4, seed=seed)
    return x, y[:, 0]


def test_a_model_that_is_not_called_itself_is_measured_like_one_that_is():
    (x, y), model = frames(6), Net()
    kfac = attach(model)
    model.loss(x, y).backward()
    kfac.step()
    assert_factors(kfac, oracle_factors(Net(), x, y, NAMES))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_call_of_a_part_is_counted_outside_the_models_forward_and_not_inside(sharing):
    """Inside, the encoder of frames would count each of them, with other numbers for each part."""
    (x, y), (one, other) = frames(6), (Net(), Net())
    kfac, like = (attach(m, weight_sharing=sharing) for m in (one, other))
    (mean_loss(one(x[:4]), y[:4]) / 2).backward()
    (one.loss(x[4:], y[4:]) / 2).backward()
    for here in (slice(4), slice(4, 6)):
        (mean_loss(other(x[here]), y[here]) / 2).backward()
    with pytest.warns(UserWarning, match="2 backward passes"):
        kfac.step()
    with pytest.warns(UserWarning, match="2 backward passes"):
        like.step()
    assert_factors(kfac, like.factors(), tol=0)


def test_lists_of_modules_are_looked_through():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.ModuleDict({"a": Encoder()}), nn.Linear(5, 3)]).double()
    (x, y), kfac = frames(6), attach(model, weight_sharing="reduce")
    mean_loss(model[1](model[0]["a"](x)), y).backward()
    kfac.step()  # raises if examples are not told apart
    assert set(kfac.factors()) == {"0.a.body.0", "1"}


@pytest.mark.parametrize("sizes", [(6,), (4, 2)])
def test_a_layer_deep_inside_counts_for_itself_where_nothing_around_it_is_called(sizes):
    found = []
    for is_called in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))).double()
        kfac, deep = attach(model, accumulate="mean"), model[0][0]
        for x, y in batches(sizes):
            output = model(x) if is_called else deep[2](deep[1](deep[0](x)))
            (mean_loss(output, y) / len(sizes)).backward()
        kfac.step()
        found.append(kfac.factors())
    assert_factors(found[1], found[0], tol=0)


def test_loss_terms_by_number_needs_no_tensor_in_the_outermost_call():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3)
            self.double()

        def forward(self, box):
            return self.layer(box.x)

    x, y = batch(6, 4)
    box = type("Box", (), {"x": x})
    model = Wrapped()
    kfac = attach(model)
    with pytest.raises(RuntimeError, match="outermost call got no tensor with a dimension 0"):
        model(box)
    kfac.close()
    kfac = attach(model, loss_terms=6)
    mean_loss(model(box), y).backward()
    kfac.step()
    assert_factors(kfac, {"layer": oracle_factors(nn.Sequential(model.layer), x, y, ["0"])["0"]})


def test_a_call_of_the_model_that_raises_does_not_stay_the_outermost_in_the_next_step():
    (x, y), model = frames(6), Net()
    kfac = attach(model, factor_decay=0.0)
    model.loss(x, y).backward()
    with contextlib.suppress(RuntimeError):
        model(x[:, :, :2])
    kfac.step()
    model.zero_grad()
    model.loss(x[:4], y[:4]).backward()
    kfac.step()
    assert_factors(kfac, oracle_factors(Net(), x[:4], y[:4], NAMES))
