"""What ranks sum is absorbed as it is received, packed: by kernels as in plain torch, and in as few operations for many
layers as for few."""

import importlib.util
import os

import pytest
import torch
from helpers_kernels import assert_passes_interpreted
from helpers_parity import LOCK, train
from helpers_ranks import on_threads

from dkfac.ops import kernels, triangles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the session of the interpreter")
CASES = [
    ("comm-opt", {"net": "wide", "block_dim": 8}),
    ("sharded", {"net": "vision"}),
    ("replicated", {"net": "language"}),
    ("local", {}),
    ("mem-opt", {"wire_dtype": "bfloat16", "net": "vision", "damping": 0.1, "steps": 3}),
    ("comm-opt", {"curvature": "ekfac", "solver": "eigen", "net": "vision"}),
]


@needs_triton
@interpreted
@pytest.mark.parametrize(("strategy", "options"), CASES, ids=str)
def test_kernels_absorb_what_plain_torch_does_interpreted(strategy, options, monkeypatch):
    options = {"curvature": "kfac", "steps": 6, "dtype": torch.float32, "strategy": strategy} | options
    real, seen = triangles.can_pack, []

    def run():
        return on_threads(2, lambda rank: train(rank, 2, **options))

    def usable(*tensors):
        seen.append(real(*tensors))
        return seen[-1]

    def one_at_a_time(*given, **constants):
        with LOCK:  # the interpreter is not made for threads
            return launch(*given, **constants)

    launch = kernels.launch_kernel
    monkeypatch.setattr(kernels, "launch_kernel", one_at_a_time)
    monkeypatch.setattr(triangles, "can_pack", usable)
    found = run()
    assert any(seen) or strategy == "local"
    monkeypatch.setattr(triangles, "can_pack", lambda *_: False)
    rounding = 2e-2 if "wire_dtype" in options else 2e-4  # the interpreter truncates bfloat16
    for ours, theirs in zip(found, run(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * float(other.abs().max()))


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that session")
def test_the_kernels_run_in_tritons_interpreter():
    assert_passes_interpreted(__file__, "interpreted")
