"""What ranks save and send of K-FAC's state: together everything, each piece once."""

import pytest
import torch
import torch.distributed as dist
from helpers_parity import EXACT, batch, build, part
from helpers_ranks import average_gradients, on_processes, on_threads
from helpers_settings import arranged

from dkfac import KFAC
from dkfac.comm import agree
from dkfac.comm.groups import Groups
from dkfac.state.checkpoint import merge

WORLD, STEPS = 4, 5
SMALL = ("means", "weight", "numbers")
"""Last parts of the names of tensors with a few numbers, or of parts that every rank has."""


def trained(rank, options, begin=0, end=STEPS, states=None):
    model = build("vision")
    adam = options.get("curvature") == "adam-eigen"
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01, **({} if adam else {"momentum": 0.9}))
    kfac = KFAC(model, optimizer, **arranged(EXACT | options))
    if states is not None:
        kfac.load_state_dict(states)
    for step in range(begin, end):
        x, y = (part(t, rank, WORLD) for t in batch(step, "vision"))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        average_gradients(model)
        optimizer.step()
    return kfac


def tensors(tree, where=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from tensors(value, (*where, key))
        elif isinstance(value, torch.Tensor):
            yield (*where, key), value


def parts_of(rank, options):
    kfac = trained(rank, options)
    return kfac.state_dict(), kfac.state_dict(shard=True), kfac.state_dict(gather=True)


def assert_same(one, other):
    one, other = dict(tensors(one)), dict(tensors(other))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.cpu(), other[name].cpu()), name


CASES = [
    {"strategy": "comm-opt", "curvature": "kfac"},
    {"strategy": "sharded", "curvature": "kfac", "share": "weights"},
    {"strategy": "replicated", "curvature": "adam-eigen"},
    {"strategy": "hybrid-opt", "curvature": "ekfac", "damping": 0.1},
    {"strategy": "spd", "curvature": "kfac", "replicate_factors": True, "solver": "cholesky"},
    {"strategy": "mem-opt", "curvature": "kfac", "inverse_lag": 1, "inverse_backend": "inline"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: options["strategy"])
def test_each_piece_is_saved_once_and_all_together_are_the_whole(options):
    found = on_threads(WORLD, parts_of, options)
    whole = merge([own for own, _, _ in found])
    assert_same(merge([shard for _, shard, _ in found]), whole)
    gathered = found[0][2]
    assert_same(gathered, whole)
    assert [state for _, _, state in found[1:]] == [{}] * (WORLD - 1)
    seen = [name for _, shard, _ in found for name, _ in tensors(shard) if not set(SMALL) & set(name)]
    assert len(seen) == len(set(seen)), "nothing is saved twice"
    sent = sum(value.nbytes for _, shard, _ in found for _, value in tensors(shard))
    assert sent == sum(value.nbytes for _, value in tensors(whole))


def goes_on(rank, options, shards):
    kfac = trained(rank, options, STEPS, STEPS, states=shards)
    return kfac.state_dict(gather=True)


def test_a_list_of_shards_is_loaded_as_the_whole_state_is():
    found = on_threads(WORLD, parts_of, CASES[0])
    shards = [shard for _, shard, _ in found]
    assert_same(on_threads(WORLD, goes_on, CASES[0], shards)[0], found[0][2])


def gathers(rank):
    """What is sent is of the CPU, and is sent by a group that can."""
    groups = Groups()
    groups.make([tuple(range(2))])
    value = {"a": torch.full((3,), float(rank)), "b": {"c": rank, "d": "text", "e": torch.tensor(rank > 0)}}
    found = agree.gather_state(groups, value)
    assert groups.for_cpu() is groups.everyone
    groups.close()
    return found if found is None else [(part["a"].tolist(), part["b"]["c"], bool(part["b"]["e"])) for part in found]


def test_dicts_of_tensors_are_gathered_without_pickle_on_real_ranks():
    assert on_processes(2, gathers) == [[([0.0] * 3, 0, False), ([1.0] * 3, 1, True)], None]


def on_a_rank_with_nccl(_rank):
    groups = Groups()
    groups.make([(0, 1)])
    found = [groups.for_cpu(), groups.for_cpu()]
    assert found[0] is found[1] is not groups.everyone
    groups.close()


def test_ranks_with_nccl_alone_send_states_through_gloo(monkeypatch):
    """A pure NCCL group cannot send tensors of the CPU: a gloo group of all ranks is made once."""
    make, wanted = dist.new_group, []

    def new_group(members, *, backend=None, **how):
        wanted.append((tuple(members), backend))
        return make(members, **how)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    on_threads(2, on_a_rank_with_nccl)
    assert sorted(wanted, key=str) == [((0, 1), "gloo")] * 2 + [((0, 1), None)] * 2
