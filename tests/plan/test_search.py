"""The search over plans, the models it knows by name, and the published cluster."""

import functools
import json
import pathlib
import sys
from dataclasses import replace

import pytest
import torch
from helpers_parity import EXACT, SGD, average_in_one, batch, build, mean_loss, part, weights_of
from helpers_ranks import on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfac import KFAC
from dkfac.plan import preset
from dkfac.plan.cluster import Cluster, Line
from dkfac.plan.costs import Costs
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS, linear, scaled, work_of
from dkfac.plan.search import most_memory, predict, search
from dkfac.plan.simulate import Kind, simulate
from dkfac.plan.strategies import STRATEGIES, balance

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
GUESSED = Cluster("guessed")


@pytest.mark.parametrize(
    ("name", "layers", "millions"),
    [
        ("resnet18", 21, 11.68), ("resnet32", 32, 0.46), ("resnet34", 37, 21.78), ("resnet50", 54, 25.50),
        ("resnet101", 105, 44.44), ("resnet152", 156, 60.04), ("vgg16", 16, 138.36), ("densenet121", 121, 7.90),
        ("densenet201", 201, 19.78), ("inception-v4", 150, 42.62), ("bert-large", 145, 303.26), ("gpt2", 48, 85.02),
        ("vit-b", 74, 86.38),
    ],
)  # fmt: skip
def test_models_have_the_parameters_they_are_known_for(name, layers, millions):
    """Without norms and embeddings: torchvision's resnet50 has 25.56 million with its norms, densenet201 20.01."""
    shapes = list(MODELS[name]())
    assert len(shapes) == layers
    assert len({shape.spec.name for shape in shapes}) == layers
    assert sum(shape.spec.grad_elements for shape in shapes) / 1e6 == pytest.approx(millions, abs=0.005)


def test_resnet50_has_the_published_factors_and_operations():
    shapes = list(MODELS["resnet50"]())
    packed = {key: sum(s.spec.factor(key).packed_elements for s in shapes) / 1e6 for key in "AG"}
    assert packed == pytest.approx({"A": 62.35, "G": 14.62}, abs=0.005)
    flops = sum(2 * s.positions * s.spec.grad_elements for s in shapes)
    assert flops / 1e9 == pytest.approx(8.2, abs=0.1), "4.1 billion multiplications for an image"


def test_scaled_work_adds_up_to_what_is_known():
    work = scaled(list(MODELS["resnet50"]()), 0.132, 0.212)
    assert sum(work.forward.values()) + sum(work.backward.values()) == pytest.approx(0.132)
    assert sum(work.backward.values()) == pytest.approx(2 * sum(work.forward.values()))
    assert sum(work.factors.values()) == pytest.approx(0.212)


layer_sets = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=8).map(
    lambda dims: [linear(f"l{i}", a, b).spec for i, (a, b) in enumerate(dims)]
)
worlds = st.one_of(st.integers(1, 64), st.sampled_from([100, 256, 1000, 4096]))


def makespan_and_costs(plan):
    costs, load = [], [0.0] * plan.world_size
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for factor, by in zip(layer.factors, placement.decomposed_by, strict=True):
            costs.append(GUESSED.costs.decompose(factor, plan.solver))
            for rank in by:
                load[rank] += costs[-1]
    return max(load), costs


@settings(max_examples=500, deadline=None, derandomize=True)
@given(layers=layer_sets, world=worlds, strategy=st.sampled_from(sorted(STRATEGIES)), share=st.floats(0.0, 1.5))
def test_any_plan_owns_every_factor_and_balances_and_budgets_hold(layers, world, strategy, share):
    fraction = 1 / world if strategy == "hybrid-opt" else None
    plan = make_plan(layers, world, Choices(strategy=strategy, worker_fraction=fraction))
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        assert all(
            by and set(by) <= set(held) for by, held in zip(placement.decomposed_by, placement.factors, strict=True)
        )
        assert len(placement.decomposed_by) == len(layer.factors)
    if strategy == "comm-opt":  # which is free to give each factor to anyone
        makespan, costs = makespan_and_costs(plan)
        assert makespan <= (sum(costs) / world + (1 - 1 / world) * max(costs)) * (1 + 1e-9)
    some = {0, world - 1, *(by[0] for p in plan.placements for by in (*p.decomposed_by, p.preconditioned_by))}
    assert most_memory(plan) == max(sum(plan.memory_bytes(rank).values()) for rank in some)
    if world > 16:
        return
    work, budget = work_of([linear(la.name, 1, 1) for la in layers], 8, Costs()), int(share * most_memory(plan))
    ask = functools.partial(search, layers, world, GUESSED, work, Choices(factor_interval=1, inverse_interval=1))
    least = min(found.memory_bytes for found in ask())
    if budget < least:
        with pytest.raises(ValueError, match="the least is"):
            ask(memory_bytes=budget)
        budget = least
    fitting = ask(memory_bytes=budget)
    assert fitting
    assert all(found.memory_bytes <= budget for found in fitting)
    assert fitting[0].seconds <= min(found.seconds for found in fitting) + 1e-9


def optimum(costs, loads, best):
    """Return the least makespan, or ``best`` if none is less: every choice that could still be better is tried."""
    if not costs:
        return max(loads)
    for rank in {load: rank for rank, load in enumerate(loads)}.values():  # of equal loads one
        if loads[rank] + costs[0] < best:
            best = min(best, optimum(costs[1:], [*loads[:rank], loads[rank] + costs[0], *loads[rank + 1 :]], best))
    return best


@settings(max_examples=100, deadline=None, derandomize=True)
@given(costs=st.lists(st.floats(0.01, 10), min_size=1, max_size=10), ranks=st.integers(1, 4))
def test_balancing_is_within_a_third_of_the_best_there_is(costs, ranks):
    bins = balance([(cost, f"{i:03}") for i, cost in enumerate(costs)], ranks)
    loads = [sum(c for c, b in zip(costs, bins, strict=True) if b == rank) for rank in range(ranks)]
    assert max(loads) <= optimum(sorted(costs, reverse=True), [0.0] * ranks, max(loads)) * 4 / 3 + 1e-9


def test_a_budget_that_nothing_fits_into_is_refused_with_the_least_that_works():
    layers = [linear(f"l{i}", 100, 100).spec for i in range(4)]
    work = work_of([linear(f"l{i}", 100, 100) for i in range(4)], 8, Costs())
    with pytest.raises(ValueError, match=r"no strategy fits into .* on 2 ranks: the least is 0\.0003") as caught:
        search(layers, 2, GUESSED, work, Choices(), memory_bytes=1000)
    assert "max_dim" in str(caught.value)


def test_the_same_question_has_the_same_answer_and_links_decide_it():
    shapes = list(MODELS["resnet18"]())
    layers = [shape.spec for shape in shapes]
    slow, fast = (
        Cluster("c", Costs(), between={how: {8: Line(1e-5, b)} for how in ("all-reduce", "all-gather", "all-to-all")})
        for b in (1e-8, 1e-13)
    )
    work = work_of(shapes, 32, Costs())
    best = [search(layers, 8, where, work, Choices(inverse_interval=10))[0] for where in (slow, fast, slow)]
    assert best[0].plan == best[2].plan
    assert (best[0].plan.strategy, best[0].overlap) != (best[1].plan.strategy, best[1].overlap)


def calls_of(function):
    """Count the Python functions that a call enters: work that is the same on a busy machine."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded", "spd", "hybrid-opt"])
def test_the_work_of_planning_and_simulating_grows_no_faster_than_the_number_of_ranks(strategy):
    shapes = list(MODELS["resnet50"]())
    layers, work = [shape.spec for shape in shapes], work_of(shapes, 32, Costs())

    def plan_and_simulate(num_ranks):
        plan = make_plan(layers, num_ranks, Choices(strategy=strategy))
        simulate(plan, Cluster("c", ranks_per_host=8), work, Kind())

    few, many = (calls_of(functools.partial(plan_and_simulate, num_ranks)) for num_ranks in (256, 1024))
    assert many <= 4.5 * few


def test_the_published_cluster_is_predicted_from_what_was_fitted_on_another_model(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import spd_table

    constants = json.loads((BENCHMARKS / "results" / "spd_table.json").read_text())["constants"]
    where, totals = spd_table.cluster(constants), []
    for algorithm, wanted in spd_table.PUBLISHED["resnet152"].items():
        found = spd_table.predict("resnet152", algorithm, where)
        assert found[3] == pytest.approx(wanted[3], rel=0.10), algorithm
        for mine, theirs in zip(found[:3], wanted[:3], strict=True):
            assert mine == pytest.approx(theirs, rel=0.25), algorithm
        totals.append(found[3])
    assert totals == sorted(totals, reverse=True), "D-KFAC, MPD-KFAC, SPD-KFAC"


def test_auto_chooses_by_a_cluster_file_and_the_weights_are_the_same(tmp_path):
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    for path, byte_seconds in ((slow, 1e-6), (fast, 1e-15)):
        lines = {how: {4: Line(1e-9, byte_seconds)} for how in ("all-reduce", "all-gather", "all-to-all")}
        lines["reduce-scatter"] = lines["all-gather"]
        path.write_text(Cluster("c", Costs(), between=lines).to_json())

    def run(rank, cluster):
        model = build("small")
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        kfac = KFAC(model, optimizer, **(EXACT | {"cluster": str(cluster), "inverse_interval": 2}))
        for step in range(4):
            x, y = (part(t, rank, 4) for t in batch(step, "small"))
            optimizer.zero_grad()
            mean_loss(model(x), y).backward()
            average_in_one(model)
            optimizer.step()
        return weights_of(model), kfac.plan.fingerprint(), kfac.plan.strategy

    found = {path: on_threads(4, run, path) for path in (slow, fast)}
    for results in found.values():
        assert len({fingerprint for _, fingerprint, _ in results}) == 1
    (weights, _, of_slow), (others, _, of_fast) = found[slow][0], found[fast][0]
    assert of_slow != of_fast
    for p, q in zip(weights, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


def test_a_cluster_file_that_is_not_there_is_refused_before_anything_is_hooked():
    model = build("small")
    with pytest.raises(ValueError, match=r"cluster 'nowhere\.json': no such file of `dkfac measure`.*spd-kfac-64"):
        KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), cluster="nowhere.json")
    assert not model[0]._forward_hooks


def test_pieces_are_offered_and_win_where_one_factor_bounds_every_placement():
    shapes = list(MODELS["resnet50"]())
    layers = [shape.spec for shape in shapes]
    cluster = preset.load_cluster("spd-kfac-64")
    work = work_of(shapes, 32, cluster.costs)
    choices = Choices(solver="cholesky", factor_interval=1, inverse_interval=1)
    found = search(layers, 64, cluster, work, choices, block_dims=(None, 2304))
    assert found[0].choices.block_dim == 2304
    assert "pieces of 2304" in found[0].name
    whole = next(one for one in found if one.choices.block_dim is None)
    assert whole.seconds > found[0].seconds


def test_a_lag_hides_decompositions_behind_so_many_steps():
    shapes = list(MODELS["resnet50"]())
    layers = [shape.spec for shape in shapes]
    cluster = preset.load_cluster("spd-kfac-64")
    work = work_of(shapes, 32, cluster.costs)
    choices = Choices(solver="cholesky", factor_interval=1, inverse_interval=10)
    found = search(layers, 64, cluster, work, choices, inverse_lags=(0, 1, 5))
    best = {lag: next(one for one in found if one.choices.inverse_lag == lag) for lag in (0, 1, 5)}
    assert best[5].seconds <= best[1].seconds < best[0].seconds
    assert best[5].name.endswith("lag 5")
    assert "decompose" not in best[5].steps[0][2].busy(0)
    same = predict(best[5].plan, replace(best[5].choices, inverse_lag=0), best[5].overlap, cluster, work)
    hidden = same.steps[0][2].seconds - best[5].steps[0][2].seconds
    assert hidden == pytest.approx(10 * (same.seconds - best[5].seconds))
