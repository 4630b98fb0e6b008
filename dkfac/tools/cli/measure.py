"""``dkfac measure``: time this machine, or under torchrun this cluster, into a file for ``dkfac plan``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "measure",
        help="time this cluster's links and linear algebra",
        description="Times K-FAC's work on this machine and, under torchrun, the links between ranks; writes a cluster "
        "file for `dkfac plan`. On a cluster: torchrun --nnodes N --nproc-per-node K -m dkfac measure -o cluster.json",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    parser.add_argument("--ranks-per-host", type=int, help="by default what torchrun says")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="in which the model will train")
    parser.add_argument("--largest", type=int, help="dimension of a factor that is still measured")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    import torch

    from dkfac import distributed
    from dkfac.tools.measure.compute import DIMS
    from dkfac.tools.measure.machine import measure

    name = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {name}: {'there is no CUDA device here' if name == 'cuda' else 'cpu or cuda'}")
    if given.ranks_per_host is not None and given.ranks_per_host < 1:
        raise ValueError(f"--ranks-per-host {given.ranks_per_host} is not a number of ranks, 1 or more")
    least = DIMS[name][1]  # a curve needs two sizes
    if given.largest is not None and given.largest < least:
        raise ValueError(f"--largest {given.largest} leaves too little to measure: {least} or more")
    if given.out.is_dir():
        raise ValueError(f"-o {given.out} is a folder: name a file in it")
    if not given.out.parent.is_dir():
        raise ValueError(f"-o {given.out}: there is no folder {given.out.parent}")
    begin, place = time.perf_counter(), distributed.init("gloo" if name == "cpu" else None)
    device = place.device if name == "cuda" else torch.device("cpu")
    try:
        options = {"ranks_per_host": given.ranks_per_host, "largest": given.largest}
        options["autocast"] = None if given.autocast is None else getattr(torch, given.autocast)
        found = measure(device, say=lambda text: print(text, file=sys.stderr), **options)
        if place.rank == 0:
            given.out.write_text(found.to_json() + "\n")
            print(f"wrote {given.out} in {time.perf_counter() - begin:.0f} s")
    finally:
        distributed.end()
    return 0
