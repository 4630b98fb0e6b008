"""Layers that K-FAC does not precondition keep their gradient, whatever the others are scaled by."""

import pytest
import torch
from helpers_capture import attach, batch, mean_loss, mlp

import dkfac
from dkfac.precondition import trust_region
from dkfac.tools.recipes import digits


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rescale", ["norm", "norm-global", "norm-kl", "kl-clip", "none"])
def test_a_layer_that_was_never_measured_keeps_its_raw_gradient(rescale):
    """Its weight is used without calling the module, as in window attention."""
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, rescale=rescale, damping=1e-6)

    def forward(inputs):
        hidden = model[1](model[0](inputs))
        hidden = torch.nn.functional.linear(hidden, model[2].weight, model[2].bias)
        return model[4](model[3](hidden))

    model.forward = forward
    mean_loss(model(x), y).backward()
    raw = gradients(model)
    with pytest.warns(UserWarning, match="saw neither a call of their module.*: 2"):
        kfac.step(lr=0.1)
    after = gradients(model)
    for name in raw:
        unchanged = torch.equal(raw[name], after[name])
        assert unchanged == name.startswith("2."), name


def test_the_global_length_is_that_of_the_preconditioned_layers():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, rescale="norm-global", skip=["2"])
    mean_loss(model(x), y).backward()
    raw = gradients(model)
    kfac.step()
    after = gradients(model)

    def length(found, skipped):
        return torch.cat([g.reshape(-1) for n, g in found.items() if n.startswith("2.") == skipped]).norm()

    torch.testing.assert_close(length(after, False), length(raw, False))
    assert torch.equal(length(after, True), length(raw, True))
    directions = [torch.cat([g.reshape(-1) for g in found.values()]) for found in (raw, after)]
    assert torch.nn.functional.cosine_similarity(*directions, dim=0) < 0.999


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (None, {}, "norm-global"),
        (torch.optim.SGD, {}, "none"),
        (torch.optim.SGD, {"curvature": "kfac"}, "norm-kl"),
        (torch.optim.SGD, {"settings": dkfac.Settings(curvature="kfac")}, "norm-kl"),
        (torch.optim.SGD, {"settings": dkfac.Settings(curvature="ekfac")}, "norm-kl"),
        (torch.optim.SGD, {"damping_mode": "relative"}, "norm-global"),
        (torch.optim.SGD, {"rescale": "norm-global"}, "norm-global"),
        (torch.optim.RMSprop, {}, "none"),
        (torch.optim.RMSprop, {"curvature": "kfac"}, "norm-global"),
        (torch.optim.RMSprop, {"rescale": "norm-kl"}, "norm-kl"),
        (torch.optim.AdamW, {"curvature": "kfac"}, "norm-global"),
        (torch.optim.AdamW, {}, "none"),
    ],
)
def test_the_default_length_is_the_gradients_held_back_where_the_step_is_lr_times_it(kind, options, expected):
    model = torch.nn.Linear(2, 2)
    optimizer = None if kind is None else kind(model.parameters(), lr=0.1)
    options = options if "settings" in options else {"announce": False, **options}
    assert dkfac.KFAC(model, optimizer, **options).settings.rescale == expected


def test_what_an_update_predicts_does_not_depend_on_who_sent_it():
    """To the last bit: the owner of a layer may hold it transposed, the others as it arrived."""
    model = torch.nn.Linear(199, 300)
    layer = dkfac.KFAC(model, announce=False).layers[0]
    model(torch.randn(8, 199)).square().mean().backward()
    rates, settings = {id(p): 0.1 for p in model.parameters()}, dkfac.Settings(rescale="norm-kl")
    for seed in range(10):
        update = torch.randn(1, 300, 200, generator=torch.Generator().manual_seed(seed))
        other = update.mT.contiguous().mT
        found = [trust_region.by_parameter([layer], [u], rates, torch.zeros(1), settings, 0) for u in (update, other)]
        assert torch.equal(*found)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_a_damping_that_rises_between_refreshes_does_not_undo_the_hold(solver):
    """Inverses keep the one they were made with."""

    def factor(later):
        torch.manual_seed(0)
        model, (x, y) = mlp(), batch(6, 4)
        options = {"factor_interval": 1, "inverse_interval": 100, "solver": solver, "kl_clip": 1e-7}
        kfac = attach(model, rescale="norm-kl", damping=lambda step: 1e-2 if step < 2 else later, **options)
        for _ in range(3):
            model.zero_grad()
            mean_loss(model(x), y).backward()
            kfac.step(lr=0.5)
        return kfac.metrics()["clip_factor"]

    found = [factor(later) for later in (1e-2, 0.1, 1.0)]
    assert found[0] < 0.5
    assert all(other < 0.8 for other in found)
    if solver == "cholesky":
        assert found[1:] == pytest.approx(found[:1] * 2)


@pytest.mark.parametrize(
    ("products", "expected"), [([0.0], torch.inf), ([4.0], 0.5), ([torch.inf], 0), ([torch.nan], 0)]
)
def test_an_update_that_predicts_more_than_a_number_can_say_takes_no_step(products, expected):
    assert float(trust_region.largest_scale(torch.tensor(products), 1.0)) == expected


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_relative_damping_leaves_a_layer_alone_whose_gradient_is_rounding(solver):
    """What is added to all logits has no gradient but for rounding, and a curvature of its square."""

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.shift = torch.nn.Linear(6, 4), torch.nn.Linear(6, 1)

        def forward(self, x):
            return self.body(x) + self.shift(x)

    torch.manual_seed(0)
    model = Shifted()
    kfac = dkfac.KFAC(model, announce=False, solver=solver, damping=1e-3, damping_mode="relative", rescale="none")
    torch.nn.functional.cross_entropy(model(torch.randn(64, 6)), torch.randint(0, 4, (64,))).backward()
    raw = model.shift.weight.grad.norm()
    assert 0 < raw < 1e-6
    kfac.step()
    body, shift = (layer.weight.grad.norm() for layer in (model.body, model.shift))
    assert shift < 0.01 * body


@pytest.mark.parametrize("batch_norm", [True, False])
def test_learning_rates_that_broke_the_first_steps_train(batch_norm):
    """Refreshes every ten steps were too old for the first ones, and nothing held them back."""
    data = digits.load_digit_images("validation")

    def accuracy(**options):
        recipe = digits.DigitsConfig(epochs=5, lr=0.3, seed=1001, batch_norm=batch_norm)
        return digits.train_digits(data, recipe, {"announce": False, **options})[-1].accuracy

    assert accuracy() > 0.9
    assert accuracy(curvature="kfac") > 0.9
    assert accuracy(rescale="norm-global", warmup_refresh=(10, 100)) < 0.7
