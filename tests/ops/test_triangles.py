"""Triangles packed and absorbed in one launch, against ``pack.py`` and plain torch."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops.pack import pack_triangle, packed_diagonal, unpack_triangle
from dkfac.ops.triangles import Entry, Triangles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
CPU = pytest.param("cpu", id="interpreted", marks=needs_triton)
every_device = pytest.mark.parametrize("device", [CPU] if INTERPRETED else [pytest.param("cuda", marks=on_gpu)])
SHAPES = [(1, 1), (2, 2), (3, 3), (1, 33), (2, 64), (3, 20), (1, 47), (5, 7)]
"""Blocks and dimension; the last is a diagonal."""


def entries():
    found, begin = [], 3
    for i, (blocks, dim) in enumerate(SHAPES):
        found.append(Entry(begin, blocks, dim, (blocks, dim) != SHAPES[-1], i // 2))
        begin += found[-1].packed
    return found, begin


def matrices(device):
    generator = torch.Generator().manual_seed(0)
    found = []
    for entry in entries()[0]:
        shape = (entry.blocks, entry.dim, entry.dim) if entry.is_dense else (entry.blocks, entry.dim)
        value = torch.randn(*shape, generator=generator)
        found.append((value + value.mT if entry.is_dense else value).contiguous().to(device))
    return found


def packed(values):
    return [(pack_triangle(v) if v.ndim == 3 else v).reshape(-1) for v in values]


@pytest.mark.parametrize("dim", range(1, 10))
def test_the_diagonal_of_a_packed_matrix(dim):
    matrix = torch.randn(2, 3, dim, dim)
    matrix = matrix + matrix.mT
    flat = pack_triangle(matrix.flatten(0, 1)).unflatten(0, (2, 3))
    assert torch.equal(packed_diagonal(flat, dim), matrix.diagonal(dim1=-2, dim2=-1))


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pack_writes_what_pack_triangle_does(device, dtype):
    places, size = entries()
    given = matrices(device)
    flat = torch.full((size + 5,), 7.0, dtype=dtype, device=device)
    scales = torch.arange(1.0, len(given) + 1, device=device)
    fine = Triangles(places, flat.device).pack([*given[:2], None, *given[3:]], scales, flat)
    parts = [scale * part for scale, part in zip(scales, packed(given), strict=True)]
    parts[2] = torch.zeros_like(parts[2])
    assert fine
    expected = torch.cat([flat.new_full((3,), 7), *(part.to(dtype) for part in parts), flat.new_full((5,), 7)])
    rounding = 2**-7 if INTERPRETED and dtype is torch.bfloat16 else 0  # the interpreter truncates
    torch.testing.assert_close(flat, expected, rtol=rounding, atol=0)


@every_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_pack_and_are_finite_see_a_value_that_is_not(device, bad, which):
    places, size = entries()
    given = matrices(device)
    table, flat = Triangles(places, given[0].device), torch.zeros(size, device=device)
    assert table.pack(given, torch.ones(len(given), device=device), flat)
    assert table.are_finite(flat, 4).tolist() == [True] * 4
    given[which].view(-1)[0] = bad
    assert not table.pack(given, torch.ones(len(given), device=device), flat)
    assert table.are_finite(flat, 4).tolist() == [i != which // 2 for i in range(4)]


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_absorb_adds_the_buffer_to_the_matrices(device, dtype):
    places, size = entries()
    totals, values = matrices(device), [value * 2 - 1 for value in matrices(device)]
    before = [value.clone() for value in values]
    table, flat = Triangles(places, totals[0].device), torch.zeros(size, dtype=dtype, device=device)
    table.pack(totals, torch.ones(len(totals), device=device), flat)
    factor = torch.linspace(0.5, 2, len(totals), device=device)
    here = torch.arange(len(totals), device=device) != 3
    table.absorb(flat, table.addresses(values), factor, here, 0.9)
    for i, (value, old, entry) in enumerate(zip(values, before, places, strict=True)):
        part = flat[entry.begin : entry.begin + entry.packed].view(entry.blocks, -1).float()
        total = unpack_triangle(part, entry.dim) if entry.is_dense else part
        expected = 0.9 * old + factor[i] * total if here[i] else old
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import kernels, triangles

CONSTANTS = {"ITEM_FIELDS": triangles.ITEM_FIELDS, "CHUNK": triangles.CHUNK, "SIDE": triangles.SIDE}
KINDS = {"pointers": "*i64", "items": "*i64", "pieces": "*i32", "fine": "*i32", "flags": "*i32", "here": "*i1"}
for wire in ("*fp32", "*bf16"):
    for kernel in map(kernels.compiled, (triangles._pack_kernel, triangles._finite_kernel, triangles._absorb_kernel)):
        kinds = KINDS | {"flat": wire, "decay": "fp32"} | dict.fromkeys(CONSTANTS, "constexpr")
        signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
        constants = {name: CONSTANTS[name] for name in signature if name in CONSTANTS}
        source = ASTSource(kernel, signature, constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.COMPILE_OPTIONS)
        print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"])
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_and_need_no_local_memory(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["True", "False"] * 6
