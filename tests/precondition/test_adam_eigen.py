"""curvature="adam-eigen": Adam in the eigenbasis of A and G is the whole update of the layers that K-FAC has."""

import copy
import functools
import io
import itertools
import math

import pytest
import reference as ref
import torch
from helpers_exact import Conv1D, square_loss
from helpers_parity import EXACT, average_in_one, build, distinct, layer_states, mean_loss, part, weights_of
from helpers_parity import batch as global_batch
from helpers_ranks import on_threads
from helpers_settings import arranged
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam
from torch.optim.lr_scheduler import StepLR

from dkfac import KFAC, Settings
from dkfac.decompose import fallback, layer_factors, refresh_scheduler, renewal, replace
from dkfac.factors.layer_state import carried
from dkfac.ops import batches, decompose, together
from dkfac.plan.strategies import FULL_STATISTICS
from dkfac.precondition import adam_eigen

OPTIONS = {"announce": False, "curvature": "adam-eigen", "solver": "eigen", "warmup_refresh": None}
RHYTHM = {"factor_interval": 2, "inverse_interval": 4, "factor_decay": 0.9}
EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
STEPS, LAYERS = 20, ["embed", "conv", "grouped", "norm", "wide", "head"]
CASES = {
    "AdamW": (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam": (Adam, {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6}),
    "Adam, L2": (Adam, {"lr": 5e-3, "betas": (0.5, 0.9), "eps": 1e-5, "weight_decay": 0.2}),
    "AdamW, maximize": (AdamW, {"lr": 3e-3, "betas": (0.95, 0.98), "weight_decay": 0.3, "maximize": True}),
    "Adam, L2, maximize": (Adam, {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.2, "maximize": True}),
}


class Net(nn.Module):
    """A layer of each kind, nonlinear between them so that factors have full rank, and a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.place = nn.Parameter(torch.randn(4, 4))
        self.conv = nn.Conv1d(4, 4, 2)
        self.grouped = nn.Conv1d(4, 6, 2, groups=2)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, index):
        x = torch.tanh(self.conv(torch.tanh(self.embed(index) + self.place).mT))
        x = torch.tanh(self.norm(torch.tanh(self.grouped(x)).mT))
        return self.head(torch.tanh(self.wide(x)).flatten(1))


def net(dtype=torch.float64):
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for p in model.norm.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.to(dtype)


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 6, (48, 4), generator=generator)
    return x, torch.randn(48, 3, generator=generator, dtype=torch.float64).to(dtype)


def backward(model, step, bad=1.0):
    """Leave the gradients of a step's loss, a mean over examples."""
    x, y = batch(step, model.head.weight.dtype)
    model.zero_grad()
    loss = square_loss(model(x), y) / len(x)
    (loss * bad).backward()
    return loss


def train(model, optimizer, start, stop):
    for step in range(start, stop):
        backward(model, step)
        optimizer.step()


def start(case="AdamW", dtype=torch.float64, parameters=None, **options):
    """Return a model, its optimizer and K-FAC; ``parameters``: from the model to the optimizer's groups."""
    model, (kind, settings) = net(dtype), CASES[case]
    optimizer = kind(parameters(model) if parameters else model.parameters(), **settings)
    return model, optimizer, KFAC(model, optimizer, norm_form="unit", **arranged(OPTIONS | RHYTHM | options))


def kfacs_parameters(model):
    return [p for name in LAYERS for p in model.get_submodule(name).parameters()]


def assert_weights(model, expected, tol):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(found, wanted, where="state"):
    """Nested dictionaries with the same bits."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{where}.{key}")
    else:
        assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted, where


# The oracle


def with_blocks(kfac):
    """Return the running factors, ``[B, D, D]``; a diagonal as a matrix."""
    result = {}
    for layer in kfac.layers:
        result[layer.name] = {}
        for factor in layer.spec.factors:
            value = kfac.factors()[layer.name][factor.key]
            value = value.unsqueeze(0) if factor.num_blocks == 1 else value
            result[layer.name][factor.key] = torch.diag_embed(value) if factor.form == "diagonal" else value.clone()
    return result


def eigenvectors(blocks):
    """Return ``[B, D, D]``; of a diagonal the identity, whatever its order."""
    if torch.equal(blocks, torch.diag_embed(blocks.diagonal(dim1=1, dim2=2))):
        return torch.eye(blocks.shape[-1], dtype=blocks.dtype).expand_as(blocks)
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    assert (values.diff() / values[:, -1:]).min() > 1e-6, "the result would depend on the basis"
    return vectors


def rotate(v, old, new):
    """Carry second moments from the bases ``old = (Q_G, Q_A)`` to ``new``."""
    left, right = ((n.mT @ o).square() for n, o in zip(new, old, strict=True))
    return left @ v @ right.mT


def longest(number, one, two):
    """The most that |m| / sqrt(v) of so many numbers can be: what numbers in proportion to w1 / w2 have."""
    ages = range(number)
    sums = {beta: sum(beta**age for age in ages) for beta in (one, two)}
    means, squares = ([beta**age / sums[beta] for age in ages] for beta in (one, two))
    worst = [w / s for w, s in zip(means, squares, strict=True)]
    m = sum(w * g for w, g in zip(means, worst, strict=True))
    return m / sum(s * g * g for s, g in zip(squares, worst, strict=True)) ** 0.5


class Oracle:
    """Adam in the eigenbasis for ``LAYERS``, and the wrapped optimizer for what is in none, one layer at a time."""

    def __init__(self, case, parameters=None, kl_clip=math.inf):
        self.model, (kind, settings) = net(), CASES[case]
        self.kl_clip, self.factors, self.least = kl_clip, {}, []
        self.optimizer = kind(parameters(self.model) if parameters else self.model.parameters(), **settings)
        self.decoupled = kind is AdamW
        self.m, self.v, self.bases, self.number = {}, {}, {}, {}

    def settings(self, p):
        return next(g for g in self.optimizer.param_groups if any(p is q for q in g["params"]))

    def refresh(self, factors):
        for name, found in factors.items():
            keys = ["F"] if "F" in found else ["G", "A"]
            new = [eigenvectors(found[key]) for key in keys]
            if "F" in found:  # the gradient is [C, 2, 1]
                new.append(torch.ones_like(new[0][:, :1, :1]))
            if name in self.bases:
                self.carry(name, new)
            self.bases[name] = new
            self.factors[name] = [found[key] for key in keys]

    def shortened(self, name, u, lr):
        """Return an update with lr^2 u^T F u at most the clip, F the product of the factors at the last refresh."""
        turned = u if len(self.factors[name]) == 1 else u @ self.factors[name][1]
        change = lr**2 * (u * (self.factors[name][0] @ turned)).sum()
        self.least.append(min(1.0, (self.kl_clip / float(change)) ** 0.5))
        return u * self.least[-1]

    def carry(self, name, new):
        """Bring v to a new basis: fourth roots by squared rotations, and no less than the mean's own square."""
        old, (value, weight) = self.bases[name], self.v[name]
        left, right = new
        mean = left.mT @ (self.m[name][0] / self.m[name][1]) @ right
        v = value / weight
        floor = torch.minimum(rotate(v, old, new), mean**2)
        self.v[name] = weight * torch.maximum(rotate(v**0.25, old, new) ** 4, floor), weight

    @torch.no_grad()
    def step(self, factors=None):
        """``factors``: the running ones, where a refresh is due."""
        self.refresh(factors or {})
        for name in LAYERS:
            module = self.model.get_submodule(name)
            group = self.settings(module.weight)
            for p in module.parameters():
                if group["maximize"]:
                    p.grad.neg_()
                if not self.decoupled:
                    p.grad += self.settings(p)["weight_decay"] * p
            g = ref.gradient_blocks(module)
            if name == "norm":  # [gammas, betas] -> [C, 2, 1]
                g = g.reshape(2, -1).T.unsqueeze(2)
            left, right = self.bases[name]
            self.m[name] = ref.averaged(self.m.get(name), g, group["betas"][0])
            self.v[name] = ref.averaged(self.v.get(name), (left.mT @ g @ right).square(), group["betas"][1])
            m, v = (value / weight for value, weight in (self.m[name], self.v[name]))
            self.number[name] = self.number.get(name, 0) + 1
            most = 1.01 * longest(self.number[name], *group["betas"])
            u = left @ ((left.mT @ m @ right) / (v.sqrt() + group["eps"])).clamp(-most, most) @ right.mT
            u = self.shortened(name, u, group["lr"])
            ref.set_gradient_blocks(module, u.squeeze(2).T.reshape(-1) if name == "norm" else u)
            for p in module.parameters():
                own = self.settings(p)
                decay = own["weight_decay"] * p if self.decoupled else 0
                p -= own["lr"] * (decay + p.grad)
                p.grad = None
        self.optimizer.step()


def assert_equals_the_oracle(case, parameters=None, **options):
    """Train 20 steps with 5 refreshes."""
    oracle = Oracle(case, parameters, options.get("kl_clip", math.inf))
    model, optimizer, kfac = start(case, parameters=parameters, **options)
    assert [layer.name for layer in kfac.layers] == LAYERS
    schedulers = [StepLR(o, 3, gamma=0.7) for o in (optimizer, oracle.optimizer)]
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        backward(oracle.model, step)
        oracle.step(with_blocks(kfac) if step % 4 == 0 else None)
        assert_weights(model, oracle.model, 1e-9)
        if options:
            assert kfac.metrics()["clip_factor"] == pytest.approx(min(oracle.least[-len(LAYERS) :]), rel=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    return model


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_with_refreshes_in_between_are_those_written_out(case):
    model = assert_equals_the_oracle(case)
    plain, (kind, settings) = net(), CASES[case]
    train(plain, kind(plain.parameters(), **settings), 0, STEPS)
    for name in LAYERS:  # the bases do matter
        p, q = (m.get_submodule(name).weight for m in (model, plain))
        assert (p - q).norm() > 1e-3 * q.norm(), name


@pytest.mark.parametrize("case", ["AdamW", "Adam, L2"])
def test_steps_are_held_back_where_the_curvature_along_them_is_large(case):
    def groups(model):  # layers with learning rates of their own
        head = list(model.head.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in head)]
        return [{"params": rest}, {"params": head, "lr": 0.05}]

    clipped = assert_equals_the_oracle(case, groups, rescale="kl-clip", kl_clip=2e-4)
    free = assert_equals_the_oracle(case, groups)
    changed = {n for n in LAYERS if not torch.equal(clipped.get_submodule(n).weight, free.get_submodule(n).weight)}
    assert changed
    loose, optimizer, kfac = start(case, parameters=groups, rescale="kl-clip", kl_clip=1e9)
    train(loose, optimizer, 0, STEPS)
    assert kfac.metrics()["clip_factor"] == 1.0
    assert kfac.metrics()["clipped_steps"] == 0.0


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_without_a_rotation_is_torchs_own(case):
    oracle, twin, (kind, settings) = Oracle(case), net(), CASES[case]
    optimizer = kind(twin.parameters(), **settings)
    blocks = {"embed": [1, 4, 6], "conv": [1, 4, 9], "grouped": [2, 3, 5], "wide": [1, 4, 6], "head": [1, 3, 9]}
    unit = {name: {"G": torch.ones(b, o, o), "A": torch.ones(b, i, i)} for name, (b, o, i) in blocks.items()}
    unit["norm"] = {"F": torch.ones(6, 2, 2)}
    unit = {name: {k: torch.eye(t.shape[1]).double() * t for k, t in found.items()} for name, found in unit.items()}
    for step in range(STEPS):
        backward(oracle.model, step)
        oracle.step(unit if step % 4 == 0 else None)
        train(twin, optimizer, step, step + 1)
        assert_weights(oracle.model, twin, 1e-12)


def test_the_oracles_rotation_there_and_back_by_permutations_restores_the_moments():
    v, eye = torch.rand(2, 3, 4, dtype=torch.float64), [torch.eye(n).double().repeat(2, 1, 1) for n in (3, 4)]
    there = [e[:, :, order] for e, order in zip(eye, ([2, 0, 1], [1, 3, 0, 2]), strict=True)]
    assert torch.equal(rotate(v, eye, there), v[:, [2, 0, 1]][:, :, [1, 3, 0, 2]])
    assert torch.equal(rotate(rotate(v, eye, there), there, eye), v)


# Where the bases are the identity


@pytest.fixture
def identity_bases(monkeypatch):
    real = decompose.eigen

    def eigen(factor):
        if factor.ndim == 2:
            return real(factor)
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype).expand_as(factor).clone()
        return decompose.Eigen(eye, factor.diagonal(dim1=1, dim2=2).clone())

    monkeypatch.setattr(decompose, "eigen", eigen)


def assert_equals_torch(kind, settings, steps=STEPS):
    model, twin = net(), net()
    optimizer, twins = kind(model.parameters(), **settings), kind(twin.parameters(), **copy.deepcopy(settings))
    KFAC(model, optimizer, norm_form="unit", **arranged(OPTIONS | RHYTHM))
    schedulers = [StepLR(o, 3, gamma=0.7) for o in (optimizer, twins)]
    for step in range(steps):
        train(model, optimizer, step, step + 1)
        train(twin, twins, step, step + 1)
        assert_weights(model, twin, 1e-10)
        for scheduler in schedulers:
            scheduler.step()
    assert list(optimizer.state) == [model.place]


@pytest.mark.parametrize("case", CASES)
def test_in_the_basis_of_the_weights_it_is_torchs_own(case, identity_bases):
    assert_equals_torch(*CASES[case])


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"fused": True}, {"foreach": False}, {"lr": torch.tensor(0.01, dtype=torch.float64)}],
    ids=["foreach", "fused", "for loop", "lr as a tensor"],
)
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_every_implementation_and_a_rate_as_a_tensor_step_the_same(kind, options, identity_bases):
    """torch itself refuses a rate as a tensor together with foreach."""
    assert_equals_torch(kind, {"lr": 0.01, "weight_decay": 0.1, **options}, steps=9)


def test_decoupled_weight_decay_of_adam_is_that_of_adamw(identity_bases):
    assert_equals_torch(Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}, steps=5)


# An update's length


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.6, 0.9)])
@pytest.mark.parametrize("number", [1, 2, 7, 60, 3000])
def test_no_update_of_adam_in_one_basis_is_longer(betas, number):
    weights = [(torch.ones(1, dtype=torch.float64) * sum(beta**age for age in range(number))) for beta in betas]
    found = float(adam_eigen.largest_update(*weights, betas))
    assert found == pytest.approx(1.01 * longest(number, *betas), rel=1e-4)
    single = float(adam_eigen.largest_update(*(w.float() for w in weights), betas))
    assert single == pytest.approx(found, rel=2e-3)
    torch.manual_seed(0)
    grads = torch.randn(min(number, 60), 500, dtype=torch.float64).abs() ** 3
    m = v = w1 = w2 = 0
    for g in grads:
        m, v, w1, w2 = betas[0] * m + g, betas[1] * v + g * g, betas[0] * w1 + 1, betas[1] * w2 + 1
    assert float(((m / w1) / (v / w2).sqrt()).max()) <= longest(len(grads), *betas) * (1 + 1e-9)


def test_moments_that_a_new_basis_makes_too_small_do_not_make_a_step_too_long():
    model, optimizer, kfac = start()
    train(model, optimizer, 0, 4)
    for state in layer_states(kfac).values():
        state.moments.value.mul_(1e-8)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 4, 5)
    moved = max(float((p.detach() - old).abs().max()) for p, old in zip(model.parameters(), before, strict=True))
    assert moved < 30 * optimizer.param_groups[0]["lr"]


def test_a_little_of_a_large_moment_does_not_drown_a_small_one():
    angle = torch.tensor(0.02, dtype=torch.float64)
    turn = torch.tensor([[angle.cos(), angle.sin()], [-angle.sin(), angle.cos()]])
    moments = torch.tensor([[[1.0], [1e-8]]], dtype=torch.float64)
    found = carried(moments, torch.zeros(1, 2, 1), {"G": turn[None]}).flatten()
    assert found[0] == pytest.approx(1.0, rel=2e-3)
    assert found[1] == pytest.approx(1e-8, rel=0.25)  # a plain mean has 4e-4


# Where there is no basis


def failing(_factor):
    raise decompose.LinAlgError("failed to converge")


def test_layers_that_fall_back_to_inverses_are_torchs_own(monkeypatch):
    monkeypatch.setattr(decompose, "eigen", failing)
    assert_equals_torch(*CASES["AdamW"], steps=9)


def test_after_a_fallback_moments_go_on_in_the_basis_of_the_weights(monkeypatch):
    oracle, (model, optimizer, kfac) = Oracle("AdamW"), start()
    for step in range(8):
        if step == 4:
            monkeypatch.setattr(decompose, "eigen", failing)
        train(model, optimizer, step, step + 1)
        backward(oracle.model, step)
        if step == 4:
            for name, pair in oracle.bases.items():
                new = [torch.eye(q.shape[-1]).to(q).expand_as(q) for q in pair]
                oracle.carry(name, new)
                oracle.bases[name] = new
        oracle.step(with_blocks(kfac) if step == 0 else None)
        assert_weights(model, oracle.model, 1e-9)


# Groups


def apart(model):
    """Weights and biases in groups of their own, as for weight decay, the bias with another rate."""
    is_bias = {name: name.endswith("bias") for name, _ in model.named_parameters()}
    weights = [p for name, p in model.named_parameters() if not is_bias[name]]
    biases = [p for name, p in model.named_parameters() if is_bias[name]]
    return [{"params": biases, "lr": 4e-3, "weight_decay": 0.0}, {"params": weights, "lr": 2e-2, "weight_decay": 0.3}]


@pytest.mark.parametrize("case", CASES)
def test_weight_and_bias_each_have_their_own_rate_and_decay(case):
    assert_equals_the_oracle(case, apart)


def test_layers_in_different_groups_each_have_their_own_betas():
    def by_layer(model):
        first = [*model.embed.parameters(), *model.conv.parameters(), *model.norm.parameters()]
        rest = [p for p in model.parameters() if not any(p is q for q in first)]
        return [{"params": first, "betas": (0.7, 0.9), "eps": 1e-5}, {"params": rest, "betas": (0.95, 0.99)}]

    assert_equals_the_oracle("AdamW", by_layer)


@pytest.mark.parametrize("options", [{"betas": (0.85, 0.95)}, {"eps": 1e-3}])
def test_a_bias_with_betas_of_its_own_is_stepped_by_the_optimizer_exactly(options):
    """The weight is preconditioned; the bias takes the steps that the optimizer takes alone on the same gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3)).double()
    (layer,), steps = model, []
    bias = torch.nn.Parameter(layer.bias.detach().clone())
    groups = [{"params": [layer.weight]}, {"params": [layer.bias]} | options]
    optimizer, alone = torch.optim.AdamW(groups, lr=0.1), torch.optim.AdamW([{"params": [bias]} | options], lr=0.1)
    kfac = KFAC(model, optimizer, announce=False)
    assert [(item.name, item.reason[:19]) for item in kfac.left] == [("0.bias", "the optimizer has o")]
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4).double()).square().sum().backward()
        bias.grad = layer.bias.grad.clone()
        optimizer.step()
        alone.step()
        steps.append((layer.bias.detach().clone(), bias.detach().clone()))
    assert all(torch.equal(mine, other) for mine, other in steps)
    assert set(optimizer.state) == {layer.bias}
    assert kfac.factors()["0"]["A"].shape == (4, 4)


# What the optimizer and the user see


@pytest.mark.parametrize("case", ["AdamW", "Adam, L2, maximize"])
def test_the_optimizer_keeps_no_state_of_these_layers_and_their_gradients_are_there_again(case):
    model, optimizer, _ = start(case)
    for step in range(6):
        backward(model, step)
        raw = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        for p, grad in zip(model.parameters(), raw, strict=True):
            assert torch.equal(p.grad, grad)
        assert not any(p in optimizer.state for p in kfacs_parameters(model))
        assert float(optimizer.state[model.place]["step"]) == step + 1


def test_the_optimizers_own_state_is_saved_and_loaded_as_ever():
    model, optimizer, _ = start()
    train(model, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    place = saved["state"][[p is model.place for p in model.parameters()].index(True)]
    assert place["exp_avg"].shape == model.place.shape
    train(model, optimizer, 3, 6)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.place]["exp_avg"], place["exp_avg"])
    train(model, optimizer, 6, 8)
    assert not any(p in optimizer.state for p in kfacs_parameters(model))


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_takes_the_steps_of_the_ordinary_loop(fused):
    model, twin = net(), net()
    optimizers = [AdamW(m.parameters(), lr=0.01, fused=fused) for m in (model, twin)]
    for m, o in zip((model, twin), optimizers, strict=True):
        KFAC(m, o, **arranged(OPTIONS | RHYTHM))
    for step in range(6):
        train(model, optimizers[0], step, step + 1)
        optimizers[1].step(functools.partial(backward, twin, step))
        assert_weights(twin, model, 0)
        assert all(p.grad is not None for p in twin.parameters())


def test_a_layer_without_a_gradient_stays_as_it_is():
    model, optimizer, kfac = start()
    train(model, optimizer, 0, 5)
    backward(model, 5)
    model.wide.weight.grad = None
    before, saved = model.wide.weight.clone(), kfac.state_dict()["layers"]["wide"]
    other = model.head.weight.clone()
    optimizer.step()
    assert torch.equal(model.wide.weight, before)
    assert model.wide.weight.grad is None
    assert_equal(kfac.state_dict()["layers"]["wide"], saved)
    assert not torch.equal(model.head.weight, other)


@pytest.mark.parametrize("num", [2, 3])
def test_micro_batches_give_the_weights_of_the_whole_batch(num):
    model, optimizer, _ = start(accumulate="mean")
    whole, optimizer_of_whole, _ = start()
    for step in range(10):
        optimizer.zero_grad()
        for x, y in zip(*(t.chunk(num) for t in batch(step)), strict=True):
            (square_loss(model(x), y) / len(x) / num).backward()
        optimizer.step()
        train(whole, optimizer_of_whole, step, step + 1)
        assert_weights(model, whole, 1e-9)


# Steps that are skipped


def everything(model, kfac):
    """All that a step changes in K-FAC's layers."""
    return copy.deepcopy({"weights": dict(model.state_dict()), "kfac": kfac.state_dict()["layers"]})


def without_place(model):
    """The optimizer would take a step of zero gradient on a parameter that is its own."""
    model.place.requires_grad_(False)
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("case", ["AdamW", "Adam, L2"])
def test_a_step_that_is_not_finite_changes_nothing(case, where, bad):
    model, optimizer, kfac = start(case, parameters=without_place)
    for step in range(10):
        if step in (3, 5, 6):  # the second step of a rhythm, the one after a refresh and one that measures
            before = everything(model, kfac)
            backward(model, step, bad if where == "loss" else 1.0)
            model.conv.bias.grad[0] = bad
            optimizer.step()
            assert_equal(everything(model, kfac), before)
        else:
            before = weights_of(model)
            train(model, optimizer, step, step + 1)
            assert all(p.isfinite().all() for p in model.parameters())
            assert not any(
                torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True) if p is not model.place
            )
    assert kfac.metrics()["skipped_batches"] == 3


def test_a_run_goes_on_as_if_a_bad_batch_had_not_been_there():
    """Where each step refreshes, one more refresh changes nothing."""
    model, optimizer, _ = start(parameters=without_place, **EVERY_STEP)
    train(model, optimizer, 0, 3)
    backward(model, 99, math.nan)
    optimizer.step()
    train(model, optimizer, 3, 6)
    clean, its_optimizer, _ = start(parameters=without_place, **EVERY_STEP)
    train(clean, its_optimizer, 0, 6)
    assert_weights(model, clean, 1e-9)


class Scaled:
    """Training in single precision under a GradScaler."""

    def __init__(self, scale=2.0**8, fused=False, **rhythm):
        self.model = net(torch.float32)
        self.optimizer = AdamW(without_place(self.model), lr=0.01, weight_decay=0.1, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        options = OPTIONS | {"norm_form": "unit", "grad_scaler": self.scaler} | rhythm
        self.kfac = KFAC(self.model, self.optimizer, **arranged(options))

    def step(self, step, overflows=False):
        x, y = batch(step, torch.float32)
        self.optimizer.zero_grad()
        loss = square_loss(self.model(x), y) / len(x)
        self.scaler.scale(loss * torch.inf if overflows else loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert (self.scaler.get_scale() < scale) is overflows


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_changes_nothing_and_leaves_no_trace(fused):
    run, clean = Scaled(fused=fused, **EVERY_STEP), Scaled(fused=fused, **EVERY_STEP)
    for step in range(8):
        if step in (2, 4, 5):
            before = weights_of(run.model)
            run.step(99, overflows=True)
            assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))
        run.step(step)
        clean.step(step)
    assert_weights(run.model, clean.model, 1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_between_refreshes_leaves_every_average_as_it_was(fused):
    run = Scaled(fused=fused, **RHYTHM)
    for step in range(7):
        before, overflows = everything(run.model, run.kfac), step in (2, 3)
        run.step(step, overflows)
        if overflows:
            assert_equal(everything(run.model, run.kfac), before)
    assert all(p.isfinite().all() for p in run.model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_scale_does_not_reach_the_update(fused):
    runs = [Scaled(scale, fused, **RHYTHM) for scale in (1.0, 2.0**12)]
    for step, run in itertools.product(range(8), runs):
        run.step(step)
    assert_weights(*(run.model for run in runs), 1e-4)


# Saving and loading


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["AdamW", "Adam, L2"])
def test_resuming_at_any_step_is_bitwise_the_uninterrupted_run(case, dtype):
    run, saved = start(case, dtype), {}
    for step in range(10):
        train(*run[:2], step, step + 1)
        saved[step + 1] = through_file([dict(part.state_dict()) for part in run])
    for at in range(1, 7):
        again = start(case, dtype)
        with torch.no_grad():
            for p in again[0].parameters():
                p.fill_(7.0)
        for own, state in zip(again, copy.deepcopy(saved[at]), strict=True):
            own.load_state_dict(state)
        assert_equal(again[2].state_dict(), saved[at][2], f"loaded at {at}")
        train(*again[:2], at, at + 4)
        assert_equal(dict(again[0].state_dict()), saved[at + 4][0], f"resumed at {at}")
        assert_equal(again[2].state_dict(), saved[at + 4][2], f"resumed at {at}")


# Refusals


def refused(optimizer, *words, **options):
    model = net()
    with pytest.raises((ValueError, TypeError)) as found:
        KFAC(model, None if optimizer is None else optimizer(model.parameters()), **arranged(OPTIONS | options))
    assert all(word in str(found.value) for word in words), found.value


def test_it_needs_an_optimizer():
    refused(None, "adam-eigen", "optimizer")


@pytest.mark.parametrize("kind", [SGD, NAdam])
def test_other_optimizers_are_refused_by_name(kind):
    refused(functools.partial(kind, lr=0.1), kind.__name__)


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_amsgrad_is_refused(kind):
    refused(functools.partial(kind, amsgrad=True), "amsgrad")


def test_a_solver_without_eigenbases_is_refused():
    refused(AdamW, "solver", "cholesky", solver="cholesky")


@pytest.mark.parametrize("rescale", ["norm", "norm-global"])
def test_a_length_other_than_adams_is_refused(rescale):
    refused(AdamW, "rescale", rescale, rescale=rescale)


@pytest.mark.parametrize("given", [{}, {"rescale": "none"}])
def test_the_length_is_adams_where_none_is_asked_for(given):
    assert start(**given)[2].settings.rescale == "none"


# Ranks

ALONE = ("sharded", "layer-wise", "mem-opt")
"""Strategies under which one rank steps a layer."""


class Rank:
    """A model, its optimizer and K-FAC on one rank, and steps on the rank's part of global batches."""

    def __init__(self, rank, world_size, *, net="deep", kind=AdamW, **options):
        self.rank, self.world_size, self.net = rank, world_size, net
        self.model = build(net)
        self.optimizer = kind(self.model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-6)
        self.kfac = KFAC(self.model, self.optimizer, **arranged(EXACT | OPTIONS | {"norm_form": "unit"} | options))

    def train(self, start, stop):
        for step in range(start, stop):
            x, y = (part(t, self.rank, self.world_size) for t in global_batch(step, self.net))
            self.optimizer.zero_grad()
            mean_loss(self.model(x), y).backward()
            if self.world_size > 1:
                average_in_one(self.model)
            raw = [p.grad.clone() for p in self.model.parameters()]
            self.optimizer.step()
            for p, grad in zip(self.model.parameters(), raw, strict=True):
                # who does not own a layer whose weights are shared has no gradient of it, whatever the curvature
                assert torch.equal(p.grad, grad) if p.grad is not None else self.kfac.plan.share == "weights"
        assert not any(p in self.optimizer.state for layer in self.kfac.layers for p in layer.parameters())
        return self


def train_on_a_rank(rank, world_size, options):
    return weights_of(Rank(rank, world_size, **options).train(0, 10).model)


@functools.cache
def one_process(options):
    return train_on_a_rank(0, 1, dict(options))


def assert_same_weights(ranks, expected):
    for rank, weights in enumerate(ranks):
        for p, q, first in zip(weights, expected, ranks[0], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=lambda m, r=rank: f"rank {r}: {m}")
            assert torch.equal(p, first), f"rank {rank} is not bitwise rank 0"


def assert_parity(world_size, strategy, **options):
    ranks = on_threads(world_size, train_on_a_rank, world_size, {"strategy": strategy, **options})
    assert_same_weights(ranks, one_process(tuple((key, value) for key, value in options.items() if key != "share")))


def covering():
    for world_size in (2, 3, 4):
        for group in distinct((*FULL_STATISTICS, "auto"), world_size, "deep"):
            marks = pytest.mark.slow if world_size == 3 else ()
            yield pytest.param(world_size, group[-1], id=f"{world_size}-{'='.join(group)}", marks=marks)


@pytest.mark.parametrize(("world_size", "strategy"), list(covering()))
def test_ranks_train_like_one_process(world_size, strategy):
    assert_parity(world_size, strategy)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
@pytest.mark.parametrize("strategy", [*ALONE, "auto"])
def test_ranks_that_share_weights_train_like_one_process(strategy, world_size):
    assert_parity(world_size, strategy, share="weights")


@pytest.mark.parametrize("share", ["gradients", "weights"])
def test_ranks_hold_steps_back_like_one_process(share):
    clip = {"rescale": "kl-clip", "kl_clip": 1e-5}
    strategy = "sharded" if share == "weights" else "hybrid-opt"
    assert_parity(3, strategy, share=share, **clip)
    assert any((p - q).norm() > 1e-6 for p, q in zip(one_process(()), one_process(tuple(clip.items())), strict=True))


@pytest.mark.parametrize("share", ["gradients", "weights"])
@pytest.mark.parametrize(("name", "kind"), [("vision", AdamW), ("vision", Adam), ("language", AdamW)])
def test_ranks_train_other_layers_like_one_process(name, kind, share):
    strategy = "sharded" if share == "weights" else "hybrid-opt"
    options = {"loss_terms": "token"} if name == "language" else {}
    assert_parity(4, strategy, net=name, kind=kind, share=share, **options)


def save_gathered(rank, world_size, options):
    run = Rank(rank, world_size, **options).train(0, 6)
    return run.model.state_dict(), run.kfac.state_dict(gather=True)


def go_on(rank, world_size, saved, options):
    run = Rank(rank, world_size, **options)
    for own, state in zip((run.model, run.kfac), copy.deepcopy(saved), strict=True):
        own.load_state_dict(state)
    return weights_of(run.train(6, 10).model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"strategy": "sharded"}, {"strategy": "comm-opt"}),
        ({"strategy": "hybrid-opt"}, {"strategy": "mem-opt", "share": "weights"}),
        ({"strategy": "layer-wise", "share": "weights"}, {"strategy": "replicated"}),
    ],
    ids=["sharded", "hybrid-opt", "weights"],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_four_ranks_go_on_as_any_number_under_another_strategy(before, after, world_size):
    saved = on_threads(4, save_gathered, 4, {"net": "vision", **before})[0]
    found = on_threads(world_size, go_on, world_size, saved, {"net": "vision", **after})
    assert_same_weights(found, one_process((("net", "vision"),)))


# Wrong paths


def test_gradients_come_back_where_another_hook_breaks_the_step():
    model, optimizer, kfac = start()

    def breaks(*_):
        raise RuntimeError("no")

    handle = optimizer.register_step_pre_hook(breaks)
    backward(model, 0)
    raw = {name: p.grad.clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    handle.remove()
    kfac.close()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, raw[name])


def test_a_weight_that_has_left_its_group_takes_no_step():
    model, optimizer, _ = start()
    train(model, optimizer, 0, 2)
    gone = {id(p) for p in model.head.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gone]
    before = model.head.weight.clone()
    train(model, optimizer, 2, 4)
    assert torch.equal(model.head.weight, before)


# Refreshes in place


class Deep(nn.Module):
    """Net, and several layers of one shape, some of them turned."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)))
        self.turned = nn.Sequential(Conv1D(5, 3), nn.Tanh(), Conv1D(3, 5), nn.Tanh(), Conv1D(5, 3), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, index):
        return self.head(self.turned(self.inner(torch.tanh(self.net(index)))))


def deep(**options):
    torch.manual_seed(0)
    model = Deep().double()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = OPTIONS | RHYTHM | {"solver": "warm-eigen", "norm_form": "unit"} | options
    return model, optimizer, KFAC(model, optimizer, **arranged(settings))


def test_a_refresh_in_place_rotates_moments_as_a_careful_one_does(monkeypatch):
    found = []
    for in_place in (True, False):
        with monkeypatch.context() as patch:
            seen, real = [], replace._carry
            patch.setattr(replace, "_carry", lambda *given, seen=seen, real=real: seen.append(0) or real(*given))
            if not in_place:
                patch.setattr(refresh_scheduler, "may_renew", lambda _: False)
            model, optimizer, kfac = deep()
            train(model, optimizer, 0, STEPS)
            assert bool(seen) == in_place
            assert {layer.kind for layer in kfac.layers} >= {"conv1d-transposed", "linear", "conv", "norm-unit"}
            found.append(model)
    assert_weights(*found, 1e-9)


@pytest.mark.parametrize("room", [1, 10**9])
def test_how_much_is_decomposed_together_changes_nothing(room, monkeypatch):
    found, calls, real = [], [], renewal._solve_batch
    for most in (room, batches.SOLVE_BYTES):
        with monkeypatch.context() as patch:
            patch.setattr(batches, "SOLVE_BYTES", most)
            patch.setattr(renewal, "_solve_batch", lambda some, *given: calls.append(len(some)) or real(some, *given))
            model, optimizer, _ = deep()
            train(model, optimizer, 0, STEPS)
        found.append(model)
    assert (1 in calls) == (room == 1)
    assert max(calls) > 1
    assert_weights(*found, 1e-10)


def repair(runner, layer, key):
    runner.refresher._decompose(runner.context, runner.ranks, runner.states, [layer], frozenset({(layer.name, key)}))


def test_a_repaired_basis_takes_the_place_of_the_old_one_and_moments_are_rotated_to_it():
    model, optimizer, kfac = deep()
    train(model, optimizer, 0, STEPS)
    runner = kfac._engine
    layer = next(la for la in kfac.layers if la.kind == "linear")
    state = runner.states[layer.name]
    before, moments = state.decompositions["A"].vectors.clone(), state.moments.value.clone()
    expected = copy.deepcopy(state)
    state.running["A"].value.copy_(torch.diag(torch.arange(1.0, 1 + layer.spec.factor("A").dim)))
    expected.running["A"].value.copy_(state.running["A"].value)
    repair(runner, layer, "A")
    ((new, rung),) = layer_factors.decompose(layer, expected, ["A"], kfac.settings, runner.step).values()
    layer_factors.adopt(layer, expected, {"A": rung}, {"A": new}, kfac.settings, runner.step)
    assert not torch.equal(state.decompositions["A"].vectors, before)
    assert not torch.equal(state.moments.value, moments)
    assert torch.equal(state.decompositions["A"].vectors, expected.decompositions["A"].vectors)
    assert torch.equal(state.moments.value, expected.moments.value)
    assert torch.equal(state.momentum.value, expected.momentum.value)


def test_a_basis_that_fails_in_place_leaves_moments_where_they_are(monkeypatch):
    real, calls = together._renewed, []

    def sometimes(jobs):
        made = []
        for new, sound in real(jobs):
            calls.append(len(sound))
            made.append((new, sound & (len(calls) % 2 == 0)))
        return made

    monkeypatch.setattr(together, "_renewed", sometimes)
    monkeypatch.setattr(
        layer_factors, "refresh", lambda f, old, *given: (old, "kept") if old else fallback.refresh(f, old, *given)
    )
    model, optimizer, kfac = deep()
    train(model, optimizer, 0, STEPS)
    assert len(calls) > 20
    assert all(torch.isfinite(p).all() for p in model.parameters())
    for layer in kfac.layers:
        moments = kfac.state_dict()["layers"][layer.name]["moments"]
        assert bool((torch.as_tensor(moments["value"]) >= 0).all())


def assert_resumes(make, stop, last):
    """A run that is saved and loaded ends as one that is not, to the last bit."""
    model, optimizer, _ = make()
    train(model, optimizer, 0, last)
    first, first_optimizer, kfac = make()
    train(first, first_optimizer, 0, stop)
    second, second_optimizer, other = make()
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    other.load_state_dict(kfac.state_dict())
    train(second, second_optimizer, stop, last)
    for p, q in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("stop", [5, 8, 11, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 7, 9, 10))])
def test_a_spread_refresh_resumes_anywhere(stop):
    assert_resumes(lambda: deep(spread_refresh=4), stop, 16)


# Bases in half the memory


def small(**options):
    model, optimizer, kfac = start("AdamW", torch.float32, **options)
    return model, optimizer, kfac


@pytest.mark.parametrize("solver", ["eigen", "warm-eigen"])
def test_bases_in_bfloat16_take_half_the_memory_and_nearly_the_same_steps(solver):
    found = {}
    for dtype in ("float32", "bfloat16"):
        model, optimizer, kfac = small(solver=solver, basis_dtype=dtype)
        train(model, optimizer, 0, STEPS)
        bases = [d for state in layer_states(kfac).values() for d in state.decompositions.values()]
        dense = [d.vectors for d in bases if d.vectors is not None]
        assert {v.dtype for v in dense} == {getattr(torch, dtype)}
        assert all(d.values.dtype == torch.float32 for d in bases)
        found[dtype] = (torch.cat([p.detach().flatten() for p in model.parameters()]), sum(v.nbytes for v in dense))
    first = torch.cat([p.detach().flatten() for p in net(torch.float32).parameters()])
    moved = (found["float32"][0] - first).norm()
    assert 0 < (found["bfloat16"][0] - found["float32"][0]).norm() < 0.1 * moved
    assert found["bfloat16"][1] * 2 == found["float32"][1]


@pytest.mark.parametrize("stop", [3, 4, 5, 9])
def test_bases_in_bfloat16_resume_to_the_last_bit(stop):
    assert_resumes(lambda: small(solver="warm-eigen", basis_dtype="bfloat16"), stop, 14)


def test_rounded_bases_are_refused_where_eigenvalues_divide():
    refused(AdamW, "basis_dtype", "adam-eigen", basis_dtype="bfloat16", curvature="kfac")


# What a second reader found


def test_moments_of_adam_are_not_taken_for_ekfacs_nor_the_other_way():
    model, optimizer, kfac = start()
    train(model, optimizer, 0, 6)
    adams = kfac.state_dict()
    kfac.close()
    with KFAC(model, announce=False, curvature="ekfac", norm_form="unit") as other:
        other.load_state_dict(adams)
        assert all(state.moments is None for state in layer_states(other).values())
        backward(model, 0)
        other.step()
        backward(model, 1)
        other.step()
        ekfacs = other.state_dict()
    assert any("moments" in layer for layer in ekfacs["layers"].values())
    back = KFAC(model, optimizer, norm_form="unit", **arranged(OPTIONS | RHYTHM))
    back.load_state_dict(ekfacs)
    assert all(state.moments is None for state in layer_states(back).values())


def test_a_state_without_decompositions_is_a_copy():
    model, optimizer, kfac = start()
    train(model, optimizer, 0, 6)
    saved = kfac.state_dict(decompositions=False)["layers"]
    before = {name: layer["moments"]["value"].clone() for name, layer in saved.items()}
    train(model, optimizer, 6, 8)
    for name, value in before.items():
        assert torch.equal(saved[name]["moments"]["value"], value)


def test_a_step_that_raised_gives_its_gradients_back_before_the_next():
    model, optimizer, _ = start()
    train(model, optimizer, 0, 5)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(model, 5)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    backward(model, 6)
    wanted = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, grad)


def test_the_optimizer_forgets_what_it_knew_of_layers_that_k_fac_steps():
    model, optimizer, _ = start()
    backward(model, 0, bad=float("nan"))
    optimizer.step()
    train(model, optimizer, 1, 6)
    kept = {id(p) for p in optimizer.state}
    assert kept == {id(model.place)}


def test_a_layer_whose_basis_was_kept_goes_on_in_the_same_moments(monkeypatch):
    model, optimizer, kfac = deep()
    train(model, optimizer, 0, 10)
    runner, layer = kfac._engine, kfac.layers[-1]
    before = runner.states[layer.name].moments.value
    monkeypatch.setattr(layer_factors, "refresh", lambda factor, old, *_: (old, "kept"))
    repair(runner, layer, "A")
    assert runner.states[layer.name].moments.value is before


def test_bases_follow_a_model_that_is_converted():
    model, optimizer, kfac = small(solver="warm-eigen", basis_dtype="bfloat16")
    train(model, optimizer, 0, 6)

    def kinds():
        found = [d.vectors for state in layer_states(kfac).values() for d in state.decompositions.values()]
        return {vectors.dtype for vectors in found if vectors is not None}

    for dtype, kept in ((torch.float64, torch.float64), (torch.float32, torch.bfloat16)):
        model.to(dtype)
        for p in model.parameters():
            optimizer.state.pop(p, None)
        train(model, optimizer, 6, 12)
        assert kinds() == {kept}


class Own(torch.optim.AdamW):
    """Someone's variant."""


@pytest.mark.parametrize(
    ("kind", "given", "options", "chosen"),
    [
        (torch.optim.AdamW, {}, {}, "adaptive"),
        (torch.optim.AdamW, {}, {"damping": 1e-2}, "adam-eigen"),
        (torch.optim.Adam, {}, {"rescale": "none", "solver": "warm-eigen"}, "adam-eigen"),
        (torch.optim.AdamW, {}, {"curvature": "kfac"}, "kfac"),
        (torch.optim.AdamW, {}, {"curvature": "ekfac"}, "ekfac"),
        (torch.optim.AdamW, {}, {"solver": "cholesky"}, "kfac"),
        (torch.optim.AdamW, {}, {"rescale": "norm"}, "kfac"),
        (torch.optim.AdamW, {}, {"rescale": "kl-clip", "kl_clip": 1e-4}, "adam-eigen"),
        (torch.optim.SGD, {}, {"rescale": "kl-clip"}, "kfac"),
        (torch.optim.AdamW, {"amsgrad": True}, {}, "adaptive"),
        (torch.optim.AdamW, {"amsgrad": True}, {"damping": 1e-2}, "kfac"),
        (torch.optim.NAdam, {}, {}, "adaptive"),
        (Own, {}, {}, "adaptive"),
        (torch.optim.SGD, {}, {}, "adaptive"),
        (torch.optim.SGD, {}, {"damping": 1e-2}, "kfac"),
        (torch.optim.SGD, {}, {"solver": "cholesky"}, "kfac"),
        (None, {}, {}, "kfac"),
    ],
)
def test_what_is_left_open_is_chosen_by_the_optimizer(kind, given, options, chosen, capsys):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = None if kind is None else kind(model.parameters(), lr=1e-3, **given)
    for form in (options, {"settings": Settings(**arranged(options))}):
        with KFAC(model, optimizer, **arranged(form)) as kfac:
            assert kfac.settings.curvature == chosen
            assert kfac.settings.rescale != "auto"
            assert f"({chosen}, " in capsys.readouterr().err


CHOSEN = ("solver", "factor_interval", "inverse_interval", "warmup_refresh", "factor_decay")
FREQUENT = ("warm-eigen", 20, 20, (5, 500), 0.8)
USUAL = ("eigen", 10, 100, 1.3, 0.95)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.AdamW, {}, FREQUENT),
        (torch.optim.AdamW, {"curvature": "adam-eigen"}, FREQUENT),
        (torch.optim.Adam, {"solver": "warm-eigen", "block_dim": 3}, FREQUENT),
        (torch.optim.AdamW, {"solver": "eigen"}, USUAL),
        (torch.optim.AdamW, {"curvature": "kfac"}, USUAL),
        (torch.optim.AdamW, {"rescale": "norm"}, USUAL),
        (torch.optim.AdamW, {"factor_interval": 2}, ("eigen", 2, *USUAL[2:])),
        (torch.optim.AdamW, {"inverse_interval": 30, "solver": "warm-eigen"}, ("warm-eigen", 10, 30, *USUAL[3:])),
        (torch.optim.AdamW, {"staleness": "change"}, USUAL),
        (
            torch.optim.AdamW,
            {"staleness": "fixed", "inverse_lag": 0, "rescale": "kl-clip", "cuda_graph": True},
            FREQUENT,
        ),
        (torch.optim.AdamW, {"inverse_lag": 8}, USUAL),
        (torch.optim.AdamW, {"settings": Settings()}, USUAL),
        (torch.optim.SGD, {}, FREQUENT),
        (torch.optim.RMSprop, {}, FREQUENT),
        (torch.optim.SGD, {"curvature": "kfac"}, USUAL),
    ],
)
def test_curvatures_that_take_steps_have_a_rhythm_of_their_own_unless_one_is_given(kind, options, expected, capsys):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with KFAC(model, kind(model.parameters(), lr=1e-3), **arranged(options)) as kfac:
        assert tuple(getattr(kfac.settings, name) for name in CHOSEN) == expected
    said = capsys.readouterr().err
    assert ("every 20, inverses every 20 steps, more often before step 500" in said) == (expected is FREQUENT)
