"""Small models, batches and loops shared by the tests of capture, checkpointing, compile and mixed precision."""

import reference as ref
import torch
from torch import nn

import dkfac

EVERY_STEP = {
    "announce": False,
    "rescale": "norm",
    "warmup_refresh": None,
    "factor_interval": 1,
    "inverse_interval": 1,
    "damping": 1e-2,
}


def attach(model, optimizer=None, **options):
    return dkfac.KFAC(model, optimizer, **{**EVERY_STEP, **options})


def mlp(*, bias=True, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias)
    return nn.Sequential(*layers).to(dtype)


def batch(*shape, out=3, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    y = torch.randn(*shape[:-1], out, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def batches(sizes, width=4, **options):
    return [batch(size, width, seed=10 + i, **options) for i, size in enumerate(sizes)]


def summed(output, target):
    return ((output - target) ** 2).sum()


def mean_loss(output, target):
    """Mean over examples of the sum over an example's elements."""
    return summed(output, target) / len(output)


def oracle_factors(model, x, y, layers, terms=None):
    """``{layer: {"A", "G"}}`` by outer products over examples that are run alone."""
    recorded = ref.per_example(model, summed, x, y, layers)
    model.zero_grad()
    result = {}
    for name in layers:
        example_rows = ref.all_rows(model.get_submodule(name), recorded[name])
        found = ref.factors(example_rows, terms or len(x), "expand")
        result[name] = {key: f.squeeze(0) for key, f in found.items()}
    return result


def assert_factors(kfac_or_factors, expected, tol=1e-10):
    got = kfac_or_factors if isinstance(kfac_or_factors, dict) else kfac_or_factors.factors()
    for name, factors in expected.items():
        assert set(got[name]) == set(factors)
        for key, factor in factors.items():
            torch.testing.assert_close(
                got[name][key], factor, rtol=tol, atol=tol, msg=lambda m, n=name, k=key: f"{n}.{k}: {m}"
            )


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(got, expected, tol=1e-10):
    """Equal dictionaries of tensors; ``tol=0`` is bitwise."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


def train(model, optimizer, data, loss=mean_loss):
    """The plain loop; returns the losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses
