"""The simulator: steps small enough to add up by hand, and what must hold for any."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfac.plan.cluster import Cluster, Line
from dkfac.plan.costs import Costs
from dkfac.plan.curves import Curve
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import linear
from dkfac.plan.program import expand
from dkfac.plan.sharing import NetworkJob, share_cores, share_network
from dkfac.plan.simulate import Kind, Work, average_seconds, simulate
from dkfac.plan.timeline import Span, Timeline

SHAPES = [linear("first", 9, 20), linear("second", 19, 30)]
LAYERS = [shape.spec for shape in SHAPES]
NAMES = [layer.name for layer in LAYERS]
COSTS = Costs(curves={"cholesky": Curve("polynomial", (0.0, 0.1)), "precondition": Curve("polynomial", (0.5,))})
WORK = Work(
    {"first": 1.0, "second": 2.0},
    {"first": 10.0, "second": 20.0},
    {("first", "A"): 0.1, ("first", "G"): 0.2, ("second", "A"): 0.3, ("second", "G"): 0.4},
    optimizer=0.05,
    reduces_gradients=False,
)
PASSES, MEASURING = 33.0, 1.0
DECOMPOSING = 0.1 * (10 + 20 + 20 + 30)


def plan_of(strategy, world, **options):
    return make_plan(LAYERS, world, Choices(strategy=strategy, solver="cholesky", **options))


def lines(latency=0.0, byte_seconds=0.0, sizes=(2, 4)):
    hows = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")
    return {how: {size: Line(latency, byte_seconds) for size in sizes} for how in hows}


def cluster(latency=0.0, byte_seconds=0.0, **more):
    return Cluster("test", COSTS, between=lines(latency, byte_seconds), **more)


def test_one_rank_does_one_thing_after_the_other():
    plan = plan_of("comm-opt", 1)
    for kind, extra in ((Kind(), MEASURING + DECOMPOSING), (Kind(True, False), MEASURING), (Kind(False, False), 0)):
        found = simulate(plan, cluster(), WORK, kind)
        assert found.seconds == pytest.approx(PASSES + extra + 2 * 0.5 + 0.05)
        assert not found.of(0, "network")
    busy = simulate(plan, cluster(), WORK, Kind()).busy(0)
    stages = {
        "forward": 3,
        "backward": 30,
        "measure": 1,
        "decompose": DECOMPOSING,
        "precondition": 1,
        "optimizer": 0.05,
    }
    assert busy == pytest.approx(stages)


def test_the_mean_of_an_interval_counts_each_kind_of_step():
    plan = plan_of("comm-opt", 1)
    mean = average_seconds(plan, cluster(), WORK, factor_interval=2, inverse_interval=6)
    assert mean == pytest.approx(PASSES + 1.05 + (3 * MEASURING + DECOMPOSING) / 6)


def test_every_transfer_of_the_program_is_waited_for():
    """Without overlap a step is its work and, one after the other, its transfers."""
    for strategy in ("replicated", "comm-opt", "sharded", "hybrid-opt", "spd"):
        plan = plan_of(strategy, 2, worker_fraction=0.5 if strategy == "hybrid-opt" else None)
        program = expand(plan)
        moved = [t for t in program.transfers if t.how not in ("collect", "deal") or sum(map(sum, t.splits(0)))]
        free, dear = (simulate(plan, cluster(latency), WORK, Kind()).seconds for latency in (0.0, 7.0))
        assert dear - free == pytest.approx(7.0 * len(moved)), strategy


def test_bytes_are_those_of_the_whole_buffer():
    plan = plan_of("replicated", 2)
    (factors,) = expand(plan).stage("factors")
    found = simulate(plan, cluster(byte_seconds=1e-3), WORK, Kind())
    packed = sum(d * (d + 1) // 2 for d in (10, 20, 20, 30))
    assert factors.used == packed
    assert found.network(0)["factors"] == pytest.approx((0.0, 4e-3 * packed))


def test_with_overlap_factors_leave_when_they_are_measured_and_hide_behind_the_passes():
    choices = Choices(strategy="replicated", solver="cholesky", fusion="optimal")
    plan = make_plan(LAYERS, 2, choices, cluster(0.01), WORK)
    assert len(plan.buckets) > 1
    plain = simulate(plan, cluster(0.01), WORK, Kind())
    found = simulate(plan, cluster(0.01), WORK, Kind(overlap=True))
    hidden, exposed = found.network(0)["factors"]
    assert hidden > 0
    assert exposed < plain.network(0)["factors"][1]
    nothing = simulate(plan, cluster(0.01, hidden=(0.0, 0.0)), WORK, Kind(overlap=True))
    assert nothing.network(0)["factors"][1] == pytest.approx(0.01 * len(expand(plan).stage("factors")))
    assert nothing.seconds > found.seconds


def test_gradients_and_factors_share_the_network():
    jobs = [NetworkJob("gradients", "", 0.0, 3.0, 0), NetworkJob("factors", "", 1.0, 3.0, 1)]
    ends = {job.stage: (begin, end) for begin, end, job in share_network(jobs, 0.0, 0.0, (1.0, 1.0))}
    assert ends["gradients"] == pytest.approx((0.0, 5.0))  # alone for 1, then with half of it
    assert ends["factors"] == pytest.approx((1.0, 6.0))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 5), st.integers(0, 1)), min_size=1, max_size=8),
    st.floats(0, 9), st.floats(0, 9), st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.3, 0.6), (0.0, 0.0)]),
)  # fmt: skip
def test_a_network_does_as_much_as_it_can_and_no_more(given_jobs, turn, longer, hidden):
    jobs = [NetworkJob("x", str(i), ready, seconds, queue) for i, (ready, seconds, queue) in enumerate(given_jobs)]
    found = share_network(jobs, turn, turn + longer, hidden)
    assert sorted(job.name for _, _, job in found) == sorted(job.name for job in jobs)
    total = sum(job.seconds for job in jobs)
    last = max(end for _, end, _ in found)
    assert last >= max(job.ready + job.seconds for job in jobs) - 1e-6
    assert last <= max(turn + longer, max(job.ready for job in jobs)) + total + 1e-6
    for queue in (0, 1):
        own = [(begin, end) for begin, end, job in found if job.queue == queue]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own)), "one at a time, in order"


def test_rounding_of_large_times_stops_nothing():
    jobs = [NetworkJob("x", str(i), 1e5 + i / 3, 0.1 / (i + 1), i % 2) for i in range(9)]
    assert len(share_network(jobs, 1e5, 1e5 + 1, (0.7, 0.3))) == 9
    assert share_cores([1e6, 1e6 + 0.1, 1e6], [1e-7, 0.3, 1e-9], 1)[1] > 1e6


def test_ranks_of_a_host_share_its_cores():
    assert share_cores([0.0, 0.0], [1.0, 3.0], None) == [1.0, 3.0]
    assert share_cores([0.0, 0.0], [1.0, 3.0], 1) == pytest.approx([2.0, 4.0])
    assert share_cores([0.0, 5.0], [1.0, 3.0], 1) == pytest.approx([1.0, 8.0])
    assert share_cores([0.0, 0.0, 0.0], [1.0, 1.0, 4.0], 2) == pytest.approx([1.5, 1.5, 4.5])
    crowded = simulate(plan_of("replicated", 4), cluster(ranks_per_host=4, slots=2), WORK, Kind())
    alone = simulate(plan_of("replicated", 4), cluster(ranks_per_host=4), WORK, Kind())
    assert crowded.seconds == pytest.approx(2 * alone.seconds)


def test_the_slowest_owner_is_waited_for():
    plan = plan_of("layer-wise", 2)  # one layer each
    found = simulate(plan, cluster(), WORK, Kind())
    assert found.busy(0)["decompose"] == pytest.approx(0.1 * 30)
    assert found.busy(1)["decompose"] == pytest.approx(0.1 * 50)
    assert found.seconds == pytest.approx(PASSES + MEASURING + 5 + 0.5 + 0.05)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 50), st.floats(0, 20)), max_size=12))
def test_what_is_hidden_and_what_is_exposed_is_all_there_is(found):
    spans = [Span(0, "network" if net else "compute", "s", "", b, b + d) for net, b, d in found]
    timeline = Timeline(tuple(spans), 100.0)
    grid = [i / 8 for i in range(8 * 75)]

    def seconds(test):
        return sum(map(test, grid)) / 8

    def during(stream, t):
        return any(s.stream == stream and s.begin <= t < s.end for s in spans)

    hidden, exposed = timeline.network(0).get("s", (0.0, 0.0))
    slack = 0.25 * (1 + len(spans))
    assert hidden == pytest.approx(seconds(lambda t: during("network", t) and during("compute", t)), abs=slack)
    assert exposed == pytest.approx(seconds(lambda t: during("network", t) and not during("compute", t)), abs=slack)


def test_a_trace_for_perfetto_has_every_span():
    found = simulate(plan_of("comm-opt", 2), cluster(0.5), WORK, Kind())
    trace = json.loads(found.to_chrome())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert len(spans) == len(found.spans)
    assert {event["pid"] for event in spans} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * found.seconds)


def test_a_cluster_survives_json_and_says_what_is_wrong_with_a_file():
    whole = cluster(0.1, 2e-9, ranks_per_host=4, slots=2.0, hidden=(1.0, 0.5), memory_bytes=10, environment={"a": "b"})
    assert Cluster.from_json(whole.to_json()) == whole
    with pytest.raises(ValueError, match=r"x\.json is not JSON.*dkfac measure"):
        Cluster.from_json("nonsense", "x.json")
    with pytest.raises(ValueError, match=r"x\.json has version 7.*measure again"):
        Cluster.from_json('{"version": 7}', "x.json")


def test_sizes_that_were_not_measured_come_from_the_nearest_by_the_steps_of_a_ring():
    known = Cluster("c", between={"all-reduce": {4: Line(0.3, 0.75)}})
    line = known.line("all-reduce", 8, one_host=False)
    assert line.latency == pytest.approx(0.3 * 7 / 3)
    assert line.byte_seconds == pytest.approx(0.75 * (7 / 8) / (3 / 4))
    half = known.line("all-gather", 4, one_host=False)
    assert (half.latency, half.byte_seconds) == pytest.approx((0.15, 0.375))
    assert known.is_measured("all-reduce", 4, one_host=False)
    assert not known.is_measured("all-reduce", 8, one_host=False)


def test_a_line_that_bends_is_read_off_between_its_knots():
    line = Line(1.0, 9.9, knots=((10.0, 2.0), (20.0, 3.0), (40.0, 13.0)))
    assert [line(x) for x in (10, 15, 20, 30, 40, 60)] == pytest.approx([2.0, 2.5, 3.0, 8.0, 13.0, 23.0])
    assert line(0) == 2.0
    twice = line.scaled(2.0, 3.0)
    assert twice(20) == pytest.approx(2 * 1.0 + 3 * (3.0 - 1.0))
    assert Cluster.from_json(Cluster("c", between={"all-reduce": {4: line}}).to_json()).between["all-reduce"][4] == line
