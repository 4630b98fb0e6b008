"""Which backward passes count, and with what weight (R09, R10, PEERS 7 and 8)."""

import contextlib
import copy
import gc
import weakref

import pytest
import reference as ref
import torch
from helpers_capture import (
    assert_factors,
    assert_same,
    attach,
    batch,
    batches,
    mean_loss,
    mlp,
    oracle_factors,
    parameters,
    summed,
    train,
)
from torch import nn

LAYERS = ["0", "2", "4"]


def eval_forward(model, x, y):
    model.eval()
    with torch.no_grad():
        model(2 * x[:4])
    model.train()


def inference_forward(model, x, y):
    with torch.inference_mode():
        model(2 * x[:4])


def forward_without_backward(model, x, y):
    mean_loss(model(2 * x[:4]), y[:4])


def adversarial_gradient(model, x, y):
    x = (2 * x[:4]).requires_grad_()
    torch.autograd.grad(mean_loss(model(x), y[:4]), x)


def saliency_by_backward(model, x, y):
    x = (2 * x[:4]).requires_grad_()
    model(x).sum().backward(inputs=[x])


@pytest.mark.parametrize(
    "other",
    [eval_forward, inference_forward, forward_without_backward, adversarial_gradient, saliency_by_backward],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_passes_that_make_no_weight_gradient_do_not_count(other, order):
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    if order == "before":
        other(model, x, y)
    loss = mean_loss(model(x), y)
    if order == "between":
        other(model, x, y)
    loss.backward()
    if order == "after":
        other(model, x, y)
    kfac.step()
    assert_factors(kfac, expected)


def test_an_adversarial_gradient_on_the_same_graph_does_not_count():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    x.requires_grad_()
    loss = mean_loss(model(x), y)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_two_backward_passes_on_a_retained_graph_are_two_passes():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model, accumulate="sum")
    loss = mean_loss(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_gradients_made_with_autograd_grad_count():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(mean_loss(model(x), y), parameters), strict=True):
        p.grad = g
    kfac.step()
    assert_factors(kfac, expected)


def test_two_forwards_under_one_backward_are_one_pass():
    model, (x, y) = mlp(), batch(6, 4)
    x2, y2 = batch(6, 4, seed=7)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = copy.deepcopy(model)

        def forward(self, both):
            return torch.cat([self.net(both[:, :4]), self.net(both[:, 4:])], dim=1)

    pair = Pair()
    expected = oracle_factors(pair, torch.cat([x, x2], 1), torch.cat([y, y2], 1), ["net.0", "net.2"])
    kfac = attach(model)
    (mean_loss(model(x), y) + mean_loss(model(x2), y2)).backward()
    kfac.step()
    assert_factors(kfac, {name.removeprefix("net."): f for name, f in expected.items()})


def test_a_backbone_with_frozen_batch_norm_is_measured_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    nn.init.normal_(model[1].running_mean)
    for p in model[1].parameters():
        p.requires_grad_(False)
    model.eval()
    x, y = torch.randn(6, 2, 4, 4).double(), torch.randn(6, 3).double()
    expected = oracle_factors(model, x, y, ["0", "5"])
    kfac = attach(model)
    mean_loss(model(x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)


SIZES = [6, 6, 4, 1, 6]


@pytest.mark.parametrize("sizes", [SIZES, [1, 1, 1]], ids=["last partial batch", "batch 1"])
def test_batches_of_any_size_train_like_the_reference(sizes):
    settings = ref.ReferenceSettings(damping=1e-2, lr=0.05, momentum=0.9, rescale="norm", factor_decay=0.8)
    oracle = ref.ReferenceKFAC(mlp, LAYERS, summed, settings)
    oracle.run(batches(sizes))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attach(model, optimizer, factor_decay=0.8)
    train(model, optimizer, batches(sizes))
    assert_same(parameters(model), parameters(oracle.model), 1e-8)


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("mean", [True, False], ids=["loss is nan", "loss is 0"])
def test_an_empty_batch_neither_crashes_nor_poisons(position, mean):
    def loss(output, target):
        total = ((output - target) ** 2).sum()
        return total / len(output) if mean or len(output) else total

    def run(data):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kfac = attach(model, optimizer)
        train(model, optimizer, data, loss)
        return parameters(model), kfac.factors()

    data = batches([6, 6, 5])
    weights, factors = run(data)
    with_empty, factors_with_empty = run([*data[:position], batch(0, 4), *data[position:]])
    assert_same(with_empty, weights, 1e-12)
    assert_factors(factors_with_empty, factors, 1e-12)


def test_an_exception_in_a_backward_pass_does_not_spoil_the_next_step():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)

    def out_of_memory(_):
        raise MemoryError("in the middle of a backward pass")

    handle = model[1].register_forward_hook(lambda m, a, out: out.register_hook(out_of_memory) and None)
    with pytest.raises(MemoryError):
        mean_loss(model(3 * x[:4]), y[:4]).backward()
    handle.remove()
    model.zero_grad()
    mean_loss(model(x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_discard_forgets_a_backward_pass_that_the_loop_dropped():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    mean_loss(model(3 * x[:4]), y[:4]).backward()
    model.zero_grad()
    kfac.discard()
    mean_loss(model(x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_a_step_that_differentiates_twice_is_measured_in_the_next_step_and_said_once():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, factor_interval=5, inverse_interval=5)
    for step in range(3):
        model.zero_grad()
        x.requires_grad_(step < 2)
        loss = mean_loss(model(x), y)
        if step < 2:
            what = "layer '4' is differentiated twice"
            with pytest.warns(UserWarning, match=what) if step == 0 else contextlib.nullcontext():
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        expected = oracle_factors(copy.deepcopy(model), x.detach(), y, LAYERS) if step == 2 else None
        loss.backward()
        kfac.step()
        assert all(bool(factors) == (step == 2) for factors in kfac.factors().values())
    assert_factors(kfac, expected)
    assert model[0].weight.grad.norm() > 0
    x.requires_grad_()
    (slope,) = torch.autograd.grad(mean_loss(model(x), y), x, create_graph=True)  # step 3 measures nothing
    slope.square().sum().backward()
    kfac.step()
    assert_factors(kfac, expected)


class Tokens(nn.Module):
    """Two Linear layers on ``[N, S, 4]``, positions independent."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("as_tensor", [True, False], ids=["n is a tensor", "n is a number"])
@pytest.mark.parametrize("flat", [False, True], ids=["[N, S, d]", "[N*S, d]"])
def test_padding_counts_neither_in_the_terms_nor_in_the_inputs(as_tensor, flat):
    model = Tokens().double()
    lengths = [4, 1, 3]
    x, y = batch(3, 4, 4)
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    rows = {"first": [], "last": []}
    for n, length in enumerate(lengths):
        alone = ref.per_example(model, summed, x[n : n + 1, :length], y[n : n + 1, :length], [*rows])
        for name in rows:
            rows[name] += ref.all_rows(model.get_submodule(name), alone[name])
    expected = {name: ref.factors(r, sum(lengths), "expand") for name, r in rows.items()}
    expected = {name: {key: f.squeeze(0) for key, f in pair.items()} for name, pair in expected.items()}
    model.zero_grad()
    kfac = attach(model, loss_terms="token")
    kfac.set_terms(mask.sum() if as_tensor else sum(lengths), mask)
    output = model(x.flatten(0, 1)).unflatten(0, (3, 4)) if flat else model(x)
    (((output - y) ** 2).sum(-1) * mask).sum().div(sum(lengths)).backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_set_terms_holds_for_one_backward_pass_only():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, factor_decay=0.0)
    kfac.set_terms(3)
    (((model(x)[:3] - y[:3]) ** 2).sum() / 3).backward()
    kfac.step()
    expected = oracle_factors(mlp(), x, y, LAYERS)
    model.zero_grad()
    mean_loss(model(x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)


@pytest.mark.parametrize("n", [0, -1])
def test_set_terms_refuses_numbers_that_are_not_positive(n):
    with pytest.raises(ValueError, match="must be > 0"):
        attach(mlp()).set_terms(n)


class Mixed(nn.Module):
    """Layers whose input autograd keeps itself, on rows and on tokens, with activations in place behind them."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv1d(4, 5, 3, padding=1), nn.Linear(5, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        x = torch.relu_(self.conv(x)).mT.contiguous()
        x = torch.relu_(self.mix(x))
        return self.head(x.mean(1))


def test_measuring_adds_no_node_to_the_graph_of_plain_layers():
    torch.manual_seed(0)
    model = Mixed()
    seen = []
    for module in (model.conv, model.mix, model.head):
        module.register_forward_hook(lambda module, args, output: seen.append(type(output.grad_fn).__name__))
    model(torch.randn(2, 4, 7))
    plain, seen[:] = list(seen), []
    with attach(model):
        model(torch.randn(2, 4, 7))
    assert seen == plain
    assert len(plain) == 3


@pytest.mark.parametrize("keep", ["loss", "nothing"])
def test_a_backward_pass_leaves_no_input_alive(keep):
    """The hand-over hangs on the node that it asks: nothing of it may keep the node or the input."""
    torch.manual_seed(0)
    model = Mixed()
    with attach(model) as kfac:
        x = torch.randn(2, 4, 7)
        alive, middle = weakref.ref(x), []
        model.mix.register_forward_hook(lambda module, args, output: middle.append(weakref.ref(args[0])))
        gc.disable()
        try:
            loss = model(x).square().mean()
            loss.backward()
            kfac.step()
            del x
            if keep == "nothing":
                del loss
            assert alive() is None
            assert middle[0]() is None
        finally:
            gc.enable()


def test_a_forward_without_a_backward_leaves_no_input_alive():
    model = Mixed()
    with attach(model):
        x = torch.randn(2, 4, 7)
        alive = weakref.ref(x)
        gc.disable()
        try:
            output = model(x)
            del x, output
            assert alive() is None
        finally:
            gc.enable()


def test_inputs_have_one_number_while_they_are_the_same_tensor_and_unchanged():
    with attach(Mixed()) as kfac:
        number_of = kfac._capture.number_of
        x, other = torch.randn(3), torch.randn(3)
        first = number_of(x)
        assert number_of(x) == first
        x.mul_(2)
        second = number_of(x)
        assert second != first
        assert number_of(other) not in (first, second)
        assert number_of(x) not in (first, second)
        with torch.inference_mode():
            hidden = torch.randn(3)
        assert number_of(hidden) != number_of(hidden), "its changes are not counted"


class Stops(torch.autograd.Function):
    """A function without a gradient for its input, as plain torch allows."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return None


def test_a_layer_whose_gradient_is_undefined_is_passed_over():
    model = mlp()
    with attach(model) as kfac:
        x, y = batch(6, 4)
        Stops.apply(model(x)).backward()
        kfac.step()
        model.zero_grad()
        mean_loss(model(x), y).backward()
        kfac.step()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
