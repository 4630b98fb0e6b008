"""How the model is called and wrapped: arguments, bypassed forwards, DDP, sharded parameters."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers_capture import (
    assert_factors,
    assert_same,
    attach,
    batch,
    batches,
    mean_loss,
    mlp,
    oracle_factors,
    parameters,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Called(nn.Module):
    """One network that takes its input in several shapes."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x=None, *, scale=1.0, inputs=None, batch=None):
        if batch is not None:
            x = batch["x"]
        if inputs is not None:
            x = inputs[0]
        return self.net(scale * x)


CALLS = {
    "positional": lambda model, x: model(x),
    "keyword": lambda model, x: model(x=x),
    "number first": lambda model, x: model(scale=1.0, x=x),
    "dict": lambda model, x: model(batch={"x": x, "mask": torch.ones(2, 2)}),
    "tuple": lambda model, x: model(inputs=(x, None)),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_examples_are_counted_however_the_model_is_called(call):
    model, (x, y) = Called(), batch(6, 4)
    expected = oracle_factors(model, x, y, ["net.0", "net.4"])
    kfac = attach(model)
    mean_loss(CALLS[call](model, x), y).backward()
    kfac.step()
    assert_factors(kfac, expected)


def test_a_layer_may_be_called_with_a_keyword():
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(4, 3).double(), batch(6, 4)
    results = []
    for call in (lambda: model(x), lambda: model(input=x)):
        with attach(model) as kfac:
            model.zero_grad()
            mean_loss(call(), y).backward()
            kfac.step()
            results.append(kfac.factors())
    assert_factors(results[1], results[0], 0)


def ddp_run(data, *, wrap, when="before", accumulate=1, **ddp_options):
    """Train with or without DDP, K-FAC attached before or after the wrap; returns parameters and factors."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = attach(model, optimizer, accumulate="mean") if when == "before" else None
    wrapped = DDP(model, **ddp_options) if wrap else model
    kfac = kfac or attach(wrapped, optimizer, accumulate="mean")
    for i, (x, y) in enumerate(data):
        last = i % accumulate == accumulate - 1
        with nullcontext() if last or not wrap else wrapped.no_sync():
            (mean_loss(wrapped(x), y) / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return SimpleNamespace(weights=parameters(model), factors=kfac.factors())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("accumulate", [1, 2], ids=["no accumulation", "no_sync"])
@pytest.mark.parametrize("view", [False, True], ids=["own gradients", "gradient_as_bucket_view"])
def test_ddp_trains_like_the_bare_model(one_process, when, accumulate, view):
    data = batches([6, 6, 6, 6])
    bare = ddp_run(data, wrap=False, accumulate=accumulate)
    ddp = ddp_run(data, wrap=True, when=when, accumulate=accumulate, gradient_as_bucket_view=view)
    assert_same(ddp.weights, bare.weights, 1e-12)
    assert_factors(ddp.factors, bare.factors, 1e-12)


def test_names_do_not_depend_on_the_ddp_wrap(one_process):
    assert set(attach(DDP(mlp())).factors()) == set(attach(mlp()).factors())


def test_one_distributed_tensor_among_the_parameters_is_refused_by_name(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = mlp()
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), init_device_mesh("cpu", (1,))))
    with pytest.raises(RuntimeError, match=r"'2.weight' is a DTensor"):
        attach(model)
