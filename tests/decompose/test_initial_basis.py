"""Where warm-eigen begins on a GPU: with iterations instead of a decomposition. The CPU is taken for one."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_parity import layer_states
from helpers_ranks import on_threads
from helpers_training import LOCK
from torch import nn

from dkfac import KFAC
from dkfac.decompose import initial_basis
from dkfac.ops import batches, decompose
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
    monkeypatch.setitem(initial_basis.FIRST, "cpu", (20, 96))
    return found


def off_diagonal(factor, vectors):
    """How much of a factor, of the blocks that it is decomposed in, a basis leaves off the diagonal."""
    blocks = (vectors.abs() @ vectors.abs().mT) > 0
    turned = vectors.mT @ torch.where(blocks, factor, 0) @ vectors
    return float((turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))).norm() / turned.norm())


@pytest.mark.parametrize("together", [batches.SOLVE_BYTES, 1])
@pytest.mark.parametrize(("block_dim", "others"), [(None, [7, 97]), (48, [7])])
def test_bases_are_near_the_eigenvectors_and_eigh_is_asked_for_other_sizes_alone(
    decompositions, monkeypatch, block_dim, others, together
):
    """Factors of 41 and 96, 97 and 50, 51 and 7, or pieces of at most 48 of them."""
    monkeypatch.setattr(batches, "SOLVE_BYTES", together)
    kfac, _ = train(block_dim=block_dim)
    assert sorted(decompositions) == others
    for name, key in (("0", "A"), ("0", "G"), ("2", "A"), ("2", "G"), ("4", "A")):
        state = layer_states(kfac)[name]
        factor, vectors = state.running[key].mean(), state.decompositions[key].vectors
        assert decompose.is_orthonormal(vectors)
        assert off_diagonal(factor, vectors) < 0.05
    assert kfac.metrics()["fallbacks_float64"] == 0


def train_on_a_rank(rank, options, sizes, steps, dtype):
    with LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)))
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"solver": "warm-eigen", "factor_interval": 1, "inverse_interval": 5, "damping": 1e-3, "announce": False}
    KFAC(model, optimizer, **(given | options))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(steps):
        x = torch.randn(480, sizes[0], generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
        own = x.chunk(world_size)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(own), own[:, : sizes[-1]].argmax(1)).backward()
        for p in model.parameters() if world_size > 1 else []:
            dist.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("curvature", ["kfac", "adam-eigen"])
@pytest.mark.parametrize("strategy", ["spd", "replicated", "comm-opt"])
def test_ranks_find_the_same_to_the_bit(decompositions, strategy, curvature):
    """Some decompose the same factors, beside others of their own."""
    options = {"strategy": strategy, "curvature": curvature}
    sizes = [40, 43, 45, 47, 49, 51, 48, 44, 10]
    ranks = on_threads(4, train_on_a_rank, options, sizes, 6, torch.float32)
    assert set(decompositions) == {10}
    for other in ranks[1:]:
        assert all(torch.equal(p, q) for p, q in zip(ranks[0], other, strict=True))


@pytest.mark.parametrize("strategy", ["spd", "replicated", "comm-opt"])
def test_the_number_of_ranks_changes_nothing(decompositions, strategy):
    sizes = [44, 46, 48, 45, 10]
    alone = train_on_a_rank(0, {"curvature": "kfac"}, sizes, 10, torch.float64)
    options = {"curvature": "kfac", "strategy": strategy}
    (several, _) = on_threads(2, train_on_a_rank, options, sizes, 10, torch.float64)
    for p, q in zip(alone, several, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
    assert set(decompositions) == {10}


def test_an_error_of_a_solver_library_ends_nothing(decompositions, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("cusolver error")

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)
    _, loss = train()
    assert len(decompositions) == 6
    assert math.isfinite(loss)


@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize(("size", "rows"), [(768, 384), pytest.param(1000, 500, marks=pytest.mark.slow)])
def test_large_factors_without_rank_become_orthonormal(size, rows, rectified):
    torch.manual_seed(0)
    x = torch.randn(rows, size)
    x = torch.relu(x) if rectified else x
    factor = (x.mT @ x / rows)[None]
    job = (factor, decompose.Eigen(torch.eye(size)[None], factor[0].diagonal()[None]), torch.zeros(1))
    ((_, sound),) = renewed([job], times=initial_basis.ITERATIONS)
    assert sound.all()


def test_training_goes_as_it_does_from_eigenvectors(decompositions, monkeypatch):
    _, loss = train(40)
    assert decompositions == [97, 7]
    monkeypatch.delitem(initial_basis.FIRST, "cpu")
    _, expected = train(40)
    assert loss == pytest.approx(expected, rel=0.03)


def test_other_solvers_and_devices_decompose(decompositions, monkeypatch):
    train(solver="eigen")
    assert len(decompositions) == 6
    decompositions.clear()
    monkeypatch.delitem(initial_basis.FIRST, "cpu")
    train()
    assert len(decompositions) == 6


def test_what_does_not_become_orthonormal_is_decomposed(decompositions, monkeypatch):
    def spoiled(jobs, times):
        return [(old, torch.zeros(len(factor), dtype=torch.bool)) for factor, old, *_ in jobs]

    monkeypatch.setattr(initial_basis, "renewed", spoiled)
    kfac, loss = train()
    assert len(decompositions) == 6
    assert kfac.metrics()["fallbacks_float64"] == 0
    assert math.isfinite(loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("block_dim", [None, 400])
def test_on_a_gpu_bases_are_near_the_eigenvectors(block_dim):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 700), nn.GELU(), nn.Linear(700, 300), nn.GELU(), nn.Linear(300, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    kfac = KFAC(model, optimizer, announce=False, block_dim=block_dim)
    x = torch.randn(2000, 200, device="cuda") * torch.logspace(0, -2, 200, device="cuda")
    F.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    optimizer.step()
    for state in layer_states(kfac).values():
        for key, found in state.decompositions.items():
            assert decompose.is_orthonormal(found.vectors)
            assert off_diagonal(state.running[key].mean(), found.vectors) < 0.05


def test_of_padded_factors_without_rank_no_direction_is_lost():
    torch.manual_seed(0)
    rows = [torch.randn(1, 5, size) for size in (32, 33, 31) * 4]
    factors = [row.mT @ row for row in rows]
    jobs = [(f, decompose.Eigen(torch.eye(len(f[0]))[None], f[0].diagonal()[None]), torch.zeros(1)) for f in factors]
    for factor, (found, sound) in zip(factors, renewed(jobs, times=8), strict=True):
        assert sound.all()
        assert decompose.is_orthonormal(found.vectors)
        assert off_diagonal(factor, found.vectors) < 0.05
