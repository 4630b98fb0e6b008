"""Many tensors in one launch: the same bits as one after the other. In Triton's interpreter, or on a GPU."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import many

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
GPU = pytest.param(
    "cuda",
    id="cuda",
    marks=[pytest.mark.gpu, needs_triton, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
)
every_device = pytest.mark.parametrize(
    "device", [GPU, pytest.param("cpu", id="interpreted", marks=needs_triton)] if INTERPRETED else [GPU]
)


def random(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def same_bits(one, other):
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def pairs(device):
    """Return a buffer of three layers, padded, its parts and the gradients that belong to them, laid out otherwise."""
    buffer = torch.full((3, 40, 80), 7.0, device=device)
    images = random(device, 33, 8, 3, 3, seed=1).to(memory_format=torch.channels_last)
    inner = [
        buffer[0, :33, :72].unflatten(1, (8, 3, 3)),
        buffer[0, :33, 72],
        buffer[1, :40, :77],
        buffer[2, :39, :80].mT,
        buffer[2, 39:, :1],
    ]
    outer = [
        images,
        random(device, 33, seed=2),
        random(device, 40, 77, seed=3),
        random(device, 80, 39, seed=4),
        random(device, 1, 1, seed=5),
    ]
    return buffer, inner, outer


def table(device, inner, outer, *, index=(0, 0, 1, 2, 2)):
    """Return the items, and the outer tensors' addresses in another order than theirs."""
    slots = [3, 0, 4, 1, 2]
    addresses = [0] * len(outer)
    for slot, tensor in zip(slots, outer, strict=True):
        addresses[slot] = tensor.data_ptr()
    items = many.describe(outer, inner, slots, index)
    assert items is not None
    return many.on_its_way(addresses, torch.device(device)).to(device), items


@every_device
@pytest.mark.parametrize("programs", [None, 1])
def test_gather_copies_tensors_wherever_they_lie_and_nothing_else(device, programs, monkeypatch):
    if programs is not None:
        monkeypatch.setattr(many, "MOST_PROGRAMS", programs)
    buffer, inner, outer = pairs(device)
    expected = buffer.clone()
    for part, tensor in zip(pairs(device)[1], outer, strict=True):
        view = expected.as_strided(part.shape, part.stride(), part.storage_offset())
        view.copy_(tensor)
    pointers, items = table(device, inner, outer)
    many.gather_tensors(pointers, items, buffer)
    assert same_bits(buffer, expected)
    assert (buffer == 7).any()
    moved = [torch.empty_strided(t.shape, t.stride(), device=device).copy_(t * 2) for t in outer]
    addresses, _ = table(device, inner, moved)
    many.gather_tensors(addresses, items, buffer)
    for part, tensor in zip(inner, moved, strict=True):
        assert same_bits(part, tensor)


@every_device
@pytest.mark.parametrize("sane", [(True, True, True), (True, False, True)])
@pytest.mark.parametrize("good", [True, False])
def test_scatter_scales_what_is_sane_and_takes_the_raw_gradient_elsewhere(device, sane, good):
    buffer, inner, outer = pairs(device)
    raw, update = random(device, *buffer.shape, seed=6), random(device, *buffer.shape, seed=7)
    if not good:
        raw.fill_(torch.nan)
    update[~torch.tensor(sane)] = torch.inf
    scale, flags = torch.tensor([0.5, torch.nan if not sane[1] else 3.0, -2.0], device=device), torch.tensor(sane)
    expected = [torch.zeros_like(t) for t in outer]
    for wanted, part, i in zip(expected, inner, (0, 0, 1, 2, 2), strict=True):
        if good:
            chosen = update * scale[i] if sane[i] else raw
            wanted.copy_(chosen.as_strided(part.shape, part.stride(), part.storage_offset()))
    pointers, items = table(device, inner, outer)
    many.scatter(pointers, items, raw, update, scale, flags.to(device), torch.tensor(good, device=device))
    for tensor, wanted in zip(outer, expected, strict=True):
        assert same_bits(tensor, wanted)


@every_device
@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("sane", [[True, True, True], [True, False, True]])
def test_a_step_decays_and_subtracts_the_scaled_update(device, sane, good):
    buffer, inner, outer = pairs(device)
    update = random(device, *buffer.shape, seed=7)
    update[~torch.tensor(sane)] = torch.inf
    parts = [update.as_strided(t.shape, t.stride(), t.storage_offset()) for t in inner]
    rate, left = torch.rand(2, len(outer), device=device)
    factor = torch.tensor([0.3, 1.0, -2.0], device=device)
    index = (0, 0, 1, 2, 2)
    expected = []
    for n, (tensor, part, i) in enumerate(zip(outer, parts, index, strict=True)):
        moved = tensor * left[n]
        moved = moved - part * (rate[n] * factor[i]) if sane[i] else moved
        expected.append(moved if good else tensor.clone())
    pointers, items = table(device, inner, outer)
    flags = torch.tensor(sane, device=device)
    many.step_tensors(pointers, items, update, rate, left, factor, flags, torch.tensor(good, device=device))
    for tensor, wanted in zip(outer, expected, strict=True):
        assert same_bits(tensor, wanted)


@every_device
def test_tensors_are_added_to_their_parts_in_a_larger_memory(device):
    _, inner, outer = pairs(device)
    memory = random(device, 100 + 3 * 40 * 80, seed=7)
    parts = [memory.as_strided(t.shape, t.stride(), 100 + t.storage_offset()) for t in inner]
    scale = torch.rand(len(outer), device=device)
    expected = memory.clone()
    for n, (part, tensor) in enumerate(zip(parts, outer, strict=True)):
        expected.as_strided(part.shape, part.stride(), part.storage_offset()).add_(tensor * scale[n])
    slots, addresses = range(len(outer)), [tensor.data_ptr() for tensor in outer]
    items = many.describe(outer, parts, slots, [0] * len(outer))
    many.add_tensors(torch.tensor(addresses, device=device), items, memory, scale)
    assert same_bits(memory, expected)
    from_there = many.describe(outer, parts, slots, [0] * len(outer), 100)
    many.add_tensors(torch.tensor(addresses, device=device), from_there, memory[100:], -scale)
    assert (memory[:100] == expected[:100]).all()
    assert not same_bits(memory, expected)


@every_device
@pytest.mark.parametrize("good", [True, False])
def test_absorb_adds_the_scaled_totals_if_good(device, good):
    shapes = [(1, 3, 3), (1, 60, 60), (2, 5), (1, 1)]
    values = [random(device, *shape, seed=i) for i, shape in enumerate(shapes)]
    totals = [random(device, *shape, seed=9 + i) for i, shape in enumerate(shapes)]
    scale = torch.tensor([0.1, -3.0, 1.0, 0.0])
    before = [v.clone() for v in values]
    if not good:
        totals[1][0, 4, 4] = torch.nan
    given = many.Totals(values)
    given.give(totals, scale.tolist())
    assert bool(given.are_finite()) == good
    given.absorb(0.95, torch.tensor(good, device=device))
    for value, old, total, s in zip(values, before, totals, scale, strict=True):
        assert same_bits(value, 0.95 * old + s * total if good else old)


@every_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("place", [(0, 0, 0), (3, 0, 6), (3, 1, 0), (1, 0, 2399)])
def test_one_bad_entry_anywhere_is_found(device, bad, place, monkeypatch):
    monkeypatch.setattr(many, "MOST_PROGRAMS", 2)
    totals = [random(device, 2, n, seed=n) for n in (3, 2400, 1, 7)]
    totals[place[0]][place[1:]] = bad
    given = many.Totals([t.clone() for t in totals])
    given.give(totals, [1.0] * 4)
    assert bool(given.are_finite()) == (bad == 3e38)


def test_neighbours_are_merged_only_where_they_lie_so_in_both():
    assert many._merged((2, 3, 4), (12, 4, 1), (12, 4, 1)) == ([24], [1], [1])
    assert many._merged((2, 3, 4), (12, 4, 1), (1, 9, 2)) == ([2, 3, 4], [12, 4, 1], [1, 9, 2])
    assert many._merged((2, 3, 4), (12, 4, 1), (40, 4, 1)) == ([2, 12], [12, 1], [40, 1])
    assert many._merged((5, 1, 7), (8, 9, 1), (7, 1, 1)) == ([5, 7], [8, 1], [7, 1])
    assert many._merged((1, 1), (3, 3), (1, 1)) == ([], [], [])


def test_what_has_too_many_dimensions_is_refused():
    x = torch.zeros(3, 3, 3, 3, 3)
    assert many.describe([x.permute(4, 2, 0, 3, 1)], [x], [0], [0]) is None
    assert many.describe([], [], [], []).meta.shape == (0, many.FIELDS)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import kernels, many

KINDS = {"raw": "*fp32", "update": "*fp32", "scale": "*fp32", "pointers": "*i64", "meta": "*i64", "table": "*i64"}
KINDS |= {"tiles": "*i32", "factor": "*fp32"}
KINDS |= {"totals": "*i64", "sane": "*i1", "good": "*i1", "decay": "fp32", "flag": "*i32", "left": "*fp32"}
HALF = dict.fromkeys(("raw", "update", "scale", "left", "factor", "sane", "good"), "*bf16")
for kernel, constants, kinds in (
    (many._move_kernel, {"MODE": 1, "DIMS": 3, "FIELDS": 16, "BLOCK": 1024}, {}),
    (many._move_kernel, {"MODE": 0, "DIMS": 1, "FIELDS": 16, "BLOCK": 1024}, {}),
    (many._move_kernel, {"MODE": 0, "DIMS": 2, "FIELDS": 16, "BLOCK": 1024}, HALF),
    (many._move_kernel, {"MODE": 2, "DIMS": 2, "FIELDS": 16, "BLOCK": 1024}, {}),
    (many._move_kernel, {"MODE": 3, "DIMS": 4, "FIELDS": 16, "BLOCK": 1024}, {}),
    (many._absorb_kernel, {"BLOCK": 1024}, {}),
    (many._finite_kernel, {"BLOCK": 1024}, {}),
):
    kernel, kinds = kernels.compiled(kernel), KINDS | kinds
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.COMPILE_OPTIONS)
    print("fma" in built.asm["ptx"], len(built.asm["cubin"]) > 0)
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_without_fused_rounding(tmp_path):
    """The interpreter runs what the compiler refuses."""
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["False", "True"] * 7
