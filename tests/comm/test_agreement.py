"""R20: ranks that were not set up alike are told so at the start, and a part of the ranks can train on its own."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_plan import linear
from helpers_ranks import on_processes, on_threads
from helpers_training import SHARE, attach, backward, batch, build, weights
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dkfac import KFAC
from dkfac.comm import groups
from dkfac.comm.agree import difference
from dkfac.comm.groups import make_groups
from dkfac.plan.make import Choices, make_plan


def other_size(model):
    model[3], model[5] = nn.Linear(16, 7).double(), nn.Linear(7, 6, bias=False).double()


def other_dtype(model):
    model.float()


def frozen_layer(model):
    model[3].requires_grad_(False)


def longer(model):
    model.append(nn.Linear(3, 3).double())


def other_name(model):
    model.add_module("head", nn.Linear(3, 3).double())


def no_bias(model):
    model[7] = nn.Linear(6, 3, bias=False).double()


DIFFERENT = {
    # what the odd rank does to its model, its options, all ranks' options, what the message names
    "layer-size": (other_size, {}, {}, ["'3'", "'G'", "7 instead of 5"]),
    "no-bias": (no_bias, {}, {}, ["'7'", "'A'", "6 instead of 7"]),
    "dtype": (other_dtype, {}, {}, ["'0'", "dtype", "'float32' instead of 'float64'"]),
    "one-more-layer": (longer, {}, {}, ["'8' is only here"]),
    "one-layer-less": (frozen_layer, {}, {}, ["layers", "'3'", "'5'"]),
    "named-otherwise": (other_name, {}, {}, ["'head' is only here"]),
    "interval": (None, {"inverse_interval": 8}, {}, ["inverse_interval", "8 instead of 4"]),
    "damping": (None, {"damping": 0.25}, {"damping": 0.125}, ["damping", "0.25 instead of 0.125"]),
    "strategy": (None, {"strategy": "sharded"}, {}, ["strategy", "'sharded' instead of 'comm-opt'"]),
    "solver": (None, {"solver": "warm-eigen"}, {}, ["solver", "'warm-eigen' instead of 'eigen'"]),
    "curvature": (None, {"curvature": "kfac", "rescale": "none"}, {}, ["curvature", "'kfac' instead of 'adaptive'"]),
    "wire": (None, {"wire_dtype": "bfloat16"}, {}, ["wire_dtype", "'bfloat16' instead of None"]),
    "skip": (None, {"skip": ["5"]}, {}, ["skip", "'5' is only here"]),
    "schedule": (None, {"damping": lambda s: 0.25}, {"damping": lambda s: 0.125}, ["damping", "0.25 instead of 0.125"]),
    "decay-schedule": (None, {"factor_decay": lambda s: 0.5}, {"factor_decay": lambda s: 0.75},
                       ["factor_decay", "0.5 instead of 0.75"]),
    "clip-schedule": (None, {"kl_clip": lambda s: 0.5}, {"kl_clip": lambda s: 0.75},
                      ["kl_clip", "0.5 instead of 0.75"]),
    "norm-schedule": (None, {"norm_damping": lambda s: 0.5}, {"norm_damping": lambda s: 0.75},
                      ["norm_damping", "0.5 instead of 0.75"]),
    "function-or-number": (None, {"damping": lambda s: 0.25}, {"damping": 0.125}, ["damping", "0.25 instead of 0.125"]),
}  # fmt: skip


def refused(rank, odd, case):
    """Return what this rank is told; a rank that hangs ends with the group's time-out."""
    change, options, common, _ = DIFFERENT[case]
    model = build()
    if rank == odd and change is not None:
        change(model)
    if rank == odd:
        common = common | options
    try:
        attach(model, **({"strategy": "comm-opt"} | common))
    except RuntimeError as error:
        return str(error)
    return "accepted"


def check_refusals(said, odd, case):
    *_, words = DIFFERENT[case]
    for rank, message in enumerate(said):
        assert f"rank {odd} attached K-FAC differently from rank 0" in message, f"rank {rank}: {message}"
        assert [word for word in words if word not in message] == [], message
    assert len(set(said)) == 1


@pytest.mark.parametrize("case", DIFFERENT)
def test_one_rank_that_differs_is_named_on_all_with_where_and_both_values(case):
    check_refusals(on_threads(3, refused, 2, case), 2, case)


def test_if_rank_0_differs_the_others_are_named():
    for message in on_threads(3, refused, 0, "damping"):
        assert "rank 1 attached K-FAC differently from rank 0 (so did ranks 2)" in message
        assert "0.125 instead of 0.25" in message


def test_equal_ranks_are_accepted_whatever_they_announce():
    assert len(set(on_threads(3, announcing))) == 1


def announcing(rank):
    return attach(build(), announce=rank == 1, strategy="comm-opt")[1].plan.fingerprint()


def refused_one_after_another(rank):
    attach(build(), strategy="comm-opt")
    cases = ["layer-size", "damping", "strategy"]
    found = {case: refused(rank, 1, case) for case in cases}
    optimizer, _ = attach(model := build(), strategy="comm-opt")  # and the ranks can still talk to each other
    backward(model, 0, rank, 2)
    optimizer.step()
    return found, weights(model)


def test_processes_are_told_too_and_can_try_again():
    (first, p), (second, q) = on_processes(2, refused_one_after_another)
    for case in first:
        check_refusals([first[case], second[case]], 1, case)
    assert all(torch.equal(a, b) for a, b in zip(p, q, strict=True))


# --- the world, and parts of it -----------------------------------------------------------------------------------


def test_a_step_in_another_world_than_the_attachments_is_refused_with_the_cure():
    optimizer, _ = attach(model := build())
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        F.cross_entropy(model(batch(0, 1)[0]), batch(0, 1)[1]).backward()
        with pytest.raises(RuntimeError, match=r"attached when torch\.distributed had 1 rank; now it has 2") as told:
            optimizer.step()
        assert "after init_process_group" in str(told.value)
    finally:
        dist.destroy_process_group()


def train_in_a_half(rank, options, dtype=torch.float64):
    """Ranks 0, 1 and 2, 3 each train on the batches of their own half, with another seed."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, place = divmod(rank, 2)
    model = build(dtype, seed=half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rhythm = {"announce": False, "warmup_refresh": None, "factor_interval": 2, "inverse_interval": 4}
    kfac = KFAC(model, optimizer, process_group=halves[half], **(rhythm | options))
    assert kfac.plan.world_size == 2
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(10 * half + step, 2, dtype)
        mine = slice(place * SHARE, (place + 1) * SHARE)
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=halves[half])
            p.grad /= 2
        optimizer.step()
    return weights(model)


def train_alone(half):
    model = build(seed=half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    KFAC(model, optimizer, announce=False, warmup_refresh=None, factor_interval=2, inverse_interval=4)
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(10 * half + step, 2)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded", "hybrid-opt"])
def test_two_halves_of_the_ranks_each_train_like_one_process_on_their_own_batches(strategy):
    found = on_threads(4, train_in_a_half, {"strategy": strategy})
    for half in range(2):
        expected = train_alone(half)
        for rank in (2 * half, 2 * half + 1):
            for p, q in zip(found[rank], expected, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


def sums_in_subgroups(rank, is_parent_given):
    """Ranks are in one or two subgroups, and have one or two when the last ones are made."""
    parent = dist.new_group(list(range(6))) if is_parent_given else None
    found = make_groups(parent)
    subsets = [(0, 3), (1, 4), (0, 1, 2), (3, 4, 5)]
    found.make(subsets)
    own = {ranks: torch.tensor([float(rank)]) for ranks in subsets if rank in ranks}
    for ranks, total in own.items():
        dist.all_reduce(total, group=found.get(ranks))
    found.close()
    return {ranks: float(total) for ranks, total in own.items()}


@pytest.mark.parametrize("is_parent_given", [True, False])
def test_ranks_with_different_numbers_of_groups_make_the_next_one_together(is_parent_given):
    for told in on_threads(6, sums_in_subgroups, is_parent_given):
        assert told
        assert all(total == sum(ranks) for ranks, total in told.items())


def attach_in_a_half(rank):
    """Return what this rank is told if the second half's ranks differ."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    model = build()
    try:
        damping = 0.25 if rank == 3 else 0.125
        KFAC(model, announce=False, process_group=halves[half], damping=damping)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_half_whose_ranks_differ_is_refused_alone():
    said = on_threads(4, attach_in_a_half)
    assert said[:2] == ["accepted"] * 2
    assert all("rank 1 attached K-FAC differently from rank 0" in message for message in said[2:])
    assert all("0.25 instead of 0.125" in message for message in said[2:])


# --- differences ---------------------------------------------------------------------------------------------------

SAID = {"settings": {"damping": 0.1, "skip": ["a"]}, "layers": [{"name": "fc", "factors": [{"key": "A", "dim": 3}]}]}


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (SAID, None),
        (SAID | {"settings": {"damping": 0.2, "skip": ["a"]}}, "settings: damping: 0.2 instead of 0.1"),
        (SAID | {"settings": {"damping": 0.1}}, "settings: skip is missing here"),
        (SAID | {"more": 1}, "more is only here"),
        (SAID | {"settings": {"damping": 0.1, "skip": []}}, "settings: skip: 'a' is missing here"),
        (SAID | {"layers": []}, "layers: 'fc' is missing here"),
        (SAID | {"layers": [*SAID["layers"], {"name": "head"}]}, "layers: 'head' is only here"),
        (SAID | {"layers": [{"name": "fc", "factors": [{"key": "A", "dim": 4}]}]},
         "layers: 'fc': factors: 'A': dim: 4 instead of 3"),
        (SAID | {"layers": [{"name": "f", "factors": [{"key": "A", "dim": 3}]}]},
         "layers: 'fc': name: 'f' instead of 'fc'"),
        (SAID | {"layers": None}, "layers: None instead of [{'name': 'fc', 'factors': [{'key': 'A', 'dim': 3}]}]"),
    ],
)  # fmt: skip
def test_a_difference_is_named_by_its_path_and_both_values(mine, message):
    assert difference(mine, SAID) == message


def test_two_plans_differ_where_they_differ():
    first, second = (json.loads(make_plan([linear("fc", 5, n)], 2, Choices("comm-opt")).to_json()) for n in (3, 4))
    assert difference(second, first) == "layers: 'fc': factors: 'A': dim: 4 instead of 3"


def made_by_members(rank):
    """A group of one rank of two, while the default group is bound to a device, as NCCL users bind it."""
    default, seen, make = dist.group.WORLD, [], dist.new_group

    def new_group(*args, **how):
        seen.append((how.get("use_local_synchronization", False), default.bound_device_id))
        return make(*args, **how)

    groups.dist.new_group = new_group
    try:
        default.bound_device_id = torch.device("cuda", 0)
        found = groups.Groups(dist.group.WORLD)
        found.make([(0, 1)])
        groups.only(found)
        bound = default.bound_device_id
    finally:
        groups.dist.new_group = make
        default.bound_device_id = None
    return seen, bound


def test_groups_that_their_members_make_alone_are_not_split_off_a_bound_communicator():
    """torch splits every group off a bound default group, in which ranks that are not members take no part: a hang."""
    for seen, bound in on_processes(2, made_by_members):
        assert seen == [(True, None), (True, None)]
        assert bound == torch.device("cuda", 0)
