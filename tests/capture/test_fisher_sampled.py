"""fisher="sampled": labels from the model's own prediction; in the mean the exact Fisher, and that is the dense one."""

import pytest
import torch
import torch.nn.functional as F
from helpers_exact import PLAIN, assert_close, randn
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from dkfac import KFAC
from dkfac.capture.fisher import columns, draw

DRAWS = 10_000


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def binary(output):
    return F.binary_cross_entropy_with_logits(output, torch.rand_like(output).round())


def squares(output):
    return F.mse_loss(output, torch.randn_like(output))


def classes(output):
    return F.cross_entropy(output.flatten(0, -2), torch.randint(output.shape[-1], output.shape[:-1]).flatten())


LOSSES = {"cross-entropy": classes, "bernoulli": binary, "mse": squares}


def net(out=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out, bias=False)).double()


def factors_of(model, x, loss, steps=1, **options):
    """Return the factors after passes over one batch at the same weights."""
    with KFAC(model, **(PLAIN | {"factor_interval": 1, "inverse_interval": 2000} | options)) as kfac:
        for _ in range(steps):
            model.zero_grad()
            LOSSES[loss](model(x)).backward()
            kfac.step()
        return kfac.factors()


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_drawn_gradient_has_the_hessian_as_its_mean_square(loss, by_token):
    logits = randn(2, 4) if not by_token else randn(2, 3, 4)
    generator = torch.Generator().manual_seed(0)
    wide = logits.unsqueeze(0).expand(40_000, *logits.shape).flatten(0, 1)
    drawn = draw(wide, loss, generator, by_token=by_token).view(40_000, *logits.shape)
    flat = drawn.flatten(2) if not by_token else drawn
    found = torch.einsum("k...i,k...j->...ij", flat, flat) / len(flat)
    exact = torch.zeros_like(found)
    for column in columns(logits, loss, by_token=by_token):
        own = column.flatten(1) if not by_token else column
        exact += own.unsqueeze(-1) * own.unsqueeze(-2)
    torch.testing.assert_close(found, exact, atol=0.02 * float(exact.abs().max()), rtol=0.0)
    assert float(drawn.mean(0).abs().max()) < 0.02


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_over_ten_thousand_draws_is_the_exact_factor(loss):
    model, x = net(), randn(3, 4)
    exact = factors_of(model, x, loss, fisher="exact", fisher_loss=loss)
    copies = x.repeat(DRAWS // 20, 1)  # twenty passes over five hundred copies
    options = {"fisher": "sampled", "fisher_loss": loss, "factor_decay": 0.9999999}
    sampled = factors_of(model, copies, loss, steps=20, **options)
    for name, pair in exact.items():
        error = (sampled[name]["G"] - pair["G"]).norm() / pair["G"].norm()
        assert error < 0.02, (name, float(error))
        assert_close(sampled[name]["A"], pair["A"])


@pytest.mark.parametrize("loss", LOSSES)
def test_the_exact_factors_are_those_of_the_dense_fisher(loss):
    """One linear layer: the Kronecker product is no approximation for one example."""
    model, x = nn.Sequential(nn.Linear(4, 3, bias=False)).double(), randn(1, 4)

    def output(weight):
        return functional_call(model, {"0.weight": weight.view(4, 3).T}, (x,)).flatten()

    theta = model[0].weight.detach().T.flatten()
    logits = output(theta).detach()
    target = torch.zeros(3, dtype=torch.float64)

    def written(values):
        if loss == "cross-entropy":
            return F.cross_entropy(values[None], torch.tensor([1]))
        if loss == "bernoulli":
            return F.binary_cross_entropy_with_logits(values, target)
        return F.mse_loss(values, target)

    J, H = jacobian(output, theta), hessian(written, logits)
    found = factors_of(model, x, loss, fisher="exact", fisher_loss=loss)["0"]
    torch.testing.assert_close(torch.kron(found["A"], found["G"]), J.T @ H @ J, rtol=1e-8, atol=1e-8)


def test_the_training_gradients_and_everybody_elses_random_numbers_are_untouched():
    found = []
    for options in ({}, {"fisher": "sampled", "fisher_loss": "cross-entropy"}):
        torch.manual_seed(1)
        model, x = net(), randn(6, 4)
        with KFAC(model, **(PLAIN | options)):
            F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
        found.append(([p.grad.clone() for p in model.parameters()], torch.rand(3)))
    for p, q in zip(*(grads for grads, _ in found), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(found[0][1], found[1][1])


def test_a_run_repeats_itself_and_draws_anew_at_each_step():
    def run():
        torch.manual_seed(2)
        model, x = net(), randn(6, 4)
        options = PLAIN | {"factor_interval": 1, "factor_decay": 0.0}
        with KFAC(model, **(options | {"fisher": "sampled", "fisher_loss": "cross-entropy"})) as kfac:
            for _ in range(3):
                model.zero_grad()
                F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
                kfac.step()
                yield kfac.factors()["2"]["G"].clone()

    first, second = list(run()), list(run())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


def test_part_of_the_batch_gives_the_same_mean():
    model, x = net(), randn(3, 4)
    exact = factors_of(model, x, "cross-entropy", fisher="exact", fisher_loss="cross-entropy")
    copies = x.repeat(2001, 1)
    options = {"fisher": "sampled", "fisher_loss": "cross-entropy", "factor_decay": 0.9999999, "fisher_fraction": 0.25}
    sampled = factors_of(model, copies, "cross-entropy", steps=20, **options)
    for name, pair in exact.items():
        assert (sampled[name]["G"] - pair["G"]).norm() < 0.02 * pair["G"].norm()


def test_images_of_outputs_are_one_term_each():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)).double()
    x = randn(2, 1, 4, 4)
    exact = factors_of(model, x, "bernoulli", fisher="exact", fisher_loss="bernoulli")["0"]["G"]
    options = {"fisher": "sampled", "fisher_loss": "bernoulli", "factor_decay": 0.9999999}
    sampled = factors_of(model, x.repeat(400, 1, 1, 1), "bernoulli", steps=5, **options)["0"]["G"]
    assert (sampled - exact).norm() < 0.02 * exact.norm()


def test_some_example_is_drawn_for_at_each_step_however_few_there_are():
    model, x, seen = net(), randn(2, 4), set()
    options = {"fisher": "sampled", "fisher_loss": "cross-entropy", "factor_decay": 0.0, "fisher_fraction": 0.1}
    with KFAC(model, **(PLAIN | {"factor_interval": 1, "inverse_interval": 100} | options)) as kfac:
        for _ in range(12):
            model.zero_grad()
            classes(model(x)).backward()
            kfac.step()
            values = torch.linalg.eigvalsh(kfac.factors()["2"]["G"])
            assert values[-1] > 0
            assert abs(values[-2]) < 1e-12  # of one of the two
            seen.add(round(float(values[-1]), 9))
    assert len(seen) > 2


@pytest.mark.slow
def test_few_examples_and_a_small_fraction_leave_the_scale_alone():
    model, x = net(), randn(2, 4)
    options = {"fisher": "sampled", "fisher_loss": "cross-entropy", "factor_decay": 0.9999999}
    whole, part = (
        factors_of(model, x, "cross-entropy", steps=1500, fisher_fraction=f, **options)["2"]["G"] for f in (1.0, 0.1)
    )
    assert float(part.trace()) == pytest.approx(float(whole.trace()), rel=0.1)


def test_a_large_loss_scale_does_not_drop_every_batch():
    """The pass of drawn labels is as small as that of the loss: where one fits into float16, so does the other."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"fisher": "sampled", "fisher_loss": "cross-entropy", "factor_interval": 1, "inverse_interval": 1}
    kfac = KFAC(model, optimizer, grad_scaler=scaler, announce=False, warmup_refresh=None, **options)
    x, y = torch.randn(512, 4), torch.randint(3, (512,))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        scaler.scale(F.cross_entropy(output.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert kfac.metrics()["skipped_batches"] == 0
    assert kfac.metrics()["refreshes"] == 3
