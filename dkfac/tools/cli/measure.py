"""``dkfac measure``: time this machine or, under torchrun, this cluster.

Input: options of the command line. Output: a cluster file for ``dkfac plan``. Owns: nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any


def add_measure_command(commands: Any) -> None:
    parser = commands.add_parser(
        "measure",
        help="time this cluster's links and linear algebra",
        description="Times K-FAC's computation on this machine and, under torchrun, the links between ranks. Writes a "
        "cluster file for `dkfac plan`. On a cluster: torchrun --nnodes N --nproc-per-node K -m dkfac measure -o "
        "cluster.json",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--device", help="cpu or cuda; default: cuda if available")
    parser.add_argument("--ranks-per-host", type=int, help="default: the value set by torchrun")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="autocast dtype of the training run")
    parser.add_argument("--largest", type=int, help="largest factor dimension to measure")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    import torch

    from dkfac import distributed
    from dkfac.tools.measure.compute import MEASURED_DIMS
    from dkfac.tools.measure.machine import measure_cluster

    name = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {name}: {'no CUDA device is available' if name == 'cuda' else 'use cpu or cuda'}")
    if given.ranks_per_host is not None and given.ranks_per_host < 1:
        raise ValueError(f"--ranks-per-host {given.ranks_per_host}: must be 1 or more")
    least = MEASURED_DIMS[name][1]  # fitting a curve needs two sizes
    if given.largest is not None and given.largest < least:
        raise ValueError(f"--largest {given.largest} leaves too little to measure: use {least} or more")
    if given.out.is_dir():
        raise ValueError(f"-o {given.out} is a folder: use the name of a file")
    if not given.out.parent.is_dir():
        raise ValueError(f"-o {given.out}: there is no folder {given.out.parent}")
    begin, place = time.perf_counter(), distributed.init("gloo" if name == "cpu" else None)
    device = place.device if name == "cuda" else torch.device("cpu")
    try:
        options = {"ranks_per_host": given.ranks_per_host, "largest": given.largest}
        options["autocast"] = None if given.autocast is None else getattr(torch, given.autocast)
        found = measure_cluster(device, say=lambda text: print(text, file=sys.stderr), **options)
        if place.rank == 0:
            given.out.write_text(found.to_json() + "\n")
            print(f"wrote {given.out} in {time.perf_counter() - begin:.0f} s")
    finally:
        distributed.end()
    return 0
