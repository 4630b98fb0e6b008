"""Precision, hooks, checkpoints and sizes that meet K-FAC in unusual places."""

import pytest
import torch
from helpers_capture import EVERY_STEP, assert_factors, assert_same, attach, batch, mean_loss, mlp, oracle_factors
from torch import nn

import dkfac

LAYERS = ["0", "2", "4"]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("inside", ["backward", "step", "both"])
def test_autocast_around_backward_or_step_changes_nothing(inside):
    def run(where):
        model, (x, y) = mlp(dtype=torch.float32), batch(6, 4)
        kfac = attach(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(model(x.float()), y.float())
        with torch.autocast("cpu", torch.bfloat16, enabled=where in ("backward", "both")):
            loss.backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=where in ("step", "both")):
            kfac.step()
        assert kfac.metrics()["fallbacks_float64"] == 0
        return kfac.factors(), gradients(model)

    (factors, grads), (expected, expected_grads) = run(inside), run("nowhere")
    assert_factors(factors, expected, 1e-6)
    assert_same(grads, expected_grads, 1e-6)


def test_terms_said_on_a_step_that_is_not_measured_do_not_reach_the_next():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, factor_interval=2, inverse_interval=2, factor_decay=0.0)
    for step in range(3):
        if step == 1:
            kfac.set_terms(100)
        model.zero_grad()
        mean_loss(model(x), y).backward()
        kfac.step()
    assert_factors(kfac, oracle_factors(mlp(), x, y, LAYERS))


def test_terms_are_not_used_up_by_a_pass_that_does_not_count():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model)
    kfac.set_terms(3)
    inputs = x.clone().requires_grad_()
    torch.autograd.grad(mean_loss(model(inputs), y), inputs)
    mean_loss(model(x), y).backward()
    assert kfac._collector.window.terms == 3


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1), nn.ReLU()], ids=str)
def test_the_exact_fisher_goes_with_a_model_that_ends_in_an_activation(activation):
    model, (x, y) = nn.Sequential(*mlp(), activation), batch(6, 4)
    kfac = attach(model, fisher="exact", fisher_loss="mse")
    mean_loss(model(x), y).backward()
    kfac.step()
    assert set(kfac.factors()["4"]) == {"A", "G"}


def test_other_hooks_may_use_and_change_a_layers_output():
    model, (x, y) = mlp(), batch(6, 4)
    kept = []
    model[2].register_forward_hook(lambda module, args, output: kept.append(output.square().sum()))
    model[2].register_forward_hook(lambda module, args, output: output * 10)
    kfac = attach(model)
    (mean_loss(model(x), y) + 0 * kept[0]).backward()
    grads = {n: (layer.weight.grad.clone(), layer.bias.grad.clone()) for n, layer in (("2", model[2]),)}
    kfac.step()
    found = kfac.factors()["2"]
    assert found["G"].trace() > 0
    # One example at a time, the outer product of its gradient with its input is its weight gradient.
    total = 0
    for n in range(6):
        model.zero_grad()
        kept.clear()
        ((model(x[n : n + 1]) - y[n : n + 1]) ** 2).sum().backward()
        total = total + torch.outer(model[2].bias.grad, model[2].bias.grad) / 6
    torch.testing.assert_close(found["G"], total)
    assert grads["2"][0].isfinite().all()


def test_a_layer_with_a_forward_of_its_own_is_left_to_the_optimizer():
    model = mlp()
    model[2].forward = lambda x: nn.functional.linear(10 * x, model[2].weight)
    kfac = attach(model)
    assert [layer.name for layer in kfac.layers] == ["0", "4"]


def test_a_checkpointed_forward_keeps_its_own_size():
    def run(wrap):
        model, data = mlp(), [batch(12, 4), batch(5, 4, seed=3)]
        kfac = attach(model, accumulate="sum")
        losses = [mean_loss(wrap(model, x), y) for x, y in data]
        for loss in losses:
            loss.backward()
        kfac.step()
        return kfac.factors()

    def checkpointed(model, x):
        return model[4](model[3](torch.utils.checkpoint.checkpoint(model[:3], x, use_reentrant=False)))

    def through_forward(function):
        def call(model, x):
            model.forward = lambda inputs: function(model, inputs)
            return model(x)

        return call

    plain = run(through_forward(lambda model, x: model[4](model[3](model[:3](x)))))
    assert_factors(run(through_forward(checkpointed)), plain, 1e-12)


def test_cholesky_survives_a_tiny_loss():
    model, (x, y) = mlp(dtype=torch.float32), batch(6, 4)
    kfac = attach(model, solver="cholesky")
    (mean_loss(model(x.float()), y.float()) * 1e-20).backward()
    before = gradients(model)
    kfac.step()
    for name, gradient in gradients(model).items():
        assert (gradient.norm() > 0) == (before[name].norm() > 0), name


def test_the_input_may_change_in_place_under_autocast():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = torch.relu(x) * 1.0
            h += self.a(h)
            return self.b(h)

    model, (x, y) = Residual(), batch(6, 4)
    kfac = attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(model(x.float()), y.float())
    loss.backward()
    kfac.step()
    assert kfac.factors()["a"]["A"].dtype == torch.float32


def test_tokens_of_a_folded_input_count_like_those_of_an_unfolded_one():
    def terms(x):
        model = nn.Sequential(nn.Linear(3, 2)).double()
        kfac = attach(model, loss_terms="token")
        model(x).square().mean().backward()
        return kfac._collector.window.terms

    x = torch.randn(4, 5, 3, dtype=torch.float64)
    assert terms(x) == terms(x.reshape(20, 3)) == 20


def test_a_bias_thawed_again_has_the_statistics_it_always_had():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model)
    for trains in (True, False, False, True):
        model[2].bias.requires_grad_(trains)
        model.zero_grad()
        mean_loss(model(x), y).backward()
        kfac.step()
    torch.testing.assert_close(kfac.factors()["2"]["A"][-1, -1], torch.tensor(1.0, dtype=torch.float64))


def test_a_step_without_effect_is_not_one_of_kfacs():
    model, (x, y) = mlp(), batch(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    kfac = attach(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert kfac.metrics()["step"] == 0
    optimizer.zero_grad()
    mean_loss(model(x), y).backward()
    optimizer.step()
    assert kfac.metrics()["step"] == 1


def test_large_float16_gradients_are_finite_gradients():
    layer = nn.Linear(100, 100, bias=False).half()
    kfac = dkfac.KFAC(layer, **EVERY_STEP)
    layer(torch.full((4, 100), 10.0).half()).float().sum().backward()
    layer.weight.grad.fill_(1000.0)
    kfac.step()
    assert kfac.metrics()["skipped_batches"] == 0


def test_factors_before_any_good_batch_are_zero_not_nan():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model)
    mean_loss(model(x * float("nan")), y).backward()
    kfac.step()
    assert all(torch.equal(f, torch.zeros_like(f)) for layer in kfac.factors().values() for f in layer.values())
    assert kfac.metrics()["refreshes"] == 0


def test_a_report_times_the_capture():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model)
    mean_loss(model(x), y).backward()
    kfac.step()
    assert set(kfac.report()["stage_seconds"]) == {"capture", "average", "decompose", "precondition"}
