"""Cholesky-QR of many matrices in one launch, against torch."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.ops import cholesky_qr

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
WAY = pytest.param("cpu", id="interpreted", marks=needs_triton) if INTERPRETED else pytest.param("cuda", marks=on_gpu)
on_devices = pytest.mark.parametrize("device", [WAY])


def columns(number, width, device, condition=1e2):
    """Return matrices with columns of length one that are far from orthogonal."""
    generator = torch.Generator().manual_seed(width)
    left, right = (
        torch.linalg.qr(torch.randn(number, width, width, generator=generator, dtype=torch.float64)).Q for _ in range(2)
    )
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), width, dtype=torch.float64)
    found = (left * spectrum) @ right.mT
    return (found / found.norm(dim=-2, keepdim=True)).contiguous().to(device, torch.float32)


@on_devices
@pytest.mark.parametrize("widths", [[8], [32, 40], [144, 64, 72], [256]], ids=str)
def test_columns_are_orthonormalized_in_their_order(widths, device):
    images = [columns(2, width, device, 10.0) for width in widths]
    expected = [torch.linalg.qr(image.double().cpu()) for image in images]
    assert cholesky_qr.can_orthonormalize(images)
    for found, (basis, right) in zip(cholesky_qr.orthonormalized(images, [0.0]), expected, strict=True):
        signed = basis * right.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        torch.testing.assert_close(found.double().cpu(), signed, rtol=0, atol=2e-4)


@on_devices
def test_nearly_dependent_columns_become_orthonormal_in_two_rounds(device):
    images = [columns(2, 96, device, 1e4), columns(1, 32, device, 1e4)]
    shift = 10 * torch.finfo(torch.float32).eps
    for found in cholesky_qr.orthonormalized(images, [shift, 0.0]):
        gram = (found.mT @ found).double().cpu()
        assert float((gram - torch.eye(len(gram[0]))).abs().max()) < 1e-3


@on_devices
def test_a_matrix_that_cannot_be_decomposed_leaves_others_alone(device):
    image = columns(3, 40, device, 10.0)
    alone = cholesky_qr.orthonormalized([image[[0, 2]].contiguous()], [0.0])[0]
    image[1, 2, 2] = torch.nan
    found = cholesky_qr.orthonormalized([image], [0.0])[0]
    assert found[1].isnan().any()
    assert torch.equal(found[[0, 2]], alone)


@on_devices
def test_what_the_kernel_does_not_handle(device):
    fine = torch.zeros(1, 16, 16, device=device)
    assert cholesky_qr.can_orthonormalize([fine])
    for other in (
        torch.zeros(1, 10, 10),
        torch.zeros(1, 264, 264),
        fine.double(),
        torch.zeros(2, 16, 17, device=device)[..., :16],
    ):
        assert not cholesky_qr.can_orthonormalize([fine, other.to(device)])


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernel_runs_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import cholesky_qr, kernels

kernel = kernels.compiled(cholesky_qr._solve_kernel)
constants = {"ROWS": cholesky_qr.ROWS, "PANEL": cholesky_qr.PANEL}
types = {"x": "*fp32", "gram": "*fp32", "table": "*i64", "shift": "fp32"}
source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
options = kernels.COMPILE_OPTIONS | {"num_warps": cholesky_qr.QR_WARPS, "num_stages": 2}
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"])
"""


@needs_triton
def test_the_kernel_compiles_for_a_gpu_and_needs_no_local_memory(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["True", "False"]
