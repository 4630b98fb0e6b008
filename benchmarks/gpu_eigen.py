"""Time of batched decompositions of small matrices on a GPU: exact, from a previous basis, and initial iterations.

Milliseconds for all matrices of a batch. The matrices are factors of rectified rows with a nonzero mean, as in a
network. ``off``: the off-diagonal part that remains after ten iterations from the identity.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from environment import write
from torch import Tensor

from dkfac.decompose import initial_basis
from dkfac.ops import decompose
from dkfac.ops.together import renewed

SIZES = (64, 128, 256, 384, 512, 513, 768, 1024, 1536)


def factors(count: int, size: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(size)
    hidden = torch.randn(count, 4 * size, size, device=device, generator=generator)
    rows = torch.relu(hidden * torch.logspace(0, -2, size, device=device) + 0.1)
    return rows.mT @ rows / rows.shape[-2]


def milliseconds(function: Callable[[], object], device: str) -> float:
    taken = []
    for _ in range(3):  # the first one prepares
        begin = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return 1e3 * min(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    for size in SIZES:
        matrices = factors(args.count, size, device)
        exact = decompose.eigen(matrices)
        start = decompose.Eigen(torch.eye(size, device=device).expand_as(matrices), matrices.diagonal(dim1=-2, dim2=-1))
        job = (matrices, start, matrices.new_zeros(args.count), ())
        begun = renewed([job], times=initial_basis.ITERATIONS)[0][0].vectors
        turned = begun.mT @ matrices @ begun
        off = (turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))).norm() / turned.norm()
        found[size] = {
            "exactly": milliseconds(lambda m=matrices: decompose.eigen(m), device),
            "improved": milliseconds(lambda m=matrices, e=exact: decompose.warm_step(m, e), device),
            "begun": milliseconds(lambda j=job: renewed([j], times=initial_basis.ITERATIONS), device),
            "off": float(off),
        }
        print(size, " ".join(f"{key} {value:.3g}" for key, value in found[size].items()), flush=True)
        del matrices, exact, start, job, begun, turned
    write(args.out, {"count": args.count, "iterations": initial_basis.ITERATIONS, "milliseconds": found})


if __name__ == "__main__":
    sys.exit(main())
