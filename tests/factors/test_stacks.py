"""Layers of one shape share tensors and operations; none of them can tell."""

import copy
import gc
import itertools

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from helpers_exact import Conv1D, assert_close, square_loss
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.layers.conv import patches_gram

RUN = {
    "announce": False,
    "rescale": "norm",
    "norm_form": "unit",
    "warmup_refresh": None,
    "factor_interval": 1,
    "inverse_interval": 2,
    "factor_decay": 0.5,
    "damping": 0.1,
}
LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "linear-no-bias": lambda: nn.Linear(4, 4, bias=False),
    "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
    "conv-groups": lambda: nn.Conv1d(4, 4, 3, padding=1, groups=2),
    "conv1D-transposed": lambda: Conv1D(4, 4),
    "embedding": lambda: nn.Embedding(7, 4),
    "norm": lambda: nn.LayerNorm(4),
}


class Many(nn.Module):
    """Layers of one shape that see ``[N, S, 4]``, one after the other or (embeddings) side by side, and a head.

    ``use``: how often each of them is called.
    """

    def __init__(self, make, count=5):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(4, 2)

    def forward(self, x, use=(1, 1, 1, 1, 1)):
        if isinstance(self.layers[0], nn.Embedding):
            found = [layer((x[..., 0] * 3).long().abs() % 7) for layer, n in zip(self.layers, use, strict=True) if n]
            return self.head(torch.tanh(sum(found, x)).mean(1))
        for layer, times in zip(self.layers, use, strict=True):
            for _ in range(times):
                y = layer(x.mT).mT if isinstance(layer, nn.Conv1d) else layer(x)
                x = x + torch.tanh(y)
        return self.head(x.mean(1))


def build(kind, count=5):
    torch.manual_seed(0)
    model = Many(LAYERS[kind], count).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def batch(step, size=12):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, 2, generator=generator, dtype=torch.float64)


def all_at_once(model, **options):
    return [KFAC(model, **arranged(RUN | options))]


def one_each(model, **options):
    """A KFAC of its own for every layer: nothing lies side by side."""
    with KFAC(model, **arranged(RUN | options)) as kfac:
        names = [layer.name for layer in kfac.layers]
    return [KFAC(model, **arranged(RUN | options), skip=[n for n in names if n != name]) for name in names]


def step_once(model, kfacs, step, use=(1, 1, 1, 1, 1), lr=0.1):
    model.zero_grad()
    x, target = batch(step)
    (square_loss(model(x, use), target) / len(x)).backward()
    for kfac in kfacs:
        kfac.step()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * p.grad


def assert_same_training(kind, uses, *, change=lambda model, step: None, **options):
    """Train with layers side by side and with each alone: the same weights and factors after every step."""
    together, apart = build(kind), build(kind)
    groups = all_at_once(together, **options), one_each(apart, **options)
    assert (len(groups[0]), len(groups[1])) == (1, 6)
    shared = [stack for stack in groups[0][0]._engine.stacks if stack.num_layers == 5]
    assert len(shared) == 1, "the claim is about layers that lie side by side"
    for step, use in enumerate(uses):
        for model, kfacs in zip((together, apart), groups, strict=True):
            change(model, step)
            step_once(model, kfacs, step, use)
        for (name, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=lambda text, s=step, n=name: f"{s} {n} {text}")
        alone = {name: factors for kfac in groups[1] for name, factors in kfac.factors().items()}
        for name, factors in groups[0][0].factors().items():
            assert sorted(factors) == sorted(alone[name])
            for key, factor in factors.items():
                assert_close(factor, alone[name][key], 1e-12)
    assert all(p.isfinite().all() for p in together.parameters())
    for kfac in itertools.chain(*groups):
        kfac.close()


ALL = (1, 1, 1, 1, 1)


@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_side_by_side_take_the_steps_that_each_takes_alone(kind, solver):
    assert_same_training(kind, [ALL] * 6, solver=solver)


OPTIONS = {
    "relative damping": {"damping_mode": "relative"},
    "ekfac": {"curvature": "ekfac"},
    "reduce": {"weight_sharing": "reduce", "solver": "cholesky"},
    "sampled": {"statistics_fraction": 0.5},
    "scheduled damping": {"rescale": "none", "damping": lambda step: 0.1 + 0.1 * (step % 2), "solver": "cholesky"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["linear", "conv-groups"])
def test_layers_side_by_side_are_alone_under_every_setting(kind, options):
    assert_same_training(kind, [ALL] * 5, **OPTIONS[options])


@pytest.mark.parametrize("form", ["full", "diagonal"])
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_norm_layers_side_by_side_are_alone_in_every_form(form, solver):
    assert_same_training("norm", [ALL] * 5, norm_form=form, solver=solver)


IRREGULAR = {
    "without gradient at some steps": [ALL, (1, 0, 1, 1, 1), ALL, (1, 1, 1, 0, 0), (0, 0, 0, 0, 0), ALL, ALL],
    "called several times": [(1, 2, 1, 1, 3), ALL, (2, 2, 2, 2, 2), (1, 1, 3, 1, 0), ALL],
    "first used late": [(1, 0, 1, 0, 0), ALL, (1, 1, 1, 1, 0), (1, 1, 1, 1, 0), ALL, (1, 1, 0, 1, 1), ALL],
    "last one never used": [(1, 1, 1, 1, 0)] * 5,
    "none of them at first": [(0, 0, 0, 0, 0), (0, 0, 0, 0, 0), ALL, ALL, ALL],
}


LIKES = [
    ("linear", "eigen"),
    ("linear", "cholesky"),
    ("linear", "warm-eigen"),
    ("conv-groups", "cholesky"),
    ("conv1D-transposed", "eigen"),
]


@pytest.mark.parametrize(
    ("kind", "solver", "how"),
    [
        pytest.param(*likes, how, marks=() if (i + j) % 5 < 2 else pytest.mark.slow)
        for i, likes in enumerate(LIKES)
        for j, how in enumerate(IRREGULAR)
    ],
)
def test_a_layer_that_is_used_otherwise_than_its_likes_is_alone_all_the_same(kind, how, solver):
    assert_same_training(kind, IRREGULAR[how], solver=solver)


@pytest.mark.parametrize("what", ["weight", "bias", "both", "thawed"])
@pytest.mark.parametrize(
    ("kind", "solver"),
    [("linear", "cholesky"), ("conv", "eigen"), ("conv1D-transposed", "warm-eigen"), ("norm", "eigen")],
)
def test_one_of_them_frozen_later_leaves_the_others_alone(kind, what, solver):
    def change(model, step):
        layer = model.layers[1]
        if step == 3:
            if what != "bias":
                layer.weight.requires_grad_(False)
            if what != "weight":
                layer.bias.requires_grad_(False)
        if step == 5 and what == "thawed":
            layer.weight.requires_grad_(True)
            layer.bias.requires_grad_(True)

    assert_same_training(kind, [ALL] * 7, change=change, solver=solver)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("kind", ["linear", "conv1D-transposed"])
def test_one_of_them_whose_bias_is_frozen_later_is_solved_as_without_a_bias(kind, solver):
    model = build(kind)
    options = {"factor_decay": 0.0, "inverse_interval": 1, "rescale": "norm", "solver": solver}
    solve = ref.factored_precondition if solver == "cholesky" else ref.dense_precondition
    with KFAC(model, **arranged(RUN | options)) as kfac:
        for step in range(5):
            if step == 2:
                model.layers[1].bias.requires_grad_(False)
            model.zero_grad()
            x, target = batch(step)
            (square_loss(model(x), target) / len(x)).backward()
            before = [ref.gradient_blocks(layer)[0].clone() for layer in model.layers]
            kfac.step()
            for i, layer in enumerate(model.layers):
                factors = kfac.factors()[f"layers.{i}"]
                size = before[i].shape[1]  # one less without the bias
                expected = solve(factors["A"][:size, :size], factors["G"], before[i], 0.1)
                expected *= before[i].norm() / expected.norm()
                assert_close(ref.gradient_blocks(layer)[0], expected)
            assert size == 5
            assert before[1].shape[1] == (5 if step < 2 else 4)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("kind", ["linear", "conv-groups", "conv1D-transposed", "norm"])
def test_layers_side_by_side_take_the_steps_of_the_oracle(kind, solver):
    rhythm = {"factor_interval": 1, "inverse_interval": 2, "factor_decay": 0.5, "damping": 0.1}
    options = {**rhythm, "rescale": "norm-global", "solver": solver}
    model = build(kind, 3)
    names = [f"layers.{i}" for i in range(3)] + ["head"]

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.many = build(kind, 3)

        def forward(self, x):
            return self.many(x, (1, 1, 1))

    settings = ref.ReferenceSettings(**options, norm_form="unit", lr=0.1)
    oracle = ref.ReferenceKFAC(Plain, [f"many.{name}" for name in names], square_loss, settings)
    with KFAC(model, **arranged(RUN | options)) as kfac:
        for step in range(4):
            step_once(model, [kfac], step, (1, 1, 1))
            oracle.step(*batch(step))
            for p, q in zip(model.parameters(), oracle.model.parameters(), strict=True):
                assert_close(p, q)
            for name, factors in kfac.factors().items():
                for key, factor in factors.items():
                    expected = oracle.factor(f"many.{name}", key)
                    assert_close(factor, expected.reshape(factor.shape))


# State


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value.values() for t in tensors(v)] if isinstance(value, dict) else []


SOME = ["linear", "conv-groups", "conv1D-transposed", "norm"]


@pytest.mark.parametrize("solver", ["eigen", "cholesky", "warm-eigen"])
@pytest.mark.parametrize("kind", SOME)
def test_a_state_is_a_copy_and_loading_it_back_is_bitwise(kind, solver):
    model = build(kind)
    (kfac,) = all_at_once(model, solver=solver)
    for step in range(3):
        step_once(model, [kfac], step)
    state, weights, read = kfac.state_dict(), copy.deepcopy(model.state_dict()), kfac.factors()
    storages = {t.untyped_storage().data_ptr() for s in kfac._engine.states.values() for t in s.tensors()}
    assert not storages & {t.untyped_storage().data_ptr() for t in (*tensors(state), *tensors(read)) if t.numel()}
    kept, read_then = copy.deepcopy(state), copy.deepcopy(read)
    for step in range(3, 8):
        step_once(model, [kfac], step)
    for found, wanted in zip(tensors(state) + tensors(read), tensors(kept) + tensors(read_then), strict=True):
        assert torch.equal(found, wanted)
    ends = [p.detach().clone() for p in model.parameters()], copy.deepcopy(kfac.state_dict())
    fresh = build(kind)
    for where, (net, resumed) in {"same": (model, kfac), "new": (fresh, all_at_once(fresh, solver=solver)[0])}.items():
        net.load_state_dict(weights)
        resumed.load_state_dict(state)
        for name, factors in resumed.factors().items():
            assert all(torch.equal(factor, read_then[name][key]) for key, factor in factors.items())
        for step in range(3, 8):
            step_once(net, [resumed], step)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), ends[0], strict=True)), where
        pairs = zip(tensors(resumed.state_dict()["layers"]), tensors(ends[1]["layers"]), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs), where
        for found, wanted in zip(tensors(state), tensors(kept), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", SOME)
def test_a_layers_state_is_its_own_by_name(kind):
    """Each layer of the oracle's has other factors; none is read from a neighbour's place."""
    model = build(kind)
    (kfac,) = all_at_once(model, factor_decay=0.0)
    step_once(model, [kfac], 0, lr=0.0)
    x, target = batch(0)
    recorded = ref.per_example(model, square_loss, x, target, [layer.name for layer in kfac.layers])
    for layer in kfac.layers:
        found = kfac.factors()[layer.name]
        saved = kfac.state_dict()["layers"][layer.name]["running"]
        if layer.is_norm:
            calls = list(itertools.chain(*recorded[layer.name]))
            x_hat = torch.cat([ref.normalised(layer.module, a, 1) for a, _ in calls])
            g = torch.cat([ref.norm_rows(layer.module, g, 1) for _, g in calls])
            expected = {"F": ref.norm_factor(x_hat, g, len(x), "unit", True)}
        else:
            expected = ref.factors(ref.all_rows(layer.module, recorded[layer.name]), len(x), "expand")
        for key, factor in expected.items():
            assert_close(found[key].reshape(factor.shape), factor)
            assert_close((saved[key]["value"] / saved[key]["weight"]).reshape(factor.shape), factor)


@pytest.mark.parametrize("kind", SOME)
def test_a_copy_of_the_model_trains_without_kfac(kind):
    model = build(kind)
    (kfac,) = all_at_once(model, solver="cholesky")
    for step in range(3):
        step_once(model, [kfac], step)
    twin, plain = copy.deepcopy(model), build(kind)
    plain.load_state_dict(model.state_dict())
    before = copy.deepcopy(kfac.state_dict())
    for step in range(3, 6):
        step_once(twin, [], step)
        step_once(plain, [], step)
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), plain.parameters(), strict=True))
    for found, wanted in zip(tensors(kfac.state_dict()), tensors(before), strict=True):
        assert torch.equal(found, wanted)
    del kfac
    gc.collect()
    step_once(twin, [KFAC(twin, **RUN)], 6)
    assert all(p.isfinite().all() for p in twin.parameters())


@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize(
    ("kind", "solver"),
    [
        ("linear", "eigen"),
        ("linear", "warm-eigen"),
        ("conv-groups", "cholesky"),
        ("conv1D-transposed", "cholesky"),
        ("norm", "eigen"),
    ],
)
def test_a_model_converted_in_training_goes_on_as_from_its_state(kind, at, solver):
    """Step 3 has no refresh and uses decompositions that were made in float32; step 4 refreshes them."""

    def take(net, kfac, step, dtype):
        net.zero_grad()
        x, target = (t.to(dtype) for t in batch(step))
        (square_loss(net(x), target) / len(x)).backward()
        kfac.step()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad

    model = build(kind).float()
    (kfac,) = all_at_once(model, solver=solver)
    for step in range(at):
        take(model, kfac, step, torch.float32)
    state = kfac.state_dict()
    model.double()
    other = copy.deepcopy(model)
    (fresh,) = all_at_once(other, solver=solver)
    fresh.load_state_dict(state)
    for step in range(at, at + 4):
        take(model, kfac, step, torch.float64)
        take(other, fresh, step, torch.float64)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert p.dtype == torch.float64
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    assert all(t.dtype == torch.float64 for factors in kfac.factors().values() for t in factors.values())
    assert all(t.dtype == torch.float64 for t in tensors(kfac.state_dict()["layers"]))


# The sum over patches


def padded(x, padding, kernel, dilation):
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        edges = [(total // 2, total - total // 2) for total in totals]
    else:
        edges = [(p, p) for p in padding]
    return F.pad(x, [*edges[1], *edges[0]])


GEOMETRIES = [
    (kernel, stride, dilation, padding)
    for kernel, stride, dilation, padding in itertools.product(
        [(1, 1), (2, 3), (3, 1), (3, 3), (5, 2), (1, 3)],
        [(1, 1), (1, 2), (2, 1)],
        [(1, 1), (1, 2), (2, 1)],
        [(0, 0), (1, 1), (2, 0), (0, 2), (4, 3), "same"],
    )
    if padding != "same" or stride == (1, 1)
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("bias", "parts"), [(False, 3), *(pytest.param(*p, marks=SLOW) for p in ((False, 1), (True, 1), (True, 3)))]
)
@pytest.mark.parametrize("size", [(5, 6), pytest.param((9, 4), marks=SLOW), (1, 3)], ids=str)
def test_the_sum_over_patches_is_that_of_unfold(size, bias, parts):
    torch.manual_seed(0)
    x = torch.randn(2 * parts, 2, *size, dtype=torch.float64)
    tried = 0
    for kernel, stride, dilation, padding in GEOMETRIES:
        wide = padded(x, padding, kernel, dilation)
        if any(n < (k - 1) * d + 1 for n, k, d in zip(wide.shape[2:], kernel, dilation, strict=True)):
            continue
        tried += 1
        module = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=bias).double()
        rows = F.unfold(wide, kernel, dilation, 0, stride).mT
        if bias:
            rows = torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)
        rows = rows.reshape(parts, -1, rows.shape[-1])
        found = patches_gram(module, x, ones=bias, dtype=torch.float64, parts=parts)
        text = f"kernel {kernel} stride {stride} dilation {dilation} padding {padding}"
        torch.testing.assert_close(found, rows.mT @ rows, rtol=1e-10, atol=1e-10, msg=lambda t, w=text: f"{w}: {t}")
    assert tried > 60


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_the_sum_over_patches_of_groups_and_padding_modes(mode, parts):
    torch.manual_seed(0)
    x = torch.randn(2 * parts, 4, 5, 6, dtype=torch.float64)
    for groups, kernel in itertools.product((1, 2, 4), (1, 2, 3)):
        module = nn.Conv2d(4, 4, kernel, padding=1, groups=groups, padding_mode=mode).double()
        wide = F.pad(x, (1, 1, 1, 1), mode="constant" if mode == "zeros" else mode)
        rows = F.unfold(wide, kernel).reshape(len(x), groups, 4 // groups * kernel**2, -1).mT
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)
        expected = (rows.mT @ rows).reshape(parts, 2, groups, *rows.shape[-1:] * 2).sum(1).flatten(0, 1)
        assert_close(patches_gram(module, x, ones=True, dtype=torch.float64, parts=parts), expected)
