"""A refresh by Triton kernels goes as one by torch."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted
from helpers_parity import layer_states
from torch import nn

from dkfac import KFAC
from dkfac.ops import carry, cholesky_qr, grouped_grams, kernels, together, traces
from dkfac.ops.precondition import rotate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-3),
}


def train(optimizer, monkeypatch, *, with_kernels):
    """Train a few steps, with a refresh in each other; return the model, K-FAC and how often each kernel ran."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, bias=False), nn.Tanh(), nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(72, 15), nn.Tanh(),
        nn.Linear(15, 24), nn.Tanh(), nn.Linear(24, 8),
    )  # fmt: skip
    opt, calls = OPTIMIZERS[optimizer](model.parameters()), dict.fromkeys(("carry", "cholesky_qr", "traces"), 0)
    options = {"factor_interval": 1, "inverse_interval": 2, "warmup_refresh": None, "factor_decay": 0.8}
    with monkeypatch.context() as patch:
        patch.setattr(grouped_grams, "can_read", lambda *_: False)  # factors are the same, to the bit
        if with_kernels:
            patch.setattr(together, "aligned", lambda size, _: size + -size % 8)
            patch.setitem(together.ANOTHER_BATCH, "cpu", 1e4)
        else:
            patch.setattr(kernels, "usable", lambda *_: False)

        def spy(name, module, function):
            real = getattr(module, function)
            patch.setattr(module, function, lambda *a, **k: calls.update({name: calls[name] + 1}) or real(*a, **k))

        spy("carry", carry, "carry_")
        spy("traces", traces, "traces")
        real = cholesky_qr.orthonormalized
        patch.setattr(
            cholesky_qr,
            "orthonormalized",
            lambda images, shifts: calls.update(cholesky_qr=calls["cholesky_qr"] + len(images)) or real(images, shifts),
        )
        kfac = KFAC(model, opt, announce=False, block_dim=64, solver="warm-eigen", **options)
        for _ in range(7):
            # More examples than any block has features: a direction without curvature depends on rounding errors.
            x = torch.randn(48, 8, 5, 5)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :, 0, 0].argmax(1)).backward()
            opt.step()
    return model, kfac, calls


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_refresh_by_kernels_interpreted(optimizer, monkeypatch):
    ours, kfac, calls = train(optimizer, monkeypatch, with_kernels=True)
    theirs, other, none = train(optimizer, monkeypatch, with_kernels=False)
    assert all(calls.values())
    assert not any(none.values())
    assert kfac.metrics()["repaired_factors"] == other.metrics()["repaired_factors"] == 0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)
    for name, state in layer_states(kfac).items():
        its = layer_states(other)[name]
        for key, decomposition in state.decompositions.items():
            q, again = decomposition.vectors, its.decompositions[key]
            assert float((q.mT @ q - torch.eye(q.shape[-1])).abs().max()) < 1e-5
            scale = float(again.values.max())
            torch.testing.assert_close(decomposition.values, again.values, rtol=0, atol=1e-3 * scale)
        # In the basis of the weights: directions of little curvature depend on rounding.
        momenta = [in_weights(each) for each in (state, its)]
        assert float((momenta[0] - momenta[1]).norm() / momenta[1].norm()) < 2e-3


def in_weights(state):
    """Return a layer's momentum in the basis of the weights."""
    value = state.momentum.value
    return rotate(value, state.basis(), back=True) if state.momentum_is_rotated else value


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_of_a_refresh_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")
