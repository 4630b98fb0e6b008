"""Doubly factored A: a Linear layer on a flattened map, against dense matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers_parity import LOCK
from helpers_ranks import average_gradients, on_threads
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC

PLAIN = {"announce": False, "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1, "factor_decay": 0.0}
C, S, OUT, N = 3, 4, 5, 14


def net(bias=True):
    with LOCK:
        torch.manual_seed(0)
        middle = nn.Linear(C * S, OUT, bias=bias)
        return nn.Sequential(nn.Conv2d(2, C, 2), nn.Tanh(), nn.Flatten(), middle, nn.Tanh(), nn.Linear(OUT, 3)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 2, 3, 3, generator=generator, dtype=torch.float64), torch.randint(
        3, (N,), generator=generator
    )


def backward(model):
    x, y = data()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def parts(model):
    """Return the flattened maps that the Linear layer sees, and its outputs' gradients of each example's own loss."""
    x, y = data()
    maps = model[:3](x).detach()
    z = model[3](maps).detach().requires_grad_()
    (grads,) = torch.autograd.grad(F.cross_entropy(model[4:](z), y, reduction="sum"), z)
    return maps.view(N, C, S), grads


@pytest.mark.parametrize("bias", [True, False])
def test_factors_are_channels_and_positions(bias):
    model = net(bias)
    with KFAC(model, experimental={"flattened": {"3": C}}, **PLAIN) as kfac:
        backward(model)
        kfac.step()
        found = kfac.factors()["3"]
    maps, grads = parts(net(bias))
    torch.testing.assert_close(found["A_C"], torch.einsum("ncs,nds->cd", maps, maps) / N)
    torch.testing.assert_close(found["A_S"], torch.einsum("ncs,nct->st", maps, maps) / N)
    torch.testing.assert_close(found["G"], grads.T @ grads / N)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("solver", ["eigen", "warm-eigen"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_is_solved_exactly_with_the_product(bias, solver, mode):
    model, damping = net(bias), 0.03
    options = PLAIN | {"rescale": "none", "damping": damping, "damping_mode": mode, "solver": solver}
    with KFAC(model, **arranged({"flattened": {"3": C}} | options)) as kfac:
        for _ in range(1 if solver == "eigen" else 40):
            backward(model)
            raw = [p.grad.clone() for p in model[3].parameters()]
            kfac.step()
    maps, grads = parts(model)
    A_C = torch.einsum("ncs,nds->cd", maps, maps) / N
    A_S = torch.einsum("ncs,nct->st", maps, maps) / N
    G = grads.T @ grads / N
    A = torch.kron(A_C, A_S) / A_C.trace()
    assert A.trace() == pytest.approx(float(maps.square().sum() / N))
    if mode == "relative":
        damping *= float(A.trace() / len(A) * G.trace() / len(G))
    F_ = torch.kron(G, A) + damping * torch.eye(OUT * C * S, dtype=torch.float64)
    tolerance = 1e-9 if solver == "eigen" else 1e-5
    weight = torch.linalg.solve(F_, raw[0].flatten()).view(OUT, -1)
    torch.testing.assert_close(model[3].weight.grad, weight, rtol=tolerance, atol=tolerance)
    if bias:
        own = torch.linalg.solve(G + damping * torch.eye(OUT, dtype=torch.float64), raw[1])
        torch.testing.assert_close(model[3].bias.grad, own, rtol=tolerance, atol=tolerance)


def test_it_is_nearer_to_the_plain_factor_than_the_other_order():
    """Maps whose channels and positions are independent: then the product is the plain factor."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(20000, C, S, generator=generator, dtype=torch.float64)
    left, right = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (C, S))
    maps = left @ noise @ right
    layer = nn.Sequential(nn.Flatten(), nn.Linear(C * S, 2, bias=False)).double()
    with KFAC(layer, experimental={"flattened": {"1": C}}, **PLAIN) as kfac:
        layer(maps).square().mean().backward()
        kfac.step()
        found = kfac.factors()["1"]
    flat = maps.flatten(1)
    plain = flat.T @ flat / len(flat)
    product = torch.kron(found["A_C"], found["A_S"]) / found["A_C"].trace()
    other = torch.kron(found["A_S"], found["A_C"]) / found["A_C"].trace()
    assert (product - plain).norm() < 0.05 * plain.norm()
    assert (other - plain).norm() > 0.5 * plain.norm()


def train(rank=0, world_size=1, optimizer=torch.optim.SGD, **options):
    model = net()
    steps = optimizer(model.parameters(), lr=0.05)
    KFAC(model, steps, damping=1e-2, **arranged({"flattened": {"3": C}} | PLAIN | {"factor_decay": 0.9} | options))
    x, y = (t.chunk(world_size)[rank] for t in data())
    for _ in range(6):
        steps.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if world_size > 1:
            average_gradients(model)
        steps.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"curvature": "ekfac"}, {"overlap": True}, {"inverse_lag": 1}])
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded", pytest.param("factor-wise", marks=pytest.mark.slow)])
def test_is_the_same_on_several_ranks(strategy, options):
    alone = train(**options)
    for weights in on_threads(2, lambda rank: train(rank, 2, strategy=strategy, **options)):
        torch.testing.assert_close(weights, alone, rtol=1e-9, atol=1e-9)


def test_adam_takes_its_step_in_the_three_bases():
    weights = train(optimizer=torch.optim.AdamW)
    plain = net()
    assert all(torch.isfinite(w).all() for w in weights)
    assert not torch.equal(weights[2], plain[3].weight)


@pytest.mark.parametrize("bias", [True, False])
def test_adams_step_is_held_back_to_a_change_of_just_so_much(bias):
    model, limit = net(bias), 1e-7
    before = model[3].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    options = PLAIN | {"curvature": "adam-eigen", "solver": "eigen", "rescale": "kl-clip", "kl_clip": limit}
    with KFAC(model, optimizer, **arranged({"flattened": {"3": C}} | options)) as kfac:
        backward(model)
        optimizer.step()
        channels, positions, output = (kfac.factors()["3"][key] for key in ("A_C", "A_S", "G"))
    change = (before - model[3].weight.detach()).view(OUT, C, S)
    turned = torch.einsum("oci,op,cd,ij->pdj", change, output, channels, positions / positions.trace())
    assert float((change * turned).sum()) <= limit * (1 + 1e-9)
    if not bias:  # which has its part in the change
        assert float((change * turned).sum()) == pytest.approx(limit, rel=1e-9)


def test_a_state_is_saved_and_loaded_and_training_goes_on_bitwise():
    def start():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return (
            model,
            optimizer,
            KFAC(model, optimizer, experimental={"flattened": {"3": C}}, **(PLAIN | {"inverse_interval": 3})),
        )

    def take(model, optimizer, steps):
        for _ in range(steps):
            backward(model)
            optimizer.step()

    straight = start()
    take(*straight[:2], 7)
    first = start()
    take(*first[:2], 4)
    again = start()
    for new, old in zip(again, first, strict=True):
        new.load_state_dict(old.state_dict())
    take(*again[:2], 3)
    for p, q in zip(again[0].parameters(), straight[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_first_linear_of_vgg16_has_an_input_factor_of_a_megabyte():
    with torch.device("meta"):
        features = [m for c in (3, 512) for m in (nn.Conv2d(c, 512, 3, padding=1), nn.ReLU())]
        model = nn.Sequential(*features, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU())
    from dkfac.config.settings import Settings
    from dkfac.layers.find import find_layers

    layers, left = find_layers(model, Settings(), None, meta=True)
    (wide,) = [layer for layer in layers if layer.kind == "linear-map"]
    sizes = {factor.key: (factor.num_blocks, factor.dim) for factor in wide.spec.factors}
    assert sizes == {"A_C": (1, 512), "A_S": (1, 49), "G": (16, 256)}
    assert sum(4 * f.num_elements for f in wide.spec.factors if f.key != "G") < 20e6
    assert 4 * 25089**2 > 2.5e9
    layers, left = find_layers(model, Settings(flattened="off"), None, meta=True)
    assert [item.reason for item in left] == ["A of dim 25089 > max_dim=8192"]
    assert math.prod(wide.spec.grad_shape) == 4096 * 25089


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flattened": {"3": 5}}, "12 inputs are not a map of 5 channels"),
        ({"flattened": {"9": 3}}, "no Linear layer of that name"),
        ({"flattened": {"3": 3}, "solver": "cholesky"}, "damping three factors needs their eigenvalues"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_hooked(options, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        KFAC(model, **arranged(PLAIN | options))
    assert not model[3]._forward_hooks


def test_only_what_follows_a_map_is_taken_for_one():
    from dkfac.config.settings import Settings
    from dkfac.layers.find import find_layers

    with torch.device("meta"):
        patches = nn.Sequential(
            nn.Conv2d(3, 64, 4), nn.LayerNorm(64), nn.Linear(64, 16384), nn.GELU(), nn.Linear(16384, 64, bias=False)
        )
        dense = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(256), nn.ReLU(), nn.Flatten(), nn.Linear(256 * 49, 10)
        )
    layers, left = find_layers(patches, Settings(), None, meta=True)
    assert all(layer.kind != "linear-map" for layer in layers)
    assert [item.name for item in left if "max_dim" in item.reason] == ["2", "4"]
    layers, _ = find_layers(dense, Settings(), None, meta=True)
    assert [f.dim for layer in layers if layer.kind == "linear-map" for f in layer.spec.factors] == [256, 49, 10]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_stays_out_of_both_factors(sharing):
    x, mask = torch.randn(6, 4, C * S).double(), torch.arange(4).expand(6, 4) < 3
    x = torch.where(mask[..., None], x, 100.0)
    found = {}
    for name, maps in (("plain", "off"), ("map", {"0": C})):
        model = nn.Sequential(nn.Linear(C * S, OUT, bias=False)).double()
        options = PLAIN | {"loss_terms": "token", "weight_sharing": sharing}
        with KFAC(model, **arranged({"flattened": maps} | options)) as kfac:
            kfac.set_terms(18, mask)
            (model(x) * mask[..., None]).square().sum().div(18).backward()
            kfac.step()
            found[name] = kfac.factors()["0"]
    assert float(found["map"]["A_C"].trace()) == pytest.approx(float(found["plain"]["A"].trace()))
    assert float(found["map"]["A_S"].trace()) == pytest.approx(float(found["plain"]["A"].trace()))


def test_maps_of_several_layers_are_turned_each_by_its_own_bases():
    from dkfac.ops.precondition import on_map

    grads, c, s = torch.randn(3, 5, C * S + 1), torch.randn(3, C, C), torch.randn(3, S, S)
    found = on_map(grads, c, s)
    for g, left, right, one in zip(grads, c, s, found, strict=True):
        torch.testing.assert_close(one[:, :-1], g[:, :-1] @ torch.kron(left, right))
        assert torch.equal(one[:, -1], g[:, -1])
