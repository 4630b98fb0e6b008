"""R30: every factor is owned, who does what follows the strategies' table, and everybody gets what the plan says."""

import dataclasses
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_plan import LISTS, layer_lists
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfac
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.plan import Plan
from dkfac.plan.program import expand
from dkfac.plan.strategies import STRATEGIES

WORLDS = [*range(1, 41), 64, 100, 257, 1000, 1024, 4096]


def owners(plan):
    return {layer.name: placement for layer, placement in zip(plan.layers, plan.placements, strict=True)}


def check_table(plan, replicated):
    """ARCHITECTURE section 2: the row of the strategies' table that the plan is of."""
    everyone, world = tuple(range(plan.world_size)), plan.world_size
    turn = itertools.count()
    assert len(plan.placements) == len(plan.layers)
    for i, (layer, p) in enumerate(zip(plan.layers, plan.placements, strict=True)):
        assert len(p.factors) == len(p.decomposed_by) == len(layer.factors)
        for held, by in zip(p.factors, p.decomposed_by, strict=True):
            assert by
            assert set(by) <= set(held) <= set(everyone)
            assert len(by) == 1 or by == everyone
            assert held == (everyone if replicated and plan.strategy != "local" else by)
        assert p.statistics == (p.decomposed_by[0] if plan.strategy == "local" else everyone)
        one = p.decomposed_by[0]
        match plan.strategy:
            case "replicated":
                assert p.decomposed_by == (everyone,) * len(layer.factors)
                assert p.preconditioned_by == everyone
            case "layer-wise":
                assert set(p.decomposed_by) == {p.preconditioned_by} == {(i % world,)}
            case "factor-wise":
                assert p.decomposed_by == tuple((next(turn) % world,) for _ in layer.factors)
                assert p.preconditioned_by == everyone
            case "comm-opt":
                assert all(len(by) == 1 for by in p.decomposed_by)
                assert p.preconditioned_by == everyone
            case "spd":
                assert p.preconditioned_by == everyone
            case "mem-opt" | "sharded" | "local":
                assert set(p.decomposed_by) == {p.preconditioned_by} == {one}
            case "hybrid-opt":
                check_column(p, world)


def check_column(placement, world):
    """KAISA: the workers are a column of the grid, and each row of ranks has one of them."""
    rows = len(placement.preconditioned_by)
    columns, rest = divmod(world, rows)
    assert rest == 0
    column = placement.preconditioned_by[0]
    assert column < columns
    assert placement.preconditioned_by == tuple(row * columns + column for row in range(rows))
    assert all(len(by) == 1 and by[0] in placement.preconditioned_by for by in placement.decomposed_by)
    for row in range(rows):
        receivers = range(row * columns, (row + 1) * columns)
        assert len(set(receivers) & set(placement.preconditioned_by)) == 1


def check_splits(transfer):
    """What one sends the other receives; owners have their parts, all members equal chunks but for the padding."""
    group = transfer.group[:12]
    splits = {rank: transfer.splits(rank) for rank in group}
    for i, a in enumerate(group):
        assert all(splits[a][0][j] == splits[b][1][i] for j, b in enumerate(group))
        own = sum(part.elements for part in transfer.parts if part.owner == a)
        chunk = min(transfer.chunk, max(0, transfer.used - transfer.group.index(a) * transfer.chunk))
        wanted = (chunk, own) if transfer.how == "collect" else (own, chunk)
        assert (sum(splits[a][0]), sum(splits[a][1])) == wanted


def check_program(plan):
    """Everybody gets what the plan says that it holds, once."""
    program = expand(plan)
    if plan.world_size == 1:
        assert program.transfers == ()
        return
    sent = {"factors": {}, "decompositions": {}, "gradients": {}}
    for transfer in program.stage("factors", "decompositions", "gradients"):
        if transfer.how in ("collect", "deal"):
            if len(transfer.group) <= 40:
                check_splits(transfer)
            continue
        for part in transfer.parts:
            sent[transfer.stage].setdefault((part.layer, part.key), []).append((transfer.group, part))
    everyone = set(range(plan.world_size))
    for layer, p in zip(plan.layers, plan.placements, strict=True):
        for factor, held, by in zip(layer.factors, p.factors, p.decomposed_by, strict=True):
            found = sent["factors"].get((layer.name, factor.key), [])
            wanted = [] if len(p.statistics) == 1 else [held[0] if len(held) == 1 else -1]
            assert [part.owner for _, part in found] == wanted
            assert all(part.elements == factor.packed_elements for _, part in found)
            receivers = set(p.preconditioned_by) - set(by)
            found = sent["decompositions"].get((layer.name, factor.key), [])
            assert bool(found) == bool(receivers)
            assert all((part.owner,) == by and receivers | set(by) == set(group) for group, part in found)
        found = sent["gradients"].get((layer.name, "gradient"), [])
        served = [rank for group, part in found for rank in group if rank != part.owner]
        assert sorted(served) == sorted(everyone - set(p.preconditioned_by))
        assert all(part.owner in p.preconditioned_by for _, part in found)


def check(layers, world, strategy, **choices):
    plan = make_plan(layers, world, Choices(strategy=strategy, **choices))
    check_table(plan, choices.get("replicate_factors", False))
    check_program(plan)
    copy = Plan.from_json(plan.to_json())
    assert copy == plan
    assert copy.fingerprint() == plan.fingerprint()
    return plan


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layers", [k for k in LISTS if k != "resnet50"])
def test_every_strategy_follows_its_row_of_the_table_in_every_world_to_40(layers, strategy):
    for world in range(1, 41):
        check(LISTS[layers], world, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=56, deadline=None, derandomize=True)
@given(layers=layer_lists(), world=st.sampled_from(WORLDS), solver=st.sampled_from(["eigen", "cholesky"]),
       replicate=st.booleans(), rule=st.sampled_from(["one", "optimal", "spd"]))  # fmt: skip
def test_generated_layers_are_owned_in_worlds_to_4096(strategy, layers, world, solver, replicate, rule):
    check(layers, world, strategy, solver=solver, replicate_factors=replicate, fusion=rule)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s not in ("layer-wise", "factor-wise")])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(layers=layer_lists(), world=st.integers(1, 12), seed=st.integers(0, 99))
def test_placement_is_a_function_of_names_and_costs_not_of_the_order_of_layers(strategy, layers, world, seed):
    shuffled = random.Random(seed).sample(layers, len(layers))
    first, second = (owners(make_plan(order, world, Choices(strategy=strategy))) for order in (layers, shuffled))
    assert first == second


def test_plans_need_no_torch_and_do_not_depend_on_the_hash_seed():
    code = (
        "import sys, types; root = types.ModuleType('dkfac')\n"
        "root.__path__ = [sys.argv[1]]; sys.modules['dkfac'] = root\n"
        "from dkfac.plan.make import Choices, make_plan\n"
        "from dkfac.plan.spec import FactorSpec, LayerSpec\n"
        "from dkfac.plan.strategies import STRATEGIES\n"
        "layers = [LayerSpec(n, 'linear', (FactorSpec('A', 9), FactorSpec('G', 9)), 81) for n in 'zyxabc']\n"
        "print(*(make_plan(layers, 4, Choices(strategy=s)).fingerprint() for s in [*STRATEGIES, 'auto']))\n"
        "assert 'torch' not in sys.modules"
    )
    said = set()
    for seed in "123":
        command = [sys.executable, "-c", code, str(Path(dkfac.__file__).parent)]
        said.add(
            subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        )
    assert len(said) == 1
    assert len(set(said.pop().split())) == len(STRATEGIES)  # all differ, but auto is one of them


# --- plans that are refused ------------------------------------------------------------------------------------

GOOD = make_plan(LISTS["mixed"], 4, Choices(strategy="comm-opt"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"statistics": ()}, "not sorted ranks of a world of 4"),
        ({"preconditioned_by": (1, 0)}, "not sorted ranks"),
        ({"preconditioned_by": (0, 0)}, "not sorted ranks"),
        ({"preconditioned_by": (0, 4)}, r"\(0, 4\) are not sorted ranks of a world of 4"),
        ({"decomposed_by": ((-1,), (0,))}, "not sorted ranks"),
        ({"factors": ((0,), (0,)), "decomposed_by": ((0,), (1,))}, r"ranks \(1,\) decompose G but only \(0,\) hold it"),
        ({"factors": ((0, 1), (0,)), "decomposed_by": ((0,), (0,))}, r"A is held by \(0, 1\)"),
        ({"statistics": (2,), "factors": ((0,), (0,)), "decomposed_by": ((0,), (0,))}, r"measures alone \(\(2,\)\)"),
        ({"preconditioned_by": (0, 1, 2)}, "3 workers cannot serve equal parts"),
    ],
)  # fmt: skip
def test_a_plan_against_the_invariants_is_refused_by_layer(change, message):
    bad = dataclasses.replace(GOOD.placements[0], **change)
    with pytest.raises(ValueError, match=message) as refused:
        dataclasses.replace(GOOD, placements=(bad, *GOOD.placements[1:]))
    assert "layer 'conv'" in str(refused.value)


@pytest.mark.parametrize("buckets", [(), GOOD.buckets * 2, (GOOD.buckets[0][1:],), ((*GOOD.buckets[0], ("x", "A")),)])
def test_buckets_that_do_not_list_each_factor_once_are_refused(buckets):
    with pytest.raises(ValueError, match="must list each factor once"):
        dataclasses.replace(GOOD, buckets=buckets)


def test_a_plan_of_another_version_is_refused():
    body = json.loads(GOOD.to_json()) | {"version": 99}
    with pytest.raises(ValueError, match="version 99"):
        Plan.from_json(json.dumps(body))
    with pytest.raises(ValueError, match="zip"):
        dataclasses.replace(GOOD, placements=GOOD.placements[1:])
