"""What a hostile reading of the distributed engine found: each case hung, diverged or died before."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_parity import EXACT, batch, build, part
from helpers_ranks import average_gradients, on_processes, on_threads
from helpers_settings import arranged
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC
from dkfac.precondition import kronecker
from dkfac.state import optimizer_state


def attach(model, optimizer=None, lr=0.05, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return optimizer, KFAC(model, optimizer, **arranged(EXACT | options))


def step(model, optimizer, number, rank, world_size, change=lambda loss: loss):
    x, y = (part(t, rank, world_size) for t in batch(number, "deep"))
    optimizer.zero_grad()
    change(F.cross_entropy(model(x), y)).backward()
    average_gradients(model)
    optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_equal_ranks(found):
    for other in found[1:]:
        assert all(torch.equal(p, q) for p, q in zip(found[0], other, strict=True))


def bad_first(rank, strategy):
    model = build("deep")
    optimizer, kfac = attach(model, strategy=strategy)
    for number in range(6):
        step(model, optimizer, number, rank, 2, lambda loss, n=number: loss * (torch.nan if n == rank == 0 else 1))
    assert kfac.metrics()["skipped_batches"] == 1
    assert kfac.metrics()["refreshes"] > 0
    return weights(model)


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded", "local"])
def test_a_bad_first_batch_on_one_rank_is_skipped_by_all(strategy):
    found = on_threads(2, bad_first, strategy)
    assert_equal_ranks(found)
    assert all(bool(torch.isfinite(p).all()) for p in found[0])


def warm_up_from_zero(rank, world_size):
    model = build("tiny")
    optimizer, kfac = attach(model, lr=0.0, strategy="local")
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.01 * number
        x = torch.randn(6, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        average_gradients(model)
        optimizer.step()
    assert kfac.metrics()["step"] == 4
    return weights(model)


def test_a_learning_rate_of_zero_is_a_step_like_others_also_on_ranks_that_measure_nothing():
    assert_equal_ranks(on_threads(4, warm_up_from_zero, 4))


def test_a_learning_rate_of_zero_moves_momentum_with_the_preconditioned_gradient():
    model = build("deep")
    optimizer, kfac = attach(model, lr=0.0)
    x, y = batch(0, "deep")
    F.cross_entropy(model(x), y).backward()
    raw = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert kfac.metrics()["step"] == 1
    assert not any(
        torch.equal(optimizer.state[p]["momentum_buffer"], g) for p, g in zip(model.parameters(), raw, strict=True)
    )


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        net = build("deep")
        # Without drawing numbers: threads share torch's generator, and another one may be in build() just now.
        shapes = ((5, 4), (4, 4), (4, 3))
        self.first, self.layer, self.last = (nn.utils.skip_init(nn.Linear, *s, dtype=torch.float64) for s in shapes)
        for mine, theirs in zip((self.first, self.layer, self.last), (net[0], net[0], net[2]), strict=True):
            with torch.no_grad():
                mine.weight.copy_(theirs.weight.flatten()[:1].expand_as(mine.weight) * torch.ones_like(mine.weight))
                mine.weight.add_(torch.linspace(-1, 1, mine.weight.numel(), dtype=torch.float64).view_as(mine.weight))
                mine.bias.zero_()
        self.times = 1

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return self.last(x)


def called_twice(rank, strategy):
    model = Twice()
    optimizer, _ = attach(model, curvature="ekfac", damping=0.1, strategy=strategy)
    for number in range(10):
        model.times = 2 if rank == 1 and number == 6 else 1
        step(model, optimizer, number, rank, 2)
    return weights(model)


@pytest.mark.filterwarnings("ignore:layer 'layer' is called several times")
@pytest.mark.parametrize("strategy", ["comm-opt", "replicated", "sharded"])
def test_a_layer_called_twice_on_one_rank_leaves_ekfac_alike_on_all(strategy):
    assert_equal_ranks(on_threads(2, called_twice, strategy))


def failing_direction(rank):
    model = build("deep")
    optimizer, _ = attach(model, strategy="sharded", factor_interval=1, inverse_interval=2)
    said = ""
    for number in range(4):
        try:
            step(model, optimizer, number, rank, 2)
        except RuntimeError as error:
            said = str(error)
            break
    return said, number


def test_an_error_while_preconditioning_on_one_rank_is_raised_on_all_at_the_next_measurement(monkeypatch):
    directions, calls = kronecker.kronecker_updates, []

    def fails(stack, *args):
        if dist.get_rank() == 1 and len(calls) < 1:
            calls.append(stack)
            raise torch.OutOfMemoryError("no memory left")
        return directions(stack, *args)

    monkeypatch.setattr(kronecker, "kronecker_updates", fails)
    (first, at), (second, at_too) = on_threads(2, failing_direction)
    assert at == at_too == 1
    assert "rank 1 failed" in first
    assert "no memory left" in first
    assert "no memory left" in second


def own_schedule(rank):
    model = build("deep")
    optimizer, _ = attach(model, strategy="comm-opt", damping=lambda n: 1e-3 * (1 + (n > 0) * rank))
    for number in range(4):
        step(model, optimizer, number, rank, 2)
    with pytest.raises(RuntimeError, match="damping is not the same on all ranks at step 4"):
        step(model, optimizer, 4, rank, 2)


def test_a_schedule_that_differs_between_ranks_is_named_on_all_at_the_next_refresh():
    on_threads(2, own_schedule)


def converted(rank):
    model = build("deep")
    optimizer, _ = attach(model, strategy="comm-opt")
    model.float()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(
        RuntimeError, match=r"layer '0' was float64 .* is torch.float32 .* after the model is converted"
    ):
        optimizer.step()


def test_a_model_converted_after_attach_is_refused_by_name():
    on_threads(2, converted)


def test_loading_an_owned_optimizer_state_leaves_what_was_loaded_alone():
    model = nn.Linear(3, 2)
    optimizer, kfac = attach(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    saved = optimizer_state.save_optimizer_state(optimizer, kfac.layers[0])
    before = copy.deepcopy(saved)
    optimizer_state.load_optimizer_state(optimizer, kfac.layers[0], saved)
    optimizer.step()
    assert repr(saved) == repr(before)


class Sometimes(nn.Module):
    """The last but one layer runs on rank 0 alone."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.net = rank, build("deep")
        self.extra, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.skips = False

    def forward(self, x):
        x = self.net(x)
        return self.head(x if self.skips and self.rank == 1 else self.extra(x))


def dropped_with_overlap(rank):
    torch.manual_seed(0)
    model = Sometimes(rank)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, kfac = attach(ddp, strategy="sharded", overlap=True, factor_interval=1, fusion="optimal")
    for number in range(8):
        model.skips = number in (3, 5)
        x, y = (part(t, rank, 2) for t in batch(number, "deep"))
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        if number not in (3, 6):
            optimizer.step()
    kfac.close()
    group = dist.new_group([0, 1])
    for _ in range(3):  # ranks that come apart, in a group of the user's own that is used again
        time.sleep(0.3 * rank)
        attach(build("deep"), process_group=group)[1].close()
    halves = [dist.new_group([0]), dist.new_group([1])]
    half = DistributedDataParallel(build("deep"), process_group=halves[rank])
    assert attach(half)[1].plan.world_size == 1
    with pytest.raises(ValueError, match=rf"rank {rank} is not in the process_group"):
        KFAC(build("deep"), process_group=halves[1 - rank], **EXACT)
    return weights(model)


def test_dropped_steps_with_overlap_groups_of_ones_own_and_ddps_of_half_the_world():
    assert_equal_ranks(on_processes(2, dropped_with_overlap))
