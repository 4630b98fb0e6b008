"""curvature="adaptive": the optimizer's own length, in a direction that the gradients to come decide."""

import copy
import functools
import math

import pytest
import reference as ref
import test_adam_eigen as base
import test_step_graphs as graphs
import torch
from helpers_parity import EXACT, average_in_one, batch, build, layer_states, mean_loss, part, weights_of
from helpers_ranks import on_threads
from helpers_settings import arranged
from torch import nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from dkfac import KFAC
from dkfac.config import optimizer_rules
from dkfac.factors import stacks
from dkfac.ops import together
from dkfac.precondition import adam_eigen, adaptive

OPTIONS = EXACT | {"curvature": "adaptive", "solver": "eigen", "norm_form": "unit"}
played, acted = graphs.played, graphs.acted


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * mean.lerp(p.grad, 1 - group["betas"][0]).sign())
                mean.lerp_(p.grad, 1 - group["betas"][1])


Own = type("Own", (AdamW,), {"step": lambda self, closure=None: AdamW.step(self, closure)})
BY_RULE = {
    "AdamW": (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam, L2": (Adam, {"lr": 5e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
    "Adam renamed, maximize": (type("Renamed", (Adam,), {}), {"lr": 3e-3, "weight_decay": 0.1, "maximize": True}),
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "SGD, Nesterov, L2": (SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "SGD, no momentum, maximize": (SGD, {"lr": 0.02, "maximize": True}),
}
MEASURED = {
    "SGD, dampening": (SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "AdamW, amsgrad": (AdamW, {"lr": 1e-2, "betas": (0.7, 0.9), "amsgrad": True, "weight_decay": 0.1}),
    "AdamW, own step": (Own, {"lr": 1e-2}),
    "RMSprop, L2": (RMSprop, {"lr": 2e-3, "momentum": 0.5, "weight_decay": 0.1}),
    "Adamax, L2": (Adamax, {"lr": 5e-3, "weight_decay": 0.5}),
    "NAdam": (NAdam, {"lr": 5e-3, "weight_decay": 0.1}),
    "NAdam, decoupled": (NAdam, {"lr": 5e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Lion": (Lion, {"defaults": {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.3}}),
}
CASES = BY_RULE | MEASURED
some_cases = pytest.mark.parametrize("case", ["AdamW", "SGD, Nesterov, L2", "RMSprop, L2"])
"""One for each way to know the length: by Adam's rule, by SGD's, and by letting the optimizer step."""


class Run:
    """A model, its optimizer and K-FAC, and steps on a rank's part of global batches."""

    def __init__(self, case, rank=0, world_size=1, *, plain=False, groups=nn.Module.parameters, lr=None, **options):
        self.rank, self.world_size, self.net = rank, world_size, options.pop("net", "vision")
        self.model, (kind, settings) = build(self.net), CASES[case]
        self.optimizer = kind(groups(self.model), **(settings if lr is None else settings | {"lr": lr}))
        self.kfac = None if plain else KFAC(self.model, self.optimizer, **arranged(OPTIONS | options))

    def backward(self, step, pieces=1):
        whole = (part(t, self.rank, self.world_size).chunk(pieces) for t in batch(step, self.net))
        self.model.zero_grad()
        for x, y in zip(*whole, strict=True):
            (mean_loss(self.model(x), y) / pieces).backward()
        if self.world_size > 1:
            average_in_one(self.model)

    def train(self, begin, end, pieces=1):
        for step in range(begin, end):
            self.backward(step, pieces)
            self.optimizer.step()
        return self

    def move(self, step):
        before = torch.cat([p.flatten() for p in weights_of(self.model)])
        return torch.cat([p.flatten() for p in weights_of(self.train(step, step + 1).model)]) - before

    def damping(self, log=None):
        found = {name: state.adaptive.log_damping for name, state in layer_states(self.kfac).items()}
        return {name: float((value if log is None else value.fill_(log)).exp()) for name, value in found.items()}


def divided(m, v, c):
    """Return w = m / sqrt(v + c² mean(v)), and its derivative by log(c)."""
    more = c**2 * v.mean()
    return m / (v + more).sqrt(), -more * m / (v + more) ** 1.5


def followed(e, y, energy, surprise):
    """Return the logarithm of what an update is of the optimizer's own length, after the score y of the last one."""
    if y < -2 and energy > surprise:
        return max(math.log(1e-3), e - 0.3 * math.log(min(energy, 1e4)))
    return min(0.0, e + 0.03)


def spread(updates):
    """Return updates whose lengths are the geometric mean of their own and one in proportion to the root of their
    number of elements, the length of all together unchanged."""
    wanted = {name: (u.norm() * u.numel() ** 0.5) ** 0.5 for name, u in updates.items()}
    total, new = (sum(x**2 for x in each) ** 0.5 for each in ([u.norm() for u in updates.values()], wanted.values()))
    return {name: u * (wanted[name] * total / new / u.norm()) for name, u in updates.items()}


class Oracle(Run, base.Oracle):
    """The rule for some layers, one at a time, and the wrapped optimizer for what is in none."""

    def __init__(self, case, layers, **how):
        super().__init__(case, plain=True, **how)
        kind, settings = CASES[case]
        self.way = "measured" if case in MEASURED else "sgd" if kind is SGD else "adam"
        self.decoupled = settings.get("decoupled_weight_decay", kind in (AdamW, Own, Lion))
        self.m, self.v, self.bases, self.factors, self.rows, self.columns = {}, {}, {}, {}, {}, {}
        self.c, self.e = dict.fromkeys(layers, 10.0), dict.fromkeys(layers, 0.0)

    def update(self, name, g, group):
        """Return the update in the optimizer's length; of one that is measured, of length one."""
        left, right = self.bases[name]
        betas, turned = group.get("betas", (group.get("momentum", 0.9), 0.99)), left.mT @ g @ right
        if name in self.m:
            v = self.v[name][0] / self.v[name][1]
            w, d = divided(left.mT @ self.m[name][0] @ right, v, self.c[name])
            d = d - w * (w * d).sum() / (w * w).sum()
            z = ((turned * d).sum() / (v * d * d).sum().sqrt()).clamp(-3, 3)
            self.c[name] = float((self.c[name] * (0.3 * (z - 1)).exp()).clamp(0.01, 100))
            y, energy = float((turned * w).sum() / (v * w * w).sum().sqrt()), float((turned**2).sum() / v.sum())
            self.e[name] = followed(self.e[name], y, energy, {"sgd": 2, "adam": math.inf, "measured": 4}[self.way])
        self.m[name] = m, number = ref.averaged(self.m.get(name), g, betas[0])
        self.v[name] = squares, weight = ref.averaged(self.v.get(name), turned**2, betas[1])
        self.rows[name] = betas[1] * self.rows.get(name, 0) + (g**2).sum(2, keepdim=True)
        self.columns[name] = betas[1] * self.columns.get(name, 0) + (g**2).sum(1, keepdim=True)
        most = float(adam_eigen.largest_update(*(torch.tensor(x, dtype=g.dtype) for x in (number, weight)), betas))
        m = g + betas[0] * m if group.get("nesterov") else m
        w = divided(left.mT @ m @ right / number, squares / weight, self.c[name])[0].clamp(-most, most)
        length = 1.0 if self.way == "measured" else m.norm()
        if self.way == "adam":
            second = self.rows[name] * self.columns[name] / self.rows[name].sum(1, keepdim=True) / weight
            length = (m / number / (second.sqrt() + group["eps"])).clamp(-most, most).norm()
        return left @ (math.exp(self.e[name]) * length * w / w.norm()) @ right.mT

    @torch.no_grad()
    def step(self, factors=None):
        self.refresh(factors or {})
        old = {p: (p.clone(), p.grad.clone()) for p in self.model.parameters()}
        if self.way == "measured":
            self.optimizer.step()
        updates, moved = {}, {}
        for name in self.c:
            module, length = self.model.get_submodule(name), 0.0
            for p in module.parameters():
                (value, raw), own = old[p], self.settings(p)
                p.grad = (-raw if own.get("maximize") else raw) + own["weight_decay"] * value * (not self.decoupled)
                value *= 1 - own["lr"] * own["weight_decay"] * self.decoupled
                length += (p - value).square().sum()
            g, is_norm = ref.gradient_blocks(module), isinstance(module, ref.NORMS)
            g = g.reshape(-1, module.weight.numel()).T.unsqueeze(2) if is_norm else g  # [gammas, betas] -> [C, 2, 1]
            updates[name], moved[name] = self.update(name, g, self.settings(module.weight)), length
        for name, u in (spread(updates) if self.way == "sgd" else updates).items():
            module = self.model.get_submodule(name)
            is_norm = isinstance(module, ref.NORMS)
            ref.set_gradient_blocks(module, u.squeeze(2).T.reshape(-1) if is_norm else u)
            for p in module.parameters():
                by = moved[name].sqrt() if self.way == "measured" else self.settings(p)["lr"]
                p.copy_(old[p][0] - by * p.grad)
                p.grad = None
        if self.way != "measured":
            self.optimizer.step()


def assert_equals_the_oracle(case, skip=(), **how):
    """Train 20 steps with 5 refreshes."""
    run = Run(case, skip=skip, **how)
    oracle = Oracle(case, layer_states(run.kfac), **how)
    assert optimizer_rules.length_of(run.optimizer) == oracle.way
    for step in range(20):
        run.train(step, step + 1)
        oracle.backward(step)
        oracle.step(base.with_blocks(run.kfac) if step % 4 == 0 else None)
        assert run.damping() == pytest.approx(oracle.c, rel=1e-7)
        base.assert_weights(run.model, oracle.model, 1e-9)
        for group in (*run.optimizer.param_groups, *oracle.optimizer.param_groups):
            group["lr"] *= 0.9
    assert len(set(oracle.c.values())) == len(oracle.c) > 2, "each layer finds its own"


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_with_refreshes_in_between_are_those_written_out(case):
    Run("AdamW", plain=True)  # from now on torch runs hooks in AdamW's step, also where a subclass calls it
    assert_equals_the_oracle(case, skip=["8"])


@some_cases
def test_embeddings_rates_by_parameter_and_padding_take_the_steps_written_out(case, monkeypatch):
    for module in (stacks, together):
        monkeypatch.setattr(module, "aligned", lambda size, _: size + -size % 8)
    groups = nn.Module.parameters if case in MEASURED else base.apart
    assert_equals_the_oracle(case, net="language", loss_terms="token", groups=groups)


def test_damping_rises_at_a_low_rate_toward_the_optimizers_own_step_and_falls_at_a_high_one():
    low, plain, high = Run("SGD", lr=1e-6), Run("SGD", lr=1e-6, plain=True), Run("SGD", lr=1.0)
    angles = [float(torch.cosine_similarity(low.move(0), plain.move(0), 0))]
    low.damping(math.log(0.05))
    for _ in range(60):
        angles.append(float(torch.cosine_similarity(low.move(0), plain.move(0), 0)))
        high.move(0)
    assert angles[1] < 0.8 < 0.9 < angles[-1]
    assert max(high.damping().values()) < 0.05 < 0.4 < min(low.damping().values())


@pytest.mark.parametrize("case", [case for case in BY_RULE if "SGD" in case])
def test_under_large_damping_each_layer_goes_where_torch_does_and_all_together_as_far(case):
    run, plain = Run(case), Run(case, plain=True)
    for step in range(10):
        plain.model.load_state_dict(run.model.state_dict())
        names = [layer.name for layer in run.kfac.layers]
        before = [torch.cat([p.detach().flatten() for p in plain.model.get_submodule(n).parameters()]) for n in names]
        moves = []
        for one in (run, plain):
            one.move(step)
            after = [
                torch.cat([p.detach().flatten() for p in one.model.get_submodule(name).parameters()]) for name in names
            ]
            moves.append([b - a for a, b in zip(before, after, strict=True)])
        if step:
            assert min(float(torch.cosine_similarity(a, b, 0)) for a, b in zip(*moves, strict=True)) > 1 - 1e-6
            ours, theirs = (float(torch.cat(each).norm()) for each in moves)
            assert ours == pytest.approx(theirs, rel=1e-3)
        run.damping(50.0)  # of which the next step makes the most there is


def test_an_optimizer_without_a_learning_rate_of_its_own_keeps_its_length():
    class Fixed(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                p.sub_(0.01 * p.grad.sign())

    model = nn.Linear(6, 4)
    optimizer = Fixed(model.parameters(), {"lr": None, "weight_decay": 0.1})
    KFAC(model, optimizer, announce=False)
    before = [p.detach().clone() for p in model.parameters()]
    mean_loss(model(torch.randn(32, 6)), torch.randint(0, 4, (32,))).backward()
    optimizer.step()
    moved = sum((p - q).square().sum() for p, q in zip(model.parameters(), before, strict=True))
    assert math.isclose(float(moved.detach()), 28 * 0.01**2, rel_tol=1e-4)


def job(rank, world_size, case, options, begin=0, end=10, saved=()):
    run = Run(case, rank, world_size, **options)
    parts = [run.model, run.kfac] if "share" in options else [run.model, run.kfac, run.optimizer]
    for own, state in zip(parts, saved, strict=False):
        own.load_state_dict(copy.deepcopy(state))
    run.train(begin, end)
    saved = [own.state_dict(**({"gather": True} if own is run.kfac else {})) for own in parts]
    return weights_of(run.model), copy.deepcopy(saved)


one_process = functools.cache(lambda case: job(0, 1, case, {})[0])
WAYS = [(2, {"strategy": "hybrid-opt"}), (3, {"strategy": "sharded"}), (4, {"strategy": "comm-opt"})]
WAYS += [(n, {"strategy": s, "share": "weights"}) for n, s in ((2, "layer-wise"), (3, "mem-opt"), (4, "sharded"))]


@pytest.mark.parametrize(("world_size", "options"), WAYS, ids=str)
@some_cases
def test_ranks_train_like_one_process(case, world_size, options):
    ranks = on_threads(world_size, job, world_size, case, options)
    base.assert_same_weights([weights for weights, _ in ranks], one_process(case))


@pytest.mark.parametrize("options", [WAYS[1][1], WAYS[-1][1]], ids=str)
@some_cases
def test_four_ranks_go_on_as_two(case, options):
    saved = on_threads(4, job, 4, case, options, 0, 5)[0][1]
    ranks = on_threads(2, job, 2, case, options, 5, 10, saved)
    base.assert_same_weights([weights for weights, _ in ranks], one_process(case))


@some_cases
def test_a_run_resumes_anywhere_to_the_last_bit(case):
    for stop in (1, 3, 4, 6):
        again, _ = job(0, 1, case, {}, stop, 10, job(0, 1, case, {}, 0, stop)[1])
        assert all(map(torch.equal, again, one_process(case)))


@pytest.mark.parametrize(("before", "after"), [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_momentum_goes_on_with_another_optimizer(before, after):
    """SGD's is kept in the eigenbasis, Adam's in that of the weights."""
    saved = Run(before).train(0, 6).kfac
    run = Run(after)
    run.kfac.load_state_dict(saved.state_dict())
    run.train(6, 7)
    known = saved.state_dict(decompositions=False)["layers"]
    for name, state in run.kfac.state_dict(decompositions=False)["layers"].items():
        grad = ref.gradient_blocks(run.model.get_submodule(name))
        value = known[name]["momentum"]["value"] * 0.9
        if grad.shape == value.shape:
            torch.testing.assert_close(state["momentum"]["value"], value + grad, rtol=1e-9, atol=1e-12)


class Products(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("case", "curvature", "number"), [
    ("SGD", "adaptive", 4), ("RMSprop, L2", "adaptive", 4), ("AdamW", "adaptive", 6), ("AdamW", "adam-eigen", 4),
])  # fmt: skip
def test_a_step_multiplies_each_layer_by_its_bases_as_often_as_it_must(case, curvature, number):
    run = Run(case, net="small", curvature=curvature, factor_interval=10, inverse_interval=10).train(0, 3)
    run.backward(3)
    with Products() as products:
        run.optimizer.step()
    assert products.number == number * len(layer_states(run.kfac))


@some_cases
def test_micro_batches_give_the_weights_of_the_whole_batch(case):
    run = Run(case, accumulate="mean").train(0, 10, pieces=3)
    base.assert_same_weights([weights_of(run.model)], one_process(case))


@some_cases
def test_a_batch_that_is_not_finite_changes_nothing(case):
    run, bad = Run(case), {3: math.nan, 5: math.inf, 6: -math.inf}
    for step in range(8):
        before = base.everything(run.model, run.kfac)
        run.backward(step)
        run.model[0].bias.grad[0] += bad.get(step, 0.0)
        run.optimizer.step()
        after = base.everything(run.model, run.kfac)
        if case in MEASURED:  # which may step with gradients of zero
            assert all(p.isfinite().all() for p in after.pop("weights").values())
        for name in after if step in bad else ():
            base.assert_equal(after[name], before[name])
    assert run.kfac.metrics()["skipped_batches"] == 3


@pytest.mark.filterwarnings("ignore:cuda_graph")  # of an optimizer that is measured none is made
@pytest.mark.parametrize("spread", [1, 3])
@some_cases
def test_steps_from_graphs_are_the_steps(acted, case, spread, monkeypatch):
    kind, settings = CASES[case]
    monkeypatch.setattr(graphs, "optimizer_of", lambda model, _: kind(model.parameters(), **settings | {"lr": 1e-3}))
    options = {"curvature": "adaptive", "solver": "warm-eigen", "spread_refresh": spread, "batch": 48}
    options["steps"] = 10 if case in MEASURED else 16  # after a bad batch
    theirs, ours = graphs.train(**options), graphs.train(**options, cuda_graph=True)
    assert case in MEASURED or graphs.Acted.replays > 30
    graphs.assert_same(ours, theirs, 1e-9)


@some_cases
def test_after_close_the_optimizer_steps_alone(case):
    run, plain = Run(case).train(0, 5), Run(case, plain=True)
    assert {p in run.optimizer.state for p in run.model.parameters()} == {case in MEASURED}
    run.kfac.close()
    plain.model.load_state_dict(run.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    base.assert_weights(run.train(5, 9).model, plain.train(5, 9).model, 0)


OTHERS = [{"damping": 0.1}, {"damping_mode": "relative"}, {"norm_damping": 0.1}, {"kl_clip": 0.1}, {"rescale": "none"}]
CHOSEN = [*((case, {}, "adaptive") for case in CASES), ("SGD", {"solver": "warm-eigen"}, "adaptive")]
CHOSEN += [(case, options, "adam-eigen") for case in ("AdamW", "Adam renamed, maximize") for options in OTHERS]
CHOSEN += [(case, options, "kfac") for case in ("SGD", "AdamW, own step", "Lion") for options in OTHERS]
CHOSEN += [(case, {"solver": "cholesky"}, "kfac") for case in ("AdamW", "SGD", None)]
CHOSEN += [("AdamW", {"rescale": "norm"}, "kfac"), (None, {}, "kfac")]


@pytest.mark.parametrize(("case", "options", "chosen"), CHOSEN, ids=str)
def test_what_auto_stands_for_follows_from_optimizer_and_options(case, options, chosen):
    model, (kind, settings) = build("deep"), CASES.get(case, (None, {}))
    with KFAC(model, kind and kind(model.parameters(), **settings), announce=False, **arranged(options)) as kfac:
        assert kfac.settings.curvature == chosen


@pytest.mark.parametrize("scale", [1e-17, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("c", [0.01, 1.0, 10.0])
def test_scores_do_not_depend_on_the_unit_of_the_loss(scale, c):
    torch.manual_seed(0)
    momentum, gradient, spread = torch.randn(3, 1, 300, 300, dtype=torch.float64)
    square, weight = (2 * spread).exp(), torch.tensor([3.0], dtype=torch.float64)
    w, d = divided(momentum, square, c)
    d = d - w * (w * d).sum() / (w * w).sum()
    exact = [weight.sqrt() * (gradient * x).sum() / (square * x * x).sum().sqrt() for x in (d, w)]
    exact.append(gradient.square().sum() * weight / square.sum())
    small = [x.float() for x in (scale * gradient, scale * momentum, scale**2 * square)]
    total = small[2].sum().view(1)
    mean = total / 90_000
    sums = adaptive.sums_of_last_update(*small, mean, c**2 * mean)
    for ours, theirs in zip(adaptive.judge(sums, weight.float(), total), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=1e-3)
