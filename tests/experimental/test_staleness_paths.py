"""Intervals that follow how statistics change, off the straight path: passes and ranks that run other layers than those
due, layers nobody calls, sums lost on the wire, states that are partial, of other settings, or malformed."""

import copy
import itertools

import pytest
import test_staleness_oracle as oracle
import torch
from helpers_parity import LOCK, SGD, average_in_one, batch, build, cut, mean_loss, part, weights_of
from helpers_ranks import average_gradients, on_threads
from helpers_settings import arranged
from torch import nn

from dkfac import KFAC
from dkfac.experimental.factor_change import Statistic

HOW = {"announce": False, "damping": 1e-2, "staleness": "change", "staleness_min_rows": 16, "max_interval": 8}
ALIKE = {"staleness_threshold": 50.0}
"""Nothing ever changes: intervals grow."""
BASIS = {"staleness": "basis"}
"""What several ranks may use."""


def start(net="small", dtype=torch.float64, **options):
    if isinstance(net, str):
        model = build(net, dtype)
    else:
        with LOCK:
            torch.manual_seed(0)
            model = net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    return model, optimizer, KFAC(model, optimizer, **arranged(HOW | options))


def take(model, optimizer, begin, end, rank=0, world_size=1, size=24):
    """Train on this rank's part of batches for the net ``small``."""
    for step in range(begin, end):
        dtype = next(model.parameters()).dtype
        x, y = (part(t, rank, world_size) for t in batch(step, "small", dtype, size * world_size))
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        if world_size > 1:
            average_in_one(model)
        optimizer.step()


def statistics_of(kfac):
    return kfac._engine.refresher.staleness.statistics


def make_due(kfac, names):
    """Let only these statistics be due at the next step."""
    for name, statistic in statistics_of(kfac).items():
        statistic.due = kfac._engine.step + (0 if name in names else 7)
    kfac._plan_next()


# 1. Passes and ranks that run other layers


class Branches(nn.Module):
    """Two layers, of which the first number of a batch chooses one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.a(x) if x[0, 0] < 0 else self.b(x)


class NormAtTimes(nn.Module):
    """A norm layer that only some steps use."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.c = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x)
        return self.c((self.norm(h) if x[0, 0] < 0 else h).tanh())


def piece(step, size, sign, scale=1.0):
    """A batch of five inputs whose first number has a sign."""
    x, y = batch(step, "deep", size=size)
    x = x * scale
    x[0, 0] = float(sign)
    return x, y


@pytest.fixture
def nets(monkeypatch):
    """The oracle knows the networks above, and that a rank may have no gradient."""
    monkeypatch.setitem(oracle.NETS, "branches", (Branches, (5,)))
    monkeypatch.setitem(oracle.NETS, "norm", (NormAtTimes, (5,)))
    monkeypatch.setattr(oracle, "average_in_one", average_gradients)


@pytest.mark.parametrize("by_rank", [False, True], ids=["by micro-batch", "by rank"])
def test_layers_that_only_some_passes_or_ranks_run(nets, by_rank):
    run = []
    for step in range(24):  # what b sees is never what it was, what a sees always
        a, b = piece(0, 17, -1), piece(100 + step, 24, 1, 1.0 + 2 * (step % 3))
        run.append([[a], [b]] if by_rank else [[a, b]])
    found = oracle.compare("branches", run, **(BASIS if by_rank else {}))
    alone = {tuple({name for name, _ in due}) for _, _, due in found.trace}
    assert ("b",) in alone, "b is due where a is not"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_norm_layer_that_nobody_called_has_no_rows(nets, world_size):
    sizes = {1: [41], 2: [21, 20]}[world_size]
    run = [
        [[piece(10 * step + rank, size, -1 if step % 2 == 0 else 1)] for rank, size in enumerate(sizes)]
        for step in range(16)
    ]
    how = BASIS if world_size > 1 else {}
    oracle.compare("norm", run, norm_form="unit", staleness_threshold=5.0, staleness_min_rows=1, **how)


def two_branches():
    """Two branches of which b alone is due."""
    model, optimizer, kfac = start(Branches, accumulate="mean")
    for sign in (-1, 1):
        x, y = piece(0, 24, sign)
        (mean_loss(model(x), y) / 2).backward()
    optimizer.step()
    make_due(kfac, {("b", "A"), ("b", "G")})
    return model, optimizer, kfac


@pytest.mark.parametrize(("said", "terms"), [(None, 48.0), (7, 31.0)])
def test_a_pass_through_layers_that_are_not_due_counts_and_uses_up_its_terms(said, terms):
    model, optimizer, kfac = two_branches()
    for sign in (-1, 1):
        x, y = piece(1, 24, sign)
        if said is not None and sign < 0:
            kfac.set_terms(said)
        (mean_loss(model(x), y) / 2).backward()
    window = kfac._collector.window
    assert (window.num_passes, window.terms, set(window.layers)) == (2, terms, {"b"})
    optimizer.step()


def test_a_pass_through_layers_that_are_not_due_is_dropped_with_its_gradients():
    model, optimizer, kfac = two_branches()
    for sign in (-1, 1):
        optimizer.zero_grad()
        x, y = piece(1, 24, sign)
        mean_loss(model(x), y).backward()
    assert (kfac._collector.window.num_passes, kfac._collector.window.terms) == (1, 24.0)
    assert kfac.metrics()["abandoned_steps"] == 1


def resumed(rank, world_size):
    """A run goes on where one layer of three is due."""
    model, optimizer, kfac = start(**BASIS)
    take(model, optimizer, 0, 2, rank, world_size)
    make_due(kfac, {("0", "A")})
    state = kfac.state_dict(gather=True)
    shared = [state]
    if world_size > 1:
        torch.distributed.broadcast_object_list(shared)
    other, its_optimizer, its_kfac = start(**BASIS)
    its_kfac.load_state_dict(shared[0])
    take(other, its_optimizer, 2, 3, rank, world_size)
    return its_kfac._engine.metrics.counters["refreshes"] - kfac._engine.metrics.counters["refreshes"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_that_are_not_due_at_the_first_step_are_not_taken_for_hidden_ones(world_size):
    assert on_threads(world_size, resumed, world_size) == [1] * world_size  # a warning would be an error


# 2. Layers that nobody calls


def test_what_is_missing_for_long_is_looked_for_after_an_eighth_of_that_time():
    looks = [step for step in range(2000) if Statistic(due=0).is_due(step, 100)]
    assert looks[:16] == list(range(16))
    gaps = {step: after - step for step, after in itertools.pairwise(looks)}
    assert all(gap <= max(1, step / 8) for step, gap in gaps.items())
    assert max(gaps.values()) == 64
    assert len(looks) == 80
    assert not Statistic(due=7).is_due(6, 100)
    assert [step for step in range(50) if Statistic(due=0).is_due(step, 1)] == list(range(50))


def seldom(rank, world_size, net, name):
    """Train a network of which one rank calls a layer from step 100 on; returns the steps that measured."""
    model, optimizer, kfac = start(net, **ALIKE, max_interval=40, staleness_min_rows=1, norm_form="unit", **BASIS)
    looked = []
    for step in range(160):
        if kfac._capture.measuring:
            looked.append(step)
        x, y = batch(step, "deep", size=12 * world_size)
        x, y = part(x, rank, world_size).clone(), part(y, rank, world_size)
        x[0, 0] = -1.0 if step >= 100 and rank == 0 else 1.0
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        if world_size > 1:
            average_gradients(model)
        optimizer.step()
        assert (not kfac._engine.states[name].decomposed) == (step < next((s for s in looked if s >= 100), 160))
    assert max(s.due for (layer, _), s in statistics_of(kfac).items() if layer == name) > 160
    return looked


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("net", "name"), [(oracle.Sometimes, "b"), (NormAtTimes, "norm")])
def test_a_layer_that_is_never_called_does_not_make_every_step_measure(world_size, net, name):
    looked, *others = on_threads(world_size, seldom, world_size, net, name)
    assert all(its == looked for its in others)
    assert sum(step < 100 for step in looked) < 50
    assert any(100 <= step <= 112 for step in looked)


def test_rows_that_are_gathered_over_many_steps_are_not_missing():
    model, optimizer, kfac = start(staleness_min_rows=30 * 24, staleness_threshold=1e-9)
    refreshed = []
    for step in range(61):
        take(model, optimizer, step, step + 1)
        refreshed.append(kfac.report()["refreshed_factors"])
    assert [refreshed.index(n) for n in (6, 12, 18)] == [0, 30, 60]


# 3. Sums that are lost on the wire


def lose(rank, strategy, min_rows):
    """At step 3 one layer's inputs are so large that the sum of two ranks' sums is infinite, and no rank's own is."""
    options = BASIS | {"strategy": strategy, "staleness_min_rows": min_rows, "max_interval": 1}
    model, optimizer, kfac = start(dtype=torch.float32, **options)
    take(model, optimizer, 0, 3, rank, 2)
    before = kfac.report()
    weights = {key: kfac._engine.states["0"].running[key].weight.clone() for key in kfac.factors()["0"]}
    make_due(kfac, {("0", "A")})
    x, y = (part(t, rank, 2).clone() for t in batch(3, "small", torch.float32, 48))
    x[:, 0] = 3e18
    optimizer.zero_grad()
    mean_loss(model(x), y).backward()
    average_in_one(model)
    optimizer.step()
    report, lost = kfac.report(), statistics_of(kfac)["0", "A"]
    for key, weight in weights.items():
        assert kfac._engine.states["0"].running[key].weight == weight, "not absorbed"
    assert report["refreshed_factors"] == before["refreshed_factors"], "not judged"
    assert report["counters"]["refreshes"] == before["counters"]["refreshes"], "nothing was decomposed"
    rows = lost.rows
    for step in range(4, 9):
        assert all(torch.isfinite(found.value).all() for found in lost.seen)
        take(model, optimizer, step, step + 1, rank, 2)
    assert kfac.report()["refreshed_factors"] > report["refreshed_factors"], "judged by what came after"
    assert all(torch.isfinite(t).all() for factors in kfac.factors().values() for t in factors.values())
    return rows, kfac.report()["intervals"], kfac.report()["refreshed_factors"], weights_of(model)


@pytest.mark.parametrize("strategy", ["sharded", "replicated"])
@pytest.mark.parametrize(("min_rows", "kept"), [(40, 0.0), (90, 48.0)], ids=["enough", "pooled"])
def test_sums_that_are_lost_on_the_wire_are_not_judged(strategy, min_rows, kept):
    first, second = on_threads(2, lose, strategy, min_rows)
    assert first[:3] == second[:3]
    torch.testing.assert_close(first[3], second[3], rtol=1e-5, atol=1e-6)
    assert first[0] == kept, "until there are enough, nobody but its holder knows"


# 4. States that are partial, of other settings, or malformed


def save_own(rank, strategy, end, options):
    model, optimizer, kfac = start(strategy=strategy, **options)
    take(model, optimizer, 0, end, rank, 2)
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "kfac": kfac.state_dict()}
    own = copy.deepcopy(own)
    take(model, optimizer, end, end + 12, rank, 2)
    return own, weights_of(model), kfac.report()["intervals"]


def load(rank, states, strategy, options):
    """Load one state on each rank."""
    model, optimizer, kfac = start(strategy=strategy, **options)
    state = copy.deepcopy(states[rank])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    kfac.load_state_dict(state["kfac"])
    return model, optimizer, kfac


def go_on_partly(rank, states, strategy, options):
    model, optimizer, kfac = load(rank, states, strategy, options)
    runner = kfac._engine
    step, found = runner.step, statistics_of(kfac)
    anew = {name for name, state in runner.states.items() if not state.decomposed}
    assert all(found[name].due == step for name in found if name[0] in anew)
    take(model, optimizer, step, step + 1, rank, 2)
    assert all(len(state.decomposed) == 2 for state in runner.states.values())
    return anew, {name: (s.interval, s.due) for name, s in found.items()}


def test_layers_that_are_measured_anew_are_due_at_once():
    options = ALIKE | BASIS | {"max_interval": 20, "staleness_min_rows": 1}
    saved = on_threads(2, save_own, "sharded", 14, options)
    states = [saved[0][0]] * 2
    with pytest.warns(UserWarning, match="measured anew"):
        first, second = on_threads(2, go_on_partly, states, "sharded", options)
    assert first == second
    anew, numbers = first
    assert 0 < len(anew) < 3
    assert all((due > 16) == (name not in anew) for (name, _), (_, due) in numbers.items())


def test_what_was_never_decomposed_is_due_at_once():
    model, optimizer, kfac = start(**ALIKE)
    take(model, optimizer, 0, 8)
    state = kfac.state_dict()
    state["layers"]["0"]["decomposed"] = "G"
    kfac.load_state_dict(state)
    waiting = {name for name, s in statistics_of(kfac).items() if s.due > 8}
    assert waiting == set(statistics_of(kfac)) - {("0", "A")}


def pooled(rank, states, strategy, options):
    kfac = load(rank, states, strategy, options)[2]
    assert rank != 0 or all((s.pool is None) == (s.rows == 0) for s in statistics_of(kfac).values())
    return {name: s.rows for name, s in statistics_of(kfac).items()}


def test_rows_whose_sums_another_ranks_state_has_are_gathered_anew():
    """Every rank holds all factors and decompositions, one of them alone what they are compared with."""
    options = BASIS | {"staleness_min_rows": 120, "max_interval": 1}
    saved = on_threads(2, save_own, "replicated", 5, options)
    for whose, rows in (([0, 1], 48.0), ([0, 0], 48.0), ([1, 1], 0.0)):
        first, second = on_threads(2, pooled, [saved[i][0] for i in whose], "replicated", options)
        assert first == second == dict.fromkeys(first, rows)


def go_on(rank, states, strategy, options):
    model, optimizer, kfac = load(rank, states, strategy, options)
    step = kfac._engine.step
    take(model, optimizer, step, step + 12, rank, 2)
    return weights_of(model), kfac.report()["intervals"]


def test_ranks_that_load_what_they_saved_go_on_bitwise():
    options = BASIS | {"staleness_min_rows": 120, "staleness_threshold": 0.2}
    saved = on_threads(2, save_own, "sharded", 11, options)
    found = on_threads(2, go_on, [own for own, _, _ in saved], "sharded", options)
    for (weights, intervals), (_, wanted, its) in zip(found, saved, strict=True):
        assert intervals == its
        assert all(torch.equal(p, q) for p, q in zip(weights, wanted, strict=True))


MODES = ["change", "basis"]


@pytest.mark.parametrize("before", MODES)
@pytest.mark.parametrize("after", MODES)
def test_what_another_mode_compared_with_is_not_compared_with(before, after):
    model, optimizer, kfac = start(staleness=before)
    take(model, optimizer, 0, 4)
    state = kfac.state_dict()
    other, its_optimizer, its_kfac = start(staleness=after)
    its_kfac.load_state_dict(state)
    number = 2 if before == after else 0
    assert [len(s.seen) for s in statistics_of(its_kfac).values()] == [number] * 6
    take(other, its_optimizer, 4, 7)
    assert [len(s.seen) for s in statistics_of(its_kfac).values()] == [2] * 6


@pytest.mark.parametrize("threshold", [50.0, 1e-9], ids=["alike", "changed"])
def test_a_lower_longest_interval_holds_from_the_resume_on(threshold):
    options = {"staleness_min_rows": 1}
    model, optimizer, kfac = start(**ALIKE, **options, max_interval=20)
    take(model, optimizer, 0, 21)  # refreshed at 0, 1, 2, 4, 7, 12 and 20
    assert {s.interval for s in statistics_of(kfac).values()} == {13}
    state = kfac.state_dict()
    other, its_optimizer, its_kfac = start(**options, staleness_threshold=threshold, max_interval=3)
    its_kfac.load_state_dict(state)
    assert {(s.interval, s.previous, s.due) for s in statistics_of(its_kfac).values()} == {(3, 3, 23)}
    for step in range(21, 30):
        take(other, its_optimizer, step, step + 1)
        assert all(s.interval <= 3 and s.due <= step + 3 for s in statistics_of(its_kfac).values())
    other, its_optimizer, its_kfac = start(**options, staleness_threshold=threshold, max_interval=3)
    state["staleness"]["layers"]["0"]["A"]["numbers"][2] = 22.0  # the last one was at 9
    its_kfac.load_state_dict(state)
    assert statistics_of(its_kfac)["0", "A"].due == 21


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


MALFORMED = {
    "not a dict": ((), [1], ["staleness", "list"]),
    "no layers": (("layers",), None, ["staleness", "layers", "None"]),
    "no number of refreshes": (("num_refreshes",), "x", ["staleness", "num_refreshes", "str"]),
    "a layer that is no dict": (("layers", "2"), 3, ["staleness", "'2'", "int"]),
    "a factor that is no dict": (("layers", "2", "G"), 3, ["staleness", "'2'", "int"]),
    "no numbers": (("layers", "2", "G", "numbers"), ..., ["factor G", "'2'", "'numbers'"]),
    "numbers that are no tensor": (("layers", "2", "G", "numbers"), [1, 1, 1, 0], ["factor G", "'2'", "list"]),
    "too few numbers": (("layers", "2", "G", "numbers"), numbers(1, 1, 1), ["factor G", "'2'", "[3]", "[4]"]),
    "no interval": (("layers", "2", "G", "numbers"), numbers(0, 1, 1, 0), ["factor G", "'2'", "at least 1"]),
    "not a number": (("layers", "2", "G", "numbers"), numbers(1, 1, torch.nan, 0), ["factor G", "'2'", "nan"]),
    "another shape": (("layers", "2", "G", "last"), torch.ones(1, 3, 3), ["G", "'2'", "[1, 3, 3]", "[1, 4, 4]"]),
    "a pool that is gone": (("layers", "2", "G", "pool"), ..., ["factor G", "'2'", "'pool'"]),
    "a noise of many": (("layers", "2", "G", "before_noise"), torch.ones(2), ["factor G", "'2'", "[2]", "[]"]),
    "a noise that is no tensor": (("layers", "2", "G", "last_noise"), 0.0, ["factor G", "'2'", "float"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_intervals_are_refused_by_name_and_nothing_is_replaced(case):
    path, value, words = MALFORMED[case]
    model, optimizer, kfac = start()
    take(model, optimizer, 0, 3)
    state = kfac.state_dict()
    place, path = state, ("staleness", *path)
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    take(model, optimizer, 3, 5)
    before = kfac.state_dict()
    with pytest.raises((ValueError, TypeError)) as refused:
        kfac.load_state_dict(state)
    for word in words:
        assert word in str(refused.value), word
    assert repr(kfac.state_dict()) == repr(before)


# 5. Models that are converted


@pytest.mark.parametrize("staleness", MODES)
def test_what_is_compared_follows_the_model(staleness):
    model, optimizer, kfac = start(dtype=torch.float32, staleness=staleness, staleness_min_rows=60)
    take(model, optimizer, 0, 8)  # in the middle of gathering
    held = [s for s in statistics_of(kfac).values() if s.pool is not None]
    assert held
    assert {t.dtype for s in held for t in (s.pool, *(seen.value for seen in s.seen))} == {torch.float32}
    model.double()
    ((x, y),) = cut(8, [24], "small")[0]
    make_due(kfac, set())
    optimizer.zero_grad()
    mean_loss(model(x), y).backward()
    optimizer.step()
    assert {t.dtype for s in held for t in (s.pool, *(seen.value for seen in s.seen))} == {torch.float64}
    assert {s.noise.dtype for s in held} == {torch.float64}
    assert all(seen.value.dtype == torch.float64 for s in statistics_of(kfac).values() for seen in s.seen)
    make_due(kfac, set(statistics_of(kfac)))
    take(model, optimizer, 9, 14)
    assert kfac.metrics()["skipped_batches"] == 0
