"""Intervals that follow how statistics change: the rule, what is measured and sent, what is kept and refused."""

import io

import pytest
import torch
import torch.nn.functional as F
from helpers_parity import LOCK, SGD, average_in_one, batch, build, cut, mean_loss, part, train, weights_of
from helpers_ranks import on_threads
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.experimental.factor_change import Seen, change, next_interval, off_diagonal
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.program import expand
from dkfac.tools import charts

HOW = {"announce": False, "damping": 1e-2, "staleness": "change", "staleness_min_rows": 16, "max_interval": 8}
EACH = {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None}


@pytest.mark.parametrize(
    ("interval", "previous", "last", "both", "expected"),
    [
        (1, 1, False, False, 1),
        (5, 3, False, False, 2),
        (5, 3, True, False, 5),
        (5, 3, True, True, 8),
        (5, 3, False, True, 2),
        (50, 34, True, True, 60),
        (80, 50, True, False, 60),
        (200, 150, False, False, 60),
    ],
)
def test_the_rule(interval, previous, last, both, expected):
    found = next_interval(interval, previous, like_last=last, like_both=last and both, most=60)
    assert found == expected


def test_what_few_rows_account_for_is_no_change():
    torch.manual_seed(0)
    root, rows = torch.diag(torch.linspace(1, 2, 6)).double(), 300

    def look():
        halves = [torch.randn(rows // 2, 6, dtype=torch.float64) @ root for _ in (0, 1)]
        first, second = (half.mT @ half for half in halves)
        return Seen((first + second)[None] / rows, ((first - second) / rows).square().sum())

    looks = [(look(), look()) for _ in range(200)]
    raw = torch.stack([(a.value - b.value).norm() / b.value.norm() for a, b in looks])
    assert raw.mean() > 0.12
    assert torch.stack([change(a, b) for a, b in looks]).median() < 0.06
    other = look()
    assert change(Seen(2 * other.value, other.noise), other) == pytest.approx(1.0, abs=0.02)


def test_off_diagonal_mass():
    values, vectors = torch.linalg.eigh(torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64))
    factor = (vectors @ torch.diag(values) @ vectors.mT)[None]
    assert off_diagonal(factor, vectors[None]) < 1e-15
    assert off_diagonal(factor, torch.eye(2, dtype=torch.float64)[None]) == pytest.approx((2 / 15) ** 0.5)


@pytest.mark.parametrize("staleness", ["change", "basis"])
@pytest.mark.parametrize("curvature", ["kfac", "adam-eigen"])
def test_intervals_of_one_are_a_refresh_at_each_step(staleness, curvature):
    adam = curvature == "adam-eigen"
    common = {"announce": False, "damping": 1e-2, "curvature": curvature, "adam": adam, "steps": 8}
    fixed = train(**common, **EACH)
    found = train(**common, staleness=staleness, staleness_min_rows=1, max_interval=1)
    torch.testing.assert_close(found, fixed, rtol=1e-11, atol=1e-12)


def start(net="small", **options):
    model = build(net)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    return model, optimizer, KFAC(model, optimizer, **arranged(HOW | options))


def take(model, optimizer, begin, end, net="small"):
    for step in range(begin, end):
        ((x, y),) = cut(step, [24], net)[0]
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()


def test_what_is_not_due_is_not_measured():
    model, optimizer, kfac = start()
    take(model, optimizer, 0, 1)
    tape, statistics = kfac._collector, kfac._engine.refresher.staleness.statistics
    statistics["0", "A"].due = statistics["2", "G"].due = 1
    for name in set(statistics) - {("0", "A"), ("2", "G")}:
        statistics[name].due = 5
    kfac._plan_next()
    assert tape.idle == {"4"}
    ((x, y),) = cut(1, [24], "small")[0]
    before = {name: {key: t.clone() for key, t in factors.items()} for name, factors in kfac.factors().items()}
    mean_loss(model(x), y).backward()
    assert {name: set(sums.factors) for name, sums in tape.window.layers.items()} == {"0": {"A"}, "2": {"G"}}
    assert all(set(sums.spreads) == set(sums.factors) for sums in tape.window.layers.values())
    optimizer.step()
    changed = {
        (name, key)
        for name, factors in kfac.factors().items()
        for key, t in factors.items()
        if not torch.equal(t, before[name][key])
    }
    assert changed == {("0", "A"), ("2", "G")}
    take(model, optimizer, 2, 4)  # due again at once, by intervals of 1; the others are not
    assert kfac.report()["refreshed_factors"] == 6 + 2 + 2 * 2


def test_between_refreshes_nothing_is_measured():
    model, optimizer, kfac = start()
    take(model, optimizer, 0, 1)
    for statistic in kfac._engine.refresher.staleness.statistics.values():
        statistic.due = 4
    kfac._plan_next()
    before = kfac.report()["refreshed_factors"]
    for step in (1, 2, 3):
        assert not kfac._capture.measuring, step
        take(model, optimizer, step, step + 1)
    assert kfac._capture.measuring
    assert kfac.report()["refreshed_factors"] == before


def test_rows_are_gathered_over_steps():
    model, optimizer, kfac = start(staleness_min_rows=70, max_interval=1)
    refreshed = []
    for step in range(9):
        take(model, optimizer, step, step + 1)
        refreshed.append(kfac.report()["refreshed_factors"])
    # First at once, then each time that 3 batches of 24 are together.
    assert refreshed == [6, 6, 6, 12, 12, 12, 18, 18, 18]


def test_a_bad_batch_is_neither_gathered_nor_judged():
    model, optimizer, kfac = start()
    take(model, optimizer, 0, 3)
    statistics = kfac._engine.refresher.staleness.statistics
    before = {name: (s.due, s.rows, s.interval) for name, s in statistics.items()}
    ((x, y),) = cut(3, [24], "small")[0]
    optimizer.zero_grad()
    mean_loss(model(x * torch.nan), y).backward()
    optimizer.step()
    assert {name: (s.due, s.rows, s.interval) for name, s in statistics.items()} == before
    take(model, optimizer, 4, 6)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("staleness", ["change", "basis"])
def test_a_run_is_resumed_bitwise(staleness):
    options = {"staleness": staleness, "staleness_min_rows": 60, "staleness_threshold": 0.2}
    model, optimizer, kfac = start(**options)
    take(model, optimizer, 0, 13)  # in the middle of gathering
    assert any(s.rows for s in kfac._engine.refresher.staleness.statistics.values())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "kfac": kfac.state_dict()}, file)
    take(model, optimizer, 13, 40)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, its_optimizer, its_kfac = start(**options)
    other.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    its_kfac.load_state_dict(saved["kfac"])
    take(other, its_optimizer, 13, 40)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert its_kfac.report()["intervals"] == kfac.report()["intervals"]
    assert its_kfac.report()["refreshed_factors"] == kfac.report()["refreshed_factors"]
    assert max(n for factors in kfac.report()["intervals"].values() for n in factors.values()) > 1


def test_a_state_of_fixed_intervals_is_taken_up():
    model, optimizer, kfac = start(staleness="fixed", staleness_min_rows=1024, max_interval=200, **EACH)
    take(model, optimizer, 0, 3)
    state = kfac.state_dict()
    other, its_optimizer, its_kfac = start()
    other.load_state_dict(model.state_dict())
    its_kfac.load_state_dict(state)
    take(other, its_optimizer, 3, 4)
    assert its_kfac.report()["refreshed_factors"] == 6
    kfac.load_state_dict(its_kfac.state_dict())
    take(model, optimizer, 4, 6)


def on_rank(rank, world_size, strategy, wire_dtype):
    """Train on this rank's examples; returns weights and intervals."""
    options = {"strategy": strategy, "wire_dtype": wire_dtype, "staleness_threshold": 0.02, "staleness_min_rows": 40}
    options["staleness"] = "basis"
    model, optimizer, kfac = start(**options)
    for step in range(24):
        x, y = (part(t, rank, world_size) for t in batch(step, "small"))
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        if world_size > 1:
            average_in_one(model)
        optimizer.step()
    return weights_of(model), kfac.report()["intervals"]


@pytest.mark.parametrize(
    ("strategy", "wire_dtype"),
    [
        pytest.param(name, dtype, marks=() if (i % 2 == 0) == (dtype is None) else pytest.mark.slow)
        for i, name in enumerate(["comm-opt", "sharded", "mem-opt", "replicated"])
        for dtype in (None, "float16")
    ],
)
def test_ranks_agree(strategy, wire_dtype):
    found = on_threads(4, on_rank, 4, strategy, wire_dtype)
    weights, intervals = found[0]
    for other, its in found[1:]:
        assert its == intervals
        torch.testing.assert_close(other, weights, rtol=1e-12, atol=1e-13)
    assert len({n for factors in intervals.values() for n in factors.values()}) > 1
    if wire_dtype is None:
        alone, its = on_rank(0, 1, "auto", None)
        assert its == intervals
        for mine, other in zip(alone, weights, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def refused_on_rank(_rank):
    """What would depend on the number of ranks is refused on each, before any group is made."""
    with pytest.raises(ValueError, match=r'staleness="change" on several ranks: .* use "fixed" or "basis"'):
        start()
    with pytest.raises(ValueError, match=r"factor A of layer '0' is diagonal.* use skip=\['0'\]"):
        start("language", staleness="basis", loss_terms="token")
    start(staleness="basis")


def test_what_depends_on_the_number_of_ranks_is_refused_on_several():
    on_threads(2, refused_on_rank)


def test_only_what_is_due_travels():
    with LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 10))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), announce=False)
    plan = make_plan([layer.spec for layer in kfac.layers], 3, Choices(strategy="sharded"))
    program = expand(plan)
    narrow = program.only("factors", {("0", "G")})
    assert [part.key for t in narrow.stage("factors") for part in t.parts] == ["G", "G"]
    assert {t.how for t in narrow.stage("factors")} == {"reduce-scatter", "collect"}
    assert sum(t.num_bytes(0) for t in narrow.stage("factors") if t.how == "reduce-scatter") == 210 * 4
    assert narrow.stage("means", "status", "gradients") == program.stage("means", "status", "gradients")
    assert program.only("factors", set()).stage("factors") == ()
    kfac.close()


def test_refused():
    for other in (
        {"overlap": True},
        {"wire_form": "rows"},
        {"strategy": "local"},
        {"inverse_lag": 1},
        {"spread_refresh": 2},
        {"cuda_graph": True, "rescale": "norm"},
        {"curvature": "ekfac"},
        {"staleness": "basis", "solver": "cholesky"},
    ):
        with pytest.raises(
            ValueError, match=r'staleness="(change|basis)" cannot be combined with .*: remove one of them'
        ):
            start(**other)


def test_it_is_reported(tmp_path):
    model, optimizer, kfac = start(staleness_threshold=1.0)
    take(model, optimizer, 0, 20)
    report = kfac.report()
    now = {}
    for entry in report["interval_history"]:
        now[entry["layer"], entry["factor"]] = entry["interval"]
    assert now == {(name, key): n for name, factors in report["intervals"].items() for key, n in factors.items()}
    assert report["refreshed_factors"] < 6 * 20
    assert report["staleness_memory_bytes"] == 2 * sum(t.nbytes for fs in kfac.factors().values() for t in fs.values())
    charts.draw_intervals(report["interval_history"], 20, tmp_path / "intervals.png")
    assert (tmp_path / "intervals.png").stat().st_size > 10_000


def test_other_fishers_and_accumulation():
    for options in (
        {"fisher": "exact", "fisher_loss": "cross-entropy"},
        {"fisher": "sampled", "fisher_loss": "cross-entropy"},
        {"accumulate": "sum"},
        {"weight_sharing": "reduce"},
        {"statistics_fraction": 0.5},
    ):
        model, optimizer, kfac = start("vision", norm_form="unit", **({"accumulate": "mean"} | options))
        for step in range(12):
            ((x, y),) = cut(step, [24], "vision")[0]
            optimizer.zero_grad()
            for half in range(2):
                (F.cross_entropy(model(x[half::2]), y[half::2]) / 2).backward()
            optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters()), options
        assert kfac.metrics()["skipped_batches"] == 0
        assert kfac.report()["refreshed_factors"] > 12, options
        kfac.close()
