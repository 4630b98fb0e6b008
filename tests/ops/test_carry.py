"""Moments rotated to new bases by kernels, against the formula in plain torch."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted, in_another_process

from dkfac.factors.layer_state import carried
from dkfac.ops import carry
from dkfac.ops.precondition import multiply

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_triton,
]
DEVICES = (
    [pytest.param("cpu", id="interpreted", marks=needs_triton)]
    if INTERPRETED
    else [pytest.param("cuda", id="cuda", marks=on_gpu)]
)
on_devices = pytest.mark.parametrize("device", DEVICES)

# Blocks; pieces and their width of G, of its rest, of A, of its rest, columns that nothing rotates (a bias); layout.
LAYERS = {
    "whole": (1, [(1, 40)], [(1, 70)], 0, "rows"),
    "pieces, rest and bias": (1, [(2, 16), (1, 8)], [(3, 24), (1, 10)], 1, "rows"),
    "blocks": (2, [(1, 9)], [(2, 12)], 0, "rows"),
    "padded": (1, [(1, 20)], [(1, 33)], 0, "padded"),
    "columns in memory": (1, [(1, 20)], [(2, 17)], 1, "columns"),
    "aligned": (1, [(2, 16)], [(3, 24)], 1, "padded"),
    "aligned, in weights' layout": (1, [(1, 12)], [(1, 72)], 0, "columns"),
    "one side": (1, [(1, 72)], [], 5, "rows"),
}


def orthogonal(number, width, generator):
    return torch.linalg.qr(torch.randn(number, width, width, generator=generator, dtype=torch.float64)).Q.contiguous()


def laid_out(values, layout):
    """Return values as a view with the strides of a stack's."""
    if layout == "columns":
        return values.mT.contiguous().mT
    if layout == "padded":
        room = values.new_full(
            (len(values), values.shape[1] + 4, values.shape[2] + 7 + -(values.shape[2] + 7) % 4), torch.nan
        )
        return room[:, : values.shape[1], : values.shape[2]].copy_(values)
    return values.contiguous()


def whole(padded):
    """Return the tensor of which a padded one is a view."""
    between, columns, _ = padded.stride()
    return padded.as_strided((len(padded), between // columns, columns), padded.stride())


def made(names, from_weights, device, seed=0):
    """Return layers for the kernels, the tensor of rotations, and the expected momentum and moments in float64."""
    generator, plain, parts = torch.Generator().manual_seed(seed), [], []
    for name in names:
        blocks, g, a, rest, layout = LAYERS[name]
        sides = [[orthogonal(blocks * n, w, generator) for n, w in side] for side in (g, a)]
        bases = [[orthogonal(blocks * n, w, generator) for n, w in side] for side in (g, a)]
        shape = blocks, sum(n * w for n, w in g), sum(n * w for n, w in a) + rest
        momentum = torch.randn(shape, generator=generator, dtype=torch.float64)
        square = torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).exp()
        weights = torch.rand(2, generator=generator, dtype=torch.float64) + 0.5
        plain.append((momentum, square, weights, sides, bases, layout))
        parts += [piece for side in sides for piece in side]
    flat = torch.cat([part.flatten() for part in parts]).to(device, torch.float32)
    views = iter(torch.split(flat, [part.numel() for part in parts]))
    layers, expected = [], []
    for momentum, square, weights, sides, bases, layout in plain:
        mine = [[next(views).view(piece.shape) for piece in side] for side in sides]
        theirs = [[basis.to(device, torch.float32) for basis in side] for side in bases]
        m, v = (laid_out(t.to(device, torch.float32), layout) for t in (momentum, square))
        w = [weight.to(device, torch.float32) for weight in weights]
        layers.append(carry.Moments(m, w[0], v, w[1], *mine, tuple(theirs) if from_weights else None))
        named, in_use = (
            dict(zip(("G", "G_rest"), g, strict=False)) | dict(zip(("A", "A_rest"), a, strict=False))
            for g, a in (sides, bases)
        )
        moved = multiply(momentum, in_use, transposed=True) if from_weights else multiply(momentum, named)
        mean = (moved / weights[0]).square() * weights[1]
        expected.append((momentum if from_weights else moved, carried(square, mean, named)))
    return layers, flat, expected


@on_devices
@pytest.mark.parametrize("from_weights", [False, True], ids=["rotated", "weights"])
@pytest.mark.parametrize(
    "names", [[name] for name in LAYERS] + [list(LAYERS)], ids=lambda names: names[0][:9] + str(len(names))
)
def test_moments_are_carried_as_by_torch(device, names, from_weights):
    layers, flat, expected = made(names, from_weights, device)
    assert all(carry.can_carry(layer, flat) for layer in layers)
    aligned = [carry.rows_are_aligned(layer) for layer in layers]
    assert aligned == [name.startswith("aligned") for name in names] or len(names) > 1
    for which in set(aligned):
        some = [layer for layer, is_aligned in zip(layers, aligned, strict=True) if is_aligned == which]
        carry.carry_(some, flat, tf32=False)
    for layer, (momentum, square) in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.momentum.double().cpu(), momentum, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.square.double().cpu(), square, rtol=1e-4, atol=1e-6)
        if layer.square.untyped_storage().nbytes() > layer.square.numel() * 4:  # padding is left alone
            assert whole(layer.square)[:, -1].isnan().all()


@on_devices
def test_nothing_becomes_of_what_is_not_finite_elsewhere(device):
    layers, flat, _ = made(["whole", "padded"], False, device)
    layers[0].square[0, 3, 3] = torch.nan
    carry.carry_(layers, flat, tf32=False)
    assert layers[0].square.isnan().all()
    assert layers[1].square.isfinite().all()


@on_devices
def test_what_kernels_do_not_rotate(device):
    (layer, *_), flat, _ = made(["whole"], False, device)
    momentum, *others = layer
    *moments, _, _, bases = layer
    assert carry.can_carry(carry.Moments(momentum, *others), flat)
    assert not carry.can_carry(carry.Moments(*moments, outputs=[], inputs=[], bases=bases), flat)
    assert not carry.can_carry(carry.Moments(momentum.double(), *others), flat)
    assert not carry.can_carry(carry.Moments(momentum.mT.contiguous().mT, *others), flat)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")


COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dkfac.ops import carry, kernels

OPTIONS = {"num_warps": 4, "num_stages": 3}
TYPES = {"table": "*i64", "owners": "*i32", "size": "i32"}
for kernel in map(kernels.compiled, (carry._rows_kernel, carry._columns_kernel)):
    for from_weights, tf32, aligned in itertools.product((False, True), repeat=3):
        constants = {"FROM_WEIGHTS": from_weights, "TF32": tf32, "ALIGNED": aligned}
        constants |= {"FIELDS": carry.SEGMENT_FIELDS, "DOWN": carry.DOWN, "ACROSS": carry.ACROSS, "DEPTH": carry.DEPTH}
        signature = {n: "constexpr" if n in constants else TYPES.get(n, "*fp32") for n in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.COMPILE_OPTIONS | OPTIONS)
        print(len(built.asm["cubin"]) > 0, "st.local" in built.asm["ptx"])
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu_and_need_no_local_memory(tmp_path):
    said = in_another_process("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.split() == ["True", "False"] * 16
