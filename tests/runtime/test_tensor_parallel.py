"""Tensor parallelism (``parallelize_module``): weights after 20 steps equal those of one process."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers_ranks import on_processes
from helpers_sharded import LENGTH, WORDS, alone, attach, batch, difference, train, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from dkfac import KFAC

CASES = {
    "kfac": ("sgd", {"curvature": "kfac"}),
    "kfac-eigen": ("plain", {"curvature": "kfac", "solver": "eigen", "damping": 0.1}),
    "kfac-cholesky": ("sgd", {"curvature": "kfac", "solver": "cholesky"}),
    "kfac-groups": ("groups", {"curvature": "kfac", "rescale": "kl-clip", "damping": 0.1}),
    "ekfac": ("sgd", {"curvature": "ekfac"}),
    "adaptive-sgd": ("sgd", {}),
    "adaptive-adam": ("adam", {}),
    "adaptive-adamw": ("adamw", {}),
    "adam-eigen": ("adamw", {"curvature": "adam-eigen"}),
}
TOLERANCE = 1e-9


class Block(nn.Module):
    def __init__(self, width, size=3):
        super().__init__()
        self.size, self.recomputed = size, False
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputed else self.run(x)

    def run(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + torch.sigmoid(self.gate(x)) * self.down(torch.tanh(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS + 1, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(3)
    return GPT().double()


PARTS = {
    "q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "out": RowwiseParallel,
    "up": ColwiseParallel, "down": RowwiseParallel,
}  # fmt: skip


def split(model, mesh):
    """Split attention and MLP over ranks, and the head by rows; norms, embeddings and gates stay whole on each."""
    for block in model.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in PARTS.items()})
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def compare_all(rank, world_size, cases, recomputed=False, micro=1):
    found, mesh = [], init_device_mesh("cpu", (world_size,))
    for case in cases:
        optimizer, options = CASES[case]
        options = options | ({"accumulate": "mean"} if micro > 1 else {})
        results = []
        for is_split in (False, True):
            model = build()
            for block in model.blocks:
                block.recomputed = recomputed
            if is_split:
                split(model, mesh)
            own, kfac = attach(model, optimizer, process_group=None if is_split else alone(), **options)
            train(model, "gpt", own, micro=micro)
            results.append((whole(model), kfac.factors(), [layer.name for layer in kfac.layers]))
            assert kfac.metrics()["abandoned_steps"] == 0
            kfac.close()
        (one, all_factors, names), (other, factors, others) = results
        assert names == others
        apart = [difference([all_factors[n][k]], [f]) for n, by_key in factors.items() for k, f in by_key.items()]
        found.append((difference(one, other), max(apart), [(n, k) for n in factors for k in factors[n]]))
    return found


def check(world_size, cases, **how):
    ranks = on_processes(world_size, compare_all, world_size, cases, *how.values())
    for found in ranks:
        for case, (distance, apart, _) in zip(cases, found, strict=True):
            assert distance < TOLERANCE, case
            assert apart < TOLERANCE, case
    return ranks


def test_two_tensor_parallel_ranks_train_like_one_process():
    one, other = check(2, ["adaptive-adamw", "kfac", "kfac-cholesky"])
    for (_, _, some), (_, _, others) in zip(one, other, strict=True):
        assert not set(some) & set(others)  # a factor has one owner
        names = {name for name, _ in some + others}
        assert names >= {f"blocks.{i}.{part}" for i in range(2) for part in [*PARTS, "gate"]}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_curvatures_train_like_one_process(world_size):
    check(world_size, list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"recomputed": True, "micro": 1}, {"recomputed": False, "micro": 2}], ids=str)
def test_checkpointing_and_accumulation(way):
    check(2, ["adaptive-adamw", "kfac"], **way)


def uneven(rank):
    """Outputs that stay DTensors, of a layer whose width the ranks do not divide, and a loss of split outputs."""
    found, mesh = [], init_device_mesh("cpu", (2,))
    for is_split in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 7)).double()
        if is_split:
            first, last = (ColwiseParallel(use_local_output=False) for _ in range(2))
            parallelize_module(model, mesh, {"0": first, "2": RowwiseParallel(), "4": last})
        own, kfac = attach(model, "adamw", process_group=None if is_split else alone())
        for step in range(10):
            given = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 6, generator=given).double(), torch.randint(7, (16,), generator=given)
            own.zero_grad()
            with loss_parallel() if is_split else contextlib.nullcontext():
                F.cross_entropy(model(x), y).backward()
            own.step()
        kfac.close()
        found.append(whole(model))
    return difference(*found)


@pytest.mark.slow
def test_uneven_parts_and_a_loss_of_split_outputs():
    assert max(on_processes(2, uneven)) < TOLERANCE


# --- beside FSDP2 ------------------------------------------------------------------------------------------------


def compare_two_dimensions(rank, cases):
    warnings.simplefilter("ignore")  # the model returns a view, of which FSDP2 warns
    found, mesh = [], init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "split"))
    for case in cases:
        optimizer, options = CASES[case]
        single = build()
        own, kfac = attach(single, optimizer, process_group=alone(), **options)
        train(single, "gpt", own)
        factors = kfac.factors()
        kfac.close()
        model = split(build(), mesh["split"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        own, kfac = attach(model, optimizer, **options)
        train(model, "gpt", own, rank=mesh.get_local_rank("data"), world_size=2)
        apart = [difference([factors[n][k]], [f]) for n, by_key in kfac.factors().items() for k, f in by_key.items()]
        kfac.close()
        found.append((difference(whole(model), whole(single)), max(apart)))
    return found


@pytest.mark.slow
def test_two_by_two_ranks_of_fsdp2_and_tensor_parallelism_train_like_one_process():
    for found in on_processes(4, compare_two_dimensions, list(CASES)):
        for case, (distance, apart) in zip(CASES, found, strict=True):
            assert distance < TOLERANCE, case
            assert apart < TOLERANCE, case


# --- faults ------------------------------------------------------------------------------------------------------


def bad_gradient(rank, mesh):
    """A NaN in one rank's shard of a weight, and in one rank's gradient of a weight that each rank has all of."""
    found = []
    for name in ("blocks.1.up.weight", "blocks.1.gate.weight"):
        model = split(build(), mesh)
        own, kfac = attach(model, "adamw", experimental={"replicas_may_differ": True})
        train(model, "gpt", own, 3)
        before = whole(model)
        x, y = batch("gpt", 3)
        own.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        if rank == 1:
            grad = dict(model.named_parameters())[name].grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[0] = torch.nan
        own.step()
        ours = {f"{layer.name}.{key}" for layer in kfac.layers for key in ("weight", "bias")}
        names = [name for name, _ in model.named_parameters()]
        moved = {n for n, a, b in zip(names, before, whole(model), strict=True) if not torch.equal(a, b)}
        skipped = kfac.metrics()["skipped_batches"]
        train(model, "gpt", own, range(4, 6))
        kfac.close()
        found.append((moved & ours, skipped, all(bool(p.isfinite().all()) for p in whole(model))))
    return found


def refusals(rank, mesh):
    said = []

    def tell(styles, *, then=None, part=None, change=None, mesh=mesh, made_before=False, **options):
        model = build()
        own = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if change is not None:
            change(model)
        if styles is not None:
            parallelize_module(model if part is None else model.blocks[part], mesh, styles)
        try:
            own, kfac = (own, KFAC(model, own)) if made_before else attach(model, "adamw", **options)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
            return
        try:
            if then is not None:
                then(model, own)
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
        finally:
            kfac.close()

    def later(model, own):
        split(model, mesh)
        train(model, "gpt", own, 1)

    def partly_sharded(model):
        fully_shard(model.blocks[0])

    def disagrees(model, own):
        with torch.no_grad():
            model.blocks[0].gate.weight[0, 0] += rank
        train(model, "gpt", own, 3)

    linear = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    tell({"norm": SequenceParallel()}, part=0)
    tell({"words": RowwiseParallel()})
    tell({"up": ColwiseParallel(input_layouts=Shard(1))}, part=0)
    tell({"down": RowwiseParallel(output_layouts=Shard(1))}, part=0)
    tell(linear, part=1, change=partly_sharded)
    tell(linear, part=0, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "split"))["split"])
    tell(linear, part=0, skip=["blocks.0.up", "blocks.0.down"])
    tell(linear, part=0, share="weights")
    tell(linear, part=0, strategy="local")
    tell(None, then=later)
    tell(linear, part=0, made_before=True)
    tell(linear, part=0, then=disagrees)
    tell(linear, part=0, then=lambda model, own: train(model, "gpt", own, 2))
    return said


SAID = [
    "belongs to a LayerNorm, as with SequenceParallel",
    "belongs to a Embedding, as with SequenceParallel or a split embedding",
    "does not support sequence parallelism",
    "does not support sequence parallelism",
    "FSDP2 shards others, but not it",
    "splits parameters over 1 of 2 ranks",
    "none of the layers that parallelize_module splits",
    'require share="gradients"',
    'strategy="local" with tensor parallelism',
    "was sharded after K-FAC was attached",
    "was it made before fully_shard(model) or parallelize_module",
    "in 'blocks.0.gate.weight'",
    "nothing",
]


def faults(rank):
    mesh = init_device_mesh("cpu", (2,))
    return bad_gradient(rank, mesh), refusals(rank, mesh)


def test_what_is_not_supported_is_refused_and_a_nan_spoils_nothing():
    for spoilt, said in on_processes(2, faults):
        assert spoilt == [(set(), 1.0, True)] * 2
        for found, wanted in zip(said, SAID, strict=True):
            assert wanted in found


# --- checkpoints, compiled code ----------------------------------------------------------------------------------


def resumed(rank, steps, load, save, by_fsdp=False):
    warnings.simplefilter("ignore")
    world_size, share = dist.get_world_size(), (0, 1)
    if by_fsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "split"))
        model, share = fully_shard(split(build(), mesh["split"]), mesh=mesh["data"]), (mesh.get_local_rank("data"), 2)
    else:
        model = split(build(), init_device_mesh("cpu", (world_size,)))
    own, kfac = attach(model, "adamw")

    def state_of():
        model_state, optimizer_state = get_state_dict(model, own)
        return {"kfac": kfac.state_dict(), "model": model_state, "optimizer": optimizer_state}

    if load:
        state = state_of()
        dcp.load(state, checkpoint_id=load)
        set_state_dict(model, own, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        kfac.load_state_dict(state["kfac"])
    train(model, "gpt", own, range(*steps), *share)
    if save:
        dcp.save(state_of(), checkpoint_id=save)
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("by_fsdp", [False, True])
def test_a_run_goes_on_from_four_ranks_to_two_to_one(by_fsdp, tmp_path):
    on_processes(4, resumed, (0, 7), None, str(tmp_path / "four"), by_fsdp)
    on_processes(2, resumed, (7, 13), str(tmp_path / "four"), str(tmp_path / "two"))
    (found,) = on_processes(1, resumed, (13, 20), str(tmp_path / "two"), None)
    (straight,) = on_processes(1, resumed, (0, 20), None, None)
    assert difference(found, straight) < TOLERANCE


def compiled(rank):
    warnings.simplefilter("ignore")
    found = []
    for is_split in (False, True):
        model = build()
        if is_split:
            split(model, init_device_mesh("cpu", (2,))).compile(backend="aot_eager")
        own, kfac = attach(model, "adamw", process_group=None if is_split else alone())
        train(model, "gpt", own, 10)
        kfac.close()
        found.append(whole(model))
    return difference(*found)


@pytest.mark.slow
def test_compiled_code():
    assert max(on_processes(2, compiled)) < TOLERANCE
