"""Where TF32 would spoil a preconditioned gradient it is not used; what it does is acted here by rounding."""

import pytest
import torch
from torch import nn

import dkfac
from dkfac.ops.decompose import damped_inverse, eigen
from dkfac.ops.precondition import factored_damping, precondition_eigen, precondition_inverse, tf32_error


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To ten bits of mantissa."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class Rounding(torch.utils._python_dispatch.TorchDispatchMode):
    """Products of matrices as a GPU makes them with TF32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            args = tuple(rounded(a) for a in args)
        return func(*args, **(kwargs or {}))


def problem(mean, inputs, outputs, seed=0):
    """Return factors and the gradient of a layer that sees rectified inputs with a mean."""
    torch.manual_seed(seed)
    rows = 3000
    x = torch.relu(torch.randn(rows, 48) @ torch.randn(48, inputs) * 0.04 + mean).double()
    g = (torch.randn(rows, 24) @ torch.randn(24, outputs) * 1e-3 + torch.randn(rows, outputs) * 1e-4).double()
    factors = {"A": (x.mT @ x / rows)[None], "G": (g.mT @ g / rows)[None]}
    return factors, (g.mT @ x / rows)[None]


@pytest.mark.parametrize("solver", [eigen, damped_inverse])
@pytest.mark.parametrize("share", [1e-3, 1e-1, 10.0])
@pytest.mark.parametrize("mean", [-0.3, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("shape", [(300, 64), (64, 200)])
def test_the_error_is_foreseen(shape, mean, share, solver):
    factors, gradient = problem(mean, *shape)
    means = {key: f.diagonal(dim1=1, dim2=2).mean(1) for key, f in factors.items()}
    damping = share * means["A"] * means["G"]
    shifts = factored_damping(means, damping)

    def solve(dtype):
        if solver is eigen:
            found = {key: eigen(factor.to(dtype)) for key, factor in factors.items()}
        else:
            found = {key: damped_inverse(factor.to(dtype), shifts[key].to(dtype)) for key, factor in factors.items()}
        return found

    def apply(found, dtype):
        if solver is eigen:
            return precondition_eigen(gradient.to(dtype), found, damping=damping.to(dtype).view(-1, 1, 1))
        return precondition_inverse(gradient.to(dtype), found)

    exact, found = apply(solve(torch.float64), torch.float64), solve(torch.float32)
    with Rounding():
        error = float((apply(found, torch.float32) - exact).norm() / exact.norm())
    foreseen = float(tf32_error(found, {key: m.float() for key, m in means.items()}, damping.float(), gradient.shape))
    assert foreseen >= 0.3 * error
    assert foreseen <= 30 * error + 1e-3


@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
def test_a_layer_is_delicate_as_long_as_its_damping_is_small(solver):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50, bias=False), nn.Tanh(), nn.Linear(50, 20, bias=False))
    options = {"damping": lambda step: 1e-4 if step < 8 else 1e4, "solver": solver, "tf32": True}
    options |= {"factor_interval": 1, "inverse_interval": 4, "warmup_refresh": None, "damping_mode": "relative"}
    with dkfac.KFAC(model, announce=False, **options) as kfac:
        seen = []
        for _ in range(16):
            model.zero_grad()
            x = torch.relu(torch.randn(64, 12) @ torch.randn(12, 60) * 0.1 + 2)
            model(x).square().sum(1).mean().backward()
            kfac.step()
            seen.append(kfac.report()["delicate_layers"])
        assert "0" in seen[0]
        assert seen[-1] == []


def test_a_run_that_goes_on_knows_its_delicate_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50, bias=False), nn.Tanh(), nn.Linear(50, 20, bias=False))
    options = {"damping": 1e-4, "damping_mode": "relative", "tf32": True, "announce": False}
    with dkfac.KFAC(model, **options) as kfac:
        model(torch.relu(torch.randn(64, 60) * 0.1 + 2)).square().sum(1).mean().backward()
        kfac.step()
        saved, seen = kfac.state_dict(), kfac.report()["delicate_layers"]
    assert seen
    with dkfac.KFAC(model, **options) as other:
        other.load_state_dict(saved)
        assert other.report()["delicate_layers"] == seen
