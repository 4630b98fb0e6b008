"""Traces of many factors in one launch, against torch."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import traces

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
WAY = pytest.param("cpu", id="interpreted", marks=needs_triton) if INTERPRETED else pytest.param("cuda", marks=on_gpu)


@pytest.mark.parametrize("device", [WAY])
def test_traces_are_those_of_torch(device):
    generator = torch.Generator().manual_seed(0)
    given, expected = [], []
    for shape, pieces in (((1, 300, 300), 1), ((6, 7, 7), 3), ((2, 400), 1), ((4, 5, 5), 1)):
        room = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)
        weight = torch.rand((), generator=generator) * (len(given) != 3)
        given.append((room.to(device)[..., : shape[-1]], weight.to(device), pieces, 0.5 + len(given), -0.25))
        value = room[..., : shape[-1]].double()
        trace = (value if len(shape) == 2 else value.diagonal(dim1=-2, dim2=-1)).sum(-1)
        tiny = torch.finfo(torch.float32).tiny
        expected.append((trace / weight.double().clamp(min=tiny)).view(-1, pieces).sum(1) * given[-1][3] - 0.25)
    found = traces.traces([traces.Trace(*each) for each in given])
    assert all(traces.can_trace(value, weight) for value, weight, *_ in given)
    torch.testing.assert_close(found.cpu(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernel_runs_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import kernels, traces

kernel = kernels.compiled(traces._trace_kernel)
constants = {"FIELDS": traces.TRACE_FIELDS, "BLOCK": traces.TRACE_BLOCK}
types = {"found": "*fp64", "rows": "*i64", "coefficients": "*fp64"}
source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.COMPILE_OPTIONS)
print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"])
"""


@needs_triton
def test_the_kernel_compiles_for_a_gpu_and_needs_no_local_memory(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["True", "False"]
