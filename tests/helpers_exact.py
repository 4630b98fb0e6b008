"""What the exactness tests share: layers of every kind, and the oracle's factors and directions for a model."""

import itertools

import reference as ref
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC

EXACT = {"announce": False, "rescale": "norm", "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1}
PLAIN = EXACT | {"rescale": "none", "norm_form": "unit"}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def square_loss(output, target):
    return ((output - target) ** 2).sum()


def token_loss(output, target):
    """Cross-entropy summed over the positions of ``[N, S, classes]``."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def assert_close(actual, expected, tol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def assert_solved(actual, expected, tol=1e-8):
    """Relative to the length of the solution, which small damping makes long."""
    assert actual.shape == expected.shape
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < tol, f"relative error {error:.2e}"


class Conv1D(nn.Module):
    """Stands for the class of this name in transformers: weight ``[in, out]``."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, out, inp):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inp, out)), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Folded(nn.Module):
    """``[N, F, ...]`` through a layer that sees ``[N * F, ...]``, as windows, frames and tokens are fed."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Repeat(nn.Module):
    """One layer called ``times`` times per forward, and one that is always called once."""

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.last, self.times = layer, nn.Linear(3, 2), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return self.last(x)


def frozen_bias(layer):
    layer.bias.requires_grad_(False)
    return layer


def tokens(*shape):
    return torch.randint(7, shape)


LAYERS = {
    "linear": lambda: (nn.Linear(3, 4), randn(6, 3)),
    "linear-2-leading": lambda: (nn.Linear(3, 4), randn(5, 4, 3)),
    "linear-3-leading": lambda: (nn.Linear(3, 4), randn(3, 2, 4, 3)),
    "linear-4-leading": lambda: (nn.Linear(3, 4), randn(3, 2, 1, 2, 3)),
    "linear-no-bias": lambda: (nn.Linear(3, 4, bias=False), randn(5, 4, 3)),
    "linear-frozen-bias": lambda: (frozen_bias(nn.Linear(3, 4)), randn(5, 4, 3)),
    "linear-one-example": lambda: (nn.Linear(3, 4), randn(1, 4, 3)),
    "linear-folded": lambda: (Folded(nn.Linear(3, 4)), randn(5, 4, 3)),
    "conv1D-transposed": lambda: (Conv1D(4, 3), randn(5, 4, 3)),
    "conv1D-transposed-frozen-bias": lambda: (frozen_bias(Conv1D(4, 3)), randn(6, 3)),
    "embedding": lambda: (nn.Embedding(7, 3), tokens(5, 4)),
    "embedding-one-token": lambda: (nn.Embedding(7, 3), tokens(8)),
    "embedding-padding": lambda: (nn.Embedding(7, 3, padding_idx=2), tokens(5, 6)),
    "conv1d": lambda: (nn.Conv1d(3, 4, 4, stride=2, padding=2), randn(3, 3, 9)),
    "conv2d": lambda: (nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), randn(3, 2, 5, 7)),
    "conv2d-no-bias": lambda: (nn.Conv2d(2, 3, 2, bias=False), randn(3, 2, 3, 4)),
    "conv2d-frozen-bias": lambda: (frozen_bias(nn.Conv2d(2, 3, 2)), randn(3, 2, 3, 4)),
    "conv2d-groups": lambda: (nn.Conv2d(4, 6, 2, groups=2), randn(3, 4, 3, 4)),
    "conv2d-depthwise": lambda: (nn.Conv2d(3, 6, 2, groups=3, bias=False), randn(3, 3, 3, 4)),
    "conv2d-folded": lambda: (Folded(nn.Conv2d(2, 3, 2)), randn(3, 2, 2, 3, 4)),
    "conv-transpose-1d": lambda: (nn.ConvTranspose1d(3, 2, 4, stride=3, padding=1, output_padding=2), randn(3, 3, 4)),
    "conv-transpose-2d": lambda: (
        nn.ConvTranspose2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 1), dilation=(1, 2), output_padding=(1, 0)),
        randn(3, 2, 3, 4),
    ),
    "conv-transpose-2d-cropped": lambda: (nn.ConvTranspose2d(2, 3, 2, stride=2, padding=2), randn(3, 2, 4, 4)),
    "conv-transpose-2d-no-bias": lambda: (nn.ConvTranspose2d(2, 3, 3, stride=2, bias=False), randn(3, 2, 2, 3)),
    "conv-transpose-2d-folded": lambda: (Folded(nn.ConvTranspose2d(2, 3, 2)), randn(3, 2, 2, 3, 2)),
    "conv-transpose-3d": lambda: (nn.ConvTranspose3d(2, 2, (2, 1, 3), stride=(1, 2, 1)), randn(2, 2, 2, 2, 2)),
    "conv3d": lambda: (nn.Conv3d(2, 2, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1)), randn(2, 2, 3, 2, 4)),
}
NORMS = {
    "layer": lambda: (nn.LayerNorm(4), randn(5, 3, 4)),
    "layer-vector": lambda: (nn.LayerNorm(4, eps=1e-2), randn(5, 4)),
    "layer-2d": lambda: (nn.LayerNorm((2, 3)), randn(5, 4, 2, 3)),
    "layer-no-bias": lambda: (nn.LayerNorm(4, bias=False), randn(5, 3, 4)),
    "layer-frozen-bias": lambda: (frozen_bias(nn.LayerNorm(4)), randn(5, 3, 4)),
    "layer-folded": lambda: (Folded(nn.LayerNorm(4)), randn(5, 3, 4)),
    "group": lambda: (nn.GroupNorm(2, 4), randn(5, 4, 2, 3)),
    "group-vector": lambda: (nn.GroupNorm(2, 4), randn(5, 4)),
    "group-folded": lambda: (Folded(nn.GroupNorm(2, 4)), randn(5, 2, 4, 3)),
    "rms": lambda: (nn.RMSNorm(4), randn(5, 3, 4)),
    "rms-small-inputs": lambda: (nn.RMSNorm(4), 1e-8 * randn(5, 3, 4)),  # as small as the default eps
    "rms-eps": lambda: (nn.RMSNorm((2, 3), eps=1e-2), randn(5, 4, 2, 3)),
}


def make(case):
    """Return ``(model, x, target, layer name)``; gammas and betas are no longer 1 and 0."""
    layer, x = case()
    model = nn.Sequential(layer, nn.Tanh()).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, x, randn(*model(x).shape), "0.layer" if isinstance(layer, Folded) else "0"


def oracle_factors(
    model, x, target, names, *, terms=None, sharing="expand", form="unit", loss=square_loss, batchwise=False
):
    """Return ``{name: {key: factor}}`` of a loss that is a mean over ``terms``, blocks in front.

    ``batchwise``: the batch is run as a whole, for batch norms, where examples are not independent.
    """
    terms = terms or len(x)
    if batchwise:
        output, calls = ref._forward(model, x, names)
        total = loss(output, target)
        recorded = {name: [pairs] for name, pairs in ref._pull_back(calls, total, torch.ones_like(total)).items()}
    else:
        recorded = ref.per_example(model, loss, x, target, names)
    result = {}
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, ref.NORMS):
            calls = list(itertools.chain(*recorded[name]))
            examples = None if batchwise else 1
            x_hat = torch.cat([ref.normalised(module, a, examples) for a, _ in calls])
            g = torch.cat([ref.norm_rows(module, g, examples) for _, g in calls])
            result[name] = {"F": ref.norm_factor(x_hat, g, terms, form, ref.folds_bias(module))}
        else:
            result[name] = ref.factors(ref.all_rows(module, recorded[name]), terms, sharing)
            if isinstance(module, nn.Embedding):
                result[name]["A"] = torch.diag_embed(result[name]["A"].diagonal(dim1=1, dim2=2))
    return result


def assert_factors(actual, expected, tol=1e-10):
    """Compare ``kfac.factors()`` with the oracle's: no dimension for a single block, diagonals as vectors."""
    assert list(actual) == list(expected)
    for name, factors in expected.items():
        assert sorted(actual[name]) == sorted(factors)
        for key, factor in factors.items():
            value = actual[name][key]
            if key != "F" and factor.shape[0] == 1:
                factor = factor.squeeze(0)
            if value.ndim == 1 and factor.ndim == 2:
                assert_close(factor, factor.diagonal().diag(), tol=0)
                factor = factor.diagonal()
            assert_close(value, factor, tol)


def one_step(model, x, target, *, loss=square_loss, terms=None, **options):
    """Take one K-FAC step; returns the factors and, by layer, the gradient before and after, ``[B, O, I]``."""
    with KFAC(model, **arranged(PLAIN | options)) as kfac:
        modules = {layer.name: layer.module for layer in kfac.layers}
        model.zero_grad()
        (loss(model(x), target) / (terms or len(x))).backward()
        used = {name: module for name, module in modules.items() if module.weight.grad is not None}
        before = {name: ref.gradient_blocks(module).clone() for name, module in used.items()}
        kfac.step()
        after = {name: ref.gradient_blocks(module).clone() for name, module in used.items()}
        return kfac.factors(), before, after


def oracle_direction(factors, grad, damping, *, form="unit", solve=ref.dense_precondition):
    """Return the preconditioned gradient of one layer, block by block."""
    if "F" in factors:
        return ref.norm_precondition(factors["F"], grad, damping, form)
    blocks = zip(factors["A"], factors["G"], grad, strict=True)
    return torch.stack([solve(A, G, g, damping) for A, G, g in blocks])
