"""The fused passes give what their formulas say, to the bit, in plain torch and as Triton kernels.

Each claim is checked on every path: torch in float64; the kernels in Triton's interpreter, in a session of its own that
``test_the_kernels_run_in_tritons_interpreter`` starts; the kernels on a GPU with ``-m gpu``.
"""

import importlib.util
import os
import sys
from typing import NamedTuple

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import fused, kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN, INF = float("nan"), float("inf")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]


class Way(NamedTuple):
    device: str
    dtype: torch.dtype
    kernels: bool


TORCH = pytest.param(Way("cpu", torch.float64, False), id="torch")
INTERPRETER = pytest.param(Way("cpu", torch.float32, True), id="interpreted", marks=needs_triton)
GPU = pytest.param(Way("cuda", torch.float32, True), id="cuda", marks=on_gpu)
KERNELS = [GPU, INTERPRETER] if INTERPRETED else [GPU]

every_way = pytest.mark.parametrize("way", [TORCH, *KERNELS])
every_shape = pytest.mark.parametrize(
    "shape", [(1,), (5,), (1, 7), (3, 5, 7), (2, 1024), (3, 1025), (1, 2, 3000), (2, 0)], ids=str
)
every_matrix = pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (3, 2, 5, 7), (2, 3, 1, 9), (1, 1, 130, 17), (2, 1, 33, 257), (1, 2, 8, 608), (2, 1, 0, 3)],
    ids=str,
)
every_flag = pytest.mark.parametrize("first", [True, False], ids=["first-good", "first-bad"])
# Triton compiles aligned and unaligned tensors differently.
every_offset = pytest.mark.parametrize("offset", [64, 3], ids=["aligned", "unaligned"])


def framed(tensor, offset):
    """Copy a tensor into the middle of a buffer of sevens, to see what is written beside it."""
    buffer = tensor.new_full((offset + tensor.numel() + 4096,), 7)
    inner = buffer[offset : offset + tensor.numel()].view(tensor.shape)
    return inner.copy_(tensor), buffer


def frame_is_intact(inner, buffer):
    start = inner.storage_offset()
    return bool((buffer[:start] == 7).all() and (buffer[start + inner.numel() :] == 7).all())


def random(way, *shape, seed=0):
    generator = torch.Generator(way.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=way.device, dtype=way.dtype)


def alternating(way, n, first):
    return torch.tensor([(i % 2 == 0) == first for i in range(n)], device=way.device)


def spoil(tensor, flags):
    """Replace the items that are not good."""
    odd = torch.tensor([INF, NAN, -0.0, -INF, 1e30]).to(tensor)
    garbage = odd.repeat(tensor.numel() // 5 + 1)[: tensor.numel()].view(tensor.shape)
    return torch.where(flags.view(-1, *[1] * (tensor.ndim - 1)), tensor, garbage)


def same_bits(one, other):
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[one.dtype]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def absorbed(value, total, decay, scale, good):
    terms = zip(value, total, scale, good.tolist(), strict=True)
    return torch.stack([decay * v + s * t if g else v for v, t, s, g in terms])


def divided(rotated, g_values, a_values, damping):
    result = torch.empty_like(rotated)
    for i, block in torch.cartesian_prod(*map(torch.arange, rotated.shape[:2])).tolist():
        curvature = torch.outer(g_values[i, block], a_values[i, block]) + damping[i]
        result[i, block] = rotated[i, block] / curvature
    return result


def finished(raw, update, scale, sane, good):
    terms = zip(update, raw, scale, sane.tolist(), strict=True)
    found = torch.stack([s * u if ok else r for u, r, s, ok in terms])
    return found if good.item() else torch.zeros_like(found)


def absorb_arguments(way, shape, first=True):
    good = alternating(way, shape[0], first)
    value, total = random(way, *shape), spoil(random(way, *shape, seed=1), good)
    scale = spoil(random(way, shape[0], seed=2), good)
    return value, total, 0.95, scale, good


def divide_arguments(way, shape):
    n, blocks, rows, columns = shape
    g_values, a_values = random(way, n, blocks, rows, seed=1).abs(), random(way, n, blocks, columns, seed=2).abs()
    return random(way, *shape), g_values, a_values, random(way, n, seed=3).abs() + 1e-3


def finish_arguments(way, shape, first=True):
    sane = alternating(way, shape[0], first)
    update, raw = spoil(random(way, *shape), sane), random(way, *shape, seed=1)
    return raw, update, spoil(random(way, shape[0], seed=2), sane), sane, torch.ones_like(sane[0])


@every_way
@every_shape
@every_flag
@every_offset
def test_absorb_adds_the_scaled_total_where_good_and_touches_nothing_else(way, shape, first, offset):
    value, *rest = absorb_arguments(way, shape, first)
    value = spoil(value, rest[-1])
    expected = absorbed(value, *rest)
    value, buffer = framed(value, offset)
    before = value.clone()
    assert fused._use_triton(value, rest[0], *rest[2:]) == way.kernels
    assert fused.absorb_(value, *rest) is None
    assert same_bits(value, expected)
    good = rest[-1]
    assert same_bits(value[~good], before[~good])
    assert frame_is_intact(value, buffer)


@every_way
@every_matrix
@every_offset
def test_divide_divides_by_the_damped_product_of_the_eigenvalues(way, shape, offset):
    rotated, *rest = divide_arguments(way, shape)
    expected = divided(rotated, *rest)
    rotated, buffer = framed(rotated, offset)
    assert fused._use_triton(rotated, *rest) == way.kernels
    assert fused.divide_(rotated, *rest) is rotated
    assert same_bits(rotated, expected)
    assert frame_is_intact(rotated, buffer)


@every_way
@every_shape
@every_flag
@every_offset
def test_finish_scales_what_is_sane_and_takes_the_raw_gradient_elsewhere(way, shape, first, offset):
    raw, *rest = finish_arguments(way, shape, first)
    expected = finished(raw, *rest)
    raw, buffer = framed(raw, offset)
    assert fused._use_triton(raw, *rest) == way.kernels
    fused.finish_(raw, *rest)
    assert same_bits(raw, expected)
    assert torch.isfinite(raw).all()
    assert frame_is_intact(raw, buffer)
    *rest, good = rest
    raw.fill_(torch.nan)
    fused.finish_(raw, *rest, ~good)
    assert same_bits(raw, torch.zeros_like(raw))
    assert frame_is_intact(raw, buffer)


@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize("change", [torch.Tensor.double, lambda t: t.mT.contiguous().mT], ids=["float64", "strided"])
def test_tensors_that_the_kernels_do_not_take_go_through_torch(way, change):
    value, total, decay, scale, good = absorb_arguments(way, (3, 5, 7))
    value = change(value)
    expected = absorbed(value, total, decay, scale, good)
    assert not fused._use_triton(value, total, scale, good)
    fused.absorb_(value, total, decay, scale, good)
    assert same_bits(value, expected)


def test_without_triton_torch_does_the_work(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(kernels, "found", kernels.found.__wrapped__)
    assert kernels.found() is None
    arguments = divide_arguments(Way("cpu", torch.float32, False), (3, 2, 5, 7))
    expected = divided(*arguments)
    assert same_bits(fused.divide_(*arguments), expected)


def test_on_the_cpu_triton_is_never_looked_for(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernels, "found", lambda: pytest.fail("looked for triton"))
    assert not fused._use_triton(torch.ones(3))


def test_where_triton_cannot_compile_a_warning_says_so_and_torch_does_the_work(monkeypatch):
    """No GPU is needed: the trial's tensor is made on the CPU."""

    def launch(*arguments, **constants):
        raise RuntimeError("Failed to find C compiler")

    class Gpu:
        type = "cuda"

        def __str__(self):
            return "cuda:0"

    ones = torch.ones
    monkeypatch.setattr(kernels, "launch_kernel", launch)
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    with pytest.warns(UserWarning, match="cannot run kernels on cuda:0.*RuntimeError: Failed to find C compiler"):
        assert not kernels.works.__wrapped__(Gpu())


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    """Memory addresses mean nothing to it: one offset will do."""
    assert_passes_interpreted(__file__, "interpreted and not unaligned")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import fused, kernels

POINTERS = {"value", "total", "scale", "rotated", "g_values", "a_values", "damping", "update", "raw"}
CONSTANTS = {"BLOCK": 1024, "HEIGHT": 32, "WIDTH": 64}

def kind(name):
    if name in CONSTANTS:
        return "constexpr"
    return {"good": "*i1", "sane": "*i1", "decay": "fp32"}.get(name, "*fp32" if name in POINTERS else "i32")

for kernel in map(kernels.compiled, (fused._absorb_kernel, fused._divide_kernel, fused._finish_kernel)):
    signature = {name: kind(name) for name in kernel.arg_names}
    constants = {name: CONSTANTS[name] for name in signature if name in CONSTANTS}
    source = ASTSource(kernel, signature, constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.COMPILE_OPTIONS)
    print("fma" in built.asm["ptx"], len(built.asm["cubin"]) > 0)
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_without_fused_rounding(tmp_path):
    """The interpreter runs what the compiler refuses."""
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["False", "True"] * 3


OPERATIONS = {
    "absorb": (fused.absorb_, absorb_arguments, absorbed, (3, 1025)),
    "divide": (fused.divide_, divide_arguments, divided, (3, 2, 65, 33)),
    "finish": (fused.finish_, finish_arguments, finished, (3, 1025)),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("way", [GPU])
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_never_wait_for_the_device_and_replay_in_a_graph(way, name):
    operation, make, oracle, shape = OPERATIONS[name]
    target, *rest = make(way, shape)
    expected = oracle(target, *rest)
    operation(target.clone(), *rest)
    static, graph = target.clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        operation(target, *rest)
        with torch.cuda.graph(graph):
            operation(static, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(target, expected)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(static, expected)


LARGE = {"absorb": [(1, 2**31 + 1029), (3, 2**30 + 5)], "divide": [(3, 1, 32769, 32771)], "finish": [(3, 2**30 + 5)]}


@pytest.mark.parametrize("way", [GPU])
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in LARGE.items() for shape in shapes])
def test_kernels_reach_beyond_two_to_the_31_elements(way, name, shape):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GiB of free GPU memory")
    operation, make, oracle, _ = OPERATIONS[name]
    target, *rest = make(way, shape)
    expected = oracle(target, *rest)
    operation(target, *rest)
    assert same_bits(target, expected)
