"""Loops that real people write: each gives the right thing or a sentence that says what to do."""

import collections
import copy

import numpy
import pytest
import torch
from helpers_capture import EVERY_STEP, assert_factors, assert_same, attach, batch, mean_loss, mlp, oracle_factors
from torch import nn

import dkfac

LAYERS = ["0", "2", "4"]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_step_dropped_with_zero_grad_leaves_no_statistics():
    model, (x, y) = mlp(), batch(6, 4)
    expected = oracle_factors(model, x, y, LAYERS)
    kfac = attach(model)
    mean_loss(model(100 * x), y).backward()
    model.zero_grad()
    mean_loss(model(x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)
    assert kfac.metrics()["abandoned_steps"] == 1


def test_a_discriminator_does_not_count_the_generators_backward():
    def run(detached):
        critic, (x, y) = mlp(), batch(6, 4)
        torch.manual_seed(1)
        generator = nn.Linear(4, 4).double()
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
        kfac = attach(critic, optimizer)
        for _ in range(4):
            mean_loss(critic(generator(x)), y).backward()  # the generator's turn
            if detached:
                kfac.discard()
            optimizer.zero_grad()
            mean_loss(critic(generator(x).detach()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach() for name, p in critic.named_parameters()}

    assert_same(run(detached=False), run(detached=True), 1e-12)


def test_gradients_made_by_autograd_grad_are_accumulated_without_a_grad_attribute():
    model, (x, y) = mlp(), batch(6, 4)
    kfac = attach(model, accumulate="mean")
    for _ in range(2):
        found = torch.autograd.grad(mean_loss(model(x), y) / 2, list(model.parameters()))
    assert kfac._collector.window.num_passes == 2
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = 2 * gradient
    kfac.step()
    assert_factors(kfac, oracle_factors(mlp(), x, y, LAYERS))


def test_a_second_attachment_names_detach_which_frees_the_model():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    with pytest.raises(RuntimeError, match=r"dkfac\.detach\(model\)"):
        attach(model, optimizer)
    dkfac.detach(model)
    assert not optimizer._optimizer_step_pre_hooks
    attach(model, optimizer).close()
    dkfac.detach(model)


def test_an_optimizer_that_runs_no_hooks_is_refused_before_anything_is_hooked():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure=None):
            self.inner.step(closure)

    model = mlp()
    with pytest.raises(TypeError, match="inner optimizer"):
        attach(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("options", [{}, {"curvature": "ekfac"}, {"solver": "cholesky"}], ids=str)
def test_a_model_converted_after_some_steps_goes_on(options):
    model, (x, y) = mlp(dtype=torch.float32), batch(6, 4)
    kfac = attach(model, inverse_interval=10, **options)  # the decompositions stay those of the first dtype
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        for _ in range(2):
            model.zero_grad()
            mean_loss(model(x.to(dtype)), y.to(dtype)).backward()
            kfac.step()
    assert all(f.dtype == torch.float64 for layer in kfac.factors().values() for f in layer.values())
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_function_transforms_pass_by_kfac():
    model, (x, _) = mlp(), batch(6, 4)
    kfac = attach(model)
    total = torch.func.grad(lambda inputs: model(inputs).sum())(x)
    assert total.shape == x.shape
    assert kfac._collector.window.num_passes == 0


@pytest.mark.parametrize(
    "wrap", [lambda x: {"x": x}, lambda x: collections.UserDict(x=x), lambda x: [torch.tensor(1), x]]
)
def test_the_first_tensor_with_a_dimension_counts_wherever_it_stands(wrap):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, inputs):
            return self.net(inputs["x"] if not isinstance(inputs, list) else inputs[1])

    model, (x, y) = Net(), batch(6, 4)
    kfac = attach(model)
    mean_loss(model(wrap(x)), y).backward()
    kfac.step()
    expected = oracle_factors(mlp(), x, y, LAYERS)
    assert_factors(kfac, {f"net.{name}": factors for name, factors in expected.items()})


def test_a_number_of_terms_needs_no_tensor_among_the_inputs():
    class Net(nn.Module):
        def __init__(self, x):
            super().__init__()
            self.net, self.x = mlp(), x

        def forward(self):
            return self.net(self.x)

    x, y = batch(6, 4)
    model = Net(x)
    kfac = attach(model)
    with pytest.raises(RuntimeError, match="loss_terms"):
        model()
    kfac.close()
    kfac = attach(model, loss_terms=6)
    mean_loss(model(), y).backward()
    kfac.step()
    expected = oracle_factors(mlp(), x, y, LAYERS)
    assert_factors(kfac, {f"net.{name}": factors for name, factors in expected.items()})


def test_layers_thawed_after_attach_are_named_once():
    model, (x, y) = mlp(), batch(6, 4)
    model[2].requires_grad_(False)
    kfac = attach(model)
    mean_loss(model(x), y).backward()
    kfac.step()
    model[2].requires_grad_(True)
    mean_loss(model(x), y).backward()
    with pytest.warns(UserWarning, match=r"frozen when K-FAC was attached.*: 2\."):
        kfac.step()
    mean_loss(model(x), y).backward()
    kfac.step()


def test_many_passes_without_a_step_are_pointed_out(monkeypatch):
    monkeypatch.setattr("dkfac.capture.passes.NEVER_STEPPED", 5)
    model, (x, y) = mlp(), batch(6, 4)
    attach(model)
    for _ in range(4):
        model.zero_grad()
        mean_loss(model(x), y).backward()
    with pytest.warns(UserWarning, match="no step was taken through K-FAC"):
        mean_loss(model(x), y).backward()


def test_a_parameter_taken_out_of_the_optimizer_has_no_learning_rate_in_the_kl_clip():
    model, (x, y) = mlp(), batch(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, rescale="kl-clip")
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model[4].bias]
    mean_loss(model(x), y).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_numbers_of_numpy_are_numbers():
    settings = dkfac.Settings(damping=numpy.float32(1e-3), kl_clip=lambda step: numpy.float64(0.5))
    assert settings.at("damping", 0) == pytest.approx(1e-3)
    assert settings.at("kl_clip", 3) == 0.5


def test_misspelt_options_swapped_arguments_and_other_states_are_recognised():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="did you mean 'damping'"):
        dkfac.KFAC(model, optimizer, dampning=1.0)
    with pytest.raises(TypeError, match="swapped"):
        dkfac.KFAC(optimizer, model)
    kfac = attach(model, optimizer)
    with pytest.raises(ValueError, match="optimizer's state"):
        kfac.load_state_dict(optimizer.state_dict())


def test_copies_of_a_model_made_by_averaging_train_without_kfac():
    model, (x, y) = mlp(), batch(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = dkfac.KFAC(model, optimizer, **EVERY_STEP)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    mean_loss(average(x), y).backward()
    assert kfac._collector.window.num_passes == 0
