"""Products of strips with matrices, in place: in Triton's interpreter, or on a GPU; and the compiled kernels."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import layer_norms, tile_products
from dkfac.ops.tile_products import Strip

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
# Rows and columns of a tensor, and the widths of pieces of the matrix on the right and on the left.
SHAPES = [
    (70, 65, [32, 32], [35, 35]),
    (3, 289, [144, 144], [3]),
    (130, 48, [48], [130]),
    (40, 41, [], [16, 16]),
    (24, 500, [250, 250], []),
    (257, 260, [256], [192, 64]),
]


@every_device
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strips_are_multiplied_where_they_are(device, shape, back):
    rows, columns, right, left = shape
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    memory, work = draw(8 + rows * columns).to(device), draw(4 + rows * columns).to(device)
    matrices = [[(draw(w, w) / w**0.5).to(device) for w in widths] for widths in (right, left)]
    before = memory.clone(), work.clone()
    for side, pieces in enumerate(matrices):
        jobs, begin = [], 0
        for piece in pieces:
            place = begin * (columns if side else 1)
            given = piece.data_ptr(), columns if side else rows, len(piece), columns
            jobs.append(Strip(memory[8 + place :].data_ptr(), *given))
            jobs.append(Strip(4 * (4 + place), *given, in_work=True))
            begin += len(piece)
        products = tile_products.describe_products(jobs, torch.device(device), left=bool(side))
        tile_products.multiply_tiles(products, work, back=back)
    for values, old, begin in ((memory, before[0], 8), (work, before[1], 4)):
        expected = old[begin:].view(rows, columns).double()
        turned = [[m.double().mT if back else m.double() for m in pieces] for pieces in matrices]
        a, g = (torch.block_diag(*pieces) if pieces else torch.zeros(0, 0).double() for pieces in turned)
        a, g = (
            torch.block_diag(m.to(device), torch.eye(size - len(m), dtype=torch.float64, device=device))
            for m, size in ((a, columns), (g, rows))
        )
        found = values[begin:].view(rows, columns)
        torch.testing.assert_close(found.double(), g.mT @ expected @ a, rtol=0, atol=1e-2 if device == "cuda" else 1e-4)
        assert torch.equal(values[:begin], old[:begin])


@every_device
def test_norms_and_whether_they_are_finite(device):
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device) for n in (5, 5000, 1, 0)]
    norms, good = torch.zeros(4, device=device), torch.zeros((), dtype=torch.bool, device=device)
    found = layer_norms.LayerNorms(tensors)
    found.write(norms, good)
    torch.testing.assert_close(norms, torch.stack([t.norm() for t in tensors]))
    assert good
    totals = torch.zeros(3, device=device)
    layer_norms.write_totals(norms, 2 * norms, totals)
    torch.testing.assert_close(totals, torch.stack([norms.norm(), 2 * norms.norm(), torch.zeros((), device=device)]))
    for bad in (torch.nan, torch.inf):
        tensors[1][4999] = bad
        found.write(norms, good)
        assert not good
        assert norms.isfinite().tolist() == [True, False, True, True]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import adam_length_kernels, adaptive_kernels, kernels, layer_norms, tile_products
from dkfac.precondition.adaptive_steps import CONSTANTS

KINDS = dict.fromkeys(("keep", "keep_square", "less", "less_square", "ratio", "surprise", "eps"), "fp32")
KINDS |= dict.fromkeys(("layers", "pieces", "strips", "rows", "order"), "*i64") | {"chunks": "*i32", "tiles": "*i32"}
KINDS |= {"good": "*i1", "sane": "*i1", "count": "i32"}


def build(kernel, num_warps=4, num_stages=3, **constants):
    kernel = kernels.compiled(kernel)
    signature = {n: "constexpr" if n in constants else KINDS.get(n, "*fp32") for n in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    options = kernels.COMPILE_OPTIONS | {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(ASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", 90, 32),
                           options=options)
    print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"])


chunks = {"ALIGNED": 1, **adaptive_kernels.PER_PROGRAM}
tiles = {"ALIGNED": 1, **adam_length_kernels.PER_TILE}
build(adaptive_kernels.total_kernel, **chunks)
build(adaptive_kernels.judge_kernel, WORKS=1, **chunks)
build(adaptive_kernels.update_kernel, WORKS=1, NESTEROV=0, **chunks)
build(adaptive_kernels.update_kernel, WORKS=0, NESTEROV=1, **chunks)
build(adam_length_kernels.sides_kernel, **tiles)
build(adam_length_kernels.length_kernel, **tiles)
build(adaptive_kernels.open_kernel, BLOCK=128)
build(adaptive_kernels.follow_kernel, BLOCK=128, BOUNDED=1, **CONSTANTS)
build(adaptive_kernels.follow_kernel, BLOCK=128, BOUNDED=0, **CONSTANTS)
build(adaptive_kernels.close_kernel, BLOCK=128, ADAM=1)
build(adam_length_kernels.collect_kernel, BLOCK=128)
build(layer_norms._squares_kernel, **chunks)
build(layer_norms._norms_kernel, BLOCK=256)
build(layer_norms._good_kernel, BLOCK=256)
build(layer_norms._totals_kernel, BLOCK=256)
for size in (16, 160, 256):
    for aligned in (False, True):
        for left, back in ((0, 1), (1, 0)):
            constants = tile_products.constants_of(size, aligned)
            build(tile_products._product_kernel, LEFT=left, BACK=back, **constants)
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_and_need_no_local_memory(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["True", "False"] * 27
