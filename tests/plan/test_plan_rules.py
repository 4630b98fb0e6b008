"""The planner's rules: balancing, fusion, grids, fractions, SPD-KFAC's placement, ResNet-50's bytes, auto."""

import itertools
import re

import pytest
from helpers_plan import LISTS, layer_lists, linear, resnet50
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfac.plan import fusion
from dkfac.plan.cluster import Cluster
from dkfac.plan.costs import Costs
from dkfac.plan.make import AUTO, Choices, make_plan, mean_seconds
from dkfac.plan.program import expand
from dkfac.plan.strategies import balance


def close(a, b):
    return a <= b * (1 + 1e-9) + 1e-12


# --- balancing ---------------------------------------------------------------------------------------------------


def makespan(costs, bins_of, bins):
    loads = [0.0] * bins
    for cost, b in zip(costs, bins_of, strict=True):
        loads[b] += cost
    return max(loads)


def least_makespan(costs, bins):
    """Return the optimum, over all placements that are not mirror images."""
    states = {(0,) * bins}
    for cost in costs:
        states = {tuple(sorted((*s[:i], s[i] + cost, *s[i + 1 :]))) for s in states for i in range(bins)}
    return min(max(state) for state in states)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(costs=st.lists(st.floats(0, 1e6), max_size=60), bins=st.integers(1, 4096))
def test_the_slowest_rank_is_within_the_bound_of_longest_processing_time(costs, bins):
    found = balance([(cost, str(i)) for i, cost in enumerate(costs)], bins)
    assert len(found) == len(costs)
    assert close(makespan(costs, found, bins), sum(costs) / bins + (1 - 1 / bins) * max(costs, default=0.0))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=10), bins=st.integers(1, 4))
def test_the_slowest_rank_is_within_four_thirds_of_the_best_placement(costs, bins):
    found = balance([(cost, str(i)) for i, cost in enumerate(costs)], bins)
    best = least_makespan(costs, bins)
    assert best <= makespan(costs, found, bins) <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


def test_equal_costs_are_dealt_out_by_name():
    names = ["d", "b", "a", "c"]
    assert dict(zip(names, balance([(1.0, n) for n in names], 4), strict=True)) == {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(layers=layer_lists(), world=st.sampled_from([1, 2, 3, 8, 17, 1000, 4096]))
def test_a_plan_is_balanced_by_what_its_strategy_balances(strategy, layers, world):
    """Seconds of decompositions per factor (comm-opt) or layer (mem-opt); state per layer (sharded)."""
    plan, costs = make_plan(layers, world, Choices(strategy=strategy)), Costs()
    items, placed = [], []
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        seconds = [costs.decompose(factor) for factor in layer.factors]
        match strategy:
            case "comm-opt":
                items += seconds
                placed += [by[0] for by in placement.decomposed_by]
            case "mem-opt":
                items.append(sum(seconds))
                placed.append(placement.preconditioned_by[0])
            case "sharded":
                items.append(layer.state_elements)
                placed.append(placement.preconditioned_by[0])
    assert close(makespan(items, placed, world), sum(items) / world + (1 - 1 / world) * max(items, default=0.0))


# --- hybrid-opt ----------------------------------------------------------------------------------------------------


def hybrid(world, fraction=None, layers=LISTS["equal"]):
    return make_plan(layers, world, Choices(strategy="hybrid-opt", worker_fraction=fraction))


def test_a_fraction_that_does_not_divide_the_ranks_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=re.escape("worker_fraction=0.3 gives 2.4 workers on 8 ranks")) as refused:
        hybrid(8, 0.3)
    assert "use one of [0.125, 0.25, 0.5, 1]" in str(refused.value)


@pytest.mark.parametrize("world", [1, 2, 3, 6, 7, 12, 30, 96, 1000, 4096])
def test_each_fraction_that_a_refusal_names_is_accepted_and_gives_another_number_of_workers(world):
    with pytest.raises(ValueError, match="use one of") as refused:
        hybrid(world, 0.99 if world > 1 else 0.5)
    allowed = [float(f) for f in re.search(r"\[(.*)\]", str(refused.value)).group(1).split(",")]
    workers = [len(hybrid(world, fraction).placements[0].preconditioned_by) for fraction in allowed]
    assert workers == [d for d in range(1, world + 1) if world % d == 0]


@pytest.mark.parametrize(
    ("world", "workers"), [(1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (9, 3), (15, 5), (4, 2), (6, 3), (8, 4), (35, 7)]
)
def test_half_of_the_ranks_work_by_default_or_the_largest_part_below(world, workers):
    assert {len(p.preconditioned_by) for p in hybrid(world).placements} == {workers}


@pytest.mark.parametrize(("world", "rows"), [(8, 2), (12, 3), (12, 4), (16, 4)])
def test_columns_of_the_grid_partition_the_ranks(world, rows):
    columns = {p.preconditioned_by for p in hybrid(world, rows / world, LISTS["equal"]).placements}
    assert len(columns) == world // rows
    assert sorted(rank for column in columns for rank in column) == list(range(world))


@pytest.mark.parametrize("world", [2, 4, 6])
def test_one_worker_per_layer_is_mem_opt_and_all_are_comm_opt(world):
    for fraction, strategy in ((1 / world, "mem-opt"), (1.0, "comm-opt")):
        assert hybrid(world, fraction).placements == make_plan(LISTS["equal"], world, Choices(strategy)).placements


@pytest.mark.parametrize("strategy", ["replicated", "factor-wise", "comm-opt", "hybrid-opt", "spd"])
def test_weights_are_shared_only_where_one_rank_steps_a_layer(strategy):
    with pytest.raises(ValueError, match=r'share="weights" needs one rank per layer') as refused:
        make_plan(LISTS["equal"], 4, Choices(strategy=strategy, share="weights"))
    allowed = re.search("one of (.*?), or", str(refused.value)).group(1).split(", ")
    for other in [*allowed, "auto"]:
        plan = make_plan(LISTS["equal"], 4, Choices(strategy=other, share="weights"))
        assert all(len(p.preconditioned_by) == 1 for p in plan.placements)


# --- spd ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layers=layer_lists(), world=st.sampled_from([2, 3, 8, 64]), solver=st.sampled_from(["eigen", "cholesky"]),
       byte_seconds=st.sampled_from([1e-9, 2e-8, 5e-8]))  # fmt: skip
def test_spd_repeats_exactly_what_is_cheaper_to_repeat_than_to_send(layers, world, solver, byte_seconds):
    """And deals out the rest, each to the least loaded rank."""
    costs = Costs(byte_seconds=byte_seconds)
    plan = make_plan(layers, world, Choices(strategy="spd", solver=solver), Cluster("given", costs))
    by = {
        (layer, factor): ranks
        for layer, p in zip(plan.layers, plan.placements, strict=True)
        for factor, ranks in zip(layer.factors, p.decomposed_by, strict=True)
    }
    load = [0.0] * world
    for (layer, factor), ranks in sorted(by.items(), key=lambda i: (-i[0][1].dim, i[0][0].name, i[0][1].key)):
        d, blocks = factor.dim, factor.num_blocks
        elements = d if factor.form == "diagonal" else d * (d + 1) // (1 if solver == "eigen" else 2)
        share = costs.latency_seconds + costs.byte_seconds * elements * blocks * (8 if layer.dtype == "float64" else 4)
        seconds = costs.decompose(factor, solver)
        assert (len(ranks) == world) == (seconds < share)
        if len(ranks) == 1:
            assert load[ranks[0]] == min(load)
        for rank in ranks:
            load[rank] += seconds


# --- fusion ------------------------------------------------------------------------------------------------------

times = st.floats(0, 10)


@st.composite
def arrivals(draw, largest=9):
    num = draw(st.integers(0, largest))
    gaps = draw(st.lists(times, min_size=num, max_size=num))
    return list(itertools.accumulate(gaps)), draw(st.lists(times, min_size=num, max_size=num)), draw(times)


def finish(sizes, ready, seconds, latency):
    """When the last bucket has arrived: a bucket leaves when its last item is ready and the channel is free."""
    now, items = 0.0, iter(zip(ready, seconds, strict=True))
    for size in sizes:
        bucket = list(itertools.islice(items, size))
        now = max(now, bucket[-1][0]) + latency + sum(s for _, s in bucket)
    assert next(items, None) is None
    return now


def partitions(num):
    for cuts in itertools.product([False, True], repeat=max(0, num - 1)):
        sizes = [1] if num else []
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        yield sizes


def finish_time(sizes, ready, seconds, latency):
    """Return when the last bucket has arrived."""
    now, start = 0.0, 0
    for size in sizes:
        end = start + size
        now = max(now, ready[end - 1]) + latency + sum(seconds[start:end])
        start = end
    return now


@settings(max_examples=150, deadline=None, derandomize=True)
@given(arrivals())
def test_optimal_buckets_finish_as_early_as_the_best_of_all_partitions(case):
    best = min(finish(sizes, *case) for sizes in partitions(len(case[0])))
    found = fusion.optimal(*case)
    assert finish(found, *case) == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert finish_time(found, *case) == pytest.approx(best, rel=1e-12, abs=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(arrivals(20))
def test_spd_buckets_are_the_published_greedy_and_never_better_than_optimal(case):
    """Merge the next item iff it is ready before the bucket's start (its last item's, or the channel's) + latency."""
    ready, seconds, latency = case
    sizes, free, begin = fusion.spd_buckets(*case), 0.0, 0
    assert sum(sizes) == len(ready)
    for size in sizes:
        end = begin + size
        starts = [max(free, ready[k]) for k in range(begin, end)]
        assert all(ready[k + 1] < starts[k - begin] + latency for k in range(begin, end - 1))
        assert end == len(ready) or ready[end] >= starts[-1] + latency
        free = starts[-1] + latency + sum(seconds[begin:end])
        begin = end
    assert close(finish(fusion.optimal(*case), *case), finish(sizes, *case))


def test_the_published_greedy_can_be_a_quarter_slower_than_optimal():
    case = ([0.0, 0.9, 1.8, 2.7, 3.6], [3.0, 0.1, 0.1, 0.1, 0.1], 1.0)
    assert finish(fusion.spd_buckets(*case), *case) > 1.25 * finish(fusion.optimal(*case), *case)


@pytest.mark.parametrize("rule", ["one", "optimal", "spd"])
def test_buckets_hold_inputs_in_forward_order_then_gradients_in_backward_order(rule):
    layers = LISTS["mixed"]
    buckets = make_plan(layers, 4, Choices(strategy="comm-opt", fusion=rule)).buckets
    inputs = [(layer.name, f.key) for layer in layers for f in layer.factors if f.key == "A"]
    others = [(layer.name, f.key) for layer in layers[::-1] for f in layer.factors if f.key != "A"]
    assert [item for bucket in buckets for item in bucket] == inputs + others
    assert (len(buckets) == 1) == (rule == "one")


# --- ResNet-50, auto ---------------------------------------------------------------------------------------------


def test_resnet50_has_54_layers_108_factors_and_three_of_dim_4608():
    dims = [factor.dim for layer in resnet50() for factor in layer.factors]
    assert len(resnet50()) == 54
    assert len(dims) == 108
    assert dims.count(4608) == 3
    assert sum(layer.grad_elements for layer in resnet50()) == 25_557_032 - 53_120  # less 2 per channel of batch norms


@pytest.mark.parametrize("what", ["factors", "decompositions"])
def test_sharded_divides_the_bytes_of_resnet50_by_8_ranks_to_within_a_fifth(what):
    plan = make_plan(resnet50(), 8, Choices(strategy="sharded"))
    held = [plan.memory_bytes(rank)[what] for rank in range(8)]
    wanted = sum(f.dim**2 + (f.dim if what == "decompositions" else 0) for layer in plan.layers for f in layer.factors)
    assert sum(held) == 4 * wanted
    assert max(held) <= 1.2 * sum(held) / 8


@pytest.mark.parametrize("options", [{"strategy": "sharded"}, {"strategy": "comm-opt", "replicate_factors": True}])
def test_packed_bfloat16_factors_of_resnet50_are_a_quarter_of_full_float32(options):
    plan = make_plan(resnet50(), 8, Choices(wire_dtype="bfloat16", **options))
    (reduction, *onward) = expand(plan).stage("factors")
    assert [t.how for t in onward] == (["collect"] if options["strategy"] == "sharded" else ["all-gather"])
    dims = [factor.dim for layer in plan.layers for factor in layer.factors]
    assert reduction.num_bytes(0) - reduction.padding_bytes == sum(d * (d + 1) for d in dims)
    assert reduction.padding_bytes < 8 * 2
    assert reduction.num_bytes(0) == pytest.approx(sum(4 * d * d for d in dims) / 4, rel=0.01)


@pytest.mark.parametrize("world", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("layers", LISTS)
def test_auto_is_the_cheapest_of_its_three_and_always_the_same(layers, world):
    choices = [Choices(strategy=s) for s in ("auto", *AUTO)]
    auto, *three = (make_plan(LISTS[layers], world, c) for c in choices)
    assert AUTO == ("replicated", "comm-opt", "sharded")
    seconds = [mean_seconds(plan, Choices(), Cluster("guessed")) for plan in three]
    assert auto == three[seconds.index(min(seconds))]
    assert auto == make_plan(LISTS[layers], world, choices[0])


def test_auto_does_not_pick_the_same_for_one_slow_link_and_for_one_fast_link():
    layers = [linear(f"{i}", 512, 512) for i in range(32)]
    given = [Cluster("given", Costs(byte_seconds=b)) for b in (1e-12, 1e-9, 1e-6)]
    picked = {make_plan(layers, 8, Choices(), cluster).strategy for cluster in given}
    assert len(picked) > 1
