"""Sums of outer products by the kernels of ``grouped_grams``, against the definition in float64.

In Triton's interpreter in a session of its own, and on a GPU with ``-m gpu``. The result is allocated with NaN, so what
is not filled shows.
"""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import grouped_grams
from dkfac.ops.grouped_grams import ConvWindow, Grams, Product, is_aligned, read_images, read_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
INTERPRETER = pytest.param("cpu", id="interpreted", marks=needs_triton)
GPU = pytest.param("cuda", id="cuda", marks=on_gpu)
every_device = pytest.mark.parametrize("device", [INTERPRETER] if INTERPRETED else [GPU])

DTYPES = [torch.float16, torch.float32] + ([] if INTERPRETED else [torch.bfloat16])  # which the interpreter misreads


def random(*shape, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def outer(rows, channels, blocks=1, first=0, ones=False):
    """The sum for each block of adjacent features."""
    found = []
    for b in range(blocks):
        part = rows[:, first + b * channels : first + (b + 1) * channels].double()
        part = torch.cat([part, part.new_ones(len(part), 1)], 1) if ones else part
        found.append(part.mT @ part)
    return torch.stack(found)


def run(cases, *, tf32=False, turn=0, scales=(1.0,)):
    """``cases``: tensors with a product each. Returns the sums of each."""
    products, begin, tensors = [], 0, []
    for i, (tensor, product) in enumerate(cases):
        products.append(replace(product, tensor=i, begins=(begin,)))
        begin += product.blocks * product.dim**2
        tensors.append(tensor)
    device = tensors[0].device
    empty = torch.empty
    torch.empty = lambda *size, **options: empty(*size, **options).fill_(torch.nan)
    try:
        found = Grams(products, begin, device, tf32=tf32).run(tensors, list(scales), turn)
    finally:
        torch.empty = empty
    sizes = [product.blocks * product.dim**2 for _, product in cases]
    parts = zip(torch.split(found, sizes), cases, strict=True)
    return [part.view(p.blocks, p.dim, p.dim) for part, (_, p) in parts]


def product_of(t, reading, channels, blocks=1, **options):
    begins = channels, options.get("first", 0), options.get("group_channels", 0)
    options |= {"aligned": is_aligned(t, reading, *begins)}
    return t, Product(0, 0, reading, t.dtype, blocks, channels, options.pop("ones", False), (), **options)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@every_device
def test_rows_of_linear_layers(device):
    x, wide = random(3, 50, 48, device=device), random(150, 200, device=device, seed=1)
    some, turned = x[:, 1::3], random(3, 48, 20, device=device, seed=2).mT
    cases = [
        product_of(x, read_rows(x), 24, 2, pieces=2),
        product_of(x, read_rows(x), 20, 2, pieces=2),  # the rest is a factor of its own
        product_of(x, read_rows(x), 8, first=40),
        product_of(x, read_rows(x), 48, ones=True),
        product_of(some, read_rows(some), 48),
        product_of(turned, read_rows(turned), 48),
        product_of(wide, read_rows(wide), 200),  # large tiles
        product_of(wide, read_rows(wide), 100, 2, pieces=2),
    ]
    found, rows = run(cases), x.reshape(-1, 48)
    expected = [outer(rows, 24, 2), outer(rows, 20, 2), outer(rows, 8, first=40), outer(rows, 48, ones=True)]
    expected += [outer(t.reshape(-1, 48), 48) for t in (some, turned)] + [outer(wide, 200), outer(wide, 100, 2)]
    for mine, wanted in zip(found, expected, strict=True):
        close(mine, wanted)


WINDOWS = [
    ConvWindow((3, 3), (1, 1), (1, 1), (1, 1), (9, 7)),
    ConvWindow((3, 2), (2, 1), (1, 0), (1, 2), (5, 5)),
    ConvWindow((1, 1), (2, 2), (0, 0), (1, 1), (5, 4)),
    ConvWindow((1, 5), (1, 1), (0, 2), (1, 1), (9, 7)),
]


def patches(x, window, turn=0):
    """Rows of features ordered by channel, then tap, at the positions that are read."""
    u = F.unfold(x.double(), window.kernel, window.dilation, window.padding, window.stride)
    u = u.unflatten(2, window.outputs)
    (down, across), begin = window.every, (turn % window.every[0], turn // window.every[0] % window.every[1])
    u = u[:, :, begin[0] :: down, begin[1] :: across]
    u = u[:, :, : window.outputs[0] // down, : window.outputs[1] // across]
    return u.flatten(2).mT.reshape(-1, u.shape[1])


@every_device
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_patches_of_convolutions(device, layout, window):
    x = random(2, 16, 9, 7, device=device).to(memory_format=layout)
    taps, reading = window.kernel[0] * window.kernel[1], read_images(x, window)
    cases = [
        product_of(x, reading, 8, 2, pieces=2),  # pieces of whole channels
        product_of(x, reading, 4, 4, group_channels=4),  # groups
        product_of(x, reading, 2, 4, pieces=2, group_channels=8, first=4, ones=True),  # pieces of groups
        product_of(x, reading, 1, 16, group_channels=1),  # depthwise
    ]
    found, rows = run(cases), patches(x, window)
    close(found[0], outer(rows, 8 * taps, 2))
    close(found[1], outer(rows, 4 * taps, 4))
    parts = [outer(rows, 2 * taps, 2, first=(8 * g + 4) * taps, ones=True) for g in range(2)]
    close(found[2], torch.cat(parts))
    close(found[3], outer(rows, taps, 16))


@every_device
@pytest.mark.parametrize("turn", [0, 1, 2, 7])
def test_a_lattice_of_positions(device, turn):
    window = replace(WINDOWS[0], every=(2, 4))
    x = random(2, 8, 9, 7, device=device).to(memory_format=torch.channels_last)
    (found,) = run([product_of(x, read_images(x, window), 8)], turn=turn)
    close(found[0], outer(patches(x, window, turn), 72)[0])


@every_device
def test_pixels_and_narrow_blocks(device):
    x = random(2, 8, 5, 7, device=device)
    last = x.to(memory_format=torch.channels_last)
    cases = [product_of(t, read_images(t), c, 8 // c, pieces=8 // c) for t in (x, last) for c in (1, 2, 8)]
    many = random(2, 130, 3, 3, device=device)
    cases.append(product_of(many, read_images(many), 2, 65, group_channels=2))  # in several tiles
    found, rows = run(cases), x.movedim(1, -1).reshape(-1, 8)
    for (_, product), mine in zip(cases[:6], found[:6], strict=True):
        close(mine, outer(rows, product.channels, product.blocks))
    close(found[6], outer(many.movedim(1, -1).reshape(-1, 130), 2, 65))


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_scales_and_results_in_two_places(device, dtype):
    x = random(700, 72, device=device, dtype=dtype)
    product = product_of(x, read_rows(x), 72)[1]
    begins = (0, 2 * 72**2)
    plan = Grams([replace(product, begins=begins, scale=1)], 3 * 72**2, x.device, tf32=False)
    found = plan.run([x], [1.0, 0.5]).view(3, 72, 72)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[0].mT)
    close(found[0], 0.5 * outer(x, 72)[0])


@every_device
def test_rows_are_split_among_programs_and_added_up_in_a_fixed_order(device, monkeypatch):
    x = random(5000, 40, device=device)
    (whole,) = run([product_of(x, read_rows(x), 40)])
    monkeypatch.setattr(grouped_grams, "FEWEST_ITERATIONS", 1)
    split = [run([product_of(x, read_rows(x), 40)])[0] for _ in range(3)]
    assert torch.equal(split[0], split[1])
    assert torch.equal(split[0], split[2])
    close(split[0], outer(x, 40))
    close(whole, outer(x, 40))


def test_rows_with_more_strides_than_two_are_not_read():
    assert read_rows(random(4, 3, 2, 5)[:, :2, :1].expand(4, 2, 3, 5)) is None
    assert read_rows(random(4, 3, 2, 5)).positions == 24
    assert read_rows(random(4, 1, 2, 5)[:2]).positions == 4


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import gram_kernels, kernels

gram_kernels.compile_helpers()
SAME = {"ONES": 0, "ROUNDS": 1, "TILE": 64, "ROWS": 64, "FIELDS": 32}
KINDS = [{"IS_CONV": 0, "INNER": 0, "CHANNELS": 0, "ALIGNED": 1, "SINGLE": 0},
         {"IS_CONV": 1, "INNER": 0, "CHANNELS": 16, "ALIGNED": 1, "SINGLE": 0},
         {"IS_CONV": 1, "INNER": 1, "CHANNELS": 0, "ALIGNED": 0, "SINGLE": 1}]
jobs = [(gram_kernels.partial_kernel, SAME | kind) for kind in KINDS]
for function, constants in [*jobs, (gram_kernels.finish_kernel, {"TILE": 64, "FIELDS": 32})]:
    kernel = kernels.compiled(function)
    kinds = {"like": "*bf16", "partial": "*fp32", "scales": "*fp32", "result": "*fp32"}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*i64") for n in kernel.arg_names}
    built = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32),
        options=kernels.COMPILE_OPTIONS,
    )
    print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"], ", 0x10, " in built.asm["ptx"])
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_and_read_16_bytes_at_a_time(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert said == ["True False True"] * 2 + ["True False False"] * 2
