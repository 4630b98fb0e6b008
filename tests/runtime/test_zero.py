"""torch's ZeroRedundancyOptimizer, which steps each parameter on one rank: right, or refused before anything starts."""

import warnings

import pytest
import torch
from helpers_parity import EXACT, average_in_one, batch, build, mean_loss, part, weights_of
from helpers_ranks import on_processes
from helpers_settings import arranged

from dkfac import KFAC

STEPS = 10


class Measured(torch.optim.AdamW):
    """Steps as AdamW does, but its update is measured, as that of an optimizer that K-FAC does not know."""

    def step(self, closure=None):
        return super().step(closure)


def zero(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **options)


def train(rank, kind, **options):
    model = build("deep")
    how = {"lr": 1e-2, "eps": 1e-3}
    optimizer = zero(model, **how) if kind is None else kind(model.parameters(), **how)
    with KFAC(model, optimizer, **arranged(EXACT | options)):
        for step in range(STEPS):
            x, y = (part(t, rank, 2) for t in batch(step))
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            average_in_one(model)
            optimizer.step()
    return weights_of(model)


def on_rank(rank):
    far = {}
    for curvature, kind in (("adaptive", Measured), ("kfac", torch.optim.AdamW)):
        for strategy in ("comm-opt", "sharded"):
            options = {"curvature": curvature, "strategy": strategy}
            pairs = zip(train(rank, kind, **options), train(rank, None, **options), strict=True)
            far[curvature, strategy] = max(float((p - q).abs().max()) for p, q in pairs)
    model = build("deep")
    with pytest.raises(ValueError, match='share="weights" with ZeroRedundancyOptimizer: both decide which rank'):
        KFAC(model, zero(model, lr=0.1), strategy="sharded", share="weights", announce=False)
    with pytest.raises(ValueError, match=r"overlap_with_ddp=True\) steps during the backward pass"):
        KFAC(model, zero(model, lr=0.1, overlap_with_ddp=True), announce=False)
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer was given"):
        KFAC(model, zero(model, lr=0.1), curvature="adam-eigen", announce=False)
    KFAC(model, zero(model, lr=0.1), announce=False).close()  # nothing was left behind
    return far


def test_zero_takes_the_steps_of_the_optimizer_inside_or_is_refused():
    for far in on_processes(2, on_rank):
        assert far == dict.fromkeys(far, 0.0)
        assert len(far) == 4
