"""Sharded parameters (FSDP2, HSDP): weights after 20 steps equal those of one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers_ranks import on_processes
from helpers_sharded import (
    OFTEN,
    Attention,
    alone,
    attach,
    batch,
    both,
    build,
    difference,
    loss_of,
    shard,
    train,
    whole,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dkfac import KFAC, LevenbergMarquardt

CASES = {
    "adaptive-adamw": ("adamw", {}),
    "adaptive-adam": ("adam", {"solver": "eigen"}),
    "adaptive-sgd": ("sgd", {}),
    "kfac-norm-kl": ("sgd", {"curvature": "kfac"}),
    "kfac-groups": ("groups", {"curvature": "kfac", "rescale": "kl-clip", "damping": 0.1}),
    "kfac-cholesky": ("adamw", {"curvature": "kfac", "solver": "cholesky"}),
    "ekfac": ("sgd", {"curvature": "ekfac"}),
    "adam-eigen": ("adamw", {"curvature": "adam-eigen"}),
}
TOLERANCE = 1e-9


def check(world_size, cases, **how):
    given = [(name, *CASES[case]) for name, case in cases]
    for found in on_processes(world_size, compare_all, given, how):
        assert max(found) < TOLERANCE, dict(zip(cases, found, strict=True))


def compare_all(rank, given, how):
    found = []
    for name, optimizer, options in given:
        distance, kfac = both(name, optimizer, options | how.get("options", {}), hsdp=how.get("hsdp", False))
        kfac.close()
        found.append(distance)
    return found


def test_two_ranks_of_fsdp2_train_like_one_process():
    check(2, [("gpt", "adaptive-adamw"), ("cnn", "adaptive-sgd"), ("cnn", "kfac-norm-kl")])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (4, {}),
        (4, {"hsdp": True}),
        (4, {"hsdp": True, "options": {"strategy": "hybrid-opt"}}),
        (4, {"options": {"strategy": "mem-opt"}}),
    ],
    ids=str,
)
def test_all_curvatures_on_shards_train_like_one_process(world_size, how, name):
    """Biases of 3 and 4 elements on 4 ranks leave shards that are smaller, or empty."""
    check(world_size, [(name, case) for case in CASES], **how)


# --- what FSDP2 can be told ------------------------------------------------------------------------------------


def recompute(model):
    for block in model.blocks:
        block.recomputed = True


def other_dimension(parameter):
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


WAYS = {
    "not resharded": {"how": {"reshard_after_forward": False}},
    "resharded": {"how": {"reshard_after_forward": True}},
    "resharded to pairs": {"how": {"reshard_after_forward": 2}},
    "other dimensions": {"how": {"shard_placement_fn": other_dimension}},
    "checkpointed": {"change": recompute},
    "accumulated": {"micro": 2},
}


def one_way(rank, way, cases):
    given, found = WAYS[way], []
    more = {"accumulate": "mean"} if "micro" in given else {}
    for case in cases:
        optimizer, options = CASES[case]
        distance, kfac = both("gpt", optimizer, options | more, **given)
        kfac.close()
        found.append(distance)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_shard_trains_like_one_process(way, world_size):
    for found in on_processes(world_size, one_way, way, ["adaptive-adamw", "kfac-norm-kl"]):
        assert max(found) < TOLERANCE, found


def synchronized_passes(rank):
    """Two passes in each step whose gradients are both reduced, and a compiled model."""
    warnings.simplefilter("ignore")  # torch.compile's own
    found = []
    for is_sharded in (False, True):
        model = build("gpt")
        if is_sharded:
            shard(model).compile(backend="aot_eager")
        own, kfac = attach(model, "adamw", accumulate="mean", process_group=None if is_sharded else alone())
        for step in range(10):
            x, y = (t[rank::2] if is_sharded else t for t in batch("gpt", step))
            own.zero_grad()
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss_of("gpt", model(a), b) / 2).backward()
            own.step()
        assert kfac.metrics()["abandoned_steps"] == 0
        found.append(whole(model))
        kfac.close()
    return difference(*found)


@pytest.mark.slow
def test_passes_that_are_each_reduced_and_compiled_code():
    assert max(on_processes(2, synchronized_passes)) < TOLERANCE


def mixed(rank):
    model = build("gpt").float()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    own, kfac = attach(model, "adamw")
    losses = train(model, "gpt", own, 30, rank, 2)
    dtypes = {factor.dtype for factors in kfac.factors().values() for factor in factors.values()}
    wide = build("gpt")
    shard(wide, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64))
    own, kfac = attach(wide, "adamw")
    train(wide, "gpt", own, 10, rank, 2)
    single = build("gpt")
    own, kfac = attach(single, "adamw", process_group=alone())
    train(single, "gpt", own, 10)
    return losses, dtypes, difference(whole(wide), whole(single))


@pytest.mark.slow
def test_mixed_precision_keeps_statistics_in_the_parameters_precision():
    for losses, dtypes, distance in on_processes(2, mixed):
        assert sum(losses[-5:]) < sum(losses[:5])
        assert dtypes == {torch.float32}
        assert distance < 1e-6


def attention(rank):
    warnings.simplefilter("ignore")  # the model returns a view, of which FSDP2 warns
    found = []
    for parts in (None, (), ("mixing", "head")):
        torch.manual_seed(1)
        model = Attention().double()
        for part in parts or ():
            fully_shard(getattr(model, part))
        if parts is not None:
            fully_shard(model)
        own, kfac = attach(model, "adamw", process_group=alone() if parts is None else None)
        assert "mixing.in_proj" in {layer.name for layer in kfac.layers}
        share = (0, 1) if parts is None else (rank, 2)
        train(model, "gpt", own, 10, *share)
        kfac.close()
        found.append(whole(model))
    return max(difference(found[0], other) for other in found[1:])


@pytest.mark.slow
def test_attention_whose_weights_are_applied_by_functions():
    assert max(on_processes(2, attention)) < TOLERANCE


# --- faults ------------------------------------------------------------------------------------------------------


def bad_shard(rank):
    """A NaN in one rank's shard, of a parameter that K-FAC steps and of one that it does not."""
    found = []
    for optimizer, options, spoilt in (
        ("adamw", {}, "places"), ("adamw", {}, "blocks.1.up.weight"), ("plain", {"curvature": "kfac"}, "places"),
    ):  # fmt: skip
        model = shard(build("gpt"))
        own, kfac = attach(model, optimizer, **options)
        train(model, "gpt", own, 3, rank, 2)
        before = whole(model)
        x, y = (t[rank::2] for t in batch("gpt", 3))
        own.zero_grad()
        loss_of("gpt", model(x), y).backward()
        if rank == 1:
            dict(model.named_parameters())[spoilt].grad.to_local()[0] = torch.nan
        own.step()
        ours = {f"{layer.name}.{key}" for layer in kfac.layers for key in ("weight", "bias")}
        names = [name for name, _ in model.named_parameters()]
        moved = {n for n, a, b in zip(names, before, whole(model), strict=True) if not torch.equal(a, b)}
        skipped = kfac.metrics()["skipped_batches"]
        train(model, "gpt", own, range(4, 6), rank, 2)
        kfac.close()
        found.append((moved & ours, moved, skipped, all(bool(p.isfinite().all()) for p in whole(model))))
    return found


def refusals(rank):
    said = []

    def tell(*, sharded=True, change=None, optimizer="adamw", then=None, **options):
        model = build("gpt")
        if sharded:
            shard(model)
        if change is not None:
            change(model)
        try:
            own, kfac = attach(model, optimizer, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(str(error))
            return
        try:
            if then is not None:
                then(model, own, kfac)
            said.append("nothing")
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(str(error))
        finally:
            kfac.close()

    def later(model, own, kfac):
        shard(model)
        train(model, "gpt", own, 1, rank, 2)

    def in_three_dimensions(model):
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("replicas", "shards", "tensor"))
        parallelize_module(model.blocks[0], mesh["tensor"], {"up": ColwiseParallel()})
        fully_shard(model, mesh=mesh["replicas", "shards"])

    tell(sharded=False, then=later)
    tell(optimizer="old")
    tell(sharded=False, change=lambda model: fully_shard(model.blocks[0]))
    tell(strategy="comm-opt")
    tell(optimizer="rmsprop")
    tell(share="weights")
    tell(optimizer="sgd", curvature="kfac", damping=LevenbergMarquardt(1e-2), solver="eigen")
    tell(sharded=False, change=in_three_dimensions)
    tell(then=lambda model, own, kfac: kfac.join_hook())
    tell()
    return said


SAID = [
    "layer 'words' was sharded after K-FAC was attached",
    "was it made before fully_shard",
    "layer 'words' is not sharded, but others are",
    'use strategy="sharded" or "mem-opt"',
    "not of RMSprop",
    'require share="gradients"',
    "lm_step needs whole gradients",
    "no other meshes, such as HSDP beside tensor parallelism",
    "FSDP2 itself needs a batch on every rank",
    "nothing",
]


def bad_shard_and_refusals(rank):
    return bad_shard(rank), refusals(rank)


@pytest.fixture(scope="module")
def faults():
    return on_processes(2, bad_shard_and_refusals)


def test_a_nan_in_one_ranks_shard_spoils_no_weight_on_any_rank(faults):
    one, other = (found for found, _ in faults)
    assert one == other
    for ours, _, skipped, is_finite in one:
        assert (ours, skipped, is_finite) == (set(), 1.0, True)
    assert one[2][1] == set()  # all gradients are zero, and SGD has no momentum


def test_what_does_not_go_with_shards_is_refused_by_name(faults):
    for _, said in faults:
        for found, wanted in zip(said, SAID, strict=True):
            assert wanted in found


def attached_after_evaluation(rank):
    """A forward without a backward leaves whole parameters in the model, which an optimizer must not be made of."""
    found = []
    for is_late in (False, True):
        model = shard(build("gpt"))
        own = None if is_late else torch.optim.AdamW(model.parameters(), lr=3e-3)
        with torch.no_grad():
            model(batch("gpt", 0)[0])
        own = own or torch.optim.AdamW(model.parameters(), lr=3e-3)
        try:
            kfac = KFAC(model, own, **OFTEN)
            train(model, "gpt", own, 2, rank, 2)
            found.append([layer.name for layer in kfac.layers])
        except RuntimeError as error:
            found.append(str(error))
    _, other = attach(build("gpt"), "adamw", process_group=alone())
    return *found, [layer.name for layer in other.layers]


@pytest.mark.slow
def test_attaching_after_an_evaluation():
    for early, late, expected in on_processes(2, attached_after_evaluation):
        assert early == expected
        assert "leaves whole parameters in the model" in late


def scaled(rank):
    """A loss scale, and an overflow on one rank: an ordinary optimizer is not called then, a fused one is."""
    distances = []
    for fused in (False, True):
        found = []
        for is_sharded in (False, True):
            model = shard(build("gpt")) if is_sharded else build("gpt")
            own = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)
            kfac = KFAC(model, own, process_group=None if is_sharded else alone(), **OFTEN)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
            for step in range(12):
                x, y = (t[rank::2] if is_sharded else t for t in batch("gpt", step))
                own.zero_grad()
                loss = loss_of("gpt", model(x), y)
                loss = loss * torch.inf if step == 6 and (rank == 1 or not is_sharded) else loss
                scaler.scale(loss).backward()
                scaler.step(own)
                scaler.update()
            seen = kfac.metrics()
            found.append((whole(model), seen["skipped_batches"], seen["abandoned_steps"]))
            kfac.close()
        assert found[0][1:] == found[1][1:] == ((1.0, 0.0) if fused else (0.0, 1.0))
        distances.append(difference(found[0][0], found[1][0]))
    return max(distances)


@pytest.mark.slow
def test_a_scaler_and_an_overflow_on_one_rank():
    assert max(on_processes(2, scaled)) < TOLERANCE


# --- checkpoints -------------------------------------------------------------------------------------------------


def state_of(model, own, kfac):
    state = kfac.state_dict()
    parts = get_state_dict(model, own)
    return {"kfac": state, "model": parts[0], "optimizer": parts[1]}


def resumed(rank, case, steps, load, save):
    warnings.simplefilter("ignore")
    model = shard(build("gpt"))
    own, kfac = attach(model, CASES[case][0], **CASES[case][1])
    if load:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = state_of(model, own, kfac)
        dcp.load(state, checkpoint_id=load)
        set_state_dict(model, own, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        kfac.load_state_dict(state["kfac"])
    train(model, "gpt", own, range(*steps), rank, dist.get_world_size())
    if save:
        dcp.save(state_of(model, own, kfac), checkpoint_id=save)
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adaptive-adamw", "adaptive-sgd", "kfac-norm-kl", "adam-eigen"])
def test_a_run_goes_on_from_four_ranks_to_two_to_one(case, tmp_path):
    on_processes(4, resumed, case, (0, 7), None, str(tmp_path / "four"))
    on_processes(2, resumed, case, (7, 13), str(tmp_path / "four"), str(tmp_path / "two"))
    (found,) = on_processes(1, resumed, case, (13, 20), str(tmp_path / "two"), None)
    (straight,) = on_processes(1, resumed, case, (0, 20), None, None)
    assert difference(found, straight) < TOLERANCE


# --- memory ------------------------------------------------------------------------------------------------------


def held(rank):
    model = shard(build("gpt"))
    own, kfac = attach(model, "adamw")
    train(model, "gpt", own, 2, rank, dist.get_world_size())
    return list(kfac.report()["memory_bytes"].values())


@pytest.mark.slow
def test_a_rank_holds_its_part_of_the_state_and_at_most_one_layer_more():
    (alone_,) = on_processes(1, held)
    total, largest = sum(alone_), max(alone_)
    for world_size in (2, 4):
        for each in on_processes(world_size, held):
            assert sum(each) <= total / world_size + largest


# --- a model of transformers --------------------------------------------------------------------------------------


def llama(rank):
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).double()
        for part in model.model.layers if is_sharded else ():
            fully_shard(part)
        if is_sharded:
            fully_shard(model)
        own = torch.optim.AdamW(model.parameters(), lr=3e-3)
        kfac = KFAC(model, own, process_group=None if is_sharded else alone(), **OFTEN)
        losses = []
        for step in range(20):
            text = torch.randint(0, 48, (8, 12), generator=torch.Generator().manual_seed(step))
            text[:, 1::2] = text[:, ::2]
            text = text[rank::2] if is_sharded else text
            own.zero_grad()
            loss = model(input_ids=text, labels=text).loss
            loss.backward()
            own.step()
            losses.append(loss.item())
        found.append((whole(model), losses, {layer.name for layer in kfac.layers}))
        kfac.close()
    return difference(found[0][0], found[1][0]), found[1][1], found[0][2] == found[1][2]


@pytest.mark.slow
def test_a_llama_trains_on_shards():
    pytest.importorskip("transformers")
    for distance, losses, is_same in on_processes(2, llama):
        assert is_same
        assert losses[-1] < losses[0] - 0.3
        assert distance < 1e-7  # its norms and rotations are computed in float32
