"""Layers in every state a model can bring them in: reused, unused, frozen, tied, in place (R09, PEERS 7 and 8)."""

import pytest
import reference as ref
import torch
import torch.nn.functional as F
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
    train,
)
from torch import nn


class Repeated(nn.Module):
    """``middle`` is called ``times`` times, each time with an in-place activation on its output."""

    def __init__(self, times=1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.times = times
        self.double()

    def forward(self, x):
        x = F.relu_(self.first(x))
        for _ in range(self.times):
            x = F.relu_(self.middle(x))
        return self.last(x)


def backward(model, x, y):
    model.zero_grad()
    mean_loss(model(x), y).backward()


def solved(module, factors, damping=1e-2):
    """The dense solve for the module's present ``.grad``, at the length of the raw gradient."""
    grad = ref.gradient_blocks(module)[0]
    v = ref.dense_precondition(factors["A"], factors["G"], grad, damping)
    return v * (grad.norm() / v.norm())


def assert_solved(module, expected):
    torch.testing.assert_close(ref.gradient_blocks(module)[0], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("times", [1, 2, 7])
def test_a_module_called_several_times_before_in_place_activations_equals_the_oracle(times):
    model, (x, y) = Repeated(times), batch(6, 4)
    expected = oracle_factors(model, x, y, ["first", "middle", "last"])
    backward(model, x, y)
    updates = {name: solved(model.get_submodule(name), f) for name, f in expected.items()}
    kfac = attach(model)
    backward(model, x, y)
    kfac.step()
    assert_factors(kfac, expected)
    for name, update in updates.items():
        assert_solved(model.get_submodule(name), update)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.Hardswish])
def test_an_in_place_activation_after_a_convolution_changes_nothing(activation):
    def run(inplace):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), activation(inplace=inplace), nn.Conv2d(3, 2, 2)).double()
        x, y = torch.randn(4, 2, 5, 5).double(), torch.randn(4, 2, 2, 2).double()
        kfac = attach(model)
        backward(model, x, y)
        kfac.step()
        return kfac.factors()

    assert_factors(run(inplace=True), run(inplace=False), 0)


def test_a_layer_is_preconditioned_from_the_step_that_first_uses_it():
    model, (x, y) = Repeated(0), batch(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = attach(model, optimizer, inverse_interval=100)
    train(model, optimizer, [(x, y)] * 3)
    assert kfac.factors()["middle"] == {}
    assert model.middle.weight.grad is None
    model.times = 2
    expected = oracle_factors(Repeated(2), x, y, ["middle"])
    backward(model, x, y)
    update = solved(model.middle, expected["middle"])
    optimizer.step()
    assert_factors({"middle": kfac.factors()["middle"]}, expected)
    assert_solved(model.middle, update)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_left_out_of_a_step_keeps_its_factors(set_to_none):
    model, (x, y) = Repeated(1), batch(6, 4)
    kfac = attach(model, factor_decay=0.5)
    backward(model, x, y)
    kfac.step()
    before = kfac.factors()["middle"]
    model.times = 0
    model.zero_grad(set_to_none=set_to_none)
    mean_loss(model(2 * x), y).backward()
    kfac.step()
    grad = model.middle.weight.grad
    assert grad is None if set_to_none else not grad.any()
    assert_factors({"middle": kfac.factors()["middle"]}, {"middle": before}, 0)


def test_a_layer_that_is_neither_called_nor_applied_by_a_function_is_named_once_and_left_alone():
    class Functional(Repeated):
        def forward(self, x):
            x = F.relu_(self.first(x))
            return self.last(x @ self.middle.weight.T + self.middle.bias)

    model, (x, y) = Functional(), batch(6, 4)
    expected = oracle_factors(model, x, y, ["first", "last"])
    kfac = attach(model)
    backward(model, x, y)
    raw = model.middle.weight.grad.clone()
    with pytest.warns(UserWarning, match="neither a call of their module nor.*: middle") as seen:
        kfac.step()
    assert len(seen) == 1
    assert_factors(kfac, expected)
    torch.testing.assert_close(model.middle.weight.grad, raw, rtol=0, atol=0)
    backward(model, x, y)
    kfac.step()  # a second warning would be an error


def test_a_layer_frozen_before_attach_is_left_to_the_optimizer_and_listed():
    model, (x, y) = mlp(), batch(6, 4)
    model[2].weight.requires_grad_(False)
    expected = oracle_factors(model, x, y, ["0", "4"])
    kfac = attach(model)
    backward(model, x, y)
    kfac.step()
    assert_factors(kfac, expected)
    assert set(kfac.factors()) == {"0", "4"}
    assert "frozen" in repr(kfac)


def test_a_weight_frozen_after_attach_is_not_measured_until_it_thaws():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, factor_decay=0.0)
    backward(model, 2 * x, y)
    kfac.step()
    before = kfac.factors()["2"]
    model[2].weight.requires_grad_(False)
    expected = oracle_factors(model, x, y, ["0", "4"])
    backward(model, x, y)
    kfac.step()
    assert model[2].weight.grad is None
    assert_factors(kfac, {**expected, "2": before})
    model[2].weight.requires_grad_(True)
    backward(model, x, y)
    kfac.step()
    assert_factors(kfac, oracle_factors(mlp(), x, y, ["2"]))


def test_freezing_a_weight_keeps_in_place_changes_of_the_layers_input_legal():
    model, (x, y) = mlp(), batch(6, 4)
    attach(model)
    model[0].weight.requires_grad_(False)
    x = x.clone()
    output = model(x)
    x.zero_()  # the data loader's buffer is reused: nothing needs it any more
    mean_loss(output, y).backward()


def test_a_bias_frozen_before_attach_is_not_folded_in():
    model, (x, y) = mlp(), batch(6, 4)
    model[2].bias.requires_grad_(False)
    expected = oracle_factors(model, x, y, ["0", "2", "4"])
    assert expected["2"]["A"].shape == (5, 5)
    kfac = attach(model)
    backward(model, x, y)
    kfac.step()
    assert_factors(kfac, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"damping_mode": "relative"}, {"solver": "cholesky"}],
    ids=["eigen", "relative damping", "cholesky"],
)
def test_a_weight_whose_bias_freezes_after_attach_goes_on_as_if_it_never_had_one(options):
    data = batches([6, 6, 6])

    def run(freeze_at):
        model = mlp()
        kfac = None
        for step, (x, y) in enumerate(data):
            if step == freeze_at:
                model[2].bias.requires_grad_(False)
                model[2].bias.grad = None
            kfac = kfac or attach(model, rescale="none", **options)
            backward(model, x, y)
            kfac.step()
        return gradients(model)

    assert_same(run(freeze_at=2), run(freeze_at=0), 1e-9)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_a_missing_gradient_is_passed_over(missing):
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, ["0", "2", "4"])
    backward(model, x, y)
    update = solved(model[4], expected["4"])
    kfac = attach(model)
    backward(model, x, y)
    model[2].get_parameter(missing).grad = None
    kfac.step()
    assert_factors(kfac, expected)
    assert_solved(model[4], update)
    assert model[2].get_parameter(missing).grad is None


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def tied_backward(model):
    generator = torch.Generator().manual_seed(3)
    tokens, target = torch.randint(7, (6, 3), generator=generator), torch.randn(6, 3, 7, generator=generator).double()
    model.zero_grad()
    mean_loss(model(tokens), target).backward()
    return tokens, target


def test_tied_weights_are_named_and_left_to_the_optimizer():
    model = Tied()
    with pytest.warns(UserWarning, match="'embed' shares its weight with 'head'") as seen:
        kfac = attach(model)
    assert len(seen) == 1
    tied_backward(model)
    raw = model.head.weight.grad.clone()
    kfac.step()
    assert set(kfac.factors()) == {"body"}
    torch.testing.assert_close(model.head.weight.grad, raw, rtol=0, atol=0)


@pytest.mark.parametrize(("skip", "kept"), [("embed", "head"), ("head", "embed")])
def test_skipping_one_of_two_tied_layers_preconditions_the_other(skip, kept):
    model = Tied()
    tokens, target = tied_backward(model)
    recorded = ref.per_example(model, lambda o, t: ((o - t) ** 2).sum(), tokens, target, [kept])[kept]
    module = model.get_submodule(kept)
    expected = {key: f.squeeze(0) for key, f in ref.factors(ref.all_rows(module, recorded), 6, "expand").items()}
    tied_backward(model)
    update = solved(module, expected)
    kfac = attach(model, skip=[skip])
    tied_backward(model)
    kfac.step()
    assert set(kfac.factors()) == {"body", kept}
    torch.testing.assert_close(kfac.factors()[kept]["G"], expected["G"], rtol=1e-10, atol=1e-10)
    assert_solved(module, update)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("make", [Attends, lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)])
def test_attention_modules_train_and_the_layers_beside_attention_are_as_ever(make):
    torch.manual_seed(0)
    model = make().double()
    x, _ = batch(6, 5, 4)
    y = torch.randn_like(model(x))
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    expected = oracle_factors(model, x, y, names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kfac = attach(model, optimizer)
    losses = train(model, optimizer, [(x, y)])
    assert_factors(kfac, expected)
    losses += train(model, optimizer, [(x, y)] * 20)
    assert losses[-1] < 0.8 * losses[0]
    assert set(names) < set(kfac.factors())
    assert "in_proj" in repr(kfac)
