"""Twenty optimizer steps equal those of the oracle, to 1e-10 in float64."""

import pytest
import reference as ref
import torch
from helpers_exact import EXACT, assert_close, oracle_direction, oracle_factors, randn, square_loss, token_loss, tokens
from torch import nn

from dkfac import KFAC


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def perceptron():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normed():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def convolutional():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))


def language():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.RMSNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7))


def train_both(factory, batches, loss, terms, *, momentum=0.0, lr=0.05, **options):
    """Return the parameters after training with dkfac and with the oracle."""
    model = factory().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    with KFAC(model, optimizer, **(EXACT | {"norm_form": "unit"} | options)) as kfac:
        names = [layer.name for layer in kfac.layers]
        for x, target in batches:
            optimizer.zero_grad()
            (loss(model(x), target) / terms(x)).backward()
            optimizer.step()
    settings = ref.ReferenceSettings(lr=lr, momentum=momentum, **options)
    oracle = ref.ReferenceKFAC(factory, names, loss, settings)
    oracle.run(batches)
    return [p.detach() for p in model.parameters()], [p.detach() for p in oracle.model.parameters()]


@pytest.mark.parametrize("rescale", ["norm", "norm-global", "norm-kl", "kl-clip", "none"])
@pytest.mark.parametrize(("solver", "curvature"), [("eigen", "kfac"), ("cholesky", "kfac"), ("eigen", "ekfac")])
def test_twenty_steps_with_momentum_equal_the_oracles(solver, curvature, rescale):
    batches = [(randn(8, 3), randn(8, 2)) for _ in range(20)]
    rhythm = {"factor_interval": 2, "inverse_interval": 4, "factor_decay": 0.9}
    options = {"solver": solver, "curvature": curvature, "rescale": rescale, "damping": 0.1} | rhythm
    ours, theirs = train_both(perceptron, batches, square_loss, len, momentum=0.9, **options)
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("change", [{}, {"damping_mode": "relative"}, {"weight_sharing": "reduce"}])
@pytest.mark.parametrize(
    ("factory", "batch", "loss", "loss_terms"),
    [
        (normed, lambda: (randn(8, 3), randn(8, 2)), square_loss, "batch"),
        (convolutional, lambda: (randn(6, 2, 3, 3), randn(6, 2)), square_loss, "batch"),
        (language, lambda: (tokens(4, 5), tokens(4, 5)), token_loss, "token"),
    ],
)
def test_twenty_steps_of_other_networks_equal_the_oracles(factory, batch, loss, loss_terms, change):
    batches = [batch() for _ in range(20)]
    terms = (lambda x: x.numel()) if loss_terms == "token" else len
    options = {"damping": 0.01, "loss_terms": loss_terms, "inverse_interval": 2} | change
    ours, theirs = train_both(factory, batches, loss, terms, **options)
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("kl_clip", [1e-6, 1e-4, 3e-4, 1e-2])
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_steps_that_are_held_back_now_and_then_equal_the_oracles(solver, kl_clip):
    batches = [(randn(8, 3), randn(8, 2)) for _ in range(20)]
    options = {"solver": solver, "rescale": "norm-kl", "kl_clip": kl_clip, "damping": 0.1, "inverse_interval": 4}
    ours, theirs = train_both(perceptron, batches, square_loss, len, momentum=0.9, **options)
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, q)


@pytest.mark.parametrize("kl_clip", [1e-4, 1e9])
def test_what_holds_back_takes_each_parameters_own_lr(kl_clip):
    model = perceptron().double()
    x, target = randn(8, 3), randn(8, 2)
    rates = {"0.weight": 0.3, "0.bias": 0.02, "2.weight": 0.1, "2.bias": 0.0}
    groups = [{"params": [p], "lr": rates[name]} for name, p in model.named_parameters()]
    factors = oracle_factors(model, x, target, ["0", "2"])
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with KFAC(model, optimizer, **(EXACT | {"rescale": "norm-kl", "kl_clip": kl_clip, "damping": 1e-2})) as kfac:
        (square_loss(model(x), target) / 8).backward()
        raw = {name: p.grad.clone() for name, p in model.named_parameters()}
        v = {}
        for name in ("0", "2"):
            solved = oracle_direction(factors[name], ref.gradient_blocks(model.get_submodule(name)), 1e-2)[0]
            v |= {f"{name}.weight": solved[:, :-1], f"{name}.bias": solved[:, -1]}
        optimizer.step()
        assert (kfac.metrics()["clip_factor"] < 1) == (kl_clip < 1)
    held = ref.norm_kl(v, raw, rates, kl_clip, 1e-2)
    for name, p in model.named_parameters():
        assert_close(p.grad, held[name])


def test_a_prediction_leaves_the_damping_out():
    """With so much of it that the direction is the gradient's, only curvature holds a step back."""
    model = perceptron().double()
    x, target = randn(8, 3), randn(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with KFAC(model, optimizer, **(EXACT | {"rescale": "norm-kl", "kl_clip": 0.1, "damping": 1e4})) as kfac:
        (square_loss(model(x), target) / 8).backward()
        optimizer.step()
        assert kfac.metrics()["clip_factor"] == 1.0


def test_the_kl_clip_takes_each_parameters_own_lr():
    """Weights and biases in groups of their own; the clip is one number for all of them."""
    model = perceptron().double()
    x, target = randn(8, 3), randn(8, 2)
    rates = {"0.weight": 0.3, "0.bias": 0.02, "2.weight": 0.1, "2.bias": 0.0}
    groups = [{"params": [p], "lr": rates[name]} for name, p in model.named_parameters()]
    factors = oracle_factors(model, x, target, ["0", "2"])
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with KFAC(model, optimizer, **(EXACT | {"rescale": "kl-clip", "kl_clip": 1e-4, "damping": 1e-2})):
        (square_loss(model(x), target) / 8).backward()
        raw = {name: p.grad.clone() for name, p in model.named_parameters()}
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        v = {}
        for name in ("0", "2"):
            solved = oracle_direction(factors[name], ref.gradient_blocks(model.get_submodule(name)), 1e-2)[0]
            v |= {f"{name}.weight": solved[:, :-1], f"{name}.bias": solved[:, -1]}
        optimizer.step()
    clipped = ref.kl_clip(v, raw, rates, 1e-4)
    assert clipped["0.weight"].norm() < 0.5 * v["0.weight"].norm()
    for name, p in model.named_parameters():
        assert_close(p.detach(), start[name] - rates[name] * clipped[name])


@pytest.mark.parametrize("rescale", ["norm", "norm-global", "norm-kl", "kl-clip", "none"])
def test_a_layer_with_a_zero_gradient_keeps_it(rescale):
    model = perceptron().double()
    torch.nn.init.zeros_(model[2].weight)
    x, target = randn(8, 3), randn(8, 2)
    with KFAC(model, **(EXACT | {"rescale": rescale})) as kfac:
        (square_loss(model(x), target) / 8).backward()
        kfac.step(lr=0.1)
    assert model[0].weight.grad.eq(0).all()
    assert model[2].weight.grad.isfinite().all()
    assert model[2].weight.grad.ne(0).all()
