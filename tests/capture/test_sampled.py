"""statistics_fraction=1/k: factors are those of the rows that were chosen, and on average those of all rows."""

import copy
import math
from collections import Counter

import pytest
import reference as ref
import torch
from helpers_exact import PLAIN, Conv1D, Folded, assert_close, oracle_factors, randn, square_loss, tokens
from torch import nn

from dkfac import KFAC
from dkfac.layers.rows import Sample

BATCH_ONLY = PLAIN | {"factor_decay": 0.0, "damping": 1e-2}
"""The running factors are those of the last step."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


CASES = {
    "linear": (lambda: (nn.Linear(3, 4), randn(5, 8, 3)), "positions"),
    "linear-uneven": (lambda: (nn.Linear(3, 4), randn(5, 7, 3)), "positions"),
    "linear-3-leading": (lambda: (nn.Linear(3, 4), randn(3, 2, 4, 3)), "positions"),
    "linear-few-positions": (lambda: (nn.Linear(3, 4, bias=False), randn(5, 2, 3)), "positions"),
    "linear-folded": (lambda: (Folded(nn.Linear(3, 4)), randn(5, 8, 3)), "rows"),
    "linear-once": (lambda: (nn.Linear(3, 4), randn(6, 3)), "all"),
    "conv1D-transposed": (lambda: (Conv1D(4, 3), randn(5, 8, 3)), "positions"),
    "conv1d": (lambda: (nn.Conv1d(2, 3, 2, stride=2), randn(8, 2, 6)), "examples"),
    "conv2d": (lambda: (nn.Conv2d(2, 3, 3, padding=1), randn(8, 2, 3, 4)), "examples"),
    "conv2d-uneven": (lambda: (nn.Conv2d(2, 3, 2, bias=False), randn(7, 2, 3, 3)), "examples"),
    "conv2d-groups": (lambda: (nn.Conv2d(4, 6, 2, groups=2), randn(8, 4, 3, 3)), "examples"),
    "conv2d-folded": (lambda: (Folded(nn.Conv2d(2, 3, 2)), randn(8, 2, 2, 3, 3)), "examples"),
    "conv2d-once": (lambda: (nn.Conv2d(2, 3, 3), randn(8, 2, 3, 3)), "all"),
    "embedding": (lambda: (nn.Embedding(7, 3), tokens(5, 8)), "all"),
    "norm": (lambda: (nn.LayerNorm(4), randn(5, 8, 4)), "all"),
}
EVEN = [kind for kind in CASES if "uneven" not in kind and "few" not in kind]


def make(kind):
    """Return ``(model, x, target, layer name, what is sampled)``."""
    case, how = CASES[kind]
    layer, x = case()
    model = nn.Sequential(layer, nn.Tanh()).double()
    return model, x, randn(*model(x).shape), "0.layer" if isinstance(layer, Folded) else "0", how


def chosen(how, n, s, every, offset):
    """Return the (example, position) pairs that a step measures of ``n`` examples with ``s`` rows each."""
    pairs = [(i, j) for i in range(n) for j in range(s)]
    if how == "positions":
        return {(i, j) for i, j in pairs if j >= offset % s and (j - offset % s) % every == 0}
    if how == "rows":
        return {(i, j) for i, j in pairs if (i * s + j) % every == offset}
    if how == "examples":
        size = (n + every - 1) // every
        begin = math.floor(offset * (n - size) / (every - 1) + 0.5)
        return {(i, j) for i, j in pairs if begin <= i < begin + size}
    return set(pairs)


def pick(example_rows, pairs):
    """Return the rows that were chosen, and their share of all rows; every example has one call."""
    result, total = [], 0
    for i, [(a, g)] in enumerate(example_rows):
        mine = [j for j in range(a.shape[1]) if (i, j) in pairs]
        total += a.shape[1]
        if mine:
            result.append([(a[:, mine], g[:, mine])])
    return result, len(pairs) / total


def sampled_factors(model, x, target, name, how, every, offset, *, sharing="expand", terms=None, loss=square_loss):
    """Return the oracle's ``{"A", "G"}`` of the rows that are chosen."""
    module = model.get_submodule(name)
    if how == "all":
        return oracle_factors(model, x, target, [name], sharing=sharing, terms=terms)[name]
    example_rows = ref.all_rows(module, ref.per_example(model, loss, x, target, [name])[name])
    rows, share = pick(example_rows, chosen(how, len(x), example_rows[0][0][0].shape[1], every, offset))
    return ref.factors(rows, (terms or len(x)) * share, sharing)


def assert_same_factors(found, expected):
    assert sorted(found) == sorted(expected)
    for key, factor in expected.items():
        value = found[key]
        factor = factor.squeeze(0) if key != "F" and factor.shape[0] == 1 else factor
        assert_close(value, factor.diagonal() if value.ndim < factor.ndim else factor)


def take_step(model, kfac, x, target, *, loss=square_loss, terms=None):
    model.zero_grad()
    (loss(model(x), target) / (terms or len(x))).backward()
    kfac.step()


def steps_by_offset(every, num_steps=40):
    """Return the first step at which each offset is used."""
    first = {}
    for step in range(num_steps):
        first.setdefault(Sample(every, step).offset, step)
    assert sorted(first) == list(range(every))
    return first


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("kind", CASES)
def test_factors_are_those_of_the_rows_that_were_chosen(kind, every):
    model, x, target, name, how = make(kind)
    with KFAC(model, **BATCH_ONLY, statistics_fraction=1 / every) as kfac:
        for step in range(max(steps_by_offset(every).values()) + 1):
            offset = Sample(every, step).offset
            take_step(model, kfac, x, target)
            expected = sampled_factors(model, x, target, name, how, every, offset)
            assert_same_factors(kfac.factors()[name], expected)


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("kind", EVEN)
def test_the_average_over_the_offsets_is_the_factors_of_all_rows(kind, every):
    model, x, target, name, how = make(kind)
    first = steps_by_offset(every)
    seen = []
    with KFAC(model, **BATCH_ONLY, statistics_fraction=1 / every) as kfac:
        for step in range(max(first.values()) + 1):
            take_step(model, kfac, x, target)
            if step in first.values():
                seen.append({key: t.clone() for key, t in kfac.factors()[name].items()})
    assert len(seen) == every
    if how != "all":  # the claim is empty if all were measured each time
        assert not torch.allclose(seen[0]["G"], seen[1]["G"])
    average = {key: torch.stack([factors[key] for factors in seen]).mean(0) for key in seen[0]}
    assert_same_factors(average, oracle_factors(model, x, target, [name])[name])


@pytest.mark.parametrize("interval", [1, 2, 8, 10, 64, 100])
@pytest.mark.parametrize("every", [2, 3, 4, 8])
def test_each_offset_occurs_about_equally_often_whatever_the_interval(every, interval):
    counts = Counter(Sample(every, step).offset for step in range(0, 1000 * interval, interval))
    assert sorted(counts) == list(range(every))
    assert max(counts.values()) < 1.05 * min(counts.values())


class Tokens(nn.Module):
    """Convolution, norm and linear layers, once per example and per position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.LayerNorm(4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(torch.tanh(self.conv(x.mT)).mT)
        return self.head(torch.tanh(self.inner(x)).mean(1))


@pytest.mark.parametrize("options", [{}, {"weight_sharing": "reduce"}, {"curvature": "ekfac"}], ids=str)
def test_gradients_of_the_loss_are_untouched(options):
    model = Tokens().double()
    plain = copy.deepcopy(model)
    with KFAC(model, **BATCH_ONLY, **options, statistics_fraction=0.25) as kfac:
        for _ in range(3):
            x, target = randn(8, 4, 3).requires_grad_(), randn(8, 2)
            x_plain = x.detach().clone().requires_grad_()
            for net, data in ((model, x), (plain, x_plain)):
                net.zero_grad()
                square_loss(net(data), target).backward()
            assert torch.equal(x.grad, x_plain.grad)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
            kfac.step()


@pytest.mark.parametrize("every", [2, 3])
def test_masked_positions_stay_out_of_the_sample(every):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, target = randn(5, 6, 3), randn(5, 6, 2)
    mask = torch.rand(5, 6) < 0.6
    mask[0] = True
    x[~mask] = 100.0  # would be seen in A
    terms = int(mask.sum())
    kept = [[j for j in range(6) if mask[n, j]] for n in range(5)]

    def loss(output, _):
        return (((output - target) ** 2).sum(-1) * mask).sum()

    with KFAC(model, **BATCH_ONLY, statistics_fraction=1 / every) as kfac:
        for step in range(max(steps_by_offset(every).values()) + 1):
            kfac.set_terms(terms, mask)
            take_step(model, kfac, x, target, loss=loss, terms=terms)
            offset = Sample(every, step).offset
            for name in ("0", "2"):
                output, calls = ref._forward(model, x, [name])
                total = loss(output, target)
                [(a, g)] = ref._pull_back(calls, total, torch.ones_like(total))[name]
                positions = range(offset % 6, 6, every)
                rows = [
                    [ref.rows(model.get_submodule(name), a[n : n + 1, [j]], g[n : n + 1, [j]])]
                    for n in range(5)
                    for j in positions
                    if j in kept[n]
                ]
                expected = ref.factors(rows, terms * len(positions) / 6, "expand")
                assert_same_factors(kfac.factors()[name], expected)


@pytest.mark.parametrize(
    "kind", ["linear", "linear-folded", "linear-once", "conv1D-transposed", "conv2d", "conv2d-groups", "conv2d-folded"]
)
def test_reduce_samples_whole_examples(kind):
    model, x, target, name, how = make(kind)
    how = how if how == "all" else "examples"
    with KFAC(model, **BATCH_ONLY, weight_sharing="reduce", statistics_fraction=0.5) as kfac:
        for step in range(max(steps_by_offset(2).values()) + 1):
            take_step(model, kfac, x, target)
            expected = sampled_factors(model, x, target, name, how, 2, Sample(2, step).offset, sharing="reduce")
            assert_same_factors(kfac.factors()[name], expected)


@pytest.mark.parametrize("kind", ["linear", "linear-folded", "linear-once", "conv2d", "conv2d-groups"])
def test_ekfac_samples_whole_examples_and_scales_its_moments(kind):
    model, x, target, name, how = make(kind)
    how = how if how == "all" else "examples"
    options = BATCH_ONLY | {"inverse_interval": 100, "curvature": "ekfac"}
    module = model.get_submodule(name)
    offsets = set()
    with KFAC(model, **options, statistics_fraction=0.5) as kfac:
        take_step(model, kfac, x, target)
        found = kfac.state_dict()["layers"][name]["decompositions"]
        basis = [found[key]["matrix"] for key in ("A", "G")]
        for step in range(1, 5):
            take_step(model, kfac, x, target)
            offset = Sample(2, step).offset
            offsets.add(offset)
            assert_same_factors(kfac.factors()[name], sampled_factors(model, x, target, name, how, 2, offset))
            example_rows = ref.all_rows(module, ref.per_example(model, square_loss, x, target, [name])[name])
            rows, share = pick(example_rows, chosen(how, len(x), example_rows[0][0][0].shape[1], 2, offset))
            moments = kfac.state_dict()["layers"][name]["moments"]
            expected = ref.ekfac_moments(rows, *basis, len(x) * share)
            assert_close(moments["value"] / moments["weight"], expected)
    assert offsets == {0, 1}


@pytest.mark.parametrize("accumulate", ["mean", "sum", "terms"])
@pytest.mark.parametrize("kind", ["linear", "linear-folded", "linear-once", "conv2d", "embedding"])
def test_every_micro_batch_is_sampled(kind, accumulate):
    model, x, target, name, how = make(kind)
    x, target = x[: len(x) // 2 * 2], target[: len(x) // 2 * 2]
    parts = list(zip(x.chunk(2), target.chunk(2), strict=True))
    divisor = {"mean": 2, "sum": 1}.get(accumulate, 0)
    with KFAC(model, **BATCH_ONLY, accumulate=accumulate, statistics_fraction=0.5) as kfac:
        for step in range(max(steps_by_offset(2).values()) + 1):
            model.zero_grad()
            for xs, ys in parts:
                loss = square_loss(model(xs), ys)
                (loss / (len(xs) * divisor) if divisor else loss / len(x)).backward()
            kfac.step()
            offset = Sample(2, step).offset
            each = [sampled_factors(model, xs, ys, name, how, 2, offset) for xs, ys in parts]
            expected = {key: (each[0][key] + each[1][key]) / 2 for key in each[0]}
            assert_same_factors(kfac.factors()[name], expected)


def test_the_exact_fisher_is_sampled_too():
    """A column of the Hessian's root is measured on the same rows as the inputs."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, target = randn(5, 4, 3), randn(5, 4, 2)
    options = BATCH_ONLY | {"fisher": "exact", "fisher_loss": "mse", "loss_terms": "token"}
    loss = nn.functional.mse_loss
    seen = []
    with KFAC(model, **options, statistics_fraction=0.5) as kfac:
        for step in range(max(steps_by_offset(2).values()) + 1):
            take_step(model, kfac, x, target, loss=loss, terms=1)
            if step in steps_by_offset(2).values():
                seen.append(copy.deepcopy(kfac.factors()))
    assert not torch.allclose(seen[0]["0"]["A"], seen[1]["0"]["A"])
    for name, factors in ref.exact_factors(model, x, ["0", "2"], "mse", 20, "expand").items():
        average = {key: (seen[0][name][key] + seen[1][name][key]) / 2 for key in factors}
        assert_same_factors(average, factors)


def train(**options):
    torch.manual_seed(0)
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"announce": False, "factor_interval": 1, "inverse_interval": 2, "norm_form": "unit", **options}
    kfac = KFAC(model, optimizer, **options)
    for _ in range(6):
        optimizer.zero_grad()
        square_loss(model(torch.randn(8, 4, 3)), torch.randn(8, 2)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()] + [t for f in kfac.factors().values() for t in f.values()]


@pytest.mark.parametrize("options", [{}, {"weight_sharing": "reduce"}, {"curvature": "ekfac"}], ids=str)
def test_all_of_it_is_bitwise_the_default(options):
    expected = train(**options)
    for fraction in (1.0, 1, 0.7):  # rounds to one in one
        for found, wanted in zip(train(**options, statistics_fraction=fraction), expected, strict=True):
            assert torch.equal(found, wanted)
    sampled = train(**options, statistics_fraction=0.5)
    assert any(not torch.equal(found, wanted) for found, wanted in zip(sampled, expected, strict=True))
