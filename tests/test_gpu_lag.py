"""inverse_lag on a GPU: the same steps on a stream, on CPU threads and in the step, and none of them early or late."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dkfac import KFAC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 30


def train(backend, steps=STEPS, lag=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    ).to("cuda", torch.float64)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    given = {"inverse_lag": lag, "inverse_backend": backend} if lag else {}
    rhythm = {"factor_interval": 1, "inverse_interval": 5, "warmup_refresh": None, "announce": False}
    kfac = KFAC(model, optimizer, damping=1e-2, **(given | rhythm | options))
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 3, 16, 16, generator=generator, device="cuda", dtype=torch.float64)
        y = torch.randint(10, (16,), generator=generator, device="cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), kfac


@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
def test_back_ends_take_the_same_steps(solver):
    inline, _ = train("inline", solver=solver)
    without, _ = train("inline", lag=0, solver=solver)
    assert (inline - without).norm() > 1e-6 * without.norm()
    for backend in ("stream", "threads"):
        found, kfac = train(backend, solver=solver)
        assert (found - inline).norm() <= 1e-7 * inline.norm(), backend
        assert kfac.metrics()["refreshes"] == 6


def test_a_stream_is_bitwise_what_the_step_itself_computes():
    assert torch.equal(train("stream")[0], train("inline")[0])


def test_it_is_chosen_by_the_users_precision():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        _, kfac = train("auto")
        assert kfac._runner.later.rounds
    finally:
        torch.set_float32_matmul_precision(before)
    _, kfac = train("auto")
    assert not kfac._runner.later.rounds
