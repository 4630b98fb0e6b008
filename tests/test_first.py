"""Where warm-eigen begins on a GPU: with iterations instead of a decomposition. The CPU is taken for one."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers_ranks import on_threads
from torch import nn

from dkfac import KFAC, first
from dkfac.ops import decompose
from dkfac.ops.together import renewed


def train(steps=1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 96), nn.GELU(), nn.Linear(96, 50), nn.GELU(), nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = {"solver": "warm-eigen", "factor_interval": 1, "inverse_interval": 4, "curvature": "adam-eigen"}
    kfac = KFAC(model, optimizer, announce=False, **(given | options))
    for _ in range(steps):
        x = torch.randn(300, 40) * torch.logspace(0, -2, 40)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :7].argmax(1))
        loss.backward()
        optimizer.step()
    return kfac, loss.item()


@pytest.fixture
def decompositions(monkeypatch):
    """The sizes that eigh is asked for."""
    found, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: found.append(matrix.shape[-1]) or eigh(matrix))
    monkeypatch.setitem(first.FIRST, "cpu", (20, 96))
    return found


def off_diagonal(factor, vectors):
    """How much of a factor, of the blocks that it is decomposed in, a basis leaves off the diagonal."""
    blocks = (vectors.abs() @ vectors.abs().mT) > 0
    turned = vectors.mT @ torch.where(blocks, factor, 0) @ vectors
    return float((turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))).norm() / turned.norm())


@pytest.mark.parametrize("together", [first.TOGETHER_BYTES, 1])
@pytest.mark.parametrize(("split_dim", "others"), [(None, [7, 97]), (48, [7])])
def test_bases_are_near_the_eigenvectors_and_eigh_is_asked_for_other_sizes_alone(
    decompositions, monkeypatch, split_dim, others, together
):
    """Factors of 41 and 96, 97 and 50, 51 and 7, or pieces of at most 48 of them."""
    monkeypatch.setattr(first, "TOGETHER_BYTES", together)
    kfac, _ = train(split_dim=split_dim)
    assert sorted(decompositions) == others
    for name, key in (("0", "A"), ("0", "G"), ("2", "A"), ("2", "G"), ("4", "A")):
        state = kfac._runner.states[name]
        factor, vectors = state.running[key].mean(), state.decompositions[key].vectors
        assert decompose.is_orthonormal(vectors)
        assert off_diagonal(factor, vectors) < 0.05
    assert kfac.metrics()["fallbacks_float64"] == 0


def test_ranks_decompose_each_factor_alone(decompositions):
    """Several may decompose the same one, and must find the same."""
    on_threads(2, lambda rank: train()[1])
    assert sorted(set(decompositions)) == [7, 41, 50, 51, 96, 97]


def test_training_goes_as_it_does_from_eigenvectors(decompositions, monkeypatch):
    _, loss = train(40)
    assert decompositions == [97, 7]
    monkeypatch.delitem(first.FIRST, "cpu")
    _, expected = train(40)
    assert loss == pytest.approx(expected, rel=0.03)


def test_other_solvers_and_devices_decompose(decompositions, monkeypatch):
    train(solver="eigen")
    assert len(decompositions) == 6
    decompositions.clear()
    monkeypatch.delitem(first.FIRST, "cpu")
    train()
    assert len(decompositions) == 6


def test_what_does_not_become_orthonormal_is_decomposed(decompositions, monkeypatch):
    def spoiled(jobs, times):
        return [(old, torch.zeros(len(factor), dtype=torch.bool)) for factor, old, *_ in jobs]

    monkeypatch.setattr(first, "renewed", spoiled)
    kfac, loss = train()
    assert len(decompositions) == 6
    assert kfac.metrics()["fallbacks_float64"] == 0
    assert math.isfinite(loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("split_dim", [None, 400])
def test_on_a_gpu_bases_are_near_the_eigenvectors(split_dim):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 700), nn.GELU(), nn.Linear(700, 300), nn.GELU(), nn.Linear(300, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    kfac = KFAC(model, optimizer, announce=False, split_dim=split_dim)
    x = torch.randn(2000, 200, device="cuda") * torch.logspace(0, -2, 200, device="cuda")
    F.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    optimizer.step()
    for state in kfac._runner.states.values():
        for key, found in state.decompositions.items():
            assert decompose.is_orthonormal(found.vectors)
            assert off_diagonal(state.running[key].mean(), found.vectors) < 0.05


def test_of_padded_factors_without_rank_no_direction_is_lost():
    torch.manual_seed(0)
    rows = [torch.randn(1, 5, size) for size in (32, 33, 31) * 4]
    factors = [row.mT @ row for row in rows]
    jobs = [
        (f, decompose.Eigen(torch.eye(len(f[0]))[None], f[0].diagonal()[None]), torch.zeros(1), ()) for f in factors
    ]
    for factor, (found, sound) in zip(factors, renewed(jobs, times=8), strict=True):
        assert sound.all()
        assert decompose.is_orthonormal(found.vectors)
        assert off_diagonal(factor, found.vectors) < 0.05
