"""R07, R08: the guarded refresh never raises, never returns a non-finite result, and counts what it did."""

import itertools
import math
import random

import pytest
import torch
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.decompose.fallback import OUTCOMES, refresh
from dkfac.ops import decompose
from dkfac.ops.decompose import Eigen, Inverse, is_orthonormal

SOLVERS = ["eigen", "cholesky", "warm-eigen"]
LinAlgError = torch.linalg.LinAlgError


def gram(dim: int, rank: int, blocks: int, generator: torch.Generator) -> torch.Tensor:
    rows = torch.randn(blocks, rank, dim, generator=generator, dtype=torch.float64)
    return rows.mT @ rows / rank


def make_factor(kind: str, dim: int, blocks: int, form: str, generator: torch.Generator) -> torch.Tensor:
    """A float32 factor of a difficult kind, ``[B, D, D]`` or ``[B, D]``."""
    full = gram(dim, dim + 2, blocks, generator)
    scale = 10 ** (30 + 8 * torch.rand((), generator=generator, dtype=torch.float64))
    if kind.startswith("condition"):
        q = torch.linalg.eigh(full).eigenvectors
        values = torch.logspace(0, -int(kind.removeprefix("condition")), dim, dtype=torch.float64)
        made = (q * values) @ q.mT
    else:
        made = {
            "zero": lambda: torch.zeros_like(full),
            "rank1": lambda: gram(dim, 1, blocks, generator),
            "denormal": lambda: full * 1e-42,
            "huge": lambda: full / full.abs().amax() * scale,
            "largest": lambda: torch.full_like(full, 3.4e38),
            "non-symmetric": lambda: torch.randn(full.shape, generator=generator, dtype=torch.float64),
            "negative": lambda: -full,
            "identity": lambda: torch.eye(dim, dtype=torch.float64).expand(full.shape),
            "nan": lambda: full.clone().index_fill_(-1, torch.tensor([dim - 1]), math.nan),
            "inf": lambda: full.clone().index_fill_(-1, torch.tensor([0]), math.inf),
        }[kind]()
    made = made.to(torch.float32)
    return made.diagonal(dim1=-2, dim2=-1).contiguous() if form == "diagonal" else made.contiguous()


KINDS = ["zero", "rank1", "denormal", "huge", "largest", "non-symmetric", "negative", "identity", "nan", "inf"]
KINDS += [f"condition{power}" for power in (6, 8, 10, 12, 14)]


def previous(solver: str, factor: torch.Tensor) -> Eigen | Inverse:
    """A sound decomposition of the same shape, such as an earlier refresh leaves behind."""
    ones = torch.ones(factor.shape[:2])
    if factor.ndim == 2:
        return Inverse(ones) if solver == "cholesky" else Eigen(None, ones)
    eye = torch.eye(factor.shape[-1]).repeat(factor.shape[0], 1, 1)
    return Inverse(eye) if solver == "cholesky" else Eigen(eye, ones)


def check(factor: torch.Tensor, old: Eigen | Inverse | None, solver: str, shift: torch.Tensor) -> None:
    kept = factor.clone()
    found, rung = refresh(factor, old, solver, shift)
    assert torch.equal(factor.nan_to_num(7.0), kept.nan_to_num(7.0)), "the factor was changed"
    assert rung in OUTCOMES
    if not factor.isfinite().all():
        assert rung == ("raw" if old is None else "kept")
    if rung in ("kept", "raw"):
        assert found is old
        assert (rung == "raw") == (old is None)
    if found is None:
        return
    for name, tensor in found.tensors().items():
        assert tensor.isfinite().all(), name
        assert tensor.dtype == factor.dtype
        assert tensor.is_contiguous()
    if isinstance(found, Eigen):
        assert (found.values >= 0).all()
        assert is_orthonormal(found.vectors)


@pytest.mark.parametrize("form", ["dense", "diagonal"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", KINDS)
def test_difficult_factors_give_a_finite_result_or_the_previous_one(kind, solver, form):
    generator = torch.Generator().manual_seed(1)
    for dim, blocks, damping, first in itertools.product([1, 2, 7], [1, 3], [0.0, 1e-3], [True, False]):
        factor = make_factor(kind, dim, blocks, form, generator)
        check(factor, None if first else previous(solver, factor), solver, torch.full((blocks,), damping))


def test_a_thousand_generated_factors_give_no_exception_and_nothing_non_finite():
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(1000):
        solver, form = rng.choice(SOLVERS), rng.choice(["dense", "diagonal"])
        factor = make_factor(rng.choice(KINDS), rng.randint(1, 12), rng.choice([1, 3]), form, generator)
        factor = factor * 10 ** rng.uniform(-6, 0)
        old = rng.choice([None, previous("eigen", factor), previous("cholesky", factor)])
        shift = torch.full(factor.shape[:1], rng.choice([0.0, 1e-30, 1e-4, 1.0, 1e30, math.inf, math.nan]))
        check(factor, old, solver, shift)


@pytest.mark.parametrize("solver", ["eigen", "warm-eigen"])
def test_a_sound_factor_is_reconstructed_from_its_decomposition(solver):
    factor = gram(6, 9, 3, torch.Generator().manual_seed(0))
    found, rung = refresh(factor, None, solver, torch.zeros(3))
    assert rung == "ok"
    torch.testing.assert_close((found.vectors * found.values.unsqueeze(-2)) @ found.vectors.mT, factor)


# --- forced failures -----------------------------------------------------------------------------------------


class Sabotage:
    """Replaces a torch.linalg function; ``spoil(call number, factor)`` returns what to do to that call."""

    def __init__(self, monkeypatch, name, spoil):
        self.calls, self.original, self.spoil = 0, getattr(torch.linalg, name), spoil
        monkeypatch.setattr(torch.linalg, name, self)

    def __call__(self, matrix, *args, **kwargs):
        self.calls += 1
        return self.spoil(self.calls, matrix, lambda: self.original(matrix, *args, **kwargs))


def fail(_call, _matrix, _original):
    raise LinAlgError("linalg.eigh: failed to converge")


def device_error(_call, _matrix, _original):
    raise RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSsyevd(...)`")


def return_nan(_call, _matrix, original):
    values, vectors = original()
    return values, vectors * math.nan


def return_skewed(_call, _matrix, original):
    values, vectors = original()
    return values, vectors * 1.01


def not_definite(_call, matrix, original):
    lower, info = original()
    return lower, torch.ones_like(info)


def only_float32(how):
    return lambda call, matrix, original: how(call, matrix, original) if matrix.dtype == torch.float32 else original()


LIES = [fail, device_error, return_nan, return_skewed]


@pytest.mark.parametrize("how", LIES)
def test_a_float32_failure_is_repaired_in_float64(how, monkeypatch):
    factor = gram(4, 9, 2, torch.Generator().manual_seed(0)).float()
    Sabotage(monkeypatch, "eigh", only_float32(how))
    found, rung = refresh(factor, None, "eigen", torch.zeros(2))
    assert rung == "float64"
    torch.testing.assert_close((found.vectors * found.values.unsqueeze(-2)) @ found.vectors.mT, factor)


@pytest.mark.parametrize("how", LIES)
def test_an_eigh_that_never_works_gives_way_to_a_more_damped_inverse(how, monkeypatch):
    factor = gram(4, 9, 2, torch.Generator().manual_seed(0)).float()
    Sabotage(monkeypatch, "eigh", how)
    found, rung = refresh(factor, None, "eigen", torch.full((2,), 1e-2))
    assert rung == "cholesky"
    wanted = torch.linalg.inv(factor.double() + 0.1 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(found.matrix, wanted.float())


def test_more_damping_is_tried_in_growing_amounts(monkeypatch):
    factor = gram(4, 9, 1, torch.Generator().manual_seed(0)).float()
    Sabotage(monkeypatch, "eigh", fail)
    spoil = lambda call, matrix, original: original() if call > 2 else not_definite(call, matrix, original)  # noqa: E731
    attempts = Sabotage(monkeypatch, "cholesky_ex", spoil)
    found, rung = refresh(factor, None, "eigen", torch.full((1,), 1e-2))
    assert (rung, attempts.calls) == ("cholesky", 3)
    wanted = torch.linalg.inv(factor.double() + 1e3 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(found.matrix, wanted.float())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("solver", SOLVERS)
def test_when_nothing_works_the_previous_decomposition_stays(solver, first, monkeypatch):
    factor = gram(4, 9, 2, torch.Generator().manual_seed(0)).float()
    old = None if first else previous(solver, factor)
    for name in ("eigh", "qr"):
        Sabotage(monkeypatch, name, fail)
    Sabotage(monkeypatch, "cholesky_ex", not_definite)
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda *a, **k: torch.full_like(factor, math.nan))
    found, rung = refresh(factor, old, solver, torch.zeros(2))
    assert found is old
    assert rung == ("raw" if first else "kept")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0.2, 1.0])
@pytest.mark.parametrize(("dim", "turned"), [(60, 0.0), (60, 1e3), (600, 0.0), (600, 0.002)])
def test_a_warm_step_is_orthonormal_whatever_the_factor_and_however_it_turned(dtype, rank, dim, turned):
    """Factors of low rank and of ten orders of magnitude; from their own basis, one near it, and any other."""
    rank = round(rank * dim)
    torch.manual_seed(rank)
    rows = torch.randn(dim, dim, dtype=torch.float64) * torch.logspace(0, -5, dim, dtype=torch.float64)
    factor = (rows[:rank].mT @ rows[:rank])[None].to(dtype)
    old = decompose.eigen(factor)
    if turned:
        old = decompose.Eigen(
            torch.linalg.qr(old.vectors + turned * torch.randn(1, dim, dim, dtype=dtype)).Q, old.values
        )
    found = decompose.warm_step(factor, old)
    off = found.vectors.mT @ found.vectors - torch.eye(dim, dtype=dtype)
    assert float(off.abs().max()) < (1e-5 if dtype == torch.float32 else 1e-12)
    order = old.values.argsort(descending=True)
    exact = torch.linalg.qr(factor.double() @ old.vectors.double()[..., order[0]]).Q
    overlap = (found.vectors.double() * exact).sum(-2).abs()[0, :9]  # what has more than rounding
    assert float(overlap.min()) > (0.98 if dtype == torch.float32 else 1 - 1e-6)


def test_a_warm_refresh_of_a_small_transformers_factors_is_not_repaired():
    """Activations behind a GELU have little rank at first, and turn fast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options = {"solver": "warm-eigen", "factor_interval": 1, "inverse_interval": 4, "factor_decay": 0.8}
    kfac = KFAC(model, optimizer, announce=False, curvature="adam-eigen", **arranged(options))
    for _ in range(40):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    assert kfac.metrics()["repaired_factors"] == 0
    assert kfac.metrics()["refreshes"] > 9
