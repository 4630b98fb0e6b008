"""What K-FAC measures by kernels is what it measures without them, for every plain layer and layout.

In Triton's interpreter in a session of its own, and on a GPU with ``-m gpu``.
"""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted
from torch import nn

import dkfac
from dkfac.capture import grouped_products
from dkfac.layers.rows import Sample
from dkfac.ops import grouped_grams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
DEVICE = pytest.param("cpu", id="interpreted") if INTERPRETED else pytest.param("cuda", id="cuda", marks=GPU)
on_kernels = pytest.mark.parametrize("device", [DEVICE])


def cnn(device, layout):
    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 24, 1), nn.ReLU(), nn.Conv2d(24, 12, 1, stride=2), nn.Conv2d(12, 12, 3, padding="same", groups=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
    ]  # fmt: skip
    model = nn.Sequential(*layers).to(device, memory_format=layout)
    return model, torch.randn(4, 3, 6, 6).to(device, memory_format=layout)


def attention(device, _):
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), nn.Linear(32, 7))
    return model.to(device), torch.randn(4, 9, 32).to(device)


class Cross(nn.Module):
    """Keys and values have another number of rows than queries."""

    def __init__(self):
        super().__init__()
        self.attention, self.more = nn.MultiheadAttention(24, 2, batch_first=True), nn.Linear(24, 24)

    def forward(self, x):
        other = self.more(x)[:, :5]
        return self.attention(x, other, other)[0]


def cross(device, _):
    return Cross().to(device), torch.randn(4, 9, 24).to(device)


def line(device, _):
    layers = [nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 18, 30), nn.ReLU(), nn.Linear(30, 5)]
    return nn.Sequential(*layers).to(device), torch.randn(7, 3, 20).to(device)


MODELS = [
    (cnn, torch.contiguous_format), (cnn, torch.channels_last), (attention, None), (cross, None), (line, None),
]  # fmt: skip


def factors(build, layout, device, steps=2, **options):
    torch.manual_seed(0)
    model, x = build(device, layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    options = {"block_dim": 20, "factor_interval": 1, "inverse_interval": 10} | options
    kfac = dkfac.KFAC(model, optimizer, announce=False, tf32=False, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {(name, key): t.cpu() for name, found in kfac.factors().items() for key, t in found.items()}


@on_kernels
@pytest.mark.parametrize(("build", "layout"), MODELS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{"statistics_fraction": 0.5}, *[pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"block_dim": None})]],
    ids=str,
)
def test_factors_are_those_of_the_path_without_kernels(device, build, layout, options, monkeypatch):
    counts, real = [], grouped_products.GroupedProducts.sum_calls
    count = lambda self, calls, turn: counts.append(len(calls)) or real(self, calls, turn)  # noqa: E731
    monkeypatch.setattr(grouped_products.GroupedProducts, "sum_calls", count)
    options = {"statistics_fraction": 1.0} | options
    ours = factors(build, layout, device, **options)
    assert len(counts) == 2
    monkeypatch.setattr(grouped_grams, "can_read", lambda *tensors: False)
    theirs = factors(build, layout, device, **options)
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert (found - theirs[name]).norm() <= 2e-5 * theirs[name].norm(), name


@on_kernels
def test_enough_rows_are_measured(device, monkeypatch):
    """With ``statistics_fraction=None``, and limits so low that layers of every kind are sampled."""
    for module in ("dkfac.layers.rows", "dkfac.capture.grouped_products"):
        monkeypatch.setattr(f"{module}.ROWS_PER_FEATURE", 2)
    monkeypatch.setattr("dkfac.layers.rows.ENOUGH_EXAMPLES", 1)

    def images(device, _):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(2))
        return model.to(device), torch.randn(4, 3, 16, 16).to(device)

    whole = factors(images, None, device, steps=6, statistics_fraction=1.0)
    some = factors(images, None, device, steps=6, statistics_fraction=None)
    for name, found in some.items():
        apart = (found - whole[name]).norm() / whole[name].norm()
        assert 1e-4 < apart < 0.5, name


def test_a_sample_keeps_enough_rows_and_examples():
    layer = type("Layer", (), {"spec": type("Spec", (), {"widest": 256}), "conv": None})()
    every = lambda rows, examples: Sample(adapts=True).of_call(layer, rows, examples).every  # noqa: E731
    assert [every(n * 8192, 1) for n in (0.5, 1, 2, 3, 4, 8, 100)] == [1, 1, 2, 2, 4, 8, 8]
    layer.conv = nn.Conv2d(1, 1, 1)
    assert [every(100 * 8192, examples) for examples in (16, 32, 64, 128, 256)] == [1, 2, 4, 8, 8]
    assert Sample(every=4).of_call(layer, 10, 1).every == 4


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")
