"""inverse_lag on a GPU: the same steps on a stream, on CPU threads and in the step, and none of them early or late."""

import pytest
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 30


@pytest.fixture(autouse=True)
def deterministic():
    """Convolutions whose gradients are the same in every run: what differs then is K-FAC's."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = before


def train(backend, steps=STEPS, lag=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).to("cuda", torch.float64)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    given = {"inverse_lag": lag, "inverse_backend": backend} if lag else {}
    rhythm = {"factor_interval": 1, "inverse_interval": 5, "warmup_refresh": None, "announce": False}
    rhythm |= {"solver": "eigen", "tf32": False, "cuda_graph": False, "spread_refresh": 1}
    kfac = KFAC(model, optimizer, damping=1e-2, **arranged(given | rhythm | options))
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 3, 16, 16, generator=generator, device="cuda", dtype=torch.float64)
        y = torch.randint(10, (16,), generator=generator, device="cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), kfac


# Bases of eigenvalues that are nearly alike are a matter of rounding: 1e-15 in the weights becomes 1e-6 in 30 steps.
@pytest.mark.parametrize(("solver", "tolerance"), [("eigen", 1e-12), ("cholesky", 1e-12), ("warm-eigen", 1e-4)])
def test_back_ends_take_the_same_steps(solver, tolerance):
    inline, _ = train("inline", solver=solver)
    for backend in ("stream", "threads"):
        found, kfac = train(backend, solver=solver)
        assert (found - inline).norm() <= tolerance * inline.norm(), backend
        assert kfac.metrics()["refreshes"] == 6
    for lag in (0, 2, 4):  # what a step early or late would be
        assert (train("inline", lag=lag, solver=solver)[0] - inline).norm() > 20 * tolerance * inline.norm(), lag


def test_it_is_chosen_by_the_users_precision():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        _, kfac = train("auto")
        assert kfac._engine.refresher.async_refresh.rounds
    finally:
        torch.set_float32_matmul_precision(before)
    _, kfac = train("auto")
    assert not kfac._engine.refresher.async_refresh.rounds
