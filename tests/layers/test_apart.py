"""A bias whose parameter group has other betas, momentum or eps than the weight's is stepped by the optimizer."""

import copy

import pytest
import torch
from torch import nn

import dkfac
from dkfac.layers.find import APART


@pytest.mark.parametrize(
    ("optimizer", "weights", "biases", "is_apart"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.95)}, {"betas": (0.8, 0.95)}, True),
        (torch.optim.AdamW, {"eps": 1e-8}, {"eps": 1e-6}, True),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}, True),
        (torch.optim.AdamW, {"weight_decay": 0.1, "lr": 0.01}, {"weight_decay": 0.0, "lr": 0.02}, False),
    ],
)
def test_a_bias_with_other_rules_is_left_to_the_optimizer_and_said(optimizer, weights, biases, is_apart):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4).double()

    def step(net, *, attached):
        of = [[p for n, p in net.named_parameters() if n.endswith(kind)] for kind in ("weight", "bias")]
        own = optimizer([{"params": of[0], **weights}, {"params": of[1], **biases}], lr=0.01)
        kfac = dkfac.KFAC(net, own, announce=False) if attached else None
        net(x).square().mean().backward()
        own.step()
        return kfac

    kfac = step(model, attached=True)
    step(plain, attached=False)
    assert [item.name for item in kfac.left] == (["0.bias", "2.bias"] if is_apart else [])
    assert all(item.reason == APART for item in kfac.left)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q) == (is_apart and name.endswith("bias")), name
