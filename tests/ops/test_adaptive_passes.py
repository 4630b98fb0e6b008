"""The two passes of ``curvature="adaptive"`` against their formulas, in plain torch and as Triton kernels."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import adaptive_passes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
TORCH = [
    pytest.param(("cpu", torch.float64, False), id="torch"),
    pytest.param(("cpu", torch.float32, False), id="torch-float32"),
]
INTERPRETER = [pytest.param(("cpu", torch.float32, True), id="interpreted", marks=needs_triton)]
GPU = [pytest.param(("cuda", torch.float32, True), id="cuda", marks=on_gpu)]
every_way = pytest.mark.parametrize("way", INTERPRETER if INTERPRETED else [*TORCH, *GPU])
# Layers, blocks of each, rows and columns: in one program, in several, with an incomplete block.
every_shape = pytest.mark.parametrize("shape", [(1, 1, 5, 7), (3, 2, 4, 8), (2, 1, 64, 33), (1, 3, 40, 40)], ids=str)


def given(way, shape):
    """Gradient, momentum, square (with padding of zeros at the end), and two values per layer."""
    device, dtype, uses_kernels = way
    layers, blocks, rows, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    tensors = [draw(layers * blocks, rows, columns) for _ in range(3)]
    tensors[2] = tensors[2].mul_(2).exp_()
    for tensor in tensors:
        tensor[:, :, -1] = 0
    tensors += [draw(layers).exp(), draw(layers).exp()]
    tensors = [tensor.to(device, dtype) for tensor in tensors]
    assert adaptive_passes.uses_kernels(*tensors) == uses_kernels
    return tensors


def close(found, expected):
    tolerance = 1e-12 if found.dtype == torch.float64 else 3e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@every_way
@every_shape
def test_sums_of_the_last_update(way, shape):
    tensors = given(way, shape)
    before = [tensor.clone() for tensor in tensors]
    found = adaptive_passes.sums_of_last_update(*tensors)
    g, m, v = (tensor.double().view(shape[0], -1) for tensor in before[:3])
    mean, added = (tensor.double()[:, None] for tensor in before[3:])
    u, y = m / (v + added).sqrt(), (v - mean) / (v + added)
    terms = (u * u, y * u * u, v * u * u, v * y * u * u, v * y * y * u * u, g * u, g * y * u, g * g)
    for i, term in enumerate(terms):
        scale = float(term.abs().sum(1).max())
        torch.testing.assert_close(
            found[:, i].double(), term.sum(1), rtol=0, atol=scale * (1e-12, 1e-5)[way[1] is torch.float32]
        )
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))  # nothing is overwritten


@every_way
@every_shape
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_moments_and_updates(way, shape, nesterov):
    gradient, momentum, square, added, bound = given(way, shape)
    g, m, v = (tensor.double().clone().view(shape[0], -1) for tensor in (gradient, momentum, square))
    keep, keep_square = gradient.new_full((), 0.9), gradient.new_full((), 0.99)
    found = adaptive_passes.update_(gradient, momentum, square, keep, keep_square, added, bound, nesterov=nesterov)
    m, v = 0.9 * m + g, 0.99 * v + g * g
    used = g + 0.9 * m if nesterov else m
    most = bound.double()[:, None]
    u = (used / (v + added.double()[:, None]).sqrt()).clamp(-most, most)
    assert ((u.abs() == most) & (u != 0)).any()  # some are clamped
    for tensor, expected in ((momentum, m), (square, v), (gradient, u)):
        close(tensor.view(shape[0], -1), expected)
    close(found, torch.stack([(u * u).sum(1), (used * used).sum(1)], 1))


@every_way
def test_a_value_that_is_not_finite_stays_in_its_layer(way):
    gradient, momentum, square, added, bound = given(way, (2, 1, 64, 33))
    gradient[0, 3, 3] = torch.nan
    one = gradient.new_ones(())
    sums = adaptive_passes.sums_of_last_update(gradient, momentum, square, added, bound)
    assert sums[0, -3:].isnan().all()
    assert sums[1].isfinite().all()
    sums = adaptive_passes.update_(gradient, momentum, square, one, one, added, bound, nesterov=False)
    assert sums[0].isnan().all()
    assert sums[1].isfinite().all()
    assert gradient[1].isfinite().all()


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import adaptive_passes, kernels

CONSTANTS = {"BLOCK": 1024, "NESTEROV": True}
for kernel in map(kernels.compiled, (adaptive_passes._judge_kernel, adaptive_passes._update_kernel)):
    kinds = {"size": "i32", "programs": "i32"} | dict.fromkeys(CONSTANTS, "constexpr")
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
    constants = {name: CONSTANTS[name] for name in signature if name in CONSTANTS}
    source = ASTSource(kernel, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.COMPILE_OPTIONS)
    print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"])
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_and_need_no_local_memory(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["True", "False"] * 2
