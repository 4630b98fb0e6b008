"""Sharded parameters (FSDP2, HSDP): weights after 20 steps equal those of one process."""

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import on_processes
from helpers_sharded import both

CASES = {
    "adaptive-adamw": ("adamw", {}),
    "adaptive-adam": ("adam", {"solver": "eigen"}),
    "adaptive-sgd": ("sgd", {}),
    "kfac-norm-kl": ("sgd", {"curvature": "kfac"}),
    "kfac-groups": ("groups", {"curvature": "kfac", "rescale": "kl-clip", "damping": 0.1}),
    "kfac-cholesky": ("adamw", {"curvature": "kfac", "solver": "cholesky"}),
    "ekfac": ("sgd", {"curvature": "ekfac"}),
    "adam-eigen": ("adamw", {"curvature": "adam-eigen"}),
}
TOLERANCE = 1e-9


def compare(rank, name, cases, how):
    found = {}
    for case in cases:
        optimizer, options = CASES[case]
        found[case], kfac = both(name, optimizer, options | how.get("options", {}), hsdp=how.get("hsdp", False))
        kfac.close()
    return found


def check(world_size, name, cases, **how):
    for found in on_processes(world_size, compare, name, list(cases), how):
        assert max(found.values()) < TOLERANCE, found


def test_two_ranks_of_fsdp2_train_like_one_process():
    check(2, "gpt", ["adaptive-adamw", "kfac-norm-kl"])


if __name__ == "__main__":
    import sys

    for net in sys.argv[1].split(","):
        for w, how in [
            (2, {}),
            (4, {}),
            (4, {"hsdp": True}),
            (4, {"hsdp": True, "options": {"strategy": "hybrid-opt"}}),
        ][int(sys.argv[2]) : int(sys.argv[3])]:
            try:
                print(net, w, how, on_processes(w, compare, net, list(CASES), how)[0], flush=True)
            except BaseException as e:
                print(net, w, how, "FAILED", str(e)[-1500:], flush=True)
                sys.exit()
