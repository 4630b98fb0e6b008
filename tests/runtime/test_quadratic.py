"""quadratic_step: length and momentum where the quadratic model is least, against dense matrices."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_ranks import on_processes
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from dkfac import KFAC, LevenbergMarquardt
from dkfac.config.settings import Settings
from dkfac.runtime.quadratic import check_settings, solve

PLAIN = {"announce": False, "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1, "rescale": "none"}
N = 12


def targets(loss, out):
    generator = torch.Generator().manual_seed(5)
    if loss == "cross-entropy":
        return torch.randint(out, (N,), generator=generator)
    y = torch.rand(N, out, generator=generator, dtype=torch.float64)
    return y.round() if loss == "bernoulli" else y


LOSSES = {
    "cross-entropy": F.cross_entropy,
    "bernoulli": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3, bias=False)).double()


def inputs():
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def dense(model, x, y, loss):
    """Return the Gauss-Newton matrix of the mean loss for all parameters."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def output(vector):
        parts = vector.split([s.numel() for s in shapes])
        new = {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, new, (x,)).flatten()

    theta = flat(model.parameters())
    z = output(theta).detach()
    J, H = jacobian(output, theta), hessian(lambda z: LOSSES[loss](z.view(N, -1), y), z)
    return J.T @ H @ J


@pytest.mark.parametrize("loss", LOSSES)
def test_the_moves_are_those_the_dense_model_is_least_at(loss):
    model, x, y = net(), inputs(), targets(loss, 3)
    kfac = KFAC(model, damping=0.05, fisher_loss=loss, **PLAIN)
    probe = net()
    twin = KFAC(probe, damping=0.05, **PLAIN)

    def closure():
        z = model(x)
        return LOSSES[loss](z, y), z

    last = torch.zeros_like(flat(model.parameters()))
    for _ in range(4):
        probe.load_state_dict(model.state_dict())
        for network in (model, probe):
            network.zero_grad()
            LOSSES[loss](network(x), y).backward()
        raw = flat(p.grad for p in probe.parameters())
        twin.step()  # the same statistics: the same direction
        direction = -flat(p.grad for p in probe.parameters())
        matrix = dense(model, x, y, loss) + 0.05 * torch.eye(len(raw), dtype=torch.float64)
        start = flat(model.parameters())
        kfac.quadratic_step(closure)
        moved = flat(model.parameters()) - start
        basis = torch.stack([direction, last], 1) if last.any() else direction[:, None]
        best = basis @ torch.linalg.solve(basis.T @ matrix @ basis, -basis.T @ raw)
        torch.testing.assert_close(moved, best, rtol=1e-8, atol=1e-10)
        last = moved


def test_a_quadratic_is_solved_at_once_without_damping():
    x, y = inputs(), targets("mse", 2)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    kfac = KFAC(model, damping=1e-12, fisher="exact", fisher_loss="mse", **PLAIN)
    F.mse_loss(model(x), y).backward()
    kfac.quadratic_step(lambda: (F.mse_loss(model(x), y), model(x)))
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    assert max(float(p.grad.abs().max()) for p in model.parameters()) < 1e-8


def test_momentum_survives_a_checkpoint_and_buffers_the_looks():
    def start():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
        lm = LevenbergMarquardt(0.1, every=2)
        return model, KFAC(model, damping=lm, fisher_loss="cross-entropy", **PLAIN), lm

    x, y = inputs(), targets("cross-entropy", 3)

    def take(model, kfac, steps):
        for _ in range(steps):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            seen = [b.clone() for b in model.buffers()]
            kfac.quadratic_step(lambda: (F.cross_entropy(z := model(x), y), z))
            assert all(torch.equal(a, b) for a, b in zip(seen, model.buffers(), strict=True))

    straight, kfac, lm = start()
    take(straight, kfac, 6)
    first, before, _ = start()
    take(first, before, 3)
    again, after, other = start()
    again.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    take(again, after, 3)
    assert torch.equal(flat(straight.parameters()), flat(again.parameters()))
    assert other.value == lm.value


def on_rank(rank, world_size):
    x, y = (t.chunk(world_size)[rank] for t in (inputs(), targets("bernoulli", 3)))
    model = net()
    kfac = KFAC(model, damping=LevenbergMarquardt(0.05, every=2), fisher_loss="bernoulli", **PLAIN)
    for _ in range(5):
        model.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        if world_size > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world_size
        kfac.quadratic_step(lambda: (F.binary_cross_entropy_with_logits(z := model(x), y), z))
    return flat(model.parameters()), kfac.settings.damping.value


def test_is_the_same_on_several_ranks():
    """Processes: torch's forward mode is one for all threads of a process."""
    weights, damping = on_rank(0, 1)
    for found, value in on_processes(2, on_rank, 2):
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-9)
        assert value == pytest.approx(damping)


def test_where_the_last_move_adds_nothing_the_direction_alone_is_used():
    assert solve((2.0, 0.0, 0.0), (-4.0, 0.0)) == (2.0, 0.0)
    assert solve((2.0, 2.0, 2.0), (-4.0, -4.0)) == (2.0, 0.0)
    assert solve((0.0, 0.0, 1.0), (-1.0, 1.0)) == (0.0, 0.0)
    assert solve((2.0, 1.0, 3.0), (-1.0, 2.0)) == pytest.approx((1.0, -1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "fisher_loss"),
        ({"fisher_loss": "mse", "rescale": "norm"}, "rescale"),
    ],
)
def test_what_it_does_not_go_with_is_said(options, message):
    model = net()
    kfac = KFAC(model, **(PLAIN | options))
    model(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match=message):
        kfac.quadratic_step(lambda: (model(inputs()).sum(), model(inputs())))


def test_terms_scales_and_shapes_that_it_does_not_know_are_refused():
    model, x = net(), inputs()
    kfac = KFAC(model, **(PLAIN | {"fisher_loss": "cross-entropy"}))
    kfac.set_terms(5)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="set_terms"):
        kfac.quadratic_step(lambda: (model(x).sum(), model(x)))
    kfac.close()
    with pytest.raises(RuntimeError, match="share"):
        check_settings(Settings(fisher_loss="mse", rescale="none", share="weights"))
    images = nn.Sequential(nn.Conv2d(1, 3, 1)).double()
    kfac = KFAC(images, **(PLAIN | {"fisher_loss": "cross-entropy"}))
    z = torch.randn(2, 1, 2, 2).double()
    images(z).sum().backward()
    with pytest.raises(ValueError, match="needs a model output of shape"):
        kfac.quadratic_step(lambda: (images(z).sum(), images(z)))
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    kfac = KFAC(model, optimizer, grad_scaler=scaler, **(PLAIN | {"fisher_loss": "cross-entropy"}))
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        kfac.quadratic_step(lambda: (model(x).sum(), model(x)))


def test_dropout_drops_the_same_in_all_passes_and_the_users_numbers_go_on():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    kfac, seen = KFAC(model, damping=0.1, **(PLAIN | {"fisher_loss": "cross-entropy"})), []
    x, y = inputs(), targets("cross-entropy", 3)
    F.cross_entropy(model(x), y).backward()
    before = torch.get_rng_state()

    def closure():
        z = model(x)
        seen.append(torch.autograd.forward_ad.unpack_dual(z).primal.detach().clone())
        return F.cross_entropy(z, y), z

    kfac.quadratic_step(closure)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(torch.get_rng_state(), before)
