"""Adaptive staleness against an oracle written from its definition: when each statistic is due, and the weights.

The oracle is one process that has all ranks' micro-batches, ``shards[rank][micro-batch] -> (x, y)``.
"""

import functools
import itertools

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from helpers_parity import LOCK, average_in_one, deep, mean_loss, summed_loss, weights_of
from helpers_ranks import on_threads
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC

STEPS, JUMP = 48, 28
SIZES = (40, 33, 25)
"""Examples of the steps, in turn: odd ones have unequal halves, and a pool is a weighted mean."""
SGD = {"lr": 0.02, "momentum": 0.9}
BASIC = {"staleness": "change", "staleness_threshold": 0.2, "staleness_min_rows": 20, "max_interval": 9}
BASIC |= {"damping": 1e-2, "factor_decay": 0.8, "solver": "eigen", "damping_mode": "absolute", "norm_form": "off"}


# 1. Networks and batches


def conv():
    layers = nn.Conv2d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6, 3)
    return nn.Sequential(*layers)


def tokens():
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def padded():
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3))


def norms():
    first = nn.Conv2d(2, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*first, nn.Linear(16, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


class Sometimes(nn.Module):
    """Uses a layer at some steps only, those of a negative first number."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.c(self.b(h).tanh() if x[0, 0] < 0 else h)


NETS = {"deep": (deep, (5,)), "conv": (conv, (2, 5, 5)), "norms": (norms, (2, 5, 5))}
NETS |= {"tokens": (tokens, (3,)), "padded": (padded, (3,)), "sometimes": (Sometimes, (5,))}


def build(net):
    with LOCK:
        torch.manual_seed(0)
        return NETS[net][0]().double()


@functools.cache
def batch(net, step, size, jump=JUMP):
    """Labels follow from inputs; from step ``jump`` on the inputs are of another distribution."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = torch.Size((size, *NETS[net][1]))
    if net in ("tokens", "padded"):
        odds = torch.tensor([1.0, 4, 3, 3, 2, 2, 1] if step < jump else [1.0, 1, 1, 2, 2, 6, 9])
        x = torch.multinomial(odds, shape.numel(), replacement=True, generator=generator).reshape(shape)
        return x, (x + torch.randint(0, 2, shape, generator=generator)) % 3
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.linspace(0.4, 1.2, shape[-1])
    if step >= jump:
        x = 2 * x.flip(-1) + x.roll(1, -1) - 0.5
    if net == "sometimes":
        x[0, 0] = -1.0 if step % 7 in (3, 4, 5) else 1.0
    noise = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x, (x.flatten(1)[:, :3] + noise).argmax(1)


def alone(net, steps=STEPS, sizes=SIZES, jump=JUMP):
    """A run of one rank with one backward pass per step."""
    return [[[batch(net, step, sizes[step % len(sizes)], jump)]] for step in range(steps)]


def cut(net, steps, sizes, jump=JUMP):
    """A run with micro-batches of ``sizes[rank]``, which are tuples."""
    flat = [size for own in sizes for size in own]
    run = []
    for step in range(steps):
        x, y = batch(net, step, sum(flat), jump)
        pieces = iter(zip(x.split(flat), y.split(flat), strict=True))
        run.append([[next(pieces) for _ in own] for own in sizes])
    return run


# 2. The oracle


class Statistic:
    """When one factor of one layer is due, what has been pooled for it, and what it was."""

    def __init__(self):
        self.interval = self.previous = 1
        self.due = 0
        self.pool = []  # (rows, batch factor, its noise)
        self.past = []  # of refreshes, the last one first: (X, noise, eigenvectors of the running factor)

    def pooled(self):
        """The pool's number of rows, the mean over them, and its noise."""
        total = sum(rows for rows, _, _ in self.pool)
        mean = sum(rows * factor for rows, factor, _ in self.pool) / total
        return total, mean, sum(rows**2 * noise for rows, _, noise in self.pool) / total**2

    def decide(self, step, similar, max_interval):
        """``similar`` is of the last refresh and of the one before, as far as there are such."""
        if not similar or not similar[0]:
            interval = max(1, self.interval // 2)
        elif similar != [True, True]:
            interval = self.interval
        else:
            interval = self.interval + self.previous
        self.previous, self.interval = self.interval, min(interval, max_interval)
        self.due = step + self.interval


def change(x, noise_x, y, noise_y):
    return max(0.0, float((x - y).square().sum() - noise_x - noise_y)) ** 0.5 / float(y.norm())


def off_diagonal(basis, factor):
    rotated = basis.mT @ factor @ basis
    rest = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    return float(rest.norm() / rotated.norm())


def halves(per_example):
    """The sum over examples, and how far its two halves are apart, as large as the sum's own error."""
    n = len(per_example)
    n1, n2 = n // 2, n - n // 2
    first, second = per_example[:n1].sum(0), per_example[n1:].sum(0)
    return first + second, (first / n1 - second / n2) * (n1 * n2) ** 0.5


def outer_products(module, x, g):
    """Per example the sums of outer products of each factor, ``[N, blocks, dim, dim]``, and the number of rows (None
    where it is that of loss terms)."""
    n = len(x)
    if isinstance(module, ref.NORMS):
        x_hat, g = ref.normalised(module, x, n), ref.norm_rows(module, g, n)
        v = torch.stack([(g * x_hat).sum(1), g.sum(1)], dim=2)  # [N, C, 2]
        return {"F": v[:, :, :, None] * v[:, :, None, :]}, None
    if isinstance(module, nn.Conv2d):
        a = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
        a, g = (t.reshape(n, module.groups, t.shape[1] // module.groups, -1).mT for t in (a, g))
    elif isinstance(module, nn.Embedding):
        kept = (x != -1 if module.padding_idx is None else x != module.padding_idx)[..., None]
        a, g = F.one_hot(x, module.num_embeddings) * kept, g * kept
        a, g = a.to(g.dtype).reshape(n, 1, -1, a.shape[-1]), g.reshape(n, 1, -1, g.shape[-1])
    else:
        a, g = x.reshape(n, 1, -1, x.shape[-1]), g.reshape(n, 1, -1, g.shape[-1])
    if getattr(module, "bias", None) is not None:
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    rows = int(kept.sum()) if isinstance(module, nn.Embedding) else n * a.shape[2]
    return {"A": a.mT @ a, "G": g.mT @ g}, rows


class StalenessOracle(ref.ReferenceKFAC):
    """K-FAC whose statistics are measured and decomposed when they are due."""

    def __init__(self, net, options):
        self.options = options
        kinds = (nn.Linear, nn.Conv2d, nn.Embedding)
        if options["norm_form"] != "off":
            kinds += ref.NORMS
        layers = [name for name, module in build(net).named_modules() if isinstance(module, kinds)]
        taken = {key: options[key] for key in ("damping", "damping_mode", "factor_decay", "solver")}
        length = ref.default_length(taken)
        settings = ref.ReferenceSettings(rescale=length, norm_form="unit", **(SGD | taken))
        super().__init__(lambda: build(net), layers, summed_loss, settings)
        self.statistics = {name: {} for name in layers}
        for name, module in self.modules.items():
            for key in "F" if isinstance(module, ref.NORMS) else "AG":
                self.statistics[name][key] = Statistic()
        self.inverses = {name: {} for name in layers}  # of "cholesky"
        self.layer_damping = {}
        self.num_refreshes = 0
        self.trace = []  # per step: (intervals, refreshes so far, what was due)

    def step(self, shards):
        self._backward(shards)
        layers = [name for name, own in self.statistics.items() if any(self.steps >= s.due for s in own.values())]
        due = []
        for name, measured in self._measure_batch(shards, layers).items():
            for key, (rows, factor, noise) in measured.items():
                statistic = self.statistics[name][key]
                if self.steps >= statistic.due and rows > 0:
                    due.append((name, key))
                    running = self.running[name]
                    running[key] = ref.averaged(running.get(key), factor, self.settings.factor_decay)
                    statistic.pool.append((rows, factor, noise))
        ready = [(name, key) for name, key in due if self._is_ready(self.statistics[name][key])]
        for name, key in ready:
            self._decide(name, key)
        for name in dict(ready):
            self._decompose(name, [key for layer, key in ready if layer == name])
        self._precondition()
        self._sgd()
        self.steps += 1
        intervals = {name: {key: s.interval for key, s in own.items()} for name, own in self.statistics.items()}
        self.trace.append((intervals, self.num_refreshes, due))

    def _is_ready(self, statistic):
        return not statistic.past or statistic.pooled()[0] >= self.options["staleness_min_rows"]

    def _backward(self, shards):
        """The mean over ranks of the mean over their micro-batches of the mean loss."""
        self.model.zero_grad()
        for own in shards:
            for x, y in own:
                (mean_loss(self.model(x), y) / (len(shards) * len(own))).backward()

    def _measure_batch(self, shards, layers):
        """``{layer: {key: (rows, batch factor, its noise)}}`` of the step."""
        terms = sum(y.numel() for own in shards for _, y in own)
        total = {name: {key: [0, 0.0, 0] for key in self.statistics[name]} for name in layers}
        for own in shards:
            spreads = {}  # of this rank
            for x, y in own:
                output, calls = ref._forward(self.model, x, layers)
                loss = summed_loss(output, y)
                for name, pairs in ref._pull_back(calls, loss, torch.ones_like(loss)).items():
                    for a, g in pairs:
                        products, rows = outer_products(self.modules[name], a, g)
                        for key, per_example in products.items():
                            whole, spread = halves(per_example)
                            spreads[name, key] = spreads.get((name, key), 0) + spread
                            total[name][key][0] += y.numel() if rows is None else rows
                            total[name][key][1] = total[name][key][1] + whole
            for (name, key), spread in spreads.items():
                total[name][key][2] += float(spread.square().sum())
        result = {}
        for name, own in total.items():
            result[name] = {}
            for key, (rows, whole, squares) in own.items():
                scale = 1 / max(1, rows if key == "A" else terms)
                result[name][key] = rows, scale * whole, scale**2 * squares
        return result

    def _decide(self, name, key):
        statistic, threshold = self.statistics[name][key], self.options["staleness_threshold"]
        _, x, noise = statistic.pooled()
        running = self.factor(name, key)
        is_diagonal = key == "A" and isinstance(self.modules[name], nn.Embedding)
        if self.options["staleness"] == "basis" and not is_diagonal:
            far = [off_diagonal(basis, running) for _, _, basis in statistic.past]
        else:
            far = [change(x, noise, old, old_noise) for old, old_noise, _ in statistic.past]
        statistic.decide(self.steps, [value <= threshold for value in far], self.options["max_interval"])
        statistic.pool = []
        statistic.past = [(x, noise, torch.linalg.eigh(running).eigenvectors), *statistic.past][:2]
        self.num_refreshes += 1

    def _decompose(self, name, keys):
        """Only ``keys`` are of the running factors as they are; the layer's means are."""
        present = {key: self.factor(name, key) for key in self.running[name]}
        self.used.setdefault(name, {}).update({key: present[key] for key in keys})
        damping = self.settings.damping
        if self.settings.damping_mode == "relative":
            if "F" in present:
                damping = ref.relative_norm_damping(damping, present["F"], "unit")
            else:
                damping = ref.relative_damping(damping, present["A"], present["G"])
        self.layer_damping[name] = damping
        if self.settings.solver == "cholesky" and "F" not in present:
            means = {key: [float(f.trace()) / len(f) for f in blocks] for key, blocks in present.items()}
            for key in keys:
                other = "G" if key == "A" else "A"
                self.inverses[name][key] = torch.stack([
                    torch.linalg.inv(f + (damping * mine / its) ** 0.5 * torch.eye(len(f), dtype=f.dtype))
                    for f, mine, its in zip(present[key], means[key], means[other], strict=True)
                ])  # fmt: skip

    def _precondition(self):
        everything = self.modules
        self.modules = {name: module for name, module in everything.items() if module.weight.grad is not None}
        super()._precondition()
        self.modules = everything

    def _solve(self, name, grad):
        used, damping = self.used[name], self.layer_damping[name]
        if "F" in used:
            return ref.norm_precondition(used["F"], grad, damping, "unit")
        if self.settings.solver == "cholesky":
            return self.inverses[name]["G"] @ grad @ self.inverses[name]["A"]
        blocks = zip(used["A"], used["G"], grad, strict=True)
        return torch.stack([ref.dense_precondition(*block, damping) for block in blocks])


def follow(net, run, options):
    found = StalenessOracle(net, options)
    for shards in run:
        found.step(shards)
    return found


# 3. The implementation, and the comparison


def train(rank, net, run, options):
    """Return the weights and, per step, what ``report()`` says of the intervals."""
    model = build(net)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    extra = {"loss_terms": "token"} if net in ("tokens", "padded") else {}
    kfac = KFAC(model, optimizer, announce=False, accumulate="mean", **arranged(extra | options))
    said = []
    for shards in run:
        optimizer.zero_grad()
        for x, y in shards[rank]:
            (mean_loss(model(x), y) / len(shards[rank])).backward()
        if len(shards) > 1:
            average_in_one(model)
        optimizer.step()
        report = kfac.report()
        said.append((report["intervals"], report["refreshed_factors"]))
    return weights_of(model), said, report["interval_history"]


def assert_equal(found, oracle):
    weights, said, history = found
    for step, ((intervals, refreshes), (wanted, count, due)) in enumerate(zip(said, oracle.trace, strict=True)):
        assert intervals == wanted, f"step {step}, at which {due} were due"
        assert refreshes == count, f"step {step}, at which {due} were due"
    told = {}
    for entry in history:
        steps = told.setdefault((entry["layer"], entry["factor"]), {})
        steps[entry["step"]] = entry["interval"]
    for name, own in oracle.statistics.items():
        for key in own:
            steps, interval = told.get((name, key), {}), 1
            for step, (intervals, _, _) in enumerate(oracle.trace):
                interval = steps.get(step, interval)
                assert interval == intervals[name][key], f"history of {name}.{key} at step {step}"
    for p, q in zip(weights, weights_of(oracle.model), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def moves(oracle):
    """How often an interval grew, and how often it shrank."""
    grew = shrank = 0
    for (before, _, _), (after, _, _) in itertools.pairwise(oracle.trace):
        for name, own in after.items():
            grew += sum(own[key] > before[name][key] for key in own)
            shrank += sum(own[key] < before[name][key] for key in own)
    return grew, shrank


def compare(net, run, oracle=None, **options):
    options = BASIC | options
    oracle = oracle or follow(net, run, options)
    if len(run[0]) == 1:
        assert_equal(train(0, net, run, options), oracle)
    else:
        for found in on_threads(len(run[0]), train, net, run, options):
            assert_equal(found, oracle)
    return oracle


# 4. One process

CHANGE = {"staleness": "change"}
BASIS = {"staleness": "basis", "staleness_threshold": 0.1}
NORMS = {"norm_form": "unit"}


@pytest.mark.parametrize(
    ("options", "net"),
    [(options, net) for options in (CHANGE, BASIS) for net in ("deep", "conv", "tokens", "norms")]
    + [
        pytest.param(CHANGE | {"solver": "cholesky"}, net, marks=() if net == "conv" else pytest.mark.slow)
        for net in ("deep", "conv", "tokens", "norms")
    ],
    ids=str,
)
def test_intervals_and_weights_equal_the_oracles(net, options):
    oracle = compare(net, alone(net), **(options | NORMS if net == "norms" else options))
    grew, shrank = moves(oracle)
    assert grew > 20
    assert shrank >= 5
    before, after = oracle.trace[JUMP - 1][0], [intervals for intervals, _, _ in oracle.trace[JUMP : JUMP + 12]]
    fell = [
        (name, key) for name in before for key in before[name] if min(s[name][key] for s in after) < before[name][key]
    ]
    assert fell, "the jump of the data shows"
    dues = {tuple(due) for _, _, due in oracle.trace}
    assert any(0 < len(due) < len(oracle.trace[0][2]) for due in dues), "some statistics are due, others are not"


@pytest.mark.parametrize("options", [{}, {"staleness_min_rows": 70}], ids=["alone", "pooled"])
def test_a_layer_that_is_not_used_waits(options):
    oracle = compare("sometimes", alone("sometimes"), **options)
    assert [("b", "A") in due for _, _, due in oracle.trace[:6]] == [False, False, False, True, True, True]
    assert min(moves(oracle)) > 0


def test_padding_is_no_row():
    compare("padded", alone("padded"))


@pytest.mark.parametrize(
    ("net", "options"),
    [
        ("deep", {"staleness_min_rows": 90, "damping_mode": "relative"}),
        ("deep", {"staleness_min_rows": 90, "damping_mode": "relative", "solver": "cholesky"}),
        ("deep", {"staleness_min_rows": 90} | BASIS),
        ("conv", {"staleness_min_rows": 290}),
        ("tokens", {"staleness_min_rows": 290} | NORMS),
        ("norms", {"staleness_min_rows": 90} | NORMS),
    ],
)
def test_few_rows_are_pooled_over_several_steps(net, options):
    oracle = compare(net, alone(net), **options)
    assert min(moves(oracle)) > 0
    assert oracle.trace[0][1] == len(oracle.trace[0][2]), "what was never decomposed does not wait for rows"
    measured = sum(len(due) for _, _, due in oracle.trace)
    assert measured > 1.5 * oracle.num_refreshes, "pools are of several steps"


def test_halves_of_few_examples_are_unequal():
    oracle = compare("deep", alone("deep", sizes=(3, 5, 3)), staleness_min_rows=9)
    assert min(moves(oracle)) > 0


def test_the_longest_interval_is_kept():
    oracle = compare("deep", alone("deep", 40, jump=99), staleness_threshold=5.0, max_interval=7)
    reached = [intervals["0"]["A"] for intervals, _, _ in oracle.trace]
    assert [n for n, _ in itertools.groupby(reached)] == [1, 2, 3, 5, 7]
    steps = [step for step, (_, _, due) in enumerate(oracle.trace) if ("0", "A") in due]
    assert steps == [0, 1, 2, 4, 7, 12, 19, 26, 33]


@pytest.mark.parametrize(
    ("sizes", "rows"), [((12, 12, 12), 20), ((15, 8, 11), 80)], ids=["equal", "unequal and pooled"]
)
def test_micro_batches_add_their_spreads(sizes, rows):
    oracle = compare("deep", cut("deep", 36, [sizes], jump=20), staleness_min_rows=rows)
    assert min(moves(oracle)) > 0


# 5. Noise


def gaussians(n, dim, seed):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_noise_is_the_expected_square_of_the_error():
    dim, n, draws = 6, 25, 2000
    rows = gaussians(draws * n, dim, 0).reshape(draws, n, dim) * torch.linspace(0.5, 2, dim)
    expected = torch.diag(torch.linspace(0.5, 2, dim, dtype=torch.float64) ** 2)
    errors, noises = 0.0, 0.0
    for x in rows:
        whole, spread = halves(x[:, :, None] * x[:, None, :])
        errors += float((whole / n - expected).square().sum()) / draws
        noises += float((spread / n).square().sum()) / draws
    assert noises == pytest.approx(errors, rel=0.05)
    sigmas = expected.diagonal()
    assert errors == pytest.approx(float(sigmas.sum() ** 2 + (sigmas**2).sum()) / n, rel=0.05)


def test_noise_does_not_keep_intervals_short():
    """Weights that stand still and one distribution: all that X changes by is noise, and more than the threshold."""
    dim, limit = 20, 30

    def start():
        with LOCK:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Tanh(), nn.Linear(dim, 2)).double()

    model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"staleness": "change", "staleness_threshold": 0.35, "staleness_min_rows": 100, "max_interval": limit}
    kfac = KFAC(model, optimizer, announce=False, **arranged(options))
    raw, x1 = [], None
    for step in range(80):
        x = gaussians(100, dim, step)
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
        factor = x.T @ x / len(x)
        raw.append(1.0 if x1 is None else float((factor - x1).norm() / x1.norm()))
        x1 = factor
    assert min(raw) > 1.3 * options["staleness_threshold"], "without subtracting noise nothing would be similar"
    assert kfac.report()["intervals"]["0"]["A"] == limit
    history = [e["interval"] for e in kfac.report()["interval_history"] if (e["layer"], e["factor"]) == ("0", "A")]
    assert history == sorted(history), "it only grew"


# 6. Several ranks


@functools.cache
def on_ranks(world_size):
    sizes = {2: [(21,), (20,)], 4: [(11,), (8,), (13,), (9,)]}[world_size]
    run = cut("deep", 24, sizes, jump=14)
    return run, follow("deep", run, BASIC | BASIS)


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        pytest.param(world, name, marks=() if (i % 2 == 0) == (world == 2) else pytest.mark.slow)
        for i, name in enumerate(["comm-opt", "sharded", "mem-opt", "replicated"])
        for world in (2, 4)
    ],
)
def test_ranks_follow_the_basis_of_what_all_have_measured(world_size, strategy):
    run, oracle = on_ranks(world_size)
    compare("deep", run, oracle, strategy=strategy, **BASIS)
    assert min(moves(oracle)) > 0


@pytest.mark.parametrize(
    ("net", "options"),
    [
        ("deep", {"damping_mode": "relative"}),
        ("conv", {}),
        ("conv", {"staleness_min_rows": 80}),
        ("norms", NORMS),
    ],
)
def test_ranks_with_micro_batches_of_every_kind_of_layer(net, options):
    oracle = compare(net, cut(net, 24, [(11, 8), (14,)], jump=14), **(BASIS | options))
    assert min(moves(oracle)) > 0
