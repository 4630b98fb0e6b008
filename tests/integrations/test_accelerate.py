"""Accelerate's real ``Accelerator``: its optimizer is unwrapped, its checkpoints hold K-FAC's state."""

import pytest
import torch
from torch import nn

import dkfac

accelerate = pytest.importorskip("accelerate", reason="the extra dkfac[accelerate] is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own

EVERY_STEP = {"announce": False, "factor_interval": 1, "inverse_interval": 1}


def prepare(accumulation=1):
    getattr(accelerate.state.AcceleratorState, "_reset_state")(reset_partial_state=True)  # noqa: B009
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    options = EVERY_STEP | ({} if accumulation == 1 else {"accumulate": "mean"})
    kfac = dkfac.KFAC(model, optimizer, **options)
    accelerator.register_for_checkpointing(kfac)
    return accelerator, model, optimizer, kfac


def step(accelerator, model, optimizer, number, parts=1):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number)).double()
    for part in x.chunk(parts):
        with accelerator.accumulate(model):
            accelerator.backward((model(part) - part[:, :3]).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def test_training_resumes_bitwise_from_a_registered_state(tmp_path):
    accelerator, model, optimizer, _ = prepare()
    for number in range(6):
        if number == 3:
            accelerator.save_state(tmp_path)
        step(accelerator, model, optimizer, number)
    accelerator, again, optimizer, kfac = prepare()
    accelerator.load_state(tmp_path)
    assert kfac.metrics()["step"] == 3
    for number in range(3, 6):
        step(accelerator, again, optimizer, number)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_accumulated_batches_give_the_factors_of_the_whole_batch():
    found = []
    for parts in (1, 4):
        accelerator, model, optimizer, kfac = prepare(parts)
        step(accelerator, model, optimizer, 0, parts)
        assert kfac.metrics()["step"] == 1
        found.append(kfac.factors())
    for name, factors in found[0].items():
        for key, value in factors.items():
            torch.testing.assert_close(found[1][name][key], value, rtol=1e-9, atol=1e-12)
