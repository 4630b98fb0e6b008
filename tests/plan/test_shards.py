"""What moves between shards and owners: sizes, and that all arrives."""

import itertools
from dataclasses import replace

import pytest
import torch

from dkfac.plan.make import Choices, make_plan
from dkfac.plan.plan import Plan
from dkfac.plan.program import expand
from dkfac.plan.shards import ShardedParameter, Sharding, copies, region, sent_elements, shard_elements, shard_range
from dkfac.plan.spec import FactorSpec, LayerSpec
from dkfac.plan.transfer import Part, Transfer

MESHES = {
    "two": ((0, 1),),
    "four": ((0, 1, 2, 3),),
    "two replicas": ((0, 1), (2, 3)),
    "columns": ((0, 2), (1, 3)),
    "turned": ((3, 1, 0, 2),),
}


def layers(number=5):
    return [
        LayerSpec(f"l{i}", "linear", (FactorSpec("A", i + 3), FactorSpec("G", 7 - i)), (i + 3) * (7 - i), "float64")
        for i in range(number)
    ]


def plan_of(mesh, strategy="sharded", number=5):
    given = layers(number)
    cuts = ((0, len(mesh[0])),)
    parameters = [ShardedParameter(la.name, "weight", (7 - i, i + 2), cuts) for i, la in enumerate(given)]
    parameters += [ShardedParameter(la.name, "bias", (7 - i,), cuts) for i, la in enumerate(given)]
    world_size = sum(map(len, mesh))
    plan = make_plan(given, world_size, Choices(strategy, share="shards"))
    return replace(plan, sharding=Sharding(mesh, tuple(parameters)))


@pytest.mark.parametrize(("size", "number"), list(itertools.product([1, 2, 3, 7, 8, 9], [1, 2, 3, 4, 8])))
def test_shards_are_the_chunks_of_torch(size, number):
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(number)]
    ranges = [shard_range(size, number, i) for i in range(number)]
    assert [end - begin for begin, end in ranges] == chunks + [0] * (number - len(chunks))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_what_a_rank_sends_to_another_is_what_that_one_receives(mesh):
    for transfer in expand(plan_of(mesh)).stage("gradients"):
        splits = {rank: transfer.splits(rank) for rank in transfer.group}
        for i, j in itertools.product(range(len(transfer.group)), repeat=2):
            assert splits[transfer.group[i]][0][j] == splits[transfer.group[j]][1][i]


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_owners_receive_each_layer_once_and_every_replica_gets_it_back(mesh):
    plan = plan_of(mesh)
    there, back = expand(plan).stage("gradients")
    total = sum(p.elements for p in plan.sharding.parameters)
    assert (there.how, back.how) == ("to-owners", "to-shards")
    assert sum(there.sizes()) == total
    assert sum(back.sizes()) == total * len(mesh)
    for rank in there.group:
        owned = sum(
            p.elements for p in plan.sharding.parameters if plan.placement(p.layer).preconditioned_by == (rank,)
        )
        assert sum(there.splits(rank)[1]) == owned


def test_each_replica_with_a_worker_of_its_own_talks_to_itself():
    program = expand(plan_of(MESHES["two replicas"], "hybrid-opt"))
    assert [t.group for t in program.stage("gradients")] == [(0, 1), (2, 3)] * 2


@pytest.mark.parametrize(("mesh", "strategy"), [("four", "hybrid-opt"), ("columns", "hybrid-opt"), ("two", "comm-opt")])
def test_workers_without_all_shards_are_refused(mesh, strategy):
    with pytest.raises(ValueError, match=r"use strategy=\"sharded\" or \"mem-opt\""):
        plan_of(MESHES[mesh], strategy)


def test_a_parameter_that_each_rank_has_goes_to_all_and_comes_from_the_owner():
    (layer,) = layers(1)
    plan = make_plan([layer], 3, Choices("sharded", share="shards"))
    weight = ShardedParameter(layer.name, "weight", (7, 2), ((0, 3),))
    given = (weight, ShardedParameter(layer.name, "bias", (7,), ((-1, 3),)))
    there, back = expand(replace(plan, sharding=Sharding(((0, 1, 2),), given))).stage("gradients")
    (owner,) = plan.placement(layer.name).preconditioned_by
    widths = [6, 6, 2]
    for rank in range(3):
        own = 7 if rank == owner else 0
        assert there.splits(rank)[0] == [widths[rank] + own if to == owner else 0 for to in range(3)]
        assert back.splits(rank)[1] == [widths[rank] + 7 if by == owner else 0 for by in range(3)]
    assert there.splits(owner)[1] == [n + 7 * (rank == owner) for rank, n in enumerate(widths)]
    assert back.splits(owner)[0] == [n + 7 for n in widths]


@pytest.mark.parametrize("cuts", [((0, 2), (0, 3)), ((0, 2), (1, 3)), ((1, 3), (-1, 2)), ((-1, 2), (1, 3))])
def test_regions_cover_a_parameter_and_one_of_equal_copies_is_sent(cuts):
    given = Part("l", "weight", 77, 4, (7, 11), cuts)
    seen, ranks = torch.zeros(7, 11), tuple(range(6))
    for index in ranks:
        seen[region(given, index)] += 1
        assert seen[region(given, index)].numel() == shard_elements(given, index)
    assert (seen == copies(cuts)).all()
    assert sum(sent_elements(given, ranks, index) for index in ranks) == 77


def test_parts_of_parts_are_those_of_torch():
    """Tensor parallelism splits first, then FSDP2."""
    given, whole = Part("l", "weight", 77, 0, (7, 11), ((0, 2), (0, 3))), torch.arange(77.0).view(7, 11)
    for index in range(6):
        outer, inner = divmod(index, 3)
        parts = whole.chunk(3)[inner].chunk(2)
        assert torch.equal(whole[region(given, index)], parts[outer] if outer < len(parts) else whole[:0])


def test_a_plan_with_shards_is_read_back_from_json():
    plan = plan_of(MESHES["two replicas"])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.fingerprint() != plan_of(MESHES["columns"]).fingerprint()


def test_no_rank_receives_more_than_its_part_and_one_layer():
    mesh = (tuple(range(8)),)
    plan = plan_of(mesh, number=6)
    (there, _), total = expand(plan).stage("gradients"), sum(p.elements for p in plan.sharding.parameters)
    largest = max(layer.grad_elements for layer in plan.layers)
    assert all(sum(there.splits(rank)[1]) <= total / 8 + largest for rank in range(8))
    assert isinstance(there, Transfer)
    assert all(isinstance(part, Part) for part in there.parts)
